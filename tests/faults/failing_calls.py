# SPDX-License-Identifier: Apache-2.0
"""The N-th system call of a save fails, or its process is killed in the middle of it: for all N, on both of two ranks.

Counted are all calls that change files below --save: of Python, of torch's writers, and of a process that writes for
the run. `failing_calls.c` stands between them and the C library; nothing of the program knows of it. It takes a C
compiler.

    python -m tests.faults.failing_calls ...       what play() starts: a process with that library loaded
"""

from __future__ import annotations

import ctypes
import functools
import io
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from errno import EIO, ENOSPC, EROFS
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from megatron.core.dist_checkpointing.directory import TRACKER_NAME, list_leftovers, settle_leftovers
from megatron.core.dist_checkpointing.finding import find_checkpoint
from megatron.core.dist_checkpointing.safe_pickle import read_restricted
from megatron.core.errors import CheckpointError
from megatron.training.launch.local_job import run_job_locally
from megatron.training.loop import train
from megatron.training.run import Hook, Run, StepResult
from megatron.training.verify.parity import open_local_run
from tests.faults.two_ranks import WAYS
from tests.faults.verdicts import Verdict
from tests.functional.pretrain_runs import ROOT
from tests.parallel.harness import _prepare
from tests.parallel.small_training import training

COMPILERS = ("cc", "gcc", "clang")
_RANKS = 2
_FLAGS = "--num-layers 1 --hidden-size 16 --seq-length 8 --global-batch-size 2 --save-retain-interval 1000"
_JOB_SECONDS = 300.0
_SAVED, _END = 1, 2


class Fault(NamedTuple):
    """What becomes of the call, and of those that follow."""

    what: int
    """As in failing_calls.c."""
    error: int


_KILL = 1
_NEVER = 10**9
_EVERY_RANK = -1
"""As the victim: each counts its calls."""
FAULTS = {
    "SIGKILL": Fault(_KILL, 0),
    "EIO": Fault(2, EIO),
    "ENOSPC": Fault(3, ENOSPC),
    "EROFS": Fault(4, EROFS),
}
"""A process killed halfway through a write; one call that fails; a disk that is full, or read-only, from then on until
the end of the save."""


def play(
    directory: Path, *, ways: list[str], faults: list[str], step: int = 1, first: int = 1, resume_each: int = 1
) -> Iterator[Verdict]:
    """Play every `step`-th call from `first` on, each fault on each rank. resume_each: so many of the runs that were
    killed are trained to their end; of all others it is looked at what is left."""
    library = directory / "failing_calls.so"
    order = {"directory": str(directory), "ways": ways, "faults": faults, "step": step, "first": first}
    order["resume_each"] = resume_each
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    source = str(Path(__file__).with_suffix(".c"))
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)
    variables = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu"}
    command = [sys.executable, "-m", "tests.faults.failing_calls", json.dumps(order)]
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        try:
            for line in driver.stdout:
                if line.startswith("verdict "):
                    yield Verdict(*json.loads(line.removeprefix("verdict ")))
        finally:
            driver.kill() if driver.poll() is None and sys.exc_info()[0] else driver.wait()
    assert driver.returncode == 0, f"the campaign ended with {driver.returncode}"


# ---- in the process with the library


class Calls:
    """The library in this process, and in those it starts from now on."""

    def __init__(self, state: Path) -> None:
        self._library = ctypes.CDLL(None)
        with state.open("wb") as file:
            file.truncate(self._library.failing_calls_size())
        assert self._library.failing_calls_use(os.fsencode(state)) == 0
        os.environ["FAILING_CALLS_STATE"] = str(state)

    def arm(self, root: Path, fault: Fault, number: int) -> None:
        """From now on count calls below `root`; the fault comes with that number."""
        prefix = os.fsencode(root.resolve())
        self._library.failing_calls_arm(prefix, fault.what, fault.error, ctypes.c_long(number))

    def disarm(self) -> int:
        """How many have been counted."""
        return int(self._library.failing_calls_disarm())


@dataclass
class _Look:
    """What is there after a save."""

    iteration: int
    call: int
    """The call of it that failed; 0 where none did."""
    found: int
    problem: str


def _look(root: Path, iteration: int, call: int, *, may_be_left: bool) -> _Look:
    try:
        found = find_checkpoint(root)
    except CheckpointError as error:
        return _Look(iteration, call, -1, str(error))
    if found is None:
        return _Look(iteration, call, 0, "no checkpoint is found")
    problems = list(found.skipped)
    leftovers = [path.name for path in list_leftovers(root)]
    if leftovers and not may_be_left:
        problems.append(f"left over: {leftovers}")
    if not leftovers and (root / TRACKER_NAME).read_text() != str(found.manifest.iteration):
        problems.append(f"the tracker names {(root / TRACKER_NAME).read_text()!r}")
    return _Look(iteration, call, found.manifest.iteration, "; ".join(problems))


