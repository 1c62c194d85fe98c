# SPDX-License-Identifier: Apache-2.0
"""The last words of pretrain_gpt.py: what they say is so, and the commands that they name run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.cli.summary import (
    FILE_NAME,
    ProgramStart,
    build_resume_flags,
    format_program,
    list_commands,
    replace_flags,
)
from tests.functional.pretrain_runs import ROOT, TINY, run
from tests.support.run_flags import run_config

LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope".split()
HEADING = "\nWhat to do next:\n"


def split_summary(output: str) -> tuple[dict[str, str], dict[str, str]]:
    """The results and the commands, by their names in the first column."""
    results, commands = output[output.index("\ntrained ") :].split(HEADING)
    tables = ([re.split(r" {2,}", line, maxsplit=1) for line in text.strip().splitlines()] for text in
              (results, commands))  # fmt: skip
    found, next_ones = (dict(table) for table in tables)
    return found, next_ones


def follow(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the summary from the root of the repository, where the run was started."""
    words = shlex.split(command)
    assert words[0] == "python"
    if words[1] == "-m":
        assert words[2] == "megatron"
        return run(words[3:], program="megatron/__main__.py")
    return run(words[2:], program=words[1])


@pytest.mark.parametrize("min_lr", ["0", "1e-3"])
def test_the_commands_of_the_summary_run(min_lr: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "my run"
    flags = [*TINY, *LLAMA, "--eval-iters", "1", "--eval-interval", "5", "--min-lr", min_lr]
    trained = run([*flags, "--save", checkpoints, "--save-interval", "5"])
    assert trained.returncode == 0, trained.stderr
    results, commands = split_summary(trained.stdout)
    assert results["trained"] == "iterations 1 to 5 of 5" and results["tokens"].startswith("640 in ")
    losses = re.findall(r"lm loss: ([0-9.E+-]+)", trained.stdout)
    assert results["lm loss"] == f"{float(losses[-1]):.4f}"
    (evaluated,) = re.findall(r"validation loss at iteration 5 on .*lm loss value: ([0-9.E+-]+)", trained.stdout)
    assert results["validation loss"].startswith(f"{float(evaluated):.4f} (perplexity ")
    assert results["checkpoint"] == f"{checkpoints}, iteration 5"
    assert (checkpoints / FILE_NAME).read_text() in trained.stdout
    assert list(commands) == ["train on", "generate", "export"]
    if min_lr == "0":
        written = follow(commands["generate"])
        assert written.returncode == 0 and written.stdout.startswith("1 2 3 "), written.stderr
        exported = follow(commands["export"])
        assert exported.returncode == 0 and (tmp_path / "my run-hf" / "model.safetensors").exists(), exported.stderr
    more = follow(commands["train on"])
    assert more.returncode == 0, more.stderr
    results, commands = split_summary(more.stdout)
    assert results["trained"] == "iterations 6 to 10 of 10" and results["checkpoint"].endswith("iteration 10")
    rates = [float(text) for text in re.findall(r"learning rate: ([0-9.E+-]+)", more.stdout)]
    # Training on with a rate of zero would be training for nothing.
    assert rates[0] > 0 and rates[-1] == float(min_lr)


def test_a_run_that_saves_nothing_says_so_and_one_that_fails_says_nothing(tmp_path: Path) -> None:
    output = run(TINY).stdout
    assert "checkpoint  none was saved; --save DIR keeps the model" in output and HEADING not in output
    failed = run([*TINY, "--lr", "1e30", "--metrics-dir", tmp_path / "metrics", "--check-for-nan-in-loss-and-grad"])
    assert failed.returncode != 0
    assert "\ntrained " not in failed.stdout and not (tmp_path / "metrics" / FILE_NAME).exists()


# ---- the command lines themselves


def start(program: str = "pretrain_gpt.py", flags: str = "", **environment: str) -> ProgramStart:
    return ProgramStart(program, flags.split(), environment, ROOT)


TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.parametrize(
    ("found", "command"),
    [
        (start(), "python pretrain_gpt.py"),
        (start(str(ROOT / "pretrain_gpt.py")), "python pretrain_gpt.py"),
        (start(**TORCHRUN), "torchrun --nproc_per_node 2 pretrain_gpt.py"),
        (start("megatron train"), "python -m megatron train"),
        (start("/x/megatron/__main__.py", **TORCHRUN), "torchrun --nproc_per_node 2 -m megatron train"),
        (start("/usr/bin/megatron-train"), "megatron-train"),
        (start("/usr/bin/megatron-train", **TORCHRUN), "torchrun --nproc_per_node 2 -m megatron train"),
        # The job is to be started again by what has started it.
        (start(WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", RANK="0"), None),
        (start(SLURM_PROCID="0", SLURM_NTASKS="2"), None),
    ],
)
def test_how_the_program_was_started(found: ProgramStart, command: str | None) -> None:
    assert format_program(found) == command


def test_a_resumed_run_loads_what_was_saved() -> None:
    flags = (
        "--load hf:x --finetune --override-ckpt-iteration 7 --seq-length 8 --ckpt-step=3 "
        "--recompute-modules core_attn mlp --no-load-optim --bf16"
    )
    kept = "--seq-length 8 --recompute-modules core_attn mlp --bf16 --load ckpt"
    assert replace_flags(flags.split(), {"--load": "ckpt"}) == kept.split()
    config = run_config("--train-iters 7 --lr-decay-iters 5 --min-lr 1e-5 --save ckpt")
    assert (
        build_resume_flags(config, ["--train-iters", "7"], is_finished=False) == "--train-iters 7 --load ckpt".split()
    )
    finished = build_resume_flags(config, ["--train-iters", "7"], is_finished=True)
    assert finished == "--load ckpt --train-iters 14 --lr-decay-iters 5".split()
    assert list_commands(run_config(""), start(), is_saved=True, is_finished=True) == {}
    assert list(list_commands(config, start(SLURM_PROCID="0"), is_saved=True, is_finished=True)) == [
        "generate",
        "export",
    ]
