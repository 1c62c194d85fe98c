# SPDX-License-Identifier: Apache-2.0
"""--async-save: the same checkpoints, written beside training by a thread or a process of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import io
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import serialization, torch_dist
from megatron.core.dist_checkpointing.async_save import AsyncSaver, SaveResult
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, SlicedTensor
from megatron.core.dist_checkpointing.writer_process import WriterProcess
from megatron.core.errors import StorageError
from megatron.core.placement import Placement
from megatron.training.hooks.exits import ExitHook
from megatron.training.run import Hook, Run, StepResult
from tests.support.small_checkpoints import ALONE, content, find, save, tensors
from tests.support.source_code import ROOT
from tests.support.tiny_training import differing, finish, prepare, train_tiny

THREAD = ("--async-save",)
PROCESS = ("--async-save", "--use-persistent-ckpt-worker")


@pytest.fixture(scope="module")
def process() -> Iterator[WriterProcess]:
    """One for all tests; starting it takes as long as importing torch."""
    writer = WriterProcess(niceness=3, disk_class=2)
    writer.start()
    yield writer
    writer.end()


def many_tensors() -> ShardedStateDict:
    """Number formats, a scalar, nothing, a transposed one, and a slice that ends within rows."""
    values = {
        "scalar": torch.tensor(3.5),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.linspace(-1, 1, 33, dtype=torch.bfloat16).view(3, 11),
        "transposed": torch.arange(30, dtype=torch.float64).view(5, 6).t(),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }
    state = {key: ShardedTensor.whole(key, value) for key, value in values.items()}
    state["slice"] = SlicedTensor.from_slice(torch.arange(35.0), 0, Placement("slice", (7, 5)))
    return state


def begin(saver: AsyncSaver, state: ShardedStateDict, root: Path, iteration: int, value: float = 0.0) -> None:
    root.mkdir(exist_ok=True)
    documents = {"state": {"iteration": iteration, "value": value}}
    saver.start(state, root, iteration, documents=documents, group=ALONE)


def awaited(saver: AsyncSaver) -> SaveResult:
    outcome = saver.wait()
    assert outcome is not None and saver.wait() is None, "an outcome is told once"
    return outcome


def files(checkpoint: Path) -> dict[str, bytes]:
    """All but what differs between two saves of the same: the manifest's run_id."""
    found = {str(p.relative_to(checkpoint)): p.read_bytes() for p in checkpoint.rglob("*") if p.is_file()}
    manifest = json.loads(found.pop("manifest.json"))["content"]
    return found | {"manifest": json.dumps(manifest | {"run_id": ""}).encode()}


# ---- the saver


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_same_bytes_although_the_tensors_change_at_once_S32(
    tmp_path: Path, process: WriterProcess, kind: str
) -> None:
    saver = AsyncSaver(process if kind == "process" else None)
    (tmp_path / "sync").mkdir()
    for iteration in (10, 20):
        documents = {"state": {"iteration": iteration, "value": 0.0}}
        whole = serialization.save(many_tensors(), tmp_path / "sync", iteration, documents=documents, group=ALONE)
        state = many_tensors()
        begin(saver, state, tmp_path / "async", iteration)
        for tensor in state.values():
            tensor.data.zero_()
        outcome = awaited(saver)
        assert outcome.check() == tmp_path / "async" / whole.name and outcome.iteration == iteration
        assert 0 < outcome.stalled_seconds < outcome.elapsed_seconds
        assert files(outcome.check()) == files(whole)
    assert saver._memory.generation == 1, "the memory is used again"
    larger = {"large": ShardedTensor.whole("large", torch.arange(5000.0))}
    begin(saver, larger, tmp_path / "async", 30)
    awaited(saver).check()
    found = find(tmp_path / "async")
    assert found is not None and saver._memory.generation == 2
    loaded = {"large": ShardedTensor.whole("large", torch.zeros(5000))}
    serialization.load(loaded, found, ALONE)
    assert torch.equal(loaded["large"].data, torch.arange(5000.0))


