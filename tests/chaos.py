# SPDX-License-Identifier: Apache-2.0
"""A run that is struck by many faults and ends as if there had been none: `python -m tests.chaos`.

A job of torchrun's trains a tiny model; this program kills ranks and launchers, stops ranks, and starts the launcher
again when it has ended, as SLURM and Kubernetes do. Nobody does anything else. In the end losses, parameters and
consumed samples are those of the undisturbed run, bit for bit, and every step that was executed is accounted for.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.planner.availability import FailureModel
from tests.faults.test_training_faults import children
from tests.faults.two_ranks import read_tensors
from tests.functional.pretrain_runs import PRETRAIN, ROOT, TINY, environment, metrics

_ITERATION = re.compile(r" iteration +([0-9]+)/")
_BEGIN = re.compile(r"training .* iterations ([0-9]+) to")
_MOST_SECONDS = 1800.0
_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class Strike:
    """A fault from outside."""

    iteration: int
    """It comes when this one is done."""
    kind: str
    """rank, launcher, save (a rank, while a checkpoint is written) or stop."""


@dataclass
class Attempt:
    """From one start of the processes to their end, as their log tells."""

    begins_after: int
    """Iterations done before."""
    times: dict[int, float] = field(default_factory=dict)
    """Iteration -> the moment at which it was reported."""


def plan(steps: int, generator: random.Random, kills: int, saves: int, stops: int) -> list[Strike]:
    """Draw the faults of a run, spread over its steps. saves: how many of the kills come during a save."""
    kinds = ["save"] * saves + [generator.choice(("rank", "rank", "launcher")) for _ in range(kills - saves)]
    kinds += ["stop"] * stops
    generator.shuffle(kinds)
    width = steps / (len(kinds) + 1)
    return [Strike(max(1, int(width * (n + generator.random()))), kind) for n, kind in enumerate(kinds)]


def is_rank(pid: int) -> bool:
    """Return whether a child of torchrun's is a process of the job; it has helpers of its own."""
    try:
        return PRETRAIN.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


class Chaos:
    """One disturbed run."""

    def __init__(self, flags: Sequence[str | Path], ranks: int, save: Path, strikes: list[Strike], seed: int) -> None:
        self.attempts: list[Attempt] = []
        self.launches = 0
        self.log: list[str] = []
        self._flags, self._ranks, self._save, self._strikes = list(map(str, flags)), ranks, save, list(strikes)
        self._generator = random.Random(seed)
        self._launcher: subprocess.Popen[str] | None = None

    def run(self) -> None:
        """Until the run has ended by itself. Raises RuntimeError where it does not come to its end."""
        deadline = time.monotonic() + _MOST_SECONDS
        while True:
            self._launch()
            assert self._launcher is not None
            while self._launcher.poll() is None:
                if time.monotonic() > deadline:
                    self._launcher.kill()
                    raise RuntimeError("the run does not come to its end:\n" + "".join(self.log[-40:]))
                self._strike_if_due()
                time.sleep(0.002)
            self._reader.join(_PATIENCE_SECONDS)
            if self._launcher.returncode == 0:
                return

    def _launch(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "100"]
        command += ["--nproc-per-node", str(self._ranks), PRETRAIN, *self._flags]
        self._launcher = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment({}), cwd=ROOT
        )
        self.launches += 1
        self._reader = threading.Thread(target=self._read, args=(self._launcher,), daemon=True)
        self._reader.start()

    def _read(self, launcher: subprocess.Popen[str]) -> None:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            self.log.append(line)
            if begin := _BEGIN.search(line):
                self.attempts.append(Attempt(int(begin[1]) - 1))
            elif (found := _ITERATION.search(line)) and self.attempts:
                self.attempts[-1].times[int(found[1])] = time.monotonic()

    def _strike_if_due(self) -> None:
        if not (self._strikes and self.attempts and self.attempts[-1].times):
            return
        strike = self._strikes[0]
        if max(self.attempts[-1].times) < strike.iteration:
            return
        assert self._launcher is not None
        if strike.kind == "save" and not any(self._save.glob("*.tmp*")):
            return
        ranks = [pid for pid in children(self._launcher.pid) if is_rank(pid)]
        if len(ranks) < self._ranks:
            return
        victim = self._launcher.pid if strike.kind == "launcher" else self._generator.choice(ranks)
        os.kill(victim, signal.SIGSTOP if strike.kind == "stop" else signal.SIGKILL)
        print(f"after iteration {max(self.attempts[-1].times)}: {strike.kind}", flush=True)
        self._strikes.pop(0)

    @property
    def missed(self) -> list[Strike]:
        """Faults that the end of the run has overtaken."""
        return self._strikes

    # ---- what the log tells

    def count_executed(self) -> int:
        """Steps over all attempts. One that was saved and not reported any more was made, too."""
        unreported = [max(0, -lost) for lost in self._compare_attempts()]
        return sum(len(attempt.times) for attempt in self.attempts) + sum(unreported)

    def list_lost(self) -> list[int]:
        """For each restart, the steps that had been done and were done again."""
        return [max(0, lost) for lost in self._compare_attempts()]

    def _compare_attempts(self) -> list[int]:
        pairs = zip(self.attempts, self.attempts[1:], strict=False)
        return [max([a.begins_after, *a.times]) - b.begins_after for a, b in pairs]

    def list_restart_seconds(self) -> list[float]:
        """For each restart, from the last step before to the first one after it."""
        with_steps = [attempt for attempt in self.attempts if attempt.times]
        pairs = zip(with_steps, with_steps[1:], strict=False)
        return [min(b.times.values()) - max(a.times.values()) for a, b in pairs]


