# SPDX-License-Identifier: Apache-2.0
"""--async-save of several ranks: the same checkpoint as without, and one outcome for all."""

from __future__ import annotations

import errno
import io
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing import torch_dist
from megatron.core.dist_checkpointing.async_requests import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.async_save import AsyncSaver
from megatron.core.dist_checkpointing.writer_process import WriterProcess
from megatron.training.loop import train
from megatron.training.verify.parity import list_placed_parameters, open_local_run
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import STYLES, own_rank, training
from tests.parallel.test_checkpoints import load_worker, save_worker, state, world


def start(saver: AsyncSaver, root: str, iteration: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = state(size, rank)
    saver.start(tensors, Path(root), iteration, documents={"state": {}}, group=world())
    for tensor in tensors.values():
        tensor.data.fill_(-1.0)


def async_worker(root: str, with_process: bool) -> str:
    saver = AsyncSaver(WriterProcess() if with_process else None)
    start(saver, root, 4)
    # Ranks go on at their own pace; a save needs none of their collectives.
    dist.barrier()
    outcome = saver.wait()
    dist.barrier()
    saver.close()
    assert outcome is not None
    return str(outcome.check())


@pytest.mark.parametrize("with_process", [False, True], ids=["thread", "process"])
def test_the_same_files_as_without(tmp_path: Path, with_process: bool) -> None:
    for name in ("sync", "async"):
        (tmp_path / name).mkdir()
    run_distributed(save_worker, 2, str(tmp_path / "sync"))
    assert len(set(run_distributed(async_worker, 2, str(tmp_path / "async"), with_process))) == 1
    theirs = {path.name: path.read_bytes() for path in (tmp_path / "sync" / "iter_0000004").iterdir()}
    ours = {path.name: path.read_bytes() for path in (tmp_path / "async" / "iter_0000004").iterdir()}
    assert {name for name in theirs if ours.pop(name) != theirs[name]} == {"manifest.json"} and not ours
    assert all(run_distributed(load_worker, 2, str(tmp_path / "async")))


def queue_worker(root: str) -> tuple[int, bool]:
    """How often a rank asked until the save was done, and whether its finalize function found the checkpoint."""
    queue, seen = AsyncCallsQueue(), []
    request = AsyncRequest(lambda saver: start(saver, root, 4), world())
    # Collective: both ranks come here in the same call.
    request.add_finalize_fn(lambda: (dist.barrier(), seen.append((Path(root) / "iter_0000004").exists())))
    assert queue.schedule_async_request(request) == 0
    calls = 1
    while queue.maybe_finalize_async_calls() != [0]:
        calls += 1
        time.sleep(0.01 * dist.get_rank())
    queue.close()
    return calls, seen == [True]


def test_ranks_finish_a_scheduled_request_in_the_same_call(tmp_path: Path) -> None:
    first, second = run_distributed(queue_worker, 2, str(tmp_path))
    assert first == second and first[1]


def failing_worker(root: str, broken_rank: int) -> tuple[str, str]:
    """The disk of one rank fails in one save, and works in the next."""
    whole_file = io.FileIO

    class Full(io.FileIO):
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saver = AsyncSaver(None)
    if dist.get_rank() == broken_rank:
        torch_dist.io.FileIO = Full  # type: ignore[misc]
    start(saver, root, 5)
    failed = saver.wait()
    torch_dist.io.FileIO = whole_file  # type: ignore[misc]
    start(saver, root, 6)
    saved = saver.wait()
    dist.barrier()
    assert failed is not None and saved is not None
    return str(failed.problem), str(saved.check())


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_S27_one_rank_has_no_space(tmp_path: Path, broken_rank: int) -> None:
    first, second = run_distributed(failing_worker, 2, str(tmp_path), broken_rank)
    assert first == second
    assert f"on rank {broken_rank}" in first[0] and "No space left on device" in first[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000006", "latest_checkpointed_iteration.txt"]


def deserted_worker(root: str) -> str:
    """The second rank's writer never ends; the run of the first one does, by an error."""
    saver = AsyncSaver(process := WriterProcess())
    saver.prepare()
    if dist.get_rank() == 1:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
    start(saver, root, 5)
    if dist.get_rank() == 1:
        dist.barrier()
        os.kill(process.pid or 0, signal.SIGKILL)
        return ""
    outcome = saver.wait(patience_seconds=0.5)
    dist.barrier()
    saver.close()
    assert outcome is not None
    return str(outcome.problem)


def test_a_run_that_fails_does_not_wait_for_ever(tmp_path: Path) -> None:
    problem, _ = run_distributed(deserted_worker, 2, str(tmp_path))
    assert "was not finished: no word of rank 1" in problem
    assert list(tmp_path.iterdir()) == []


def trained(layout: str, directory: str, more: str) -> tuple[int, list[torch.Tensor]]:
    flags = f"{STYLES['gpt2']} --hidden-dropout 0.1 --save {directory} --load {directory} --save-interval 3 {more}"
    config, recipe = training(flags, layout)
    with open_local_run(config, recipe, own_rank(config)) as run:
        train(run)
        weights = [_own_part(parameter).clone() for _, parameter in list_placed_parameters(run)]
        return run.progress.iteration, weights


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.detach()
    return local.to_local() if isinstance(local, DTensor) else local


@pytest.mark.flags("--async-save")
@pytest.mark.parametrize("layout", ["pp2", "dp2 --use-distributed-optimizer", "dp2,fsdp2"])
def test_runs_of_two_ranks_are_saved_the_same_and_resumed_bit_for_bit(layout: str, tmp_path: Path) -> None:
    layout, _, more = layout.partition(" ")
    way = "--async-save --save-retain-interval 300"
    whole = run_distributed(trained, 2, layout, str(tmp_path / "sync"), more)
    run_distributed(trained, 2, layout, str(tmp_path / "async"), f"{more} {way} --exit-interval 6")
    assert [path.name for path in (tmp_path / "async").glob("iter_*")] == ["iter_0000006"]
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"):
        found = (tmp_path / "async" / "iter_0000006" / name).read_bytes()
        assert found == (tmp_path / "sync" / "iter_0000006" / name).read_bytes(), name
    resumed = run_distributed(trained, 2, layout, str(tmp_path / "async"), f"{more} {way}")
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours[0] == theirs[0] == 10
        assert all(map(torch.equal, ours[1], theirs[1]))