def test_who_writes_what_is_planned_again_only_where_the_structure_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[ShardedStateDict] = []
    plan_write = torch_dist.plan_write

    def counting(directory: Path, state: ShardedStateDict, group: Any) -> torch_dist.WritePlan:
        plans.append(state)
        return plan_write(directory, state, group)

    monkeypatch.setattr(torch_dist, "plan_write", counting)
    saver = AsyncSaver(None)
    (tmp_path / "sync").mkdir()
    states = [many_tensors(), many_tensors()]
    other = next(iter(states[0]))
    # Values that lie elsewhere; then a number format, a padding and a tensor that there was not.
    states.append({**many_tensors(), other: ShardedTensor.whole(other, states[0][other].data.double())})
    padded = ShardedTensor.from_placement(torch.ones(4), Placement("padded", (4,), valid_rows=3))
    states.append({**states[2], "padded": padded})
    for number, (state, is_planned) in enumerate(zip(states, (True, False, True, True), strict=True)):
        plans.clear()
        begin(saver, state, tmp_path / "async", number)
        path = awaited(saver).check()
        assert len(plans) == is_planned
        documents = {"state": {"iteration": number, "value": 0.0}}
        whole = serialization.save(state, tmp_path / "sync", number, documents=documents, group=ALONE)
        assert files(path) == files(whole)


class Gate(io.FileIO):
    """A file on which writing waits until the gate is open, and then fails where it is told to."""

    opened = threading.Event()
    error: int | None = None
    of = ""
    """Fails only in checkpoints with this in their path."""

    def write(self, data: Any) -> int:
        assert Gate.opened.wait(600)
        if Gate.error is not None and Gate.of in str(self.name):
            raise OSError(Gate.error, os.strerror(Gate.error))
        return super().write(data)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> type[Gate]:
    monkeypatch.setattr(torch_dist.io, "FileIO", Gate)
    monkeypatch.setattr(Gate, "opened", threading.Event())
    monkeypatch.setattr(Gate, "error", None)
    monkeypatch.setattr(Gate, "of", "")
    return Gate


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_leaves_the_old_checkpoint_S27_S28(tmp_path: Path, gate: type[Gate], number: int) -> None:
    gate.opened.set()
    save(tmp_path, 10)
    saver = AsyncSaver(None)
    gate.error = number
    begin(saver, tensors(20.0), tmp_path, 20, 20.0)
    outcome = awaited(saver)
    assert os.strerror(number) in str(outcome.problem) and "iter_0000020" in str(outcome.problem)
    with pytest.raises(StorageError, match="failed on rank 0"):
        outcome.check()
    assert not list(tmp_path.glob("*.tmp-*"))
    found = find(tmp_path)
    assert found is not None and content(found) == 10
    gate.error = None
    begin(saver, tensors(30.0), tmp_path, 30, 30.0)
    awaited(saver).check()
    found = find(tmp_path)
    assert found is not None and content(found) == 30


def test_nothing_is_visible_before_all_is_written(tmp_path: Path, gate: type[Gate]) -> None:
    saver = AsyncSaver(None)
    begin(saver, tensors(10.0), tmp_path, 10, 10.0)
    assert saver.poll() is None
    assert [path.name[:16] for path in tmp_path.iterdir()] == ["iter_0000010.tmp"]
    gate.opened.set()
    while (outcome := saver.poll()) is None:
        time.sleep(0.01)
    assert outcome.path == tmp_path / "iter_0000010" and saver.poll() is None


def test_memory_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    saver = AsyncSaver(None)
    begin(saver, tensors(), tmp_path, 10)
    assert os.strerror(errno.ENOMEM) in str(awaited(saver).problem)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu_lies_in_pinned_memory(tmp_path: Path) -> None:
    values = torch.arange(1000.0, device="cuda")
    saver = AsyncSaver(None)
    begin(saver, {"values": ShardedTensor.whole("values", values)}, tmp_path, 10)
    values.zero_()
    assert saver._memory.data.is_pinned()
    awaited(saver).check()
    saver.close()
    found = find(tmp_path)
    loaded = {"values": ShardedTensor.whole("values", torch.zeros(1000))}
    assert found is not None
    serialization.load(loaded, found, ALONE)
    assert torch.equal(loaded["values"].data, torch.arange(1000.0))


