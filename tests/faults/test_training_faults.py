# SPDX-License-Identifier: Apache-2.0
"""A training job that is killed, loses a loader process, or meets data of another tokenizer."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.preprocessing.worker_pool import WorkerPool
from megatron.core.errors import ConfigError
from megatron.training.config.data import DataConfig
from megatron.training.data.loading import LoaderSettings, TrainingData, check_loader_processes
from tests.faults.hanging_jobs import hang, run_hanging
from tests.functional.pretrain_runs import TINY, free_port, metrics, run, start
from tests.programs import Program
from tests.support.tiny_training import prepare

DATA = Path(__file__).resolve().parents[1] / "golden" / "data" / "preprocess" / "hf_small_2keys" / "out_text_document"
REAL_DATA = [flag for flag in TINY if flag != "--mock-data"]
WITH_DROPOUT = (
    "--hidden-dropout 0.1 --attention-dropout 0.1 --train-iters 12 --num-workers 2 --eval-interval 4 --eval-iters 1 "
    f"--vocab-size 1000 --data-path {DATA} --split 90,8,2"
).split()

TENSOR_AND_SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"


def wait_for_rows(directory: Path, number: int, process: Program, seconds: float = 120) -> None:
    """Until metrics.jsonl has `number` complete lines."""
    deadline, is_ended = time.monotonic() + seconds, False
    while time.monotonic() < deadline and not is_ended:
        # Before the look: a run that ends between the two has written all of its rows.
        is_ended = process.poll() is not None
        with contextlib.suppress(FileNotFoundError):
            if (directory / "metrics.jsonl").read_bytes().count(b"\n") >= number:
                return
        time.sleep(0.002)
    process.kill()
    pytest.fail(f"no {number} rows after {seconds} s: {process.communicate()}")


@pytest.mark.flags("--save", "--load", "--save-interval", "--metrics-dir", "--num-workers")
def test_kill_9_and_resume_is_the_uninterrupted_run(tmp_path: Path) -> None:
    """With dropout, two loader processes and evaluation: every number of metrics.jsonl is equal bit for bit."""
    flags = [*REAL_DATA, *WITH_DROPOUT, "--data-cache-path", str(tmp_path / "cache")]
    whole = run([*flags, "--metrics-dir", tmp_path / "whole"])
    assert whole.returncode == 0, whole.stderr

    checkpoints = ["--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--save-interval", "3"]
    parts = [*flags, *checkpoints, "--metrics-dir", tmp_path / "parts"]
    process = start(parts)
    wait_for_rows(tmp_path / "parts", random.randint(4, 11), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = run(parts)
    assert resumed.returncode == 0, resumed.stderr
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert len([row for row in metrics(tmp_path / "parts") if "eval" not in row]) == 12


def children(parent: int) -> list[int]:
    """Process ids of the children, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds child processes in /proc")
def test_I15_killed_loader_process_ends_the_job_with_75(tmp_path: Path) -> None:
    flags = ["--num-workers", "2", "--train-iters", "100000", "--metrics-dir", tmp_path]
    process = start([*TINY, *flags])
    wait_for_rows(tmp_path, 2, process)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert [
        line for line in errors.splitlines() if line.startswith("error:") and "data loader process was lost" in line
    ]
    assert "Traceback" not in errors


def alive(pid: int) -> bool:
    """Whether the process still runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Hanging(torch.utils.data.Dataset[Any]):
    """Its loader processes say that they are there, and never come to give a sample."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.pipe.send_bytes(struct.pack("!i", os.getpid()))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(600)


def read_hanging(pipe: Any) -> None:
    """A trainer that waits for its first batch."""
    settings = LoaderSettings(micro_batch_size=1, dp_rank=0, dp_size=1, device=torch.device("cpu"), num_workers=2)
    next(TrainingData({"train": Hanging(pipe)}, settings).open("train", 0))


def work_hanging(pipe: Any) -> int:
    hang(0, pipe)
    return 0


def preprocess_hanging(pipe: Any) -> None:
    """A tool whose workers are in the middle of an item."""
    with WorkerPool(work_hanging, 2) as pool:
        list(pool.map_ordered([pipe, pipe]))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("parent", [read_hanging, preprocess_hanging, run_hanging])
