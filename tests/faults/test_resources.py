# SPDX-License-Identifier: Apache-2.0
"""Resources that run out, bytes that strangers send, and traces that a long run or a user's script leaves."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import command_line
from megatron.core.open_files import allow_open_files
from megatron.core.progress_record import ProgressRecord
from tests.faults.test_training_faults import wait_for_rows
from tests.faults.two_ranks import find_saved
from tests.functional.pretrain_runs import TINY, finish, free_port, metrics, run, run_ranks, start
from tests.support import tiny_training
from tests.support.tiny_training import prepare, replace_forward_step


def test_R2_a_grace_that_ends_within_the_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    flags = [*TINY, "--save", tmp_path, "--load", tmp_path, "--metrics-dir", tmp_path]
    assert run([*flags, "--save-interval", "3", "--exit-interval", "3"]).returncode == 0
    flags += ["--train-iters", "100000", "--override-opt-param-scheduler", "--exit-signal-handler"]
    job = start(flags, MEGATRON_CRASH_POINT="documents-written")
    wait_for_rows(tmp_path, 6, job)
    job.send_signal(signal.SIGTERM)
    assert finish([job])[0].returncode == -signal.SIGKILL, "killed while it saves"
    assert find_saved(tmp_path) == 3


def test_R13_what_strangers_send_to_the_ports_of_a_job_changes_nothing(tmp_path: Path) -> None:
    flags = [*TINY, "--train-iters", "150"]
    assert run_ranks([*flags, "--metrics-dir", tmp_path / "alone"], 2).returncode == 0
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    flags += ["--metrics-dir", tmp_path / "molested"]
    ranks = [start(flags, RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(2)]
    wait_for_rows(tmp_path / "molested", 3, ranks[0])
    generator, connections = random.Random(1), []
    ports = [port for rank in ranks for port in list_ports(rank.pid)]
    assert int(job["MASTER_PORT"]) in ports
    for port in ports:
        for content in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, generator.randbytes(1 << 16), b""):
            connection = socket.create_connection(("localhost", port), timeout=5)
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):  # it hangs up
                connection.sendall(content)
            connections.append(connection)
    done = finish(ranks)
    for connection in connections:
        connection.close()
    assert [rank.returncode for rank in done] == [0, 0], done
    assert metrics(tmp_path / "molested") == metrics(tmp_path / "alone")


def list_ports(pid: int) -> set[int]:
    """The ports on which a process listens."""
    mine = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def test_R19_too_few_open_files_are_told_before_anything_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (24, 90))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: set_limits.append(limits))
    sentence = "this process may have 90 files open, and a run with --num-workers 2 needs 96; raise the limit with ulim"
    with pytest.raises(Exception, match=sentence) as caught:
        prepare("--num-workers", "2")
    assert getattr(caught.value, "exit_code", None) == 74
    assert set_limits == [(90, 90)], "as far as the system permits"
    assert allow_open_files(10_000) == 90


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.ENOSPC, "in /dev/shm as well"), (errno.EDQUOT, "user's")]
)
def test_R19_what_has_run_out_is_a_sentence_wherever_it_happens(
    number: int, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @command_line
    def main() -> int:
        raise OSError(number, os.strerror(number))

    assert main() == 74
    assert f"{os.strerror(number)}; " in (errors := capsys.readouterr().err) and remedy in errors


def test_R19_a_full_shared_memory_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hole in the file of a progress record would end the process by SIGBUS when it is written."""
    record = ProgressRecord.make(tmp_path / "rank_0.progress", 0)
    assert (tmp_path / "rank_0.progress").stat().st_blocks * 512 >= (tmp_path / "rank_0.progress").stat().st_size
    del record

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space"):  # which becomes a warning (test_hangs.py)
        ProgressRecord.make(tmp_path / "rank_1.progress", 1)


def test_R25_a_script_that_forks_in_its_step_does_not_hang() -> None:
    """Beside the threads of torch, of a loader and of the hooks: each child computes, and ends."""
    run = prepare("--num-workers", "1")
    forward_step = run.recipe.forward_step

    def fork_and_step(*arguments: Any) -> Any:
        child = os.fork()
        if child == 0:
            os._exit(int(torch.ones(64, 64).sum().item() != 4096))
        deadline = time.monotonic() + 30
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < deadline, "the child hangs"
            time.sleep(0.001)
        assert ended[1] == 0
        assert subprocess.run([sys.executable, "-S", "-c", ""], check=False, timeout=30).returncode == 0
        return forward_step(*arguments)

    replace_forward_step(run, fork_and_step)
    tiny_training.finish(run)


def test_R27_steps_leave_nothing_behind(tmp_path: Path) -> None:
    """Objects, files and threads after 73 steps are those after 53: with logs, saves, evaluations and a ledger.

    A leak grows in each 20 steps. What other tests of this process still do in threads of theirs, or a module that
    is imported late, grows in some 20 steps only: so objects are counted three times, by type.
    """
    objects: dict[int, Counter[str]] = {}
    traces: dict[int, tuple[int, int]] = {}
    flags = "--train-iters 75 --log-interval 5 --save-interval 10 --keep-last 1 --eval-interval 10 --eval-iters 1 "
    flags += "--log-straggler --check-for-spiky-loss --rerun-mode validate_results"
    run = prepare(*flags.split(), "--save", tmp_path, "--metrics-dir", tmp_path / "metrics", "--async-save")
    forward_step = run.recipe.forward_step

    def count_and_step(*arguments: Any) -> Any:
        iteration = run.progress.iteration
        if iteration in (33, 53, 73) and iteration not in objects:
            for thread in threading.enumerate():
                if thread.name.startswith("save of"):
                    thread.join()  # what a save under way holds is not left behind
            gc.collect()
            objects[iteration] = Counter(type(thing).__name__ for thing in gc.get_objects())
            traces[iteration] = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        return forward_step(*arguments)

    replace_forward_step(run, count_and_step)
    tiny_training.finish(run)
    assert traces[73] == traces[53], "open files and threads"
    grown = [objects[53] - objects[33], objects[73] - objects[53]]  # a type that became fewer hides no other
    in_both = {name: grown[0][name] for name in grown[0] if min(grown[0][name], grown[1][name]) >= 10}
    assert not in_both, f"a type of which each second step leaves an object is one too many: {in_both}"