# ---- the process


@pytest.mark.flags("--async-ckpt-cpu-priority", "--async-ckpt-io-priority")
def test_the_process_is_modest(process: WriterProcess) -> None:
    assert process.pid is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, own + 3)
    number = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
    if number is not None:
        found = ctypes.CDLL(None).syscall(number, 1, process.pid)
        assert found in (-1, 2 << 13 | 4), "where the system has the call"
    run = prepare(*PROCESS, "--save", "unused", "--async-ckpt-cpu-priority", "5", "--async-ckpt-io-priority", "1")
    assert (run.config.checkpoint.async_ckpt_cpu_priority, run.config.checkpoint.async_ckpt_io_priority) == (5, 1)


def test_signals_of_a_scheduler_do_not_end_it_but_a_kill_costs_one_save(tmp_path: Path, process: WriterProcess) -> None:
    saver = AsyncSaver(process)
    begin(saver, tensors(10.0), tmp_path, 10, 10.0)
    awaited(saver).check()
    first = process.pid
    assert first is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(first, number)
    begin(saver, tensors(20.0), tmp_path, 20, 20.0)
    awaited(saver).check()
    # Stopped, so that the save is under way for certain when it is killed.
    os.kill(first, signal.SIGSTOP)
    begin(saver, tensors(30.0), tmp_path, 30, 30.0)
    os.kill(first, signal.SIGKILL)
    assert f"the process {first} that writes checkpoints was lost (killed by signal 9)" in str(awaited(saver).problem)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000010", "iter_0000020"]
    begin(saver, tensors(40.0), tmp_path, 40, 40.0)
    awaited(saver).check()
    found = find(tmp_path)
    assert found is not None and content(found) == 40 and process.pid != first


def test_what_fails_in_the_process_names_the_file(tmp_path: Path, process: WriterProcess) -> None:
    process.start()
    assert process.pid is not None
    limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    saver = AsyncSaver(process)
    begin(saver, tensors(), tmp_path, 10)
    problem = str(awaited(saver).problem)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
    assert os.strerror(errno.EFBIG) in problem and "__0_0.distcp" in problem and "on rank 0" in problem
    assert list(tmp_path.iterdir()) == []
    begin(saver, tensors(20.0), tmp_path, 20, 20.0)
    awaited(saver).check()


