# SPDX-License-Identifier: Apache-2.0
"""Runs that hang: the rank that the others wait for is named, and the job ends to be started again."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.progress_record import ProgressRecord
from megatron.training.launch.hang_watcher import Watched
from tests.functional.pretrain_runs import TINY, finish, free_port, metrics, start
from tests.programs import Program

LONG = [*TINY, "--train-iters", "100000", "--global-batch-size", "6"]


def _start_ranks(count: int, *flags: str | Path) -> list[Program]:
    job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "TEST_SPEAK_AT_ONCE": "1"}
    return [start([*LONG, *flags], RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(count)]


@pytest.mark.flags("--hang-timeout")
def test_a_stopped_rank_is_named_and_the_job_ends_to_be_started_again(tmp_path: Path) -> None:
    places = ["--metrics-dir", tmp_path / "metrics", "--save", tmp_path / "save"]
    ranks = _start_ranks(3, "--hang-timeout", "3", "--simulate-fault", "stop:1,3", *places)
    outcomes = finish(ranks, timeout=90)

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


def test_only_steps_are_watched_and_only_beyond_their_limit(tmp_path: Path) -> None:
    record = ProgressRecord.make(tmp_path / "rank_0.progress", 0)
    record.set_limit(5.0)
    watched = Watched(tmp_path / "rank_0.progress", record)
    assert not watched.look(100.0), "it is seen for the first time"
    assert not watched.look(1000.0), "set-up, an evaluation or a save may take what it takes"
    record.begin_step(1)
    assert [watched.look(now) for now in (2000.0, 2004.9, 2005.1)] == [False, False, True]
    record.take_microbatch()
    assert [watched.look(now) for now in (2006.0, 2010.9)] == [False, False]
    record.leave_step()
    assert [watched.look(now) for now in (2011.0, 9999.0)] == [False, False]


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


def test_a_run_with_a_short_limit_goes_through(tmp_path: Path) -> None:
    places = ["--metrics-dir", tmp_path / "metrics", "--save", tmp_path / "save"]
    flags = ["--global-batch-size", "4", "--train-iters", "6", "--save-interval", "3"]
    outcomes = finish(_start_ranks(2, "--hang-timeout", "60", *flags, *places), timeout=120)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    assert len(metrics(tmp_path / "metrics")) == 6
    assert not list((tmp_path / "save").glob("hang_*"))
