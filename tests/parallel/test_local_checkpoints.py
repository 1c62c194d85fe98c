# SPDX-License-Identifier: Apache-2.0
"""--non-persistent-ckpt-type local on two ranks with a directory each, as on two nodes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import local_checkpoints
from megatron.core.dist_checkpointing.local_checkpoints import compute_layout, find_rank_directory
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.training.checkpoint.save_directories import find_local_directory
from megatron.training.config.checkpoint import CheckpointConfig
from tests.faults.two_ranks import read_tensors
from tests.functional.pretrain_runs import PRETRAIN, TINY, environment, finish, free_port
from tests.parallel.harness import run_distributed
from tests.parallel.test_checkpoints import world
from tests.programs import Program

LOCAL = "--non-persistent-save-interval 1 --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir fast".split()


def train(job: Path, crash_point: str = "") -> tuple[list[int | None], str, str]:
    """A run of two ranks, each of which has a working directory, and with it `fast`, of its own: exit codes, output of
    the first, errors of both."""
    flags = [*TINY, *"--train-iters 6 --bf16 --use-distributed-optimizer --save-interval 3".split(), *LOCAL]
    flags += ["--save", job / "save", "--load", job / "save"]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    common |= {"MEGATRON_CRASH_POINT": crash_point} if crash_point else {}
    programs = []
    for rank in range(2):
        node = job / f"node{rank}"
        node.mkdir(exist_ok=True, parents=True)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        programs.append(Program([PRETRAIN, *flags], environment(common | own), node))
    ranks = finish(programs)
    return [rank.returncode for rank in ranks], ranks[0].stdout, "".join(rank.stderr for rank in ranks)


def list_parts(job: Path) -> list[str]:
    return sorted(f"{path.parent.name[-1]}{path.name[-1]}" for path in job.glob("node?/fast/*/rank_*/iter_*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """All tensors of a run that nothing has interrupted."""
    job = tmp_path_factory.mktemp("whole")
    assert train(job)[0] == [0, 0]
    assert list_parts(job) == ["05", "15"], "and only the newest stays"
    return read_tensors(job / "save", 6)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that is killed when one of the ranks has saved iteration 5 and the other has not."""
    job = tmp_path_factory.mktemp("killed") / "job"
    codes, _, _ = train(job, "renamed:1:4")
    assert codes[1] == -signal.SIGKILL
    assert {"04", "14", "15"} <= set(list_parts(job))
    # The other may have been quicker than the kill.
    for part in job.glob("node0/fast/*/rank_00000/iter_0000005"):
        shutil.rmtree(part)
    return job


@pytest.mark.parametrize("lost", [None, 0])
def test_a_killed_run_repeats_the_uninterrupted_one(
    lost: int | None, whole: dict[str, torch.Tensor], killed: Path, tmp_path: Path
) -> None:
    job = shutil.copytree(killed, tmp_path / "job")
    settings = CheckpointConfig(non_persistent_local_ckpt_dir="fast")
    # Its name is that of --save, which is another one now.
    for place in job.glob("node?/fast/save-*"):
        place.rename(place.with_name(find_local_directory(settings, str(job / "save")).name))
    if lost is not None:
        shutil.rmtree(job / f"node{lost}" / "fast")
    codes, output, errors = train(job)
    assert codes == [0, 0], errors
    if lost is None:
        assert "rank 0 has no file of the local checkpoint of iteration 5; was a node replaced?" in errors
        assert "rank_00000/iter_0000004, after 16 samples" in output
    else:
        assert "rank 0 has no file of the local checkpoint of iteration 4" in errors
        assert "save/iter_0000003, after 12 samples" in output
    resumed = read_tensors(job / "save", 6)
    assert resumed.keys() == whole.keys()
    assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []


# ---- the parts themselves


def state(fill: float | None = None) -> ShardedStateDict:
    """What both ranks have, what each has of a tensor of both, and nothing, as a short slice has."""
    rank = dist.get_rank()
    values = {"same": torch.arange(12.0).view(3, 4), "other": torch.ones(5, dtype=torch.bfloat16)}
    values |= {f"own.{rank}": torch.full((2,), rank + 1.0), "empty": torch.zeros(0)}
    for tensor in values.values() if fill is not None else ():
        tensor.fill_(fill)
    return {key: ShardedTensor.whole(key, tensor) for key, tensor in values.items()}


def save_parts(root: str, iterations: list[int], *, is_shared: bool) -> int:
    """Save; the bytes of tensors that this rank has written the last time."""
    directory = find_rank_directory(Path(root) / f"node{dist.get_rank()}", dist.get_rank())
    directory.mkdir(parents=True, exist_ok=True)
    for iteration in iterations:
        path = local_checkpoints.save(
            state(), directory, iteration, documents={"state": iteration}, since=None, layout={"dp": 2}, group=world(),
            replicas=(world(),) if is_shared else (),
        )  # fmt: skip
    return (path / "__0_0.distcp").stat().st_size


def load_parts(root: str, size: int = 2) -> tuple[int | None, list[str]]:
    """Which iteration is found, whose tensors have come back, and what was passed over."""
    rank, tensors = dist.get_rank(), state(fill=-1.0)
    directory = find_rank_directory(Path(root) / f"node{rank}", rank)
    layout = compute_layout(tensors, {"dp": size}, world())
    found, passed_over = local_checkpoints.find(directory, layout, world(), lambda offer: offer.iteration != 9)
    if found is None:
        return None, passed_over
    local_checkpoints.load(tensors, found, group=world(), replicas=(world(),))
    assert all(torch.equal(tensors[key].data, saved.data) for key, saved in state().items())
    local_checkpoints.remove_others(directory, found.checkpoint.manifest.iteration)
    assert [path.name[-1] for path in directory.glob("iter_*")] == [str(found.checkpoint.manifest.iteration)]
    return found.checkpoint.manifest.iteration, passed_over


@pytest.mark.flags("--non-persistent-local-ckpt-algo")
def test_replicas_divide_the_writing(tmp_path: Path) -> None:
    divided = run_distributed(save_parts, 2, str(tmp_path / "divided"), [3], is_shared=True)
    atomic = run_distributed(save_parts, 2, str(tmp_path / "atomic"), [3], is_shared=False)
    assert atomic[0] == atomic[1] and max(divided) < atomic[0]
    for name in ("divided", "atomic"):
        assert run_distributed(load_parts, 2, str(tmp_path / name)) == [(3, [])] * 2


def test_the_newest_is_the_last_one_that_all_have_undamaged(tmp_path: Path) -> None:
    """The run has gone back from 8 to 5; 9 is not wanted."""
    run_distributed(save_parts, 2, str(tmp_path), [7, 8, 5, 6, 9], is_shared=True)
    whole = shutil.copytree(tmp_path, tmp_path.with_name("whole"))
    assert run_distributed(load_parts, 2, str(tmp_path)) == [(6, [])] * 2
    shutil.rmtree(whole / "node1" / "rank_00001" / "iter_0000006")
    damaged = whole / "node0" / "rank_00000" / "iter_0000005" / "__0_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (iteration, passed_over), second = run_distributed(load_parts, 2, str(whole))
    assert second == (iteration, passed_over) and iteration == 8
    assert passed_over[0].startswith("rank 1 has no file of the local checkpoint of iteration 6")
    assert passed_over[1].startswith(f"the local checkpoint of iteration 5 cannot be loaded: {damaged} is damaged")
    iteration, passed_over = run_distributed(load_parts, 2, str(whole), 4)[0]
    assert (iteration, passed_over) == (None, ["the local checkpoint of iteration 8 was written in another layout"])