def test_R7_no_worker_outlives_its_parent(parent: Any) -> None:
    """Killed in the middle of work that takes ten minutes: all children are gone long before its end."""
    context = multiprocessing.get_context("fork" if parent is not run_hanging else "spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=parent, args=(theirs,))
    process.start()
    workers = []
    for _ in range(2):
        assert ours.poll(60), "no worker has begun"
        workers.append(struct.unpack("!i", ours.recv_bytes())[0])
    assert len(set(workers)) == 2 and all(map(alive, workers))
    process.kill()
    process.join()
    deadline = time.monotonic() + 60
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [worker for worker in workers if alive(worker)]
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert not left


@pytest.mark.flags("--num-workers")
@pytest.mark.parametrize(("cores", "most"), [(1, 32), (2, 32), (64, 256)])
def test_loader_processes_are_bounded_by_the_machine(cores: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(cores), raising=False)
    check_loader_processes(DataConfig(num_workers=most))
    words = f"--num-workers 1000 is more than the {cores} cores of this machine are good for; give at most {most} "
    with pytest.raises(ConfigError, match=words):
        check_loader_processes(DataConfig(num_workers=1000))
    with pytest.raises(ConfigError, match=words):
        prepare("--num-workers", "1000")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds child processes in /proc")
def test_R1_ctrl_c_on_a_terminal_saves_once(tmp_path: Path) -> None:
    """It reaches every process of the job: two ranks, and the loader processes of each."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    flags = [*REAL_DATA, *WITH_DROPOUT, "--data-cache-path", str(tmp_path / "cache"), "--metrics-dir", tmp_path,
             "--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--save-interval", "1000",
             # An evaluation has loader processes of its own, which come and go.
             "--lr-decay-iters", "12", "--eval-interval", "1000000"]  # fmt: skip
    ranks = [
        start([*flags, "--train-iters", "100000"], RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in (0, 1)
    ]
    wait_for_rows(tmp_path, 3, ranks[0])
    job = [pid for rank in ranks for pid in (rank.pid, *children(rank.pid))]
    assert len(job) == 2 + 2 * 2
    for pid in job:
        # One rank's signal ends both, and the second one may have ended before its own comes.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 130, errors
        assert "Traceback" not in errors
    saved = int((tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text())
    assert saved == max(row["iteration"] for row in metrics(tmp_path)) >= 3


@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2", TENSOR_AND_SEQUENCE])
def test_R3_a_killed_rank_ends_the_others_with_75(layout: str, tmp_path: Path) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    flags = [*TINY, *layout.split(), "--train-iters", "100000", "--metrics-dir", tmp_path]
    first, second = (start(flags, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2))
    wait_for_rows(tmp_path, 2, first)
    second.kill()
    second.communicate()
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 75, errors
    (line,) = (line for line in errors.splitlines() if line.startswith("error:"))
    assert "another rank was lost: rank 1 has ended" in line
    assert "Traceback" not in errors


def test_R3_a_first_rank_that_is_lost_while_the_others_meet(tmp_path: Path) -> None:
    port = free_port()
    store = torch.distributed.TCPStore("localhost", int(port), 2, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": "1", "LOCAL_RANK": "1"}
    other = start([*TINY, "--tensor-model-parallel-size", "2"], **place)
    deadline = time.monotonic() + 120
    while store.num_keys() < 3 and other.poll() is None:
        assert time.monotonic() < deadline, "rank 1 does not come"
        time.sleep(0.01)
    # The store goes with the process that serves it.
    del store
    gc.collect()
    _, errors = other.communicate(timeout=120)
    assert other.returncode == 75, errors
    (line,) = (line for line in errors.splitlines() if line.startswith("error:"))
    assert "another rank was lost or did not answer" in line and "Traceback" not in errors


def test_I8_data_of_another_tokenizer(tmp_path: Path) -> None:
    """Token 77 of document 3 is beyond the vocabulary of 60, padded to 64."""
    with IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.uint16) as builder:
        for document in range(20):
            tokens = [5] * 100
            if document == 3:
                tokens[40] = 77
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(str(tmp_path / "data.idx"))
    flags = ["--data-path", tmp_path / "data", "--split", "100,0,0", "--train-iters", "20"]
    done = run([*REAL_DATA, *flags, "--data-cache-path", tmp_path / "cache"])
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    for text in ("token id 77", str(tmp_path / "data"), "the model's padded vocabulary has 64 tokens"):
        assert text in errors[0]
    assert "Traceback" not in done.stderr


def test_R20_metrics_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run([*TINY, "--metrics-dir", tmp_path / "file"])
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert f"--metrics-dir {tmp_path / 'file'} cannot be written" in done.stderr


def test_torn_metrics_line_after_a_kill(tmp_path: Path) -> None:
    """The line being written at the kill is dropped; the file is JSON lines again."""
    flags = [*TINY, "--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--save-interval", "2"]
    assert run([*flags, "--exit-interval", "2", "--metrics-dir", tmp_path]).returncode == 0
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "lm lo')
    assert run([*flags, "--metrics-dir", tmp_path]).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
