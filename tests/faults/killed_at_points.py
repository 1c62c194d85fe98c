# SPDX-License-Identifier: Apache-2.0
"""Every crash point x rank x way of saving: two ranks train and save, one of them is killed there, and the same command
goes on.

After each kill an older or the new checkpoint is whole; the next start tidies up and continues; the end has the bits
of the uninterrupted run. A process that writes for a rank may be killed as well: that costs one checkpoint, and not the
run.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.crash_points import CRASH_POINTS
from megatron.core.dist_checkpointing.mapping import RNG_PREFIX
from tests.faults.two_ranks import RANKS, WAYS, find_saved, list_remains, read_tensors, train
from tests.faults.verdicts import Verdict

_FLAGS = ["--save-retain-interval", "100"]
_SAVED_FIRST, _SAVED_AGAIN, _END = 2, 4, 6
_ORDER = list(CRASH_POINTS)
_SIGKILL = 9
_PASSED_BY = {
    "torch": """weights-gathered metadata-created metadata-begun metadata-flushed metadata-renamed document-created
        document-unflushed document-flushed documents-written attachments-copied earlier-moved-aside""",
    "non-persistent": "earlier-moved-aside",
}
"""Points that a way of saving has not."""


class Case(NamedTuple):
    """Who dies where."""

    point: str
    rank: int
    way: str = "sync"

    def __str__(self) -> str:
        return f"{self.point} on rank {self.rank}, {self.way}"


def list_cases(ways: Sequence[str] = tuple(WAYS)) -> list[Case]:
    """Each point on each rank that comes by."""
    ranks = {True: range(RANKS), False: range(1)}
    return [
        Case(name, rank, way)
        for way in ways
        for name, point in CRASH_POINTS.items()
        for rank in ranks[point.on_every_rank]
        if name not in _PASSED_BY.get(way, "").split()
        and ("--async-save" in WAYS[way] or not point.beside_training_only)
    ]


@dataclass(frozen=True)
class Beginning:
    """What all cases start from and are compared with."""

    start: Path
    """A directory with a checkpoint of iteration 2, and what an earlier crash has left."""
    again: Path
    """The same with iteration 4, which will be saved a second time."""
    end: dict[str, torch.Tensor]
    """Tensors of the uninterrupted run at iteration 6."""


def begin(directory: Path) -> Beginning:
    """Train the uninterrupted run."""
    first = directory / "start"
    train(first, *_FLAGS, "--exit-interval", "2")
    (first / "iter_0000001.tmp-0123abcd").mkdir()
    again = shutil.copytree(first, directory / "again")
    train(again, *_FLAGS, "--exit-interval", "4")
    # Saving iteration 4 has removed iteration 2, from which it is to be repeated.
    shutil.copytree(first / "iter_0000002", again / "iter_0000002")
    (again / "iter_0000001.tmp-0123abcd").mkdir()
    whole = shutil.copytree(first, directory / "whole")
    train(whole, *_FLAGS)
    return Beginning(first, again, read_tensors(whole, _END))


def play(cases: Sequence[Case], beginning: Beginning, directory: Path) -> Iterator[Verdict]:
    """Play the cases one after the other."""
    for number, case in enumerate(cases):
        root = directory / f"case{number}"
        try:
            check(case, beginning, root)
            yield Verdict(str(case))
        except AssertionError as error:
            yield Verdict(str(case), str(error))
        # One that hangs is one case that does not hold, and no end of the others.
        except subprocess.TimeoutExpired as error:
            yield Verdict(str(case), f"a rank has not ended after {error.timeout:.0f} s")
        shutil.rmtree(root)


def check(case: Case, beginning: Beginning, root: Path) -> None:
    """Play one case in a directory that does not exist yet. Raises AssertionError."""
    # Only a directory that has the iteration already moves it aside.
    is_again = case.point == "earlier-moved-aside"
    shutil.copytree(beginning.again if is_again else beginning.start, root)
    flags = [*_FLAGS, *WAYS[case.way], *(["--ckpt-step", str(_SAVED_FIRST)] if is_again else [])]
    outcomes = train(root, *flags, crash_point=f"{case.point}:{case.rank}")
    assert not any("Traceback" in errors for _, errors in outcomes), outcomes
    if case.way == "process" and CRASH_POINTS[case.point].by_writer:
        _check_goes_on(outcomes)
    else:
        assert outcomes[case.rank][0] == -_SIGKILL, f"rank {case.rank} was not killed: {outcomes}"
        found, expected = find_saved(root), _find_expected_iteration(case)
        # A rank that has trained to its end does not wait for the first one to remove what is old.
        assert expected == _END or all(code != 0 for code, _ in outcomes), outcomes
        assert found == expected, f"{found} is loaded instead of {expected}"
        train(root, *_FLAGS)
    assert list_remains(root) == []
    end = read_tensors(root, _END)
    assert end.keys() == beginning.end.keys()
    differing = [key for key in beginning.end if not torch.equal(end[key], beginning.end[key])]
    # Upstream's formats have no place for the state of our random numbers.
    differing = [key for key in differing if case.way != "torch" or not key.startswith(RNG_PREFIX)]
    assert not differing, f"other values after resuming: {differing[:5]}"


def _check_goes_on(outcomes: list[tuple[int, str]]) -> None:
    """The process that wrote for a rank was killed."""
    assert [code for code, _ in outcomes] == [0] * RANKS, outcomes
    lines = outcomes[0][1].splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: iteration {_SAVED_AGAIN} was not saved: "), outcomes
    assert "was lost (killed by signal 9)" in lines[0] and lines[0].endswith("training goes on"), outcomes
    assert not outcomes[1][1], outcomes


def _find_expected_iteration(case: Case) -> int:
    """What a run loads after a kill there."""
    if case.way == "non-persistent" and case.point in ("old-unmarked", "old-removed"):
        return _END  # the last checkpoint is persistent again, and removes the first
    if case.way == "torch" and case.point == "tensors-written" and case.rank > 0:
        return _SAVED_AGAIN  # the first rank has heard of every file by then, and needs nothing more of the others
    return _SAVED_AGAIN if _ORDER.index(case.point) >= _ORDER.index("renamed") else _SAVED_FIRST
