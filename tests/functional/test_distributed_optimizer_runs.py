# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py with a divided optimizer state: the same curve, and resuming it bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.functional.pretrain_runs import TINY, metrics, run_ranks
from tests.parallel.checkpoint_contents import assert_bit_equal, saved

BATCH = ["--global-batch-size", "12"]
DIVIDED = [*"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000".split()]


def train(directory: Path, processes: int, *flags: str | Path) -> list[dict[str, Any]]:
    done = run_ranks([*TINY, *BATCH, "--metrics-dir", directory, *flags], processes)
    assert done.returncode == 0, done.stderr
    return metrics(directory)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The run of one process."""
    return train(tmp_path_factory.mktemp("plain"), 1)


def test_two_processes_with_both_overlaps_equal_one_and_resume_bit_for_bit(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    straight = train(tmp_path / "straight", 2, *DIVIDED, "--save", tmp_path / "whole", "--save-interval", "5")
    for name, rel in (("lm loss", 1e-5), ("grad_norm", 1e-4)):
        assert [row[name] for row in straight] == pytest.approx([row[name] for row in plain], rel=rel)
    save = ["--save", tmp_path / "parts", "--load", tmp_path / "parts", "--save-interval", "2"]
    first = train(tmp_path / "first", 2, *DIVIDED, *save, "--exit-interval", "2")
    rest = train(tmp_path / "rest", 2, *DIVIDED, *save)
    assert first + rest == straight
    assert_bit_equal(saved(tmp_path / "parts", 5), saved(tmp_path / "whole", 5))
