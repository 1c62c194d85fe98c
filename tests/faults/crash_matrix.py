# SPDX-License-Identifier: Apache-2.0
"""What crashes, failing disks and damage cost: nothing but the steps since the last save. The whole of it, or parts.

    python -m tests.faults.crash_matrix                             all of it: about half an hour on two cores
    python -m tests.faults.crash_matrix --point renamed --rank 0 --way thread
    python -m tests.faults.crash_matrix --calls                     every system call of a save fails, or is the last
    python -m tests.faults.crash_matrix --kills 100 --seed 7        at random moments
    python -m tests.faults.crash_matrix --flips 10000 --kinds       damage to files

Progress comes with rate and time left, and at the end a tally. Exit code 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing.crash_points import CRASH_POINTS
from tests.faults import damaged_checkpoints, failing_calls, killed_at_points, killed_at_random
from tests.faults.two_ranks import RANKS, WAYS
from tests.faults.verdicts import Tally, Verdict, count
from tests.parallel.harness import run_distributed

_KILLS, _FLIPS = 1000, 10_000
_CALLS_BESIDE_TRAINING = 7
"""Of the calls of a save that goes on beside training each so-manieth: they are those of one that does not."""


def main(argv: Sequence[str] | None = None) -> int:
    """Play what was asked for; 1 where anything failed."""
    options = _parse(argv)
    tallies: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory(prefix="crash-matrix-") as directory:
        for name, is_wanted, campaign in (
            ("crash points", options.point or options.rank is not None or options.points, _play_points),
            ("system calls", options.calls, _play_calls),
            ("kills at random", options.kills, _play_kills),
            ("kinds of damage", options.kinds, _play_kinds),
            ("bits and lengths", options.flips, _play_flips),
        ):
            if is_wanted:
                print(f"---- {name}", flush=True)
                place = Path(directory) / name.replace(" ", "-")
                place.mkdir()
                tallies[name] = campaign(options, place)
    for name, tally in tallies.items():
        print(f"{name}: {tally}")
    return int(not tallies or any(tally.failed or not tally.played for tally in tallies.values()))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.crash_matrix", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--points", action="store_true", help="kills at all named crash points")
    parser.add_argument(
        "--point", choices=list(CRASH_POINTS), action="append", metavar="POINT", help="at this one alone"
    )
    parser.add_argument("--rank", type=int, choices=range(RANKS), help="on this rank alone")
    parser.add_argument("--way", choices=list(WAYS), action="append", help="with this way of saving alone")
    parser.add_argument("--calls", action="store_true", help="SIGKILL, EIO, ENOSPC and EROFS at each system call")
    parser.add_argument("--kills", type=int, default=0, metavar="NUMBER", help=f"kills at random moments ({_KILLS})")
    parser.add_argument(
        "--flips", type=int, default=0, metavar="NUMBER", help=f"flipped bits and truncations ({_FLIPS})"
    )
    parser.add_argument("--kinds", action="store_true", help="kinds of damage")
    parser.add_argument("--seed", type=int, default=1, help="which kills and bits (default: 1)")
    options = parser.parse_args(argv)
    chosen = (options.points, options.point, options.rank is not None, options.calls, options.kills, options.flips)
    if not any(chosen) and not options.kinds:
        options.points = options.calls = options.kinds = True
        options.kills, options.flips = _KILLS, _FLIPS
    options.ways = options.way or list(WAYS)
    return options


def _play_points(options: argparse.Namespace, directory: Path) -> Tally:
    cases = [
        case
        for case in killed_at_points.list_cases(options.ways)
        if case.point in (options.point or CRASH_POINTS) and options.rank in (None, case.rank)
    ]
    beginning = killed_at_points.begin(directory)
    return count(killed_at_points.play(cases, beginning, directory), len(cases))


def _play_calls(options: argparse.Namespace, directory: Path) -> Tally:
    def play() -> Iterator[Verdict]:
        # Where a save lies makes no difference to the calls it is made of.
        for way in (way for way in options.ways if way != "non-persistent"):
            step = 1 if way in ("sync", "torch") else _CALLS_BESIDE_TRAINING
            yield from failing_calls.play(directory, ways=[way], faults=list(failing_calls.FAULTS), step=step)

    return count(play(), None)


def _play_kills(options: argparse.Namespace, directory: Path) -> Tally:
    whole = killed_at_random.train_whole(directory / "whole")
    ways = [way for way in options.ways if way in killed_at_random.EXACT_WAYS]
    return count(killed_at_random.play(whole, directory, options.seed, options.kills, ways), options.kills)


def _play_kinds(options: argparse.Namespace, directory: Path) -> Tally:
    undamaged, names = directory / "undamaged", list(damaged_checkpoints.KINDS)
    damaged_checkpoints.make_directory(undamaged)
    play: Callable[..., list[Verdict]] = damaged_checkpoints.play_kinds

    def both() -> Iterator[Verdict]:
        for layout, ranks in (("", 1), ("tp2", 2)):
            copies = directory / f"{ranks} ranks"
            copies.mkdir()
            yield from run_distributed(play, ranks, str(undamaged), str(copies), layout, names)[0]

    return count(both(), 2 * len(names))


def _play_flips(options: argparse.Namespace, directory: Path) -> Tally:
    undamaged = directory / "undamaged"
    damaged_checkpoints.make_directory(undamaged)
    return count(damaged_checkpoints.flip(undamaged, options.seed, options.flips), options.flips, every_seconds=2.0)


if __name__ == "__main__":
    sys.exit(main())
