# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several processes: each box once, errors everywhere, one layout into another."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import checksums, serialization, shard_files, verification
from megatron.core.dist_checkpointing.finding import Verify
from megatron.core.dist_checkpointing.manifest import DamagedCheckpointError, read_manifest
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, model_state
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.errors import CheckpointError, StorageError
from megatron.core.placement import Part, Placement, Split
from tests.parallel.harness import WorkerError, run_distributed
from tests.support.small_checkpoints import ALONE, find


def state(tp: int, rank: int, fill: float | None = None) -> ShardedStateDict:
    """What one of `tp` ranks holds: something cut, something replicated, something of its own."""
    parts = (Part(6), Part(6))
    placements = [
        Placement("cut", (12, 5), (Split(0, "tp", tp, rank, parts),)),
        Placement("vocabulary", (16, 3), (Split(0, "tp", tp, rank),), valid_rows=13),
        *(Placement(f"replicated{i}", (9, 7)) for i in range(4)),
    ]
    shards = [(full(p) if fill is None else torch.full(p.full_shape, fill), p) for p in placements]
    tensors = model_state((p.take(values).clone(), p) for values, p in shards)
    own = torch.full((3,), float(rank) if fill is None else fill)
    key = f"rng_state.{rank}.cpu"
    return {**tensors, key: ShardedTensor.whole(key, own)}


