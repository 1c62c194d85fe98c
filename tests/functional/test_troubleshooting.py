# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md holds: its flags exist, and what it says helps does help, shown small."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from megatron.core.mesh import VirtualStages
from megatron.core.pipeline_parallel.schedules import ScheduleName, build_tables
from megatron.core.pipeline_parallel.timelines import EQUAL_PARTS, UNDIVIDED, simulate
from megatron.planner.step_memory import find_fullest, predict_step_memory
from megatron.training.flags.declarations import flags_by_spelling
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import describe_gpt_workload
from tests.functional.pretrain_runs import TINY, metrics, run

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
# Flags of other programs of this project, in the rows that name one.
OF_TOOLS = {"--max-restarts", "--config", "--input", "--decode", "--write-sum", "--trace", "--gradients"}


def read_rows(section: str) -> list[tuple[str, str]]:
    """(what helps, the third column) of the section's table."""
    return re.findall(r"^\| \d \| (.+?) \| (.+?) \|", SECTIONS[section], flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("section", "rows"),
    [("Out of memory", 8), ("Low utilisation", 7), ("Diverging loss", 8), ("Communication", 9), ("Checkpoints", 5),
     ("Pipeline imbalance", 6), ("Slow convergence", 8), ("Slower than expected", 3), ("Fragmented memory", 3),
     ("Slow data", 4), ("Data that cannot be used", 4), ("Exploding gradients", 4), ("Lost nodes", 4),
     ("Other formats", 4)],
)  # fmt: skip
def test_every_problem_has_its_parts(section: str, rows: int) -> None:
    for part in ("Symptom", "Cause", "Verify", "Prevention"):
        assert f"**{part}.**" in SECTIONS[section], f"{section} lacks {part}"
    assert len(read_rows(section)) == rows
    for flag in re.findall(r"(--[a-z][a-z0-9-]+)", " ".join(re.findall(r"`([^`\n]+)`", SECTIONS[section]))):
        assert flag in flags_by_spelling() or flag in OF_TOOLS, f"{section}: {flag} does not exist"


LARGE = (
    "--preset llama3-8b --seq-length 8192 --bf16 --micro-batch-size 2 --global-batch-size 64 --lr 1e-4 "
    "--train-iters 10 --mock-data --tokenizer-type NullTokenizer"
)


def predict(flags: str) -> float:
    config = read_run_config(f"{LARGE} {flags}".split(), {"WORLD_SIZE": "8"})
    workload = describe_gpt_workload(config, 128256)
    return find_fullest(predict_step_memory(config.model, config.ddp, config.optimizer, workload)).total


@pytest.mark.parametrize("row", [1, 2, 3, 6, 7])
def test_what_helps_against_a_shortage_of_memory_needs_less(row: int) -> None:
    """By the planner; what recomputation and fully sharded weights save is measured in tests/parallel."""
    (flags,) = re.findall(r"`(.+?)`", read_rows("Out of memory")[row - 1][1])
    assert predict(flags) < predict("")


def count_idle_share(name: ScheduleName, stages: int, microbatches: int, chunks: int = 1) -> float:
    shape = VirtualStages(stages, chunks, folded=name == "zb-v")
    costs = EQUAL_PARTS if name.startswith("zb") else UNDIVIDED
    return simulate(build_tables(name, shape, microbatches), shape, costs).bubble


def test_what_helps_against_imbalance_idles_less() -> None:
    """Rows 1 to 3: more micro-batches, several chunks, weight gradients where ranks would idle."""
    before = count_idle_share("1f1b", 4, 8)
    assert count_idle_share("1f1b", 4, 16) < before
    assert count_idle_share("interleaved", 4, 8, chunks=2) < before
    assert count_idle_share("zb-h1", 4, 8) < before


def train(directory: Path, flags: str) -> list[float]:
    """The loss of each step; infinite from where it was no number."""
    done = run([*TINY, "--train-iters", "25", "--metrics-dir", directory, *flags.split()])
    losses = [row["lm loss"] for row in metrics(directory)]
    assert done.returncode == (17 if None in losses else 0), done.stderr
    return [math.inf if loss is None else loss for loss in losses]


def test_what_helps_against_divergence_helps(tmp_path: Path) -> None:
    """A learning rate far too high makes the loss climb; rows 1 and 2 of the table keep it falling."""
    wild = "--lr 3 --clip-grad 0 --lr-decay-style constant"
    diverged = train(tmp_path / "diverged", wild)
    assert diverged[-1] > 2 * diverged[0]
    lower = train(tmp_path / "lower", f"{wild} --lr 1e-2")
    warm = train(tmp_path / "warm", f"{wild} --lr-warmup-iters 5000 --lr-decay-style linear --lr-decay-iters 10000")
    assert lower[-1] < lower[0] and warm[-1] < warm[0]


def test_what_helps_against_slow_convergence_helps(tmp_path: Path) -> None:
    """Row 1: a learning rate that is too low leaves the loss where it was."""
    slow, faster = train(tmp_path / "slow", "--lr 1e-5"), train(tmp_path / "faster", "--lr 1e-2")
    assert faster[-1] < slow[-1] - 0.1
