# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md holds: its flags exist, and what it says helps does help, shown small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.planner.memory import estimate_memory
from megatron.training.flags.parser import flags_by_spelling
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import describe_gpt_workload

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
# Flags of other programs of this project, in the rows that name one.
OF_TOOLS = {"--config", "--input", "--decode", "--write-sum", "--trace"}


def read_rows(section: str) -> list[tuple[str, str]]:
    """(what helps, the third column) of the section's table."""
    return re.findall(r"^\| \d \| (.+?) \| (.+?) \|", SECTIONS[section], flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("section", "rows"),
    [("Out of memory", 8), ("Low utilisation", 7), ("Diverging loss", 8), ("Communication", 8), ("Checkpoints", 5),
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


def estimate(flags: str) -> float:
    config = read_run_config(f"{LARGE} {flags}".split(), {"WORLD_SIZE": "8"})
    workload = describe_gpt_workload(config, 128256)
    return estimate_memory(config.model, config.ddp, workload).total


@pytest.mark.parametrize("row", [1, 2, 3, 6, 7])
def test_what_helps_against_a_shortage_of_memory_needs_less(row: int) -> None:
    """By the formula; what recomputation and fully sharded weights save is measured in tests/parallel."""
    (flags,) = re.findall(r"`(.+?)`", read_rows("Out of memory")[row - 1][1])
    assert estimate(flags) < estimate("")