class _Failing(Hook):
    """Lets call after call fail, one in each second save, while training goes on."""

    def __init__(self, root: Path, fault: Fault, first: int, step: int, *, is_victim: bool, state: Path) -> None:
        self.root, self.fault, self.first, self.step, self.is_victim = root, fault, first, step, is_victim
        self.calls = Calls(state)
        self.looks: list[_Look] = []
        self.counts: list[int] = []
        self._last: tuple[int, int] | None = None

    def on_step_end(self, run: Run, result: StepResult) -> None:
        number, is_odd = divmod(run.progress.iteration, 2)
        call = self.first + (number - 1) * self.step if number and is_odd else 0
        self._last = run.progress.iteration, call
        if self.is_victim:
            self.calls.arm(self.root, self.fault, call or _NEVER)

    def on_step_start(self, run: Run) -> None:
        self.look(run)

    def look(self, run: Run) -> None:
        """Wait for the end of the last save, and look."""
        if self._last is None:
            return
        for thread in threading.enumerate():
            if thread.name.startswith("save of iteration"):
                thread.join()
        if self.is_victim:
            self.counts.append(self.calls.disarm())
        iteration, call = self._last
        if run.is_first_rank:
            # What could not be removed goes with the next save, which succeeds.
            self.looks.append(_look(self.root, iteration, call, may_be_left=bool(call)))


def train_on(
    rank: int, root: str, way: str, fault: str, victim: int, first: int, step: int, iterations: int
) -> tuple[int, list[list[str]]]:
    """Train with a fault in each second save; how many calls a save has on this rank, if it is the victim, and on the
    first rank case and problem of each fault."""
    path = Path(root)
    path.mkdir(exist_ok=True)
    flags = (
        f"{_FLAGS} {' '.join(WAYS[way])} --save {root} --save-interval 1 --train-iters {iterations} --lr-warmup-iters 0"
    )
    state = path.with_name(f"{path.name}.state{rank}")
    failing = _Failing(path, FAULTS[fault], first, step, is_victim=victim in (rank, _EVERY_RANK), state=state)
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    config, recipe = training(flags, "tp2")
    with open_local_run(config, recipe, rank, [failing]) as run:
        train(run)
        failing.look(run)
    lines = sys.stderr.getvalue().splitlines()
    case = f"{fault}, {way}, rank {victim}, call"
    verdicts = [[f"{case} {look.call}", _judge(look, failing.looks, lines)] for look in failing.looks if look.call]
    told = r"error: iteration \d+ was not (saved|removed): |warning: .*/ledger.jsonl was not written: "
    strange = [line for line in lines if not re.match(told, line)]
    if strange and verdicts:
        verdicts[-1][1] = f"said: {strange[:3]}"
    return max(failing.counts, default=0), verdicts


def _judge(look: _Look, looks: list[_Look], lines: list[str]) -> str:
    told = [line for line in lines if line.startswith(f"error: iteration {look.iteration} was not saved: ")]
    before = max((other.found for other in looks if other.iteration < look.iteration), default=0)
    problems = [look.problem]
    if len(told) > 1 or any("training goes on" not in line for line in told):
        problems.append(f"said: {told}")
    if look.found != look.iteration and not (told and look.found == before):
        problems.append(f"iteration {look.found} is there after {look.iteration} was to be saved; said: {told}")
    after = next((other for other in looks if other.iteration == look.iteration + 1), None)
    if after is None or after.found != after.iteration or after.problem:
        problems.append(f"the next save did not succeed: {after}")
    return "; ".join(filter(None, problems))


def train_killed(rank: int, root: str, way: str, victim: int, call: int, last: int) -> int:
    """Go on from what is in `root`; the victim is killed in that call below it. How many calls there were here."""
    path = Path(root)
    calls = Calls(path.with_name(f"{path.name}.state{rank}"))
    sys.stdout = sys.stderr = io.StringIO()
    flags = f"{_FLAGS} {' '.join(WAYS[way])} --save {root} --load {root} --save-interval 1 --train-iters {_END}"
    config, recipe = training(f"{flags} --exit-interval {last} --lr-warmup-iters 0", "tp2")
    if rank == victim:
        calls.arm(path, FAULTS["SIGKILL"], call)
    with open_local_run(config, recipe, rank) as run:
        train(run)
    return calls.disarm()


def _run(function: Any, *arguments: Any) -> Any:
    """On two ranks: the job's reports."""
    context = multiprocessing.get_context("fork")
    return run_job_locally(function, _RANKS, arguments, _JOB_SECONDS, context, _prepare)


def _value(job: Any, rank: int) -> Any:
    report = job.reports.get(rank)
    assert report is not None and not report.error_type, f"rank {rank}: {report or job.causes_of_death}"
    return report.value


