# SPDX-License-Identifier: Apache-2.0
"""Runs that hang: the rank that the others wait for is named, and the job ends to be started again."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.progress_record import ProgressRecord
from megatron.training.launch import hang_watcher
from megatron.training.launch.hang_watch import _remove_abandoned
from megatron.training.launch.hang_watcher import Watched, read_written_bytes
from tests.functional.pretrain_runs import PRETRAIN, ROOT, TINY, environment, finish, free_port, metrics
from tests.programs import Program

LONG = [*TINY, "--train-iters", "100000", "--global-batch-size", "12"]

THREE_STAGES = ["--num-layers", "3", "--pipeline-model-parallel-size", "3"]


def _start_ranks(count: int, *flags: str | Path, program: str = PRETRAIN, nodes: int = 1, **own: str) -> list[Program]:
    """Ranks of a job. nodes: nodes that they pretend to be on, the first rank alone on the first one."""
    job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "TEST_SPEAK_AT_ONCE": "1"}
    places = [(rank, 0) if nodes == 1 else (max(0, rank - 1), min(rank, 1)) for rank in range(count)]
    return [
        Program(
            [program, *LONG, *flags],
            environment({"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node), **job, **own}),
            ROOT,
        )
        for rank, (local, node) in enumerate(places)
    ]


@pytest.mark.flags("--hang-timeout")
def test_R5_a_stopped_rank_is_named_and_the_job_ends_to_be_started_again(tmp_path: Path) -> None:
    """On two nodes, whose watchers meet at the job's store."""
    places = ["--metrics-dir", tmp_path / "metrics", "--save", tmp_path / "save"]
    ranks = _start_ranks(3, "--hang-timeout", "5", "--simulate-fault", "stop:1,3", *places, nodes=2)
    outcomes = finish(ranks, timeout=60)

    assert [outcome.returncode for outcome in outcomes] == [75, -signal.SIGKILL, 75]
    errors = "".join(outcome.stderr for outcome in outcomes)
    assert f"process {ranks[1].pid}) is stopped (by SIGSTOP, a debugger or a frozen container) in iteration 3" in errors
    assert "ranks 0, 2 wait, rank 0 in all_reduce number" in errors
    (report,) = (tmp_path / "save").glob("hang_*.txt")
    text = report.read_text()
    assert str(report) in errors
    assert "no stack: the process is stopped, or has ended" in text
    assert text.count("Python stack of rank") == 3
    assert "finalize_model_grads" in text, "where the others wait"
    # torch's own record of collectives, which NCCL and gloo keep alike.
    assert text.count("Flight recorder of rank") == 2
    assert re.search(r"gloo:all_reduce number \d+ of group \S+ \([0-9x, ]+\): scheduled", text)


def test_R5_a_rank_that_holds_the_interpreter_lock_is_named_with_its_stack(tmp_path: Path) -> None:
    fault = "--fault-injector-ranks 1 --fault-injector-fault-types LOCK_GIL --fault-injector-fault-delay 0".split()
    ranks = _start_ranks(2, "--hang-timeout", "2", *fault, "--save", tmp_path)
    outcomes = finish(ranks, timeout=60)
    assert [outcome.returncode for outcome in outcomes] == [75, -signal.SIGKILL]
    assert f"process {ranks[1].pid}) has not entered all_reduce number" in outcomes[0].stderr
    (report,) = tmp_path.glob("hang_*.txt")
    stack = report.read_text().partition("Python stack of rank 1\n")[2]
    assert "_lock_interpreter" in stack, "written in C, without the lock"


@pytest.mark.parametrize(
    ("mismatch", "layout", "expected"),
    [
        (
            "operation",
            [],
            r"is in broadcast number \d+ of group dp \(256 bytes\), where the rest of the group is in",
        ),
        (
            "order",
            THREE_STAGES,
            r"is in all_reduce number \d+ of group pp 2 .*: its groups come in another order",
        ),
    ],
)
def test_R5_a_rank_in_another_collective_than_its_group_is_named(
    tmp_path: Path, mismatch: str, layout: list[str], expected: str
) -> None:
    program = str(ROOT / "tests/faults/mismatched_collectives.py")
    ranks = _start_ranks(3, "--hang-timeout", "2", *layout, "--save", tmp_path, program=program, MISMATCH=mismatch)
    outcomes = finish(ranks, timeout=60)
    assert [outcome.returncode for outcome in outcomes] == [75, 75, 75]
    errors = "".join(outcome.stderr for outcome in outcomes)
    assert re.search(rf"rank 1 \([^()]*, process {ranks[1].pid}\) {expected}", errors), errors


