# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py as a pipeline of two processes: the curve is that of one process, and it goes on after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.functional.pretrain_runs import TINY, metrics, run, run_ranks

FLAGS = [*TINY, "--num-layers", "4", "--global-batch-size", "8", "--eval-interval", "5", "--eval-iters", "1"]
PIPELINES = {
    "1f1b": "",
    "interleaved": "--num-virtual-stages-per-pipeline-rank 2",
    "zb-v": "--pipeline-schedule zb-v",
}


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """What a row of metrics.jsonl measured, the losses of an evaluation included."""
    return {name: value for name, value in (row | row.get("eval", {})).items() if isinstance(value, int | float)}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    directory = tmp_path_factory.mktemp("one")
    alone = run([*FLAGS, "--metrics-dir", directory])
    assert alone.returncode == 0, alone.stderr
    return [numbers(row) for row in metrics(directory)]


@pytest.mark.flags("--pipeline-model-parallel-size")
@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_curve(name: str, expected: list[dict[str, float]], tmp_path: Path) -> None:
    """With one restart in the middle, from a checkpoint of all stages."""
    pipeline = [*FLAGS, "--pipeline-model-parallel-size", "2", *PIPELINES[name].split()]
    saved = ["--metrics-dir", tmp_path / "2", "--save", tmp_path / "checkpoints", "--save-interval", "100"]
    first = run_ranks([*pipeline, *saved, "--exit-interval", "3"], 2)
    second = run_ranks([*pipeline, *saved, "--load", tmp_path / "checkpoints"], 2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    found = [numbers(row) for row in metrics(tmp_path / "2")]
    assert len(found) == len(expected) > 5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert "lm loss" in ours
