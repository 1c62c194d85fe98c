# SPDX-License-Identifier: Apache-2.0
"""Kills at random moments: two ranks train and save often, one or both are killed, and the same command goes on.

A case is a run that is killed several times; which ranks, when, and how it saves is a function of the case's seed.
After each kill no more than the last interval is lost; at the end all losses and tensors have the bits of the
uninterrupted run.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.faults.test_resume import rows
from tests.faults.two_ranks import WAYS, find_saved, list_remains, read_tensors, start_ranks
from tests.faults.verdicts import Verdict
from tests.functional.pretrain_runs import finish
from tests.programs import Program

ITERATIONS, INTERVAL = 20, 2
_FLAGS = f"""--train-iters {ITERATIONS} --save-interval {INTERVAL} --save-retain-interval 1000
    --hidden-dropout 0.1 --attention-dropout 0.1""".split()
# Upstream's formats have no place for the state of our random numbers.
EXACT_WAYS = [way for way in WAYS if way != "torch"]
_VICTIMS = ((0,), (1,), (0, 1))
_KILLS_OF_A_RUN = 13
"""A kill costs a start, and a run costs its end and a comparison. Each resume shows in the end of its run."""
_END_SECONDS = 240
"""Ranks that have lost one end within seconds; on a machine with ten times as much to do within minutes."""
_AT_START = 0.25
"""Part of the kills that come before the first step: while ranks meet, load, and tidy up."""


@dataclass(frozen=True)
class Whole:
    """The uninterrupted run."""

    rows: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]


def train_whole(directory: Path) -> Whole:
    """Train it."""
    directory.mkdir()
    outcomes = finish(_start(directory, "sync"))
    assert not any(rank.returncode for rank in outcomes), outcomes
    return Whole(rows(directory), read_tensors(directory / "ckpt", ITERATIONS))


class Clock:
    """How long things take on this machine at this time, so that kills come in the middle of them."""

    def __init__(self) -> None:
        self.start_seconds, self.step_seconds = 1.0, 0.1

    def wait(self, ranks: list[Program], directory: Path, saved: int, pick: random.Random) -> bool:
        """Wait for a random moment of a run that goes on from `saved`: at its start, or after one of its next
        iterations. Whether it has begun to train."""
        began_at = time.monotonic()
        is_at_start = pick.random() < _AT_START
        # Near enough that the kills of a run are spread over all of it.
        target, delay = min(ITERATIONS, saved + pick.randint(1, 2 * ITERATIONS // _KILLS_OF_A_RUN)), pick.random()
        if is_at_start:
            time.sleep(delay * self.start_seconds)
            return False
        # Rows of iterations that will be repeated are there until the run begins to train.
        stale = _read_metrics(directory) if _count_done(directory) > saved else b""
        seen: tuple[int, int] | None = None
        started_at: float | None = None
        while ranks[0].poll() is None:
            # Reading rows again and again would take the time of those who train.
            if (now := _look_at_metrics(directory)) != seen:
                seen = now
                done = saved if stale and _read_metrics(directory) == stale else _count_done(directory)
                if done > saved and started_at is None:
                    started_at = time.monotonic()
                if done >= target:
                    break
            time.sleep(0.002)
        if started_at is not None:
            self.start_seconds = started_at - began_at
            self.step_seconds = (time.monotonic() - started_at) / max(1, target - saved - 1)
        # The next iteration and its save.
        time.sleep(delay * 2 * self.step_seconds)
        return started_at is not None


def _read_metrics(directory: Path) -> bytes:
    # A run that begins anew sets the file aside.
    try:
        return (directory / "metrics" / "metrics.jsonl").read_bytes()
    except FileNotFoundError:
        return b""


def _look_at_metrics(directory: Path) -> tuple[int, int] | None:
    """What changes when a row is written."""
    path = directory / "metrics" / "metrics.jsonl"
    if not path.exists():
        return None
    state = path.stat()
    return state.st_size, state.st_mtime_ns


def _count_done(directory: Path) -> int:
    return max((row["iteration"] for row in rows(directory)), default=0)


def _start(directory: Path, way: str) -> list[Program]:
    root = directory / "ckpt"
    return start_ranks([*_FLAGS, *WAYS[way], "--save", root, "--load", root, "--metrics-dir", directory / "metrics"])


def play(whole: Whole, directory: Path, seed: int, kills: int, ways: list[str]) -> Iterator[Verdict]:
    """Runs until so many kills have come; a verdict for each kill, the last of a run's with the run's end."""
    left, number, clock = kills, 0, Clock()
    while left:
        number += 1
        pick = random.Random(f"{seed} {number}")
        run = directory / f"run{number}"
        run.mkdir()
        way = ways[(seed + number) % len(ways)]
        verdicts = [Verdict("")]
        for _ in range(min(left, _KILLS_OF_A_RUN)):
            verdict = _kill_once(run, way, pick, clock)
            # It came to its end before the kill.
            if verdict is None:
                break
            verdicts.append(verdict)
        yield from verdicts[1:-1]
        problem = _judge_end(whole, run, way)
        if len(verdicts) > 1 or problem:
            case, own = verdicts[-1]
            yield Verdict(f"{case}; run {number} of seed {seed}", "; ".join(filter(None, (own, problem))))
        left -= len(verdicts) - 1
        shutil.rmtree(run)


def _kill_once(directory: Path, way: str, pick: random.Random, clock: Clock) -> Verdict | None:
    """Start, kill at a random moment, and look what is left; None where the run came to its end before."""
    victims = pick.choice(_VICTIMS)
    before = find_saved(directory / "ckpt")
    ranks = _start(directory, way)
    is_training = clock.wait(ranks, directory, before, pick)
    for victim in victims:
        ranks[victim].kill()
    if not is_training:
        # Whoever has not met the others yet waits for them as long as a job may take to start; a launcher does this.
        time.sleep(pick.random() * clock.start_seconds)
        for rank in ranks:
            rank.kill()
    victim_names = " and ".join(map(str, victims))
    case = f"{way}, rank {victim_names} killed"
    try:
        outcomes = finish(ranks, _END_SECONDS)
    except subprocess.TimeoutExpired:
        return Verdict(case, f"the others have not ended after {_END_SECONDS} s")
    if all(rank.returncode == 0 for rank in outcomes):
        return None
    problems = []
    for number, rank in enumerate(outcomes):
        if rank.returncode not in (0, -signal.SIGKILL, 75) or "Traceback" in rank.stderr:
            problems.append(f"rank {number} ended with {rank.returncode}: {rank.stderr[-500:]}")
    saved, done = find_saved(directory / "ckpt"), _count_done(directory)
    # A save that goes on beside training is complete before the next one begins.
    lost_at_most = 2 * INTERVAL if "--async-save" in WAYS[way] else INTERVAL
    if saved < before or saved < done - lost_at_most:
        problems.append(f"iteration {saved} is what is left of {before} before, after {done}")
    return Verdict(f"{case} at iteration {done}", "; ".join(problems))


def _judge_end(whole: Whole, directory: Path, way: str) -> str:
    """Let the run come to its end and compare."""
    try:
        outcomes = finish(_start(directory, way))
    except subprocess.TimeoutExpired as error:
        return f"the run that went on has not ended after {error.timeout:.0f} s"
    if any(rank.returncode for rank in outcomes):
        return f"the run did not go on: {[(rank.returncode, rank.stderr[-500:]) for rank in outcomes]}"
    root = directory / "ckpt"
    if remains := list_remains(root):
        return f"something is left over: {remains}"
    if rows(directory) != whole.rows:
        differing = [pair for pair in zip(rows(directory), whole.rows, strict=False) if pair[0] != pair[1]]
        return f"other numbers: {differing[:1] or len(rows(directory))}"
    end = read_tensors(root, ITERATIONS)
    differing_keys = [key for key in whole.tensors if key not in end or not torch.equal(end[key], whole.tensors[key])]
    return f"other tensors: {differing_keys[:5]}" if differing_keys or len(end) != len(whole.tensors) else ""
