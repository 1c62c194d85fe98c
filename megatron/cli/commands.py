# SPDX-License-Identifier: Apache-2.0
"""The programs by name: `python -m megatron` lists them, `python -m megatron NAME ...` runs one.

One of them is a module with a `main`, which reads sys.argv and returns an exit code.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import NamedTuple

from megatron.core import __version__
from megatron.core.errors import ConfigError, command_line

PROGRAM = "python -m megatron"


class Command(NamedTuple):
    """A program: the name to call it by, its module, a line about it, and the function that runs it."""

    name: str
    module: str
    text: str
    function: str = "main"


COMMANDS: dict[str, tuple[Command, ...]] = {
    "Text to model": (
        Command("preprocess", "megatron.cli.preprocess_data", "turn text into a token dataset"),
        Command("train", "megatron.cli.train", "pretrain a GPT model, or train one on", "run"),
        Command("launch", "megatron.cli.launch", "train in several processes: torchrun, with the error last"),
        Command("generate", "megatron.cli.generate", "continue texts with a trained model, or talk with it"),
        Command("serve", "megatron.cli.serve", "answer over HTTP: OpenAI's interface, and a page to try the model"),
        Command("convert", "megatron.hf.convert", "models from and to Hugging Face directories"),
        Command("prune", "megatron.cli.prune", "a smaller model of a trained one: fewer layers, heads, channels"),
    ),
    "Datasets": (
        Command("merge-datasets", "megatron.cli.merge_datasets", "several datasets as one"),
        Command("verify-dataset", "megatron.cli.verify_dataset", "is a dataset whole? write its checksums"),
        Command("verify-tokenization", "megatron.cli.verify_tokenization", "is a dataset what its text gives?"),
        Command("build-dataset-cache", "megatron.cli.build_dataset_cache", "the indices of a run, before it starts"),
    ),
    "Before a run": (
        Command("plan", "megatron.cli.plan", "the best layouts on a cluster: memory, time, cost, and why"),
        Command("probe", "megatron.cli.probe", "the speed of this machine, for plan"),
        Command("memory", "megatron.cli.report_theoretical_memory", "memory of a run by formula"),
        Command("shrink", "megatron.cli.shrink", "try a cluster's command line small, on this machine"),
        Command("parity", "megatron.cli.check_parity", "is it the same run under other layouts?"),
        Command("autotune", "megatron.cli.autotune", "the fastest micro-batch, recomputation and kernels, by trying"),
        Command("draw-schedule", "megatron.cli.draw_schedule", "a pipeline's schedule as a picture"),
        Command("draw-pattern", "megatron.cli.draw_pattern", "the layers of a hybrid as a picture"),
        Command("env", "megatron.cli.env", "the environment variables of a network, with reasons"),
    ),
    "During and after a run": (
        Command("report", "megatron.cli.report", "a page of a run: curves, events, a verdict; --live follows it"),
        Command("inspect", "megatron.cli.inspect_checkpoint", "what is in a checkpoint"),
        Command("doctor", "megatron.cli.check_checkpoint", "what is wrong with a directory of checkpoints"),
        Command("average", "megatron.cli.average_checkpoints", "the mean of several checkpoints"),
        Command("convert-checkpoint", "megatron.cli.convert_checkpoint", "upstream's tool of that name"),
        Command("evaluate", "megatron.cli.evaluate", "perplexity on texts, and tasks of lm-evaluation-harness"),
        Command("loss-by-position", "megatron.cli.loss_by_position", "perplexity by the position of a token"),
        Command("draw-fp8", "megatron.cli.draw_fp8", "what rounding to 8 or 4 bits did, by layer and operand"),
        Command("draw-experts", "megatron.cli.draw_experts", "how evenly a run's experts were chosen"),
    ),
    "This program": (
        Command("completion", "megatron.cli.completion", "commands and flags for bash or zsh to complete"),
    ),
}  # fmt: skip
"""Heading -> programs, in the order in which one comes to need them."""


def find_command(name: str) -> Command:
    """The program of this name. Raises ConfigError where there is none."""
    commands = {command.name: command for group in COMMANDS.values() for command in group}
    if name in commands:
        return commands[name]
    close = difflib.get_close_matches(name, commands, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"{PROGRAM} {name}: there is no program of this name; {hint}{PROGRAM} lists them")


def format_commands() -> str:
    """Every program with its line."""
    width = max(len(command.name) for group in COMMANDS.values() for command in group)
    lines = [f"usage: {PROGRAM} NAME ...     {PROGRAM} NAME --help says what it takes", ""]
    for heading, group in COMMANDS.items():
        lines += [f"{heading}:", *(f"  {command.name:<{width}}  {command.text}" for command in group), ""]
    lines.append(f"On several GPUs: {PROGRAM} launch --nproc_per_node 8 -- ... (megatron {__version__})")
    return "\n".join(lines)


@command_line
def main() -> int:
    """List the programs, or run the one that the command line names with the rest of the command line."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(format_commands())
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    command = find_command(arguments[0])
    # What argparse calls the program in its help.
    sys.argv = [f"megatron {command.name}", *arguments[1:]]
    run = getattr(importlib.import_module(command.module), command.function)
    code: int = run()
    return code
