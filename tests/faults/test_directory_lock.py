# SPDX-License-Identifier: Apache-2.0
"""Two runs and one --save: one of them writes, whoever died, was stopped, or sits on another machine."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import directory_lock
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock, Holder
from megatron.core.errors import StorageError, TemporaryError
from megatron.training.hooks.dispatch import Hooks
from megatron.training.hooks.writers import MetricsFile
from megatron.training.run import Hook, Run, StepResult
from tests.functional.pretrain_runs import TINY, start
from tests.support.tiny_training import finish, prepare

ELSEWHERE = Holder("0123456789ab", "gpu07", 4711, "2026-01-01 00:00:00 +0000", "another machine", 5)
NEVER = 1e6


def ignore(sentence: str) -> None:
    """What the lock has to tell."""


def lock_files(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*.lock"))


def leave_lock(root: Path, holder: Holder, number: int = 1) -> Path:
    path = root / f"save-{number:08d}.lock"
    path.write_bytes(holder.format(0))
    return path


@contextlib.contextmanager
def process(action: Callable[[], None]) -> Iterator[int]:
    """A forked process that has done the action, and lives until the end of the block or its death."""
    done, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os.write(report, b".")
            time.sleep(NEVER)
        finally:
            os._exit(1)
    os.close(report)
    assert os.read(done, 1) == b"."
    os.close(done)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def hold(root: Path, kept: list[DirectoryLock]) -> Callable[[], None]:
    return lambda: kept.append(DirectoryLock(root, ignore))


def test_a_living_run_keeps_the_directory_and_a_killed_one_loses_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", NEVER)  # waiting at all would never end
    told: list[str] = []
    with process(hold(tmp_path, [])) as pid:
        with pytest.raises(TemporaryError, match=rf"--save {tmp_path} is in use by run \w+ \(process {pid} on"):
            DirectoryLock(tmp_path, told.append)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TemporaryError):
            DirectoryLock(tmp_path, told.append)
        os.kill(pid, signal.SIGKILL)
        # Not waited for: the parent of a killed run need not have asked for its exit code yet.
        while directory_lock._read_process(pid)[1] is not None:
            time.sleep(0.01)
        lock = DirectoryLock(tmp_path, told.append)
    assert len(told) == 1 and "whose process is gone" in told[0] and str(pid) in told[0]
    assert lock_files(tmp_path) == ["save-00000002.lock"]
    lock.release()
    lock.release()
    assert lock_files(tmp_path) == []


def test_a_number_that_another_process_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", NEVER)
    ours = Holder.of_this_process()
    assert ours.machine is not None and ours.process_started is not None
    leave_lock(tmp_path, Holder("a", "here", os.getppid(), "", ours.machine, 1))
    # And a run of this process that was left without being closed.
    leave_lock(tmp_path, Holder("b", "here", os.getpid(), "", ours.machine, ours.process_started), 2)
    DirectoryLock(tmp_path, ignore).release()


def test_S37_elsewhere_the_counter_decides_by_our_own_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a machine whose processes we cannot see: refused while it beats, taken over once it stands still."""
    # Refused with its first beat, however late that comes on a busy machine.
    monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", NEVER)
    told: list[str] = []

    def hold_elsewhere() -> None:
        directory_lock.BEAT_SECONDS = 0.1
        directory_lock.name_machine = lambda: "another machine"
        kept.append(DirectoryLock(tmp_path, ignore))

    kept: list[DirectoryLock] = []
    with process(hold_elsewhere) as pid:
        with pytest.raises(TemporaryError, match=f"process {pid}"):
            DirectoryLock(tmp_path, told.append)
        os.kill(pid, signal.SIGKILL)
        monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", 1.5)
        killed = time.monotonic()
        lock = DirectoryLock(tmp_path, told.append)
        waited = time.monotonic() - killed
    assert waited >= 1.5
    assert "waiting up to" in told[0] and "no sign of life" in told[-1], told
    lock.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": 1}', b"\xff"])
