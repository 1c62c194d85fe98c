# SPDX-License-Identifier: Apache-2.0
"""The harness itself: values and failures come back, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.errors import ConfigError, CrashError, TemporaryError
from megatron.training.launch.local_job import run_locally
from tests.parallel.harness import DEFAULT_TIMEOUT_SECONDS, WorkerError, distributed, run_distributed, server


def sum_of_ranks(scale: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("a lost tensor")
    dist.barrier()


def hang_on_rank_1(directory: Path) -> None:
    (directory / str(os.getpid())).touch()
    if dist.get_rank() == 1:
        time.sleep(600)


def die_on_rank_1(directory: Path) -> None:
    (directory / str(os.getpid())).touch()
    if dist.get_rank() == 1:
        # Not before the other one has said its number, too.
        while len(os.listdir(directory)) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exit_on_rank_0() -> None:
    if dist.get_rank() == 0:
        sys.exit(3)
    dist.barrier()


def skip_everywhere() -> None:
    pytest.skip("not here")


def worker_facts() -> tuple[str, str, int, bool]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads(), torch.cuda.is_available()


def still_running(directory: Path) -> list[int]:
    """Process ids noted in the directory whose process exists and is no zombie."""
    found = []
    for name in os.listdir(directory):
        try:
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(int(name))
    return found


def test_values_come_back_in_rank_order() -> None:
    results = run_distributed(sum_of_ranks, 3, 10)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert [total.item() for _, total in results] == [30.0, 30.0, 30.0]


def test_workers_are_single_threaded_and_without_gpu() -> None:
    assert run_distributed(worker_facts, 2) == [("0", "2", 1, False), ("1", "2", 1, False)]


@distributed(world_size=2)
def test_decorated_function_runs_on_every_rank() -> None:
    gathered = [None, None]
    dist.all_gather_object(gathered, dist.get_rank())
    assert gathered == [0, 1]


@pytest.mark.parametrize("factor", [2, 3])
@distributed(world_size=2)
def test_fixtures_and_parameters_reach_the_workers(tmp_path: Path, factor: int) -> None:
    (tmp_path / f"{dist.get_rank()}").write_text(str(factor))
    dist.barrier()
    assert [(tmp_path / name).read_text() for name in "01"] == [str(factor)] * 2


def test_failing_worker_is_named_with_its_traceback() -> None:
    started_at = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        run_distributed(fail_on_rank_1, 2)
    assert (caught.value.rank, caught.value.error_type) == (1, "KeyError")
    assert "rank 1 of 2 raised KeyError" in str(caught.value)
    assert "fail_on_rank_1" in str(caught.value)
    assert "a lost tensor" in str(caught.value)
    assert time.monotonic() - started_at < DEFAULT_TIMEOUT_SECONDS / 2


def test_hanging_worker_is_killed_and_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"no answer from rank\(s\) \[1\] within 3 s; finished: \[0\]") as caught:
        run_distributed(hang_on_rank_1, 2, tmp_path, timeout=3)
    assert caught.value.error_type == "timeout"
    assert len(os.listdir(tmp_path)) == 2
    assert still_running(tmp_path) == []


def test_dying_worker_is_named_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="rank 1 of 2 died without a report, by signal SIGKILL") as caught:
        run_distributed(die_on_rank_1, 2, tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    assert still_running(tmp_path) == []
    assert caught.value.error_type in ("died", "RuntimeError", "DistBackendError")


def test_exiting_worker_is_a_failure() -> None:
    with pytest.raises(WorkerError, match="rank 0 of 2 raised SystemExit"):
        run_distributed(exit_on_rank_0, 2)


def test_skip_in_a_worker_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_distributed(skip_everywhere, 2)


def test_nested_functions_are_refused() -> None:
    def nested() -> None: ...

    with pytest.raises(ValueError, match="module-level"):
        run_distributed(nested, 2)


# ---- run_locally, for tools: errors as sentences


def fail_as(rank: int, kind: str) -> int:
    if rank == 1 and kind == "config":
        raise ConfigError("the layout is impossible")
    if rank == 1 and kind == "bug":
        raise KeyError("a lost tensor")
    if rank == 1 and kind in ("SIGKILL", "SIGSEGV"):
        os.kill(os.getpid(), signal.Signals[kind])
    if rank == 1 and kind == "exit":
        os._exit(3)
    dist.barrier()
    return rank


def test_tools_get_values_in_rank_order() -> None:
    server()
    assert run_locally(fail_as, 3, ("not at all",)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("config", ConfigError, "^the layout is impossible$"),
        ("bug", TemporaryError, "^rank 1 of 2: KeyError: 'a lost tensor' (.*test_harness.py:[0-9]+)"),
        ("SIGKILL", TemporaryError, "^rank 1 of 2 died by signal SIGKILL; the system does that when memory is short"),
        ("SIGSEGV", CrashError, "^rank 1 of 2 died by signal SIGSEGV, without a traceback: "),
        ("exit", TemporaryError, "^rank 1 of 2 died with exit code 3$"),
    ],
)
def test_tools_get_the_first_failure_as_a_sentence(kind: str, error: type[Exception], message: str) -> None:
    server()
    with pytest.raises(error, match=message):
        run_locally(fail_as, 2, (kind,))