def test_the_process_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, signal; from megatron.core.dist_checkpointing.writer_process import WriterProcess\n"
        "writer = WriterProcess(); writer.start(); print(writer.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    child = int(result.stdout)
    until = time.monotonic() + 60
    while _is_running(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# ---- the run


def flags(root: Path, *more: str | Path) -> tuple[str | Path, ...]:
    return ("--save", root, "--save-interval", "2", *more)


@pytest.mark.flags("--async-save", "--use-persistent-ckpt-worker")
def test_a_run_saves_the_same_and_is_resumed_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train_tiny(*flags(tmp_path / "sync"))
    for kind, way in (("thread", THREAD), ("process", PROCESS)):
        root = tmp_path / kind
        capsys.readouterr()
        stopped = train_tiny(*flags(root, *way, "--exit-interval", "4"))
        assert stopped.saved_progress == stopped.progress
        assert [line.split(" in ")[0] for line in capsys.readouterr().out.splitlines() if "saved" in line] == [
            f"checkpoint: saved {root / 'iter_0000002'}", f"checkpoint: saved {root / 'iter_0000004'}",
        ]  # fmt: skip
        for iteration in ("iter_0000002", "iter_0000004"):
            ours, theirs = files(root / iteration), files(tmp_path / "sync" / iteration)
            # The settings differ, by this flag among others, and with them the manifest.
            assert {name for name in theirs if ours[name] != theirs[name]} == {"config.json", "manifest"}
        resumed = train_tiny(*flags(root, *way, "--load", root))
        assert differing(whole, resumed) == [] and resumed.progress == whole.progress


class Each(Hook):
    """Calls a function after each step."""

    def __init__(self, action: Callable[[Run], None]) -> None:
        self.action = action
        self.saved: list[tuple[int, int]] = []

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.action(run)

    def on_save(self, run: Run) -> None:
        assert run.saved_progress is not None
        self.saved.append((run.progress.iteration, run.saved_progress.iteration))


def with_hook(run: Run, hook: Hook) -> Run:
    run.hooks.hooks.append(hook)  # type: ignore[attr-defined]
    return run


def test_S29_training_goes_on_and_the_previous_checkpoint_stays_until_the_next_is_complete(
    tmp_path: Path, gate: type[Gate]
) -> None:
    seen = []

    def look(run: Run) -> None:
        seen.append(sorted(path.name for path in tmp_path.glob("iter_???????")))
        # The first save is held up while training goes on, until the second one is due.
        if run.progress.iteration == 3:
            gate.opened.set()

    hook = Each(look)
    train = prepare(*flags(tmp_path, *THREAD, "--save-retain-interval", "1000"))
    finish(with_hook(train, hook))
    assert seen[:3] == [[], [], []], "one save at a time, and training goes on"
    assert [saved for _, saved in hook.saved] == [2, 4, 6]
    assert hook.saved[0][0] >= 3 and all(now >= saved for now, saved in hook.saved)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000006"]


def test_a_failure_is_told_after_a_later_step_and_training_goes_on(
    tmp_path: Path, gate: type[Gate], capsys: pytest.CaptureFixture[str]
) -> None:
    gate.error, gate.of = errno.ENOSPC, "iter_0000002"
    told = [""]

    def look(run: Run) -> None:
        told.append(told[-1] + capsys.readouterr().err)
        # The disk answers when training has gone on.
        if run.progress.iteration == 3:
            gate.opened.set()

    finish(with_hook(prepare(*flags(tmp_path, *THREAD)), Each(look)))
    assert told[:3] == ["", "", ""]
    errors = (told[-1] + capsys.readouterr().err).splitlines()
    assert [line.split(":")[1] for line in errors] == [" iteration 2 was not saved"]
    assert "No space left on device" in errors[0] and errors[0].endswith("training goes on")
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006"]


def test_the_last_checkpoint_is_an_error_S27(tmp_path: Path, gate: type[Gate]) -> None:
    gate.opened.set()
    gate.error = errno.ENOSPC
    with pytest.raises(StorageError, match="No space left on device"):
        train_tiny("--save", tmp_path, "--save-interval", "100", *THREAD)
    assert [path.name for path in tmp_path.iterdir()] == ["failures.jsonl"], "no half of a checkpoint"


def test_a_save_under_way_is_finished_when_the_run_fails(tmp_path: Path, gate: type[Gate]) -> None:
    """And then the emergency save of what was done since."""

    def fail(run: Run) -> None:
        if run.progress.iteration == 3:
            threading.Timer(0.2, gate.opened.set).start()
            raise ValueError("of the run")

    with pytest.raises(ValueError, match="of the run"):
        finish(with_hook(prepare(*flags(tmp_path, *THREAD)), Each(fail)))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "failures.jsonl", "iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt", "ledger.jsonl",
    ]  # fmt: skip
    assert differing(train_tiny("--load", tmp_path), train_tiny()) == []


def test_S31_ctrl_c_finishes_both_saves(tmp_path: Path, gate: type[Gate]) -> None:
    def press(run: Run) -> None:
        if run.progress.iteration == 3:
            os.kill(os.getpid(), signal.SIGINT)
            # A thread notes the signal, on a busy machine some steps later.
            (exits,) = (hook for hook in run.hooks.hooks if isinstance(hook, ExitHook))  # type: ignore[attr-defined]
            while exits._interrupted_at is None:
                time.sleep(0.001)
            threading.Timer(0.2, gate.opened.set).start()

    run = finish(with_hook(prepare(*flags(tmp_path, *THREAD)), Each(press)))
    assert run.interrupted
    saved = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert saved[0] == "iter_0000002" and saved[-1] == f"iter_{run.progress.iteration:07d}"
    assert dataclasses.asdict(run.progress)["iteration"] < 6