def test_a_lock_file_of_no_known_run_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Its process was killed between creating and writing it, or something else wrote it."""
    monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", 0.1)
    (tmp_path / "save-00000001.lock").write_bytes(content)
    told: list[str] = []
    DirectoryLock(tmp_path, told.append).release()
    assert len(told) == 2 and lock_files(tmp_path) == []


def contend(root: Path, go: int, end: int, report: int) -> None:
    """One of several that want the lock of the dead `ELSEWHERE`, each as if on a machine of its own."""
    directory_lock.BEAT_SECONDS, directory_lock._LOOK_SECONDS = 0.05, 0.01
    machine = f"machine {os.getpid()}"
    directory_lock.name_machine = lambda: machine
    Holder.is_gone = lambda self: True if self.run == ELSEWHERE.run else None  # type: ignore[method-assign]
    os.read(go, 1)
    time.sleep(random.choice([0, 0, random.uniform(0, 0.003)]))
    try:
        lock = DirectoryLock(root, ignore)
        os.write(report, b"W")
        os.read(end, 1)
        lock.check()
    except TemporaryError:
        os.write(report, b"L")
    except BaseException as error:
        os.write(report, f"!{error}".encode())


def race(root: Path, contenders: int) -> str:
    """Who wins (W) and who is refused (L), all starting at once; the winner stays until everybody has an answer."""
    pipes = [os.pipe() for _ in range(3)]
    (go, start_all), (end, end_all), (outcomes, report) = pipes
    pids = []
    for _ in range(contenders):
        pid = os.fork()
        if pid == 0:
            os.close(start_all)
            os.close(end_all)
            contend(root, go, end, report)
            os._exit(0)
        pids.append(pid)
    os.close(start_all)
    letters = "".join(os.read(outcomes, 1).decode() for _ in range(contenders))
    os.close(end_all)
    for pid in pids:
        os.waitpid(pid, 0)
    # A winner that had lost its lock meanwhile has written more.
    os.close(report)
    letters += os.read(outcomes, 1000).decode()
    for descriptor in (go, end, outcomes):
        os.close(descriptor)
    return letters


@pytest.mark.parametrize("starts_with", ["nothing", "the lock of a dead run"])
def test_of_many_that_race_exactly_one_wins(tmp_path: Path, starts_with: str) -> None:
    for number in range(20):
        root = tmp_path / str(number)
        root.mkdir()
        if starts_with != "nothing":
            leave_lock(root, ELSEWHERE)
        letters = race(root, contenders=5)
        assert sorted(letters) == list("LLLLW"), letters


def test_a_rival_that_came_and_went_between_looking_and_creating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We see lock 1 of a dead run. Before we create lock 2, one rival has taken over and ended, and another has begun,
    with number 1 again."""
    monkeypatch.setattr(Holder, "is_gone", lambda self: self.run == ELSEWHERE.run)
    leave_lock(tmp_path, ELSEWHERE)
    create, rivals = directory_lock._create, []

    def create_late(path: Path, holder: Holder) -> None:
        if not rivals:
            rivals.append(holder)
            DirectoryLock(tmp_path, ignore).release()
            rivals.append(DirectoryLock(tmp_path, ignore))
        create(path, holder)

    monkeypatch.setattr(directory_lock, "_create", create_late)
    with pytest.raises(TemporaryError, match=rf"in use by run \w+ \(process {os.getpid()} "):
        DirectoryLock(tmp_path, ignore)
    assert lock_files(tmp_path) == ["save-00000001.lock"]
    rivals[1].check()


def test_a_full_disk_and_a_forked_process_leave_the_lock_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_lock, "BEAT_SECONDS", 0.01)
    beats, write = [], os.pwrite

    def fail_at_first(*arguments: Any) -> int:
        beats.append(arguments)
        if len(beats) < 5:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", fail_at_first)
    lock = DirectoryLock(tmp_path, ignore)
    pid = os.fork()
    if pid == 0:
        lock.release()
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 60
    while int(json.loads(lock.path.read_bytes() or b'{"beat": 0}')["beat"]) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert int(json.loads(lock.path.read_bytes())["beat"]) >= 5
    lock.check()
    del lock
    assert lock_files(tmp_path) == [], "a lock to which nobody refers is released"