def full(placement: Placement) -> torch.Tensor:
    return torch.randn(placement.full_shape, generator=torch.Generator().manual_seed(sum(map(ord, placement.name))))


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def save_worker(root: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    return str(serialization.save(state(size, rank), Path(root), 4, documents={"state": {}}, group=world()))


def load_worker(root: str) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = serialization.find(Path(root), None, world())
    assert found is not None
    wanted, loaded = state(size, rank), state(size, rank, fill=-1.0)
    wanted = {
        key: tensor
        for key, tensor in wanted.items()
        if key in read_metadata(found.path / ".metadata").state_dict_metadata
    }
    loaded = {key: loaded[key] for key in wanted}
    serialization.load(loaded, found, world())
    return all(torch.equal(loaded[key].data, wanted[key].data) for key in wanted)


def test_two_ranks_write_each_box_once(tmp_path: Path) -> None:
    assert len(set(run_distributed(save_worker, 2, str(tmp_path)))) == 1
    checkpoint = tmp_path / "iter_0000004"
    shards = sorted(checkpoint.glob("*.distcp"))
    assert [shard.name for shard in shards] == ["__0_0.distcp", "__1_0.distcp"]
    metadata = read_metadata(checkpoint / ".metadata")
    assert len(metadata.state_dict_metadata["cut"].chunks) == 4, "gate and up, of two ranks"
    writers = [
        metadata.storage_data[index].relative_path for index in metadata.storage_data if "replicated" in index.fqn
    ]
    assert sorted(writers) == ["__0_0.distcp"] * 2 + ["__1_0.distcp"] * 2, "replicas share the writing"
    assert all(run_distributed(load_worker, 2, str(tmp_path)))


def test_two_ranks_to_one_and_back(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    run_distributed(save_worker, 2, str(tmp_path / "two"))
    found = find(tmp_path / "two")
    assert found is not None and found.manifest.world_size == 2
    loaded, wanted = state(1, 0, fill=-1.0), state(1, 0)
    serialization.load(loaded, found, ALONE)
    assert all(torch.equal(loaded[key].data, wanted[key].data) for key in wanted)

    (tmp_path / "one").mkdir()
    serialization.save(wanted, tmp_path / "one", 4, documents={"state": {}}, group=ALONE)
    assert all(run_distributed(load_worker, 2, str(tmp_path / "one")))


def failing_worker(root: str, broken_rank: int) -> str:
    """One rank's disk fails; what does each rank see?"""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == broken_rank:
        import errno
        import io
        import os

        from megatron.core.dist_checkpointing import torch_dist

        class Full(io.FileIO):
            def write(self, data: bytes) -> int:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        torch_dist.io.FileIO = Full  # type: ignore[misc]
    try:
        serialization.save(state(size, rank), Path(root), 5, documents={"state": {}}, group=world())
    except StorageError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_S27_one_rank_has_no_space(tmp_path: Path, broken_rank: int) -> None:
    run_distributed(save_worker, 2, str(tmp_path))
    texts = run_distributed(failing_worker, 2, str(tmp_path), broken_rank)
    assert texts[0] == texts[1] and "iter_0000005" in texts[0] and f"on rank {broken_rank}" in texts[0]
    assert "No space left on device" in texts[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000004", "latest_checkpointed_iteration.txt"]


def mismatch_worker(root: str) -> tuple[str, tuple[str, ...]]:
    """The second rank's model differs; both must say so, and know of it where that is tolerated."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = serialization.find(Path(root), None, world())
    assert found is not None
    tensors = state(size, rank, fill=0.0)
    if rank == 1:
        tensors["extra"] = ShardedTensor.whole("extra", torch.zeros(2))
    try:
        serialization.load(tensors, found, world())
    except CheckpointError as error:
        return str(error), serialization.load(tensors, found, world(), may_lack=True).lacking
    return "loaded", ()


def test_L7_mismatch_on_one_rank_is_everyones(tmp_path: Path) -> None:
    run_distributed(save_worker, 2, str(tmp_path))
    for refusal, tolerated in run_distributed(mismatch_worker, 2, str(tmp_path)):
        assert "extra is missing" in refusal and tolerated == ("extra (2,)",)


def verifying_worker(root: str) -> tuple[str, int]:
    """What this rank is told of the checkpoint, and how many bytes it has read for the checksums."""
    count, compute = 0, checksums._compute

    def counting(path: Path, segment: checksums.FileSegment) -> int:
        nonlocal count
        count += segment.num_bytes
        return compute(path, segment)

    checksums._compute = counting
    try:
        found = serialization.find(Path(root), None, world())
    except CheckpointError as error:
        return str(error), count
    return str(found and found.skipped), count


def sharing_worker(root: str, together: bool, broken_rank: int | None) -> tuple[str, int]:
    """Load in one pass: what this rank is told, and how many bytes it has read."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count, read = 0, shard_files._read_exactly

    def counting(file: io.FileIO, position: int, memory: torch.Tensor) -> None:
        nonlocal count
        count += len(memory)
        read(file, position, memory)
        # Only this process's disk gives back something else.
        if rank == broken_rank:
            memory[-1] ^= 1

    shard_files._read_exactly = counting  # type: ignore[assignment]
    found = serialization.find(Path(root), None, world(), leave_tensors=True)
    assert found is not None and len(found.unverified) == size
    wanted, loaded = state(size, rank), state(size, rank, fill=-1.0)
    try:
        serialization.load(loaded, found, world(), replicas=[world()] if together else ())
    except DamagedCheckpointError as error:
        return str(error), count
    same = all(torch.equal(loaded[key].data, wanted[key].data) for key in wanted if key != "vocabulary")
    return "loaded" if same else "other values", count


def test_each_byte_is_read_once_where_ranks_share_the_reading(tmp_path: Path) -> None:
    run_distributed(save_worker, 2, str(tmp_path))
    total = sum(path.stat().st_size for path in tmp_path.glob("iter_*/*.distcp"))
    replicated = 4 * 9 * 7 * 4
    for together, expected in ((True, total), (False, total + replicated)):
        answers = run_distributed(sharing_worker, 2, str(tmp_path), together, None)
        assert [answer for answer, _ in answers] == ["loaded"] * 2
        assert sum(count for _, count in answers) == expected
    for together in (True, False):
        answers = run_distributed(sharing_worker, 2, str(tmp_path), together, 1)
        assert len({answer for answer, _ in answers}) == 1 and "distcp is damaged: its checksum is" in answers[0][0]
    # Also where only a rank that does not verify the box stumbles over it.
    for file in tmp_path.glob("iter_*/*.distcp"):
        whole = file.read_bytes()
        file.write_bytes(whole.replace(b"PK", b"pk"))
        answers = run_distributed(sharing_worker, 2, str(tmp_path), False, None)
        file.write_bytes(whole)
        assert len({answer for answer, _ in answers}) == 1 and f"{file.name} is damaged" in answers[0][0]


def out_of_threads_worker(root: str, rank: int) -> str:
    """What every rank is told where one cannot start the threads that read, or has another error of its own."""

    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    def fail(verify: Verify) -> None:
        raise RecursionError("too deep")

    if dist.get_rank() == rank:
        checksums.ThreadPoolExecutor.map = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(CheckpointError) as refused:
        serialization.find(Path(root), None, world())
    with pytest.raises(RecursionError):
        verification.find_together(fail, world())
    return str(refused.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_L2_nobody_waits_for_a_rank_that_cannot_read(tmp_path: Path, rank: int) -> None:
    run_distributed(save_worker, 2, str(tmp_path))
    for refusal in run_distributed(out_of_threads_worker, 2, str(tmp_path), rank):
        assert "iter_0000004 cannot be read: can't start new thread" in refusal


def test_L2_all_ranks_verify_a_share_of_the_files(tmp_path: Path) -> None:
    run_distributed(save_worker, 2, str(tmp_path))
    checkpoint = tmp_path / "iter_0000004"
    total = sum(record.bytes for record in read_manifest(checkpoint).files.values())
    answers = run_distributed(verifying_worker, 2, str(tmp_path))
    assert [answer for answer, _ in answers] == ["[]", "[]"]
    assert sum(count for _, count in answers) == total and all(0 < count < 0.9 * total for _, count in answers)
    for name in ("__0_0.distcp", "__1_0.distcp", "metadata.json"):
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for answer, _ in run_distributed(verifying_worker, 2, str(tmp_path)):
            assert f"{name} is damaged: its checksum is" in answer
        (checkpoint / name).write_bytes(content[:-1])
        for answer, _ in run_distributed(verifying_worker, 2, str(tmp_path)):
            assert f"{name} is {len(content) - 1} bytes long" in answer
        (checkpoint / name).write_bytes(content)


def other_mount_worker(roots: list[str]) -> None:
    serialization.find(Path(roots[0]), None, world())
    import os

    os.chdir(roots[dist.get_rank()])
    serialization.find(Path("checkpoints"), None, world())


def test_L6_ranks_that_see_different_directories(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("a", "b")]
    for root in roots:
        (root / "checkpoints").mkdir(parents=True)
        run_distributed(save_worker, 2, str(root / "checkpoints"))
    with pytest.raises(WorkerError, match="rank 1 sees another checkpoint there than rank 0"):
        run_distributed(other_mount_worker, 2, [str(root) for root in roots])
