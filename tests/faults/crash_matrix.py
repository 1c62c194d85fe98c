"""Every crash point x rank: two ranks train and save, one of them is killed there, and the same command goes on.

    python -m tests.faults.crash_matrix                             all points on both ranks: about five minutes
    python -m tests.faults.crash_matrix --point renamed --rank 0    one of them

After each kill an older or the new checkpoint is whole; the next start tidies up and continues; the end has the bits of
the uninterrupted run. Exit code 1 where that does not hold.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.crash_points import CRASH_POINTS
from megatron.core.dist_checkpointing.directory import find_checkpoint, list_leftovers
from megatron.core.dist_checkpointing.stored_tensors import open_checkpoint
from tests.functional.pretrain_runs import TINY, finish, free_port, start

RANKS = 2
# The two ranks hold different halves of everything, so that neither's file can be done without.
FLAGS = [*TINY, *"--train-iters 6 --tensor-model-parallel-size 2 --save-interval 2 --save-retain-interval 100".split()]
_SAVED_FIRST, _SAVED_AGAIN, _END = 2, 4, 6
_ORDER = list(CRASH_POINTS)
_SIGKILL = 9


class Case(NamedTuple):
    """Who dies where."""

    point: str
    rank: int

    def __str__(self) -> str:
        return f"{self.point} on rank {self.rank}"


def list_cases() -> list[Case]:
    """Each point on each rank that comes by."""
    ranks = {True: range(RANKS), False: range(1)}
    return [Case(name, rank) for name, point in CRASH_POINTS.items() for rank in ranks[point.on_every_rank]]


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
    train(first, "--exit-interval", "2")
    (first / "iter_0000001.tmp-0123abcd").mkdir()
    again = shutil.copytree(first, directory / "again")
    train(again, "--exit-interval", "4")
    # Saving iteration 4 has removed iteration 2, from which it is to be repeated.
    shutil.copytree(first / "iter_0000002", again / "iter_0000002")
    (again / "iter_0000001.tmp-0123abcd").mkdir()
    whole = shutil.copytree(first, directory / "whole")
    train(whole)
    return Beginning(first, again, read_tensors(whole))


def train(root: Path, *flags: str, crash_point: str | None = None) -> list[tuple[int, str]]:
    """Train from what is in `root`, or from the beginning; exit code and errors of each rank. Fails unless a crash was
    asked for and came, or none was and none came."""
    job = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    if crash_point is not None:
        job["MEGATRON_CRASH_POINT"] = crash_point
    places = ["--save", root, "--load", root]
    ranks = finish([start([*FLAGS, *places, *flags], RANK=str(n), LOCAL_RANK=str(n), **job) for n in range(RANKS)])
    outcomes = [(rank.returncode, rank.stderr) for rank in ranks]
    assert crash_point is not None or not any(code for code, _ in outcomes), outcomes
    return outcomes


def read_tensors(root: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last iteration, random-number states among them."""
    return {tensor.key: tensor.read() for tensor in open_checkpoint(root, _END).tensors}


def check(case: Case, beginning: Beginning, root: Path) -> None:
    """Play one case in a directory that does not exist yet. Raises AssertionError."""
    # Only a directory that has the iteration already moves it aside.
    is_again = case.point == "earlier-moved-aside"
    shutil.copytree(beginning.again if is_again else beginning.start, root)
    flags = ["--ckpt-step", str(_SAVED_FIRST)] if is_again else []
    outcomes = train(root, *flags, crash_point=f"{case.point}:{case.rank}")
    assert outcomes[case.rank][0] == -_SIGKILL, f"rank {case.rank} was not killed: {outcomes}"
    for code, errors in outcomes:
        assert code != 0 and "Traceback" not in errors, outcomes
    found = find_checkpoint(root)
    expected = _find_expected_iteration(case.point)
    assert found is not None and found.manifest.iteration == expected, f"{found} is loaded instead of {expected}"
    train(root)
    assert list_leftovers(root) == [] and not list(root.glob("*.lock")), sorted(root.iterdir())
    end = read_tensors(root)
    differing = [key for key in beginning.end if not torch.equal(end[key], beginning.end[key])]
    assert end.keys() == beginning.end.keys() and not differing, f"other values after resuming: {differing[:5]}"


def _find_expected_iteration(point: str) -> int:
    """What a run loads after a kill there."""
    return _SAVED_AGAIN if _ORDER.index(point) >= _ORDER.index("renamed") else _SAVED_FIRST


def main(argv: Sequence[str] | None = None) -> int:
    """Play the cases and print a line for each; 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.crash_matrix", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--point", choices=list(CRASH_POINTS), action="append", metavar="POINT", help="this one alone")
    parser.add_argument("--rank", type=int, choices=range(RANKS), help="on this rank alone")
    options = parser.parse_args(argv)
    cases = [
        case
        for case in list_cases()
        if case.point in (options.point or CRASH_POINTS) and options.rank in (None, case.rank)
    ]
    failed = 0
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crash-matrix-") as directory:
        beginning = begin(Path(directory))
        for number, case in enumerate(cases, start=1):
            root = Path(directory) / f"case{number}"
            try:
                check(case, beginning, root)
                verdict = "holds"
            except AssertionError as error:
                failed += 1
                verdict = f"FAILED: {error}"
            shutil.rmtree(root)
            elapsed_seconds = time.monotonic() - started_at
            print(f"{number}/{len(cases)} after {elapsed_seconds:.0f} s: {case}: {verdict}", flush=True)
    print(f"{len(cases) - failed} of {len(cases)} kills cost no more than the steps since the last save")
    return int(failed > 0 or not cases)


if __name__ == "__main__":
    sys.exit(main())
