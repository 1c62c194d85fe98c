# SPDX-License-Identifier: Apache-2.0
"""What only observes a run never ends it: full disks, lost services, closed outputs, hooks with faults of their own."""

from __future__ import annotations

import io
import json
import math
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron.core import line_files
from megatron.core.errors import StorageError, report_error, say
from megatron.core.line_files import append_lines
from megatron.training.hooks import outages
from megatron.training.hooks.dispatch import Hooks
from megatron.training.metrics import MetricsRow
from megatron.training.run import Hook, Phase, Run, StepResult
from tests.functional.pretrain_runs import PRETRAIN, ROOT, TINY, environment
from tests.programs import Program
from tests.support.tiny_training import differing, finish, prepare, train_tiny

FULL = OSError(28, "No space left on device")


def with_hooks(run: Run, *hooks: Hook) -> Run:
    assert isinstance(run.hooks, Hooks)
    run.hooks.hooks += hooks
    return run


# ---- files


def fill_after(monkeypatch: pytest.MonkeyPatch, calls_that_fail: Sequence[int]) -> list[int]:
    """Of the writes of whole lines, those with these numbers (from 1) get half of their bytes onto the disk."""
    real, sizes = line_files._write_all, []

    def write(file: io.FileIO, data: bytes) -> None:
        sizes.append(len(data))
        if len(sizes) in calls_that_fail:
            file.write(data[: len(data) // 2])
            raise FULL
        real(file, data)

    monkeypatch.setattr(line_files, "_write_all", write)
    return sizes


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    with monkeypatch.context() as patch:
        fill_after(patch, [2])
        append_lines(path, ["one"])
        with pytest.raises(StorageError, match="lines cannot be written .No space left on device.; free some space"):
            append_lines(path, ["two", "three"])
        append_lines(path, ["four"])
    assert path.read_text() == "one\nfour\n"
    path.write_text(path.read_text() + "torn by a ki")
    append_lines(path, ["five"])
    assert path.read_text() == "one\nfour\nfive\n"
    path.write_text("nothing but a torn line")
    append_lines(path, ["six"])
    assert path.read_text() == "six\n"


def test_a_file_system_that_takes_half_a_line(tmp_path: Path) -> None:
    """By the system's own limit of file sizes, under which a write is short before the next one fails."""
    path, before = tmp_path / "lines", resource.getrlimit(resource.RLIMIT_FSIZE)
    append_lines(path, ["x" * 99])
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            append_lines(path, ["y" * 99])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "x" * 99 + "\n"
    if Path("/dev/full").exists():
        with pytest.raises(StorageError, match="/dev/full cannot be written .No space left on device"):
            append_lines(Path("/dev/full"), ["x"])


def test_a_disk_that_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """metrics.jsonl, progress.txt and the pipeline's trace are on it: a warning and a note for each, no torn line, and
    a run like any other."""
    undisturbed = train_tiny("--log-interval", "1")
    run = prepare("--log-interval", "1", "--metrics-dir", tmp_path, "--save", tmp_path / "save", "--save-interval", "2",
                  "--log-progress", "--pipeline-trace-dir", tmp_path / "trace", "--profile-step-start", "0",
                  "--profile-step-end", "6")  # fmt: skip
    numbers = range(6, 13)
    sizes = fill_after(monkeypatch, numbers)
    finish(run)
    errors = capsys.readouterr().err
    assert len(sizes) > max(numbers), "some writes came after"
    assert "Traceback" not in errors
    for line in errors.splitlines():
        assert line.startswith(("warning: ", "note: ")), errors
    assert errors.count("MetricsFileHook failed, training goes on") == 1
    assert errors.count("MetricsFileHook works again; ") == 1
    for path in (tmp_path / "metrics.jsonl", tmp_path / "trace" / "stage-0.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line)
    assert differing(run, undisturbed) == []
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "6"


# ---- TensorBoard


def test_tensorboard_writes_on_when_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its thread ends with the first error, and would keep the run from closing it."""
    full = [False]

    class Switch(Hook):
        phase = Phase.SAVE

        def on_step_end(self, run: Run, result: StepResult) -> None:
            full[0] = 2 <= run.progress.iteration < 4

    real = RecordWriter.write

    def write(writer: RecordWriter, data: bytes) -> None:
        if full[0]:
            raise FULL
        real(writer, data)

    monkeypatch.setattr(RecordWriter, "write", write)
    # No pause follows a failure, however long it takes on a busy machine.
    monkeypatch.setattr(outages, "_UNNOTICED_SECONDS", math.inf)
    flags = ("--log-interval", "1", "--tensorboard-queue-size", "1", "--tensorboard-dir", tmp_path)
    finish(with_hooks(prepare(*flags), Switch()))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [point.step for point in events.Scalars("lm loss")] == [1, 2, 5, 6]
    errors = capsys.readouterr().err
    assert errors.count("warning: TensorBoardHook failed, training goes on (OSError: [Errno 28] No space left") == 1
    assert "note: TensorBoardHook works again; 2 rows were lost\n" in errors
    assert "Traceback" not in errors


def test_tensorboard_on_a_disk_that_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepare("--log-interval", "1", "--train-iters", "20", "--tensorboard-dir", tmp_path)

    def write(writer: RecordWriter, data: bytes) -> None:
        if run.progress.iteration:
            raise FULL

    monkeypatch.setattr(RecordWriter, "write", write)
    finish(run)
    errors = capsys.readouterr().err
    assert errors.count("TensorBoardHook failed") == 1
    assert "warning: TensorBoardHook did not recover; 20 rows were lost\n" in errors
    assert "Traceback" not in errors
    assert len(list(tmp_path.iterdir())) < 12, "the trials become rarer"


# ---- any hook


class Faulty(Hook):
    """Raises at every moment."""

    def __init__(self, phase: Phase, error: Exception, *, is_collective: bool = False) -> None:
        self.phase, self.error, self.is_collective = phase, error, is_collective

    def on_step_end(self, run: Run, result: StepResult) -> None:
        raise self.error

    def on_train_end(self, run: Run) -> None:
        raise self.error

    def on_close(self, run: Run) -> None:
        raise self.error


@pytest.mark.parametrize("phase", [Phase.MEASURE, Phase.WRITE])
@pytest.mark.parametrize("error", [FULL, StorageError("the disk is gone"), ValueError("a library's"), KeyError("x")])
def test_whatever_an_observer_raises_the_run_goes_on(
    phase: Phase, error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finish(with_hooks(prepare("--train-iters", "3", "--metrics-dir", tmp_path), Faulty(phase, error)))
    assert run.progress.iteration == 3 and (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
    errors = capsys.readouterr().err
    assert errors.count("\n") == errors.count("warning: Faulty failed, training goes on (") == 1


@pytest.mark.parametrize(
    "hook", [Faulty(Phase.MEASURE, FULL, is_collective=True), Faulty(Phase.CONTROL, FULL), Faulty(Phase.SAVE, FULL)]
)
def test_errors_of_others_end_the_run_and_closing_hides_none(hook: Faulty, tmp_path: Path) -> None:
    """A rank that went on after an error in a collective would be out of step."""
    closed: list[str] = []

    class Closing(Hook):
        phase = Phase.MEASURE

        def on_close(self, run: Run) -> None:
            closed.append("all the same")

    with pytest.raises(OSError, match="No space left") as raised:
        finish(with_hooks(prepare("--train-iters", "3"), Closing(), hook))
    assert raised.value is FULL and raised.value.__context__ is None, "no chained traceback"
    assert closed == ["all the same"]


def test_a_lost_loader_process_is_no_fault_of_the_hook_in_which_it_shows() -> None:
    lost = RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed.")
    with pytest.raises(RuntimeError, match="killed by signal"):
        finish(with_hooks(prepare("--train-iters", "3"), Faulty(Phase.WRITE, lost)))


class Service(Hook):
    """One that waits for its network whenever it is called."""

    phase = Phase.WRITE

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock, self.trials = clock, []

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        self.trials.append(self.clock.now)
        self.clock.now += 30.0
        raise TimeoutError("no answer")


def test_a_collective_that_fails_is_no_fault_of_the_hook_in_which_it_shows() -> None:
    """Whatever the reason, such as NCCL's own memory: the other ranks would wait in it."""
    full = torch.distributed.DistBackendError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'")
    with pytest.raises(torch.distributed.DistBackendError, match="out of memory"):
        finish(with_hooks(prepare("--train-iters", "3"), Faulty(Phase.WRITE, full)))


def test_a_service_that_is_waited_for_takes_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(outages, "time", clock)
    service, run = Service(clock), SimpleNamespace()
    hooks = Hooks([service])
    while clock.now < 3600.0:
        hooks.on_metrics(run, [MetricsRow(1)])  # type: ignore[arg-type]
        clock.now += 1.0
    assert 8 <= len(service.trials) <= 12
    assert 30.0 * len(service.trials) <= 3600.0 / 8


# ---- standard output


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_what_cannot_be_printed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", Closed())
    say("nobody listens")
    report_error(StorageError("nobody listens"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's full disk")
def test_R21_a_log_on_a_full_disk(tmp_path: Path) -> None:
    """Standard output and standard error on it, from the first line to the exit: trained, saved, exit code 0."""
    flags = [*TINY, "--save", tmp_path / "save", "--save-interval", "100", "--metrics-dir", tmp_path]
    with open("/dev/full", "w") as full:
        program = Program([PRETRAIN, *flags], environment({}), ROOT, log=full)
        assert program.wait(120) == 0
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 5
