# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py with sequences shared by two processes: the curve is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.functional.pretrain_runs import TINY, metrics, run, run_ranks

RUNS = {
    "masks from the loader": "--cp-comm-type a2a --reset-attention-mask --eod-mask-loss",
    "causal": "--position-embedding-type rope --cp-comm-type p2p all_gather",
    "documents": "--dataloader-inter-document-masking",
}
EVALUATED = ["--eval-interval", "5", "--eval-iters", "1"]


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """What a row of metrics.jsonl measured, the losses of an evaluation included."""
    return {name: value for name, value in (row | row.get("eval", {})).items() if isinstance(value, int | float)}


@pytest.mark.flags("--context-parallel-size", "--cp-comm-type")
@pytest.mark.parametrize("name", RUNS)
def test_context_parallel_curve(name: str, tmp_path: Path) -> None:
    flags = [*TINY, *EVALUATED, *RUNS[name].split()]
    alone = run([*flags, "--metrics-dir", tmp_path / "1"])
    both = run_ranks([*flags, "--context-parallel-size", "2", "--metrics-dir", tmp_path / "2"], 2)
    assert (alone.returncode, both.returncode) == (0, 0), alone.stderr + both.stderr
    expected, found = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    assert len(found) == len(expected) > 5
    for ours, theirs in zip(found, expected, strict=True):
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-5)
        assert "lm loss" in numbers(ours)


def test_a_length_that_cannot_be_shared_is_refused_at_the_start() -> None:
    flags = [*TINY, "--seq-length", "30", "--context-parallel-size", "2"]
    failed = run(flags, WORLD_SIZE="2", RANK="0")
    assert failed.returncode == 2
    assert "--seq-length 30 is not divisible by 2 x --context-parallel-size 2" in failed.stderr
