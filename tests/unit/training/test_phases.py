# SPDX-License-Identifier: Apache-2.0
"""--phase-transition-iterations: a run ends at each, and begins the next phase's data at their first sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError, DataError
from megatron.training.data.phases import DataPhase, find_phase
from megatron.training.flags.read import read_run_config
from megatron.training.run import Run
from tests.support.tiny_training import FLAGS, RandomTokens, differing, finish, prepare

PHASES = ("--phase-transition-iterations", "4, 2")


class _Noted(RandomTokens):
    """Data of one name, which note what is read of them."""

    def __init__(self, samples: int, name: str, read: list[tuple[str, int]]) -> None:
        super().__init__(samples)
        self.name, self.read = name, read

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append((self.name, index))
        return super().__getitem__(index + 1000 * ord(self.name))


def _train(name: str, *flags: str | Path) -> tuple[Run, list[tuple[str, int]], list[int]]:
    """A run with data of that name: the run, what it has read, for how many samples the data were made."""
    read: list[tuple[str, int]] = []
    made: list[int] = []

    def build(counts: Sequence[int]) -> list[Any]:
        made.append(counts[0])
        return [_Noted(counts[0], name, read), None, None]

    return finish(prepare(*flags, build_datasets=build)), read, made


@pytest.mark.flags("--phase-transition-iterations")
def test_each_phase_reads_its_own_data_from_the_first_sample_on_also_when_it_is_resumed(tmp_path: Path) -> None:
    def place(name: str) -> list[str | Path]:
        return ["--save", tmp_path / name, "--load", tmp_path / name, *PHASES]

    ends: list[int] = []
    for root, stops in (("whole", [None, None, None]), ("in pieces", [None, "3", None, "5", None])):
        everything: list[tuple[str, int]] = []
        for stop in stops:
            done = ends[-1] if ends and ends[-1] < 6 else 0
            name = "abc"[done // 2]
            run, read, made = _train(name, *place(root), *(["--exit-interval", stop] if stop else []))
            assert made == [8], "two iterations of four samples"
            ends.append(run.progress.iteration)
            everything += read
        assert everything == [(name, index) for name in "abc" for index in range(8)]
        assert run.progress.consumed_train_samples == 24
        if root == "whole":
            whole = run
    assert ends == [2, 4, 6, 2, 3, 4, 5, 6]
    assert differing(whole, run) == []


def test_phases_follow_from_the_iterations_done() -> None:
    found = [find_phase([2, 5, 90], done, 9, 4 * done, 4) for done in range(10)]
    first, second, third = DataPhase(0, 8), DataPhase(8, 12), DataPhase(20, 16)
    assert found == [first] * 2 + [second] * 3 + [third] * 5
    with pytest.raises(ConfigError, match="has consumed 10 in 3 iterations, not 12; keep the batch size"):
        find_phase([2], 3, 9, 10, 4)


def test_samples_of_an_earlier_phase_are_not_made_up(tmp_path: Path) -> None:
    run, _, _ = _train("a", "--save", tmp_path, "--load", tmp_path, *PHASES)
    run, _, _ = _train("b", "--save", tmp_path, "--load", tmp_path, *PHASES)
    with pytest.raises(DataError, match="sample 4 is of an earlier phase of the data.*its first one is 8"):
        run.data.open("train", 4)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--phase-transition-iterations 4;2", "is not a list of iterations, counted from 1, with commas between them"),
        ("--phase-transition-iterations 0", "is not a list of iterations"),
        ("--phase-transition-iterations 2 --rampup-batch-size 2 2 8", "counts batches of one size, and --rampup-batch"),
    ],
)
def test_what_is_no_list_or_has_no_size_is_refused(flags: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_run_config([*FLAGS.split(), *flags.split()], {})
