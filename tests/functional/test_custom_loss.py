# SPDX-License-Identifier: Apache-2.0
"""examples/custom_loss.py as a user runs it: a loss, a flag and a curve of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.functional.pretrain_runs import TINY, metrics, run

EXAMPLE = "examples/custom_loss.py"


def train(directory: Path, *flags: str) -> list[dict[str, Any]]:
    result = run(
        [*TINY, "--train-iters", "3", "--metrics-dir", directory, *flags], program=EXAMPLE, directory=Path("/")
    )
    assert result.returncode == 0, result.stderr
    return metrics(directory)


def test_the_loss_is_the_scripts_own(tmp_path: Path) -> None:
    usual = train(tmp_path / "usual")
    evaluation = ("--eval-interval", "3", "--eval-iters", "1", "--tensorboard-dir", str(tmp_path / "curves"))
    focal = train(tmp_path / "focal", "--focal-gamma", "2", *evaluation)
    first = focal[0]["focal loss"] / usual[0]["focal loss"]
    # An untrained model gives each of the 64 tokens about 1/64.
    assert 0.9 < first / (1 - 1 / 64) ** 2 < 1.0 + 1e-3
    assert focal[-1]["eval"]["focal loss"] > 0

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "curves"))
    events.Reload()
    points = events.Scalars("probability of the right token")
    assert {point.step for point in points} == {3} and 0 < points[0].value < 1