def build_flags(root: Path, name: str, steps: int, interval: int, layout: str) -> list[str | Path]:
    """The command of a run in a directory of its own."""
    save = root / name
    own = (
        f"--train-iters {steps} --lr-decay-iters {steps} --save-interval {interval} --hidden-dropout 0.1 --keep-last 2"
    )
    guards = "--hang-timeout 10 --rerun-mode validate_results --nan-policy skip"
    places = ["--save", save, "--load", save, "--metrics-dir", save / "metrics"]
    return [*TINY, *own.split(), *guards.split(), *layout.split(), *places]


def compare(root: Path, steps: int) -> list[str]:
    """The differences between the disturbed and the undisturbed run, in words."""
    whole, parts = root / "undisturbed", root / "disturbed"
    problems = [*compare_rows(metrics(whole / "metrics"), metrics(parts / "metrics"))]
    found, expected = read_tensors(parts, steps), read_tensors(whole, steps)
    problems += [f"{key} differs" for key in expected if key not in found or not found[key].equal(expected[key])]
    if (whole / "ledger.jsonl").read_text() != (parts / "ledger.jsonl").read_text():
        problems.append("the consumed samples differ")
    return problems


def compare_rows(expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what is missing from the metrics, twice there, or different."""
    for row in expected:
        rows = [other for other in found if other.get("iteration") == row.get("iteration")]
        if len(rows) != 1:
            yield f"metrics have {len(rows)} rows of iteration {row.get('iteration')}"
        elif rows[0] != row:
            keys = [key for key in row.keys() | rows[0].keys() if row.get(key) != rows[0].get(key)]
            yield f"metrics of iteration {row.get('iteration')} differ in {', '.join(sorted(keys))}"


def run_chaos(
    root: Path, *, steps: int, interval: int, ranks: int, layout: str, strikes: list[Strike], faults: str, seed: int
) -> tuple[Chaos, list[str]]:
    """Run both, and return the disturbed one and what is wrong with it. faults: of --simulate-fault."""
    undisturbed = Chaos(build_flags(root, "undisturbed", steps, interval, layout), ranks, root, [], seed)
    undisturbed.run()
    flags = build_flags(root, "disturbed", steps, interval, layout)
    for fault in faults.split():
        flags += ["--simulate-fault", fault]
    chaos = Chaos(flags, ranks, root / "disturbed", strikes, seed)
    chaos.run()
    problems = compare(root, steps)
    problems += [f"the run was over before {strike}" for strike in chaos.missed]
    lost, executed = chaos.list_lost(), chaos.count_executed()
    if executed != steps + sum(lost):
        problems.append(f"{executed} steps were executed, {steps} + {sum(lost)} are accounted for")
    # A save that found the disk full costs one interval more.
    most = interval * (2 if "disk" in faults else 1)
    if any(steps_lost > most for steps_lost in lost):
        problems.append(f"more than {most} steps were lost at once: {lost}")
    report(chaos, steps, undisturbed)
    return chaos, problems


def report(chaos: Chaos, steps: int, undisturbed: Chaos) -> None:
    """Print goodput, and what the model of failures makes of the same figures."""
    lost, restarts = chaos.list_lost(), chaos.list_restart_seconds()
    print(f"{len(chaos.attempts)} attempts, {chaos.launches} launches; steps lost at each restart: {lost}")
    print(f"goodput: {steps} useful of {chaos.count_executed()} executed steps = {steps / chaos.count_executed():.4f}")
    times = sorted(undisturbed.attempts[0].times.values())
    step_seconds = (times[-1] - times[0]) / (len(times) - 1)
    # From the first step on: the first start is no failure's.
    times = sorted(when for attempt in chaos.attempts for when in attempt.times.values())
    seconds = times[-1] - times[0]
    if restarts:
        model = FailureModel(
            failures_per_second=len(restarts) / seconds,
            restart_seconds=sum(restarts) / len(restarts),
            replay_seconds=step_seconds * sum(lost) / len(restarts),
        )
        useful = step_seconds * steps / seconds
        print(f"useful share of the time: {useful:.3f} measured, {model.useful_share:.3f} by the model of failures")


def main() -> int:
    """Run the whole of it: 20 kills, 5 of them during saves, 2 stops, a passing NaN and a full disk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    strikes = plan(asked.steps, random.Random(asked.seed), kills=20, saves=5, stops=2)
    faults = f"nan:1,{asked.steps // 3} disk:0,{asked.steps // 2}"
    with tempfile.TemporaryDirectory() as root:
        _, problems = run_chaos(
            Path(root), steps=asked.steps, interval=10, ranks=4, layout="--tensor-model-parallel-size 2",
            strikes=strikes, faults=faults, seed=asked.seed,
        )  # fmt: skip
    print(
        "\n".join(problems) or "losses, parameters and consumed samples are those of the undisturbed run, bit for bit"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
