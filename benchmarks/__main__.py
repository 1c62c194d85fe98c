# SPDX-License-Identifier: Apache-2.0
"""One entry for all benchmarks.

    python -m benchmarks list
    python -m benchmarks 125m moe --json results.json
    python -m benchmarks attention linear optimizer loss --picture roofline.png
    python -m benchmarks train_step --rounds 5          # a program of this directory, with its own options
    python -m benchmarks gpu --minutes 9 --out results  # everything that a machine with a GPU can answer in 9 minutes
    python -m benchmarks attention --help               # the options of a benchmark

Every report has the machine, versions, the command, ratios to a baseline that was measured in the same run, and the
shares of ceilings that were measured in it, too: one large matrix product, and the copy of a large tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

from megatron.core.errors import ConfigError, command_line  # noqa: E402


class Entry(NamedTuple):
    """A benchmark."""

    text: str
    module: str
    is_program: bool = False
    """A program with options of its own; the others are functions that share theirs."""


_PROGRAMS = {
    "train_step": "a small training step against its bare matrix products and against Hugging Face",
    "experts": "a layer of experts against loops over experts and a dense MLP",
    "mixers": "layers with a state against their recurrence, transformers and formulas",
    "hyper_connections": "a layer with several residual streams against one without",
    "overlap": "how much of an artificial link's time overlap hides",
    "tokenization": "tokenising against one call per document",
    "index_building": "indices of documents against loops in C++",
    "data_loading": "samples read from disk",
    "checkpointing": "saving and loading against plain writing and reading",
    "conversion": "models from and to Hugging Face directories against copying the files",
    "guards": "steps with all guards against none, and the time to find a fault",
    "memory": "bytes of weights, gradients, state and activations against the plan",
    "planned_layouts": "layouts that are planned for known models and clusters against their dry runs",
    "planned_order": "the order in which layouts are fast, planned against measured on this machine",
    "serving": "the inference engine against Hugging Face's generate",
    "generality": "one process through the parallel code against a model without it",
}
TABLE: dict[str, Entry] = {
    "125m": Entry("training steps of a Llama of 134M parameters, with peers", "benchmarks.training"),
    "1b": Entry("training steps of Llama 3.2 1B, with peers", "benchmarks.training"),
    "8b-slice": Entry("training steps of 16 of the 32 layers of Llama 3.1 8B, with peers", "benchmarks.training"),
    "8b": Entry("training steps of Llama 3.1 8B with small optimizer state, with peers", "benchmarks.training"),
    "moe": Entry("training steps of a model with 8 experts, top-2, with peers", "benchmarks.training"),
    "attention": Entry("attention, forward and backward", "benchmarks.operations"),
    "linear": Entry("linear layers, experts and FP8 products, forward and backward", "benchmarks.operations"),
    "optimizer": Entry("an update of all parameters", "benchmarks.operations"),
    "loss": Entry("cross entropy of a large vocabulary", "benchmarks.operations"),
    "emulation": Entry("a small model in emulated FP8 and FP4 against bfloat16", "benchmarks.operations"),
    **{name: Entry(text, f"benchmarks.{name}", is_program=True) for name, text in _PROGRAMS.items()},
    "gpu": Entry("everything that a machine with a GPU can answer in nine minutes", "benchmarks.gpu", True),
}
"""Name -> benchmark."""


def format_table() -> str:
    """Every benchmark with its line."""
    width = max(map(len, TABLE))
    return "\n".join(f"{name:<{width}}  {entry.text}" for name, entry in TABLE.items())


def split_names(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The leading names, and the options behind them. Raises ConfigError for a name that is not known."""
    count = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    names, options = list(words[:count]), list(words[count:])
    for name in names:
        if name not in TABLE:
            raise ConfigError(f"python -m benchmarks {name}: there is no such benchmark; known are {', '.join(TABLE)}")
    if len({TABLE[name].module for name in names}) > 1 and any(TABLE[name].is_program for name in names):
        programs = ", ".join(name for name in names if TABLE[name].is_program)
        raise ConfigError(f"python -m benchmarks: {programs} has options of its own; start it without other names")
    return names, options


def run_functions(names: Sequence[str], options: Sequence[str]) -> None:
    """Measure presets and operations, and write what was found."""
    from benchmarks.conditions import print_conditions
    from benchmarks.measurements import Report, draw_roofline, write_json

    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {' '.join(names)}", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_report_arguments(parser)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    for module in dict.fromkeys(TABLE[name].module for name in names):
        importlib.import_module(module).add_arguments(parser)
    arguments = parser.parse_args(options)
    print_conditions()
    reports: list[Report] = []
    for name in names:
        reports.append(importlib.import_module(TABLE[name].module).run(name, arguments))
        reports[-1].print()
        # After each: what was measured is kept when a later one fails.
        if arguments.json is not None:
            write_json(arguments.json, reports)
    if arguments.picture is not None:
        print(draw_roofline(arguments.picture, reports))


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results go."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw a roofline (with matplotlib)")


class _Tee(io.TextIOBase):
    """Writes to a stream, and keeps what was written."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.text = stream, io.StringIO()

    def write(self, text: str) -> int:
        self.text.write(text)
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


def run_program(name: str, options: Sequence[str]) -> int:
    """Run a program of this directory with its own options; with --json, what it prints goes to the file as lines."""
    from benchmarks.conditions import describe_conditions
    from benchmarks.measurements import choose_dtype, measure_ceilings

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_report_arguments(parser)
    ours, others = parser.parse_known_args(list(options))
    command = f"python -m benchmarks {name} {' '.join(options)}".strip()
    sys.argv = [f"python -m benchmarks {name}", *others]
    output = _Tee(sys.stdout)
    with contextlib.redirect_stdout(output):
        importlib.import_module(TABLE[name].module).main()
    found = measure_ceilings(choose_dtype())
    print(
        f"ceilings, measured now: product {found.product_flops / 1e12:.4g} TFLOP/s ({found.dtype}), "
        f"copy {found.copy_bytes_per_second / 1e9:.4g} GB/s"
    )
    if ours.json is not None:
        content = {
            "title": name,
            "conditions": describe_conditions() | {"command": command},
            "ceilings": dataclasses.asdict(found),
            "output": output.text.getvalue().splitlines(),
        }
        ours.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if ours.picture is not None:
        print(f"--picture {ours.picture} is left out: {name} prints a table of its own")
    return 0


@command_line
def main() -> int:
    """List the benchmarks, or run those that are named."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "list"):
        print(format_table() if words[:1] == ["list"] else f"{__doc__.strip()}\n\n{format_table()}")
        return 0
    names, options = split_names(words)
    if not names:
        raise ConfigError(f"python -m benchmarks: a name comes first; known are {', '.join(TABLE)}")
    if names == ["gpu"]:
        sys.argv = ["python -m benchmarks gpu", *options]
        return int(importlib.import_module("benchmarks.gpu").main())
    if TABLE[names[0]].is_program:
        return run_program(names[0], options)
    run_functions(names, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