def _play_fault(directory: Path, way: str, fault: str, victim: int, order: dict[str, Any]) -> Iterator[list[str]]:
    first, step = order["first"], order["step"]
    calls = _count_calls(directory / "count", way)[victim]
    cases = len(range(first, calls + 1, step))
    # The first save has nothing before it, and after each fault comes a save without one.
    job = _run(train_on, str(directory / f"{fault}{victim}"), way, fault, victim, first, step, 2 * cases + 2)
    yield from _value(job, 0)[1]


@functools.cache
def _count_calls(root: Path, way: str) -> list[int]:
    """How many calls a save has on each rank; whichever fault is to come, up to it they are the same."""
    job = _run(train_on, str(root), way, "EIO", _EVERY_RANK, _NEVER, 1, 4)
    return [_value(job, rank)[0] for rank in range(_RANKS)]


def _play_kills(directory: Path, way: str, victim: int, order: dict[str, Any]) -> Iterator[list[str]]:
    start = directory / "start"
    if not start.exists():
        start.mkdir()
        _run(train_killed, str(start), way, victim, _NEVER, _SAVED)
        whole = shutil.copytree(start, directory / "whole")
        _run(train_killed, str(whole), way, victim, _NEVER, _END)
    for number, call in enumerate(range(order["first"], _NEVER, order["step"]), start=1):
        root = directory / f"kill{victim}-{call}"
        shutil.copytree(start, root)
        job = _run(train_killed, str(root), way, victim, call, _END)
        report = job.reports.get(victim)
        if report is not None and not report.error_type and report.value < call:
            return
        resume = functools.partial(_resume, root, directory / "whole", way, victim)
        problem = _judge_killed(root) or (resume() if number % order["resume_each"] == 0 else "")
        yield [f"SIGKILL, {way}, rank {victim}, call {call}", problem]
        shutil.rmtree(root)


def _judge_killed(root: Path) -> str:
    look = _look(root, _END, 1, may_be_left=True)
    if look.problem or look.found not in (_SAVED, _END):
        return f"{look.found} is found: {look.problem}"
    for lock in root.glob("*.lock"):
        lock.unlink()
    settle_leftovers(root)
    tidied = _look(root, _END, 1, may_be_left=False)
    return tidied.problem or ("" if tidied.found == look.found else f"{look.found} became {tidied.found}")


def _resume(root: Path, whole: Path, way: str, victim: int) -> str:
    job = _run(train_killed, str(root), way, victim, _NEVER, _END)
    for rank in range(_RANKS):
        _value(job, rank)
    ours, theirs = (_read_tensors(place / f"iter_{_END:07d}") for place in (root, whole))
    return "" if ours == theirs else "other tensors after resuming"


def _read_tensors(checkpoint: Path) -> dict[str, Any]:
    files = [*checkpoint.glob("*.distcp"), *checkpoint.glob("*/*.pt")]
    assert len(files) == _RANKS, files
    return {str(path.relative_to(checkpoint)): _read_file(path) for path in files}


def _read_file(path: Path) -> Any:
    if path.suffix != ".pt":
        return path.read_bytes()
    # The settings are in there as well, with the name of the directory.
    state = {key: value for key, value in read_restricted(path, path.name).items() if key != "args"}
    leaves, structure = tree_flatten(state)
    return str(structure), [_describe(leaf) for leaf in leaves]


def _describe(leaf: Any) -> bytes | str:
    """A value, to the last bit."""
    if isinstance(leaf, torch.Tensor):
        return bytes(leaf.contiguous().view(-1).view(torch.uint8).numpy())
    # Of numpy's types the reader makes objects without a text of their own.
    return re.sub(r" at 0x\w+", "", repr(vars(leaf) if hasattr(leaf, "__dict__") else leaf))


def _play_one(directory: Path, way: str, fault: str, victim: int, order: dict[str, Any]) -> Iterator[list[str]]:
    """All calls with one fault on one rank; what ends them early is a verdict, and no end of the campaign."""
    try:
        if FAULTS[fault].what == _KILL:
            yield from _play_kills(directory, way, victim, order)
        else:
            yield from _play_fault(directory, way, fault, victim, order)
    except AssertionError as error:
        yield [f"{fault}, {way}, rank {victim}", repr(error)]


def main() -> int:
    """Play what the argument says, and print each verdict as a line."""
    order = json.loads(sys.argv[1])
    for way in order["ways"]:
        directory = Path(order["directory"]) / way
        directory.mkdir()
        for fault in order["faults"]:
            for victim in range(_RANKS):
                for case in _play_one(directory, way, fault, victim, order):
                    print("verdict", json.dumps(case), flush=True)
    return 0


if __name__ == "__main__":
    import tests.preload  # noqa: F401

    sys.exit(main())
