# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written by version 0.1.0, before settings checked themselves and rooms moved, still load and continue.

    dense_interleaved   four layers on two stages of two virtual stages each, fp32
    experts             four experts on two processes with the distributed optimizer, bf16, biases that learn

Beside each is the curve that version 0.1.0 itself continued it with, from the same arguments.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.functional.pretrain_runs import metrics, run_ranks

DATA = Path(__file__).resolve().parents[1] / "golden" / "data" / "checkpoints"
TOLERANCES = {"dense_interleaved": 2e-5, "experts": 1e-2}
"""Of losses and gradient norms, relative: another processor rounds otherwise, in bf16 to three digits."""


def unpacked(name: str, directory: Path) -> Path:
    """The checkpoint directory of one of the runs."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


def continued_without_layout(arguments: list[str]) -> list[str]:
    """The same run on one process."""
    dropped = (
        "--pipeline-model-parallel-size",
        "--num-virtual-stages-per-pipeline-rank",
        "--expert-model-parallel-size",
    )
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument not in dropped:
            kept.append(argument)
        skip = argument in dropped
    return kept


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", ["dense_interleaved", "experts"])
def test_a_checkpoint_of_before_continues_its_curve(name: str, processes: int, tmp_path: Path) -> None:
    expected: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    arguments = expected["arguments"] if processes == 2 else continued_without_layout(expected["arguments"])
    load = unpacked(name, tmp_path / "before")
    done = run_ranks([*arguments, "--train-iters", "8", "--load", str(load), "--metrics-dir", str(tmp_path)], processes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = metrics(tmp_path)
    assert [row["iteration"] for row in rows] == [5, 6, 7, 8]
    tolerance = TOLERANCES[name]
    assert [row["lm loss"] for row in rows] == pytest.approx(expected["losses"], rel=tolerance)
    assert [row["grad_norm"] for row in rows] == pytest.approx(expected["grad_norms"], rel=tolerance)