def test_only_steps_are_watched_and_only_beyond_their_limit(tmp_path: Path) -> None:
    record = ProgressRecord.make(tmp_path / "rank_0.progress", 0)
    record.set_limit(5.0)
    watched = Watched(tmp_path / "rank_0.progress", record)
    assert not watched.look(100.0), "it is seen for the first time"
    assert not watched.look(1000.0), "set-up or an evaluation may take what it takes"
    record.begin_step(1)
    assert [watched.look(now) for now in (2000.0, 2004.9, 2005.1)] == [False, False, True]
    record.take_microbatch()
    assert [watched.look(now) for now in (2006.0, 2010.9)] == [False, False]
    record.leave_step()
    assert [watched.look(now) for now in (2011.0, 9999.0)] == [False, False]


def test_a_save_has_a_limit_of_its_own_and_a_process_that_writes_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int | None] = [0]
    monkeypatch.setattr(hang_watcher, "read_written_bytes", lambda process: written[0])
    record = ProgressRecord.make(tmp_path / "rank_0.progress", 0)
    record.set_limit(5.0)
    record.set_save_limit(50.0)
    watched = Watched(tmp_path / "rank_0.progress", record)
    record.begin_save()
    assert [watched.look(now) for now in (100.0, 149.9, 150.1)] == [False, False, True]
    written[0] = 10
    assert [watched.look(now) for now in (151.0, 200.9, 201.1)] == [False, False, True]
    written[0] = None
    assert [watched.look(now) for now in (202.0, 999.0)] == [False, False], "nobody can tell whether it writes"
    record.leave_step()
    assert not watched.look(9999.0)


def test_a_process_that_is_stopped_during_a_save_is_found_too(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        record = ProgressRecord.make(tmp_path / "rank_0.progress", 0)
        record.set_limit(5.0)
        watched = Watched(tmp_path / "rank_0.progress", record)
        seen = dataclasses.replace(record.read(), process=sleeper.pid)
        record.read = lambda: seen  # type: ignore[method-assign]
        assert [watched.look(now) for now in (100.0, 200.0)] == [False, False]
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        assert [watched.look(now) for now in (300.0, 304.9, 305.1)] == [False, False, True]
    finally:
        sleeper.kill()
        sleeper.wait()


def test_bytes_written_are_those_of_a_process(tmp_path: Path) -> None:
    before = read_written_bytes(os.getpid())
    (tmp_path / "file").write_bytes(bytes(12345))
    after = read_written_bytes(os.getpid())
    assert before is not None and after is not None and 12345 <= after - before < 20000
    assert read_written_bytes(2**22 + 1) is None


def test_directories_of_killed_jobs_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    living, killed, new = (tmp_path / f"megatron_hang_watch_{name}" for name in "abc")
    for path in (living, killed, new):
        path.mkdir()
        (path / "rank_0.progress").touch()
    for path in (living, killed):
        os.utime(path, (1.0, 1.0))
    lock = os.open(living, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    _remove_abandoned(tmp_path)
    os.close(lock)
    assert sorted(tmp_path.iterdir()) == [living, new]


def test_a_run_with_a_short_limit_goes_through(tmp_path: Path) -> None:
    places = ["--metrics-dir", tmp_path / "metrics", "--save", tmp_path / "save"]
    flags = ["--global-batch-size", "4", "--train-iters", "6", "--save-interval", "3"]
    outcomes = finish(_start_ranks(2, "--hang-timeout", "60", *flags, *places), timeout=120)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    assert len(metrics(tmp_path / "metrics")) == 6
    assert not list((tmp_path / "save").glob("hang_*"))