def test_tidied_up_by_hand_or_taken_over_meanwhile(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path, ignore)
    lock.path.unlink()
    lock.check()
    assert lock_files(tmp_path) == ["save-00000001.lock"], "nobody else was here: taken again"
    lock.path.unlink()
    leave_lock(tmp_path, ELSEWHERE, 2)
    with pytest.raises(StorageError, match=rf"{tmp_path} was lost to run {ELSEWHERE.run} \(process 4711 on gpu07"):
        lock.check()
    lock.release()
    (tmp_path / "save-00000002.lock").unlink()
    (tmp_path / directory_lock.TRACKER_NAME).write_text("20")
    with pytest.raises(StorageError, match="to another run, which has saved there"):
        lock.check()
    lock.note_save()
    lock.check()
    lock.release()


class LosingHook(Hook):
    """While step 3 is computed, another run takes the directory over, as if this process had been stopped."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.progress.iteration == 3:
            for name in lock_files(self.root):
                (self.root / name).unlink()
            leave_lock(self.root, ELSEWHERE, 2)


def test_S35_a_run_that_lost_its_directory_saves_nothing_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "ckpt"
    run = prepare("--save", root, "--save-interval", "2")
    assert lock_files(root) == ["save-00000001.lock"]
    run.hooks.hooks.append(LosingHook(root))  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match="was lost to run"):
        finish(run)
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["iter_0000002"]
    assert run.progress.iteration == 6
    errors = capsys.readouterr().err
    assert "iteration 4 was not saved" in errors and "gpu07" in errors and "training goes on" in errors
    assert lock_files(root) == ["save-00000002.lock"], "the other's lock is left alone"


def test_rows_of_two_runs_are_never_mixed(tmp_path: Path) -> None:
    rows = tmp_path / "metrics.jsonl"
    rows.write_text('{"iteration": 1, "lm loss": 4.0}\n')
    kept: list[DirectoryLock] = []
    with process(lambda: kept.append(MetricsFile(tmp_path).lock())) as pid:
        with pytest.raises(TemporaryError, match=rf"--metrics-dir {tmp_path} is in use by run \w+ \(process {pid} on"):
            finish(prepare("--metrics-dir", str(tmp_path)))
        assert len(rows.read_text().splitlines()) == 1, "what the other run writes stays its own"
    finish(prepare("--metrics-dir", str(tmp_path)))
    assert rows.with_suffix(".jsonl.old").exists() and lock_files(tmp_path) == []


def test_metrics_within_the_save_directory_need_no_lock_of_their_own(tmp_path: Path) -> None:
    class Look(Hook):
        def on_step_end(self, run: Run, result: StepResult) -> None:
            found.append([*lock_files(tmp_path), *lock_files(tmp_path / "metrics")])

    found: list[list[str]] = []
    beside = tmp_path / "there" / ".." / "metrics"
    (tmp_path / "there").mkdir()
    run = prepare("--save", str(tmp_path), "--metrics-dir", str(beside))
    run.hooks = Hooks([*run.hooks.hooks, Look()])
    finish(run)
    assert found and all(len(files) == 1 for files in found)
    assert (tmp_path / "metrics" / "metrics.jsonl").exists()


def test_S36_two_runs_with_one_save_directory(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    flags = [*TINY, "--save", root, "--load", root, "--save-interval", "5"]
    first = start([*flags, "--train-iters", "100000", "--lr-decay-style", "constant", "--lr-decay-iters", "10"])
    deadline = time.monotonic() + 120
    while not (root / "iter_0000005").exists() and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    second = start(flags)
    output, errors = second.communicate(timeout=120)
    assert second.returncode == 75, errors
    assert f"--save {root} is in use by run" in errors and f"process {first.pid} on" in errors
    assert "Traceback" not in errors and "removed" not in output
    first.kill()
    first.communicate()
    third = start([*flags, "--override-opt_param-scheduler"])
    output, errors = third.communicate(timeout=120)
    assert third.returncode == 0, errors
    assert f"process {first.pid} on" in output and "whose process is gone" in output and "waiting" not in output
    assert lock_files(root) == []
