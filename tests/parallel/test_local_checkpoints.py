# SPDX-License-Identifier: Apache-2.0
"""--non-persistent-ckpt-type local on two ranks with a directory each, as on two nodes."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import local_checkpoints
from megatron.core.dist_checkpointing.local_checkpoints import Copying, compute_layout, find_rank_directory
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.training.checkpoint.save_directories import find_local_directory
from megatron.training.config.checkpoint import CheckpointConfig
from tests.faults.two_ranks import read_tensors
from tests.functional.pretrain_runs import PRETRAIN, TINY, environment, finish, free_port
from tests.parallel.harness import run_distributed
from tests.parallel.test_checkpoints import world
from tests.programs import Program

LOCAL = "--non-persistent-save-interval 1 --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir fast".split()
IN_MEMORY = "--non-persistent-save-interval 1 --non-persistent-ckpt-type in_memory".split()


def train(
    job: Path, crash_point: str = "", more: Sequence[str] = (), kind: Sequence[str] = LOCAL
) -> tuple[list[int | None], str, str]:
    """A run of two ranks, each of which has a working directory, and with it `fast`, of its own: exit codes, output of
    the first, errors of both."""
    flags = [*TINY, *"--train-iters 6 --bf16 --use-distributed-optimizer --save-interval 3".split(), *kind, *more]
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


@pytest.mark.flags("--replication", "--replication-jump", "--replication-factor")
def test_a_run_whose_node_was_lost_goes_on_from_the_copies(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Rank 1 dies when it has saved iteration 5 and its copy of rank 0's part, whose node is lost then."""
    job, copies = tmp_path / "job", "--replication --replication-jump 1 --replication-factor 2".split()
    assert train(job, "renamed:1:8", copies)[0][1] == -signal.SIGKILL
    shutil.rmtree(job / "node0" / "fast")
    codes, output, errors = train(job, more=copies)
    assert codes == [0, 0], errors
    assert "rank 0 takes its file of the local checkpoint of iteration 5 from rank 1, which has it on its" in output
    assert "rank_00000/iter_0000005, after 20 samples" in output
    resumed = read_tensors(job / "save", 6)
    assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []
    assert len(list(job.glob("node?/fast/*/rank_*/copy_of_rank_*/iter_0000005"))) == 2, "there are copies again"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
@pytest.mark.flags("--non-persistent-ckpt-type")
def test_checkpoints_in_memory_outlive_the_processes_and_not_the_run(
    whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    job = tmp_path / "job"
    memory = find_local_directory(CheckpointConfig(non_persistent_ckpt_type="in_memory"), str(job / "save"))
    try:
        assert train(job, "renamed:1:4", kind=IN_MEMORY)[0][1] == -signal.SIGKILL
        assert len(list(memory.glob("rank_*/iter_*"))) >= 2
        codes, output, errors = train(job, kind=IN_MEMORY)
        assert codes == [0, 0], errors
        assert re.search(f"resuming from {memory}/rank_00000/iter_000000[45], after (16|20) samples", output), output
        assert list(memory.glob("rank_*/iter_*")) == []
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    resumed = read_tensors(job / "save", 6)
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


def find_in_other_layouts(root: str) -> list[tuple[bool, list[str]]]:
    """Whether anything is found with other axes, and with another tensor on one of the ranks; what was passed over."""
    rank, results = dist.get_rank(), []
    directory = find_rank_directory(Path(root) / f"node{rank}", rank)
    for size, changed in ((4, {}), (2, {"other": ShardedTensor.whole("other", torch.ones(rank + 4))})):
        layout = compute_layout(state() | changed, {"dp": size}, world())
        found, passed_over = local_checkpoints.find(directory, layout, world(), lambda offer: offer.iteration == 8)
        results.append((found is not None, passed_over))
    return results


def load_parts(root: str) -> tuple[int | None, list[str]]:
    """Which iteration is found, whose tensors have come back, and what was passed over."""
    rank, tensors = dist.get_rank(), state(fill=-1.0)
    directory = find_rank_directory(Path(root) / f"node{rank}", rank)
    layout = compute_layout(tensors, {"dp": 2}, world())
    found, passed_over = local_checkpoints.find(directory, layout, world(), lambda offer: offer.iteration != 9)
    if found is None:
        return None, passed_over
    local_checkpoints.load(tensors, found, group=world(), replicas=(world(),))
    assert all(torch.equal(tensors[key].data, saved.data) for key, saved in state().items())
    local_checkpoints.remove_others(directory, [found.checkpoint.manifest.iteration])
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
    """The run has gone back from 8 to 4; 9 is not wanted."""
    run_distributed(save_parts, 2, str(tmp_path), [7, 8, 4, 5, 6, 9], is_shared=True)
    whole = shutil.copytree(tmp_path, tmp_path.with_name("whole"))
    assert run_distributed(load_parts, 2, str(tmp_path)) == [(6, [])] * 2
    shutil.rmtree(whole / "node1" / "rank_00001" / "iter_0000006")
    damaged = whole / "node0" / "rank_00000" / "iter_0000005" / "__0_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    local = whole / "node0" / "rank_00000" / "iter_0000004" / "local.json"
    local.write_text(local.read_text().replace('"iteration": 4', '"iteration": 3'))
    (iteration, passed_over), second = run_distributed(load_parts, 2, str(whole))
    assert second == (iteration, passed_over) and iteration == 8
    assert passed_over[0].startswith("rank 1 has no file of the local checkpoint of iteration 6")
    assert passed_over[1].startswith(f"the local checkpoint of iteration 5 cannot be loaded: {damaged} is damaged")
    assert passed_over[2].startswith("rank 0 has no file of the local checkpoint of iteration 4")
    others = (False, ["the local checkpoint of iteration 8 was written in another layout"])
    assert run_distributed(find_in_other_layouts, 2, str(whole)) == [[others] * 2] * 2


# ---- copies on other nodes


COPYING = Copying(jump=2, factor=2)
"""Four ranks, two of which share a node: 0 and 2 keep each other's parts, 1 and 3 as well."""


def own_directory(root: str, places: Sequence[int] = (0, 0, 1, 1)) -> Path:
    """Of this rank, on the node at its place in `places`."""
    return find_rank_directory(Path(root) / f"node{places[dist.get_rank()]}", dist.get_rank())


def save_copies(
    root: str, iterations: list[int], fails_at: int | None = None, places: Sequence[int] = (0, 0, 1, 1)
) -> list[list[str]]:
    """Save on two nodes, with copies; what went wrong with the copies of each save."""
    directory, found = own_directory(root, places), []
    partners = COPYING.list_partners(dist.get_rank())
    directory.mkdir(parents=True, exist_ok=True)
    for iteration in iterations:
        path = local_checkpoints.save(
            state(), directory, iteration, documents={"state": iteration}, since=None, layout={"dp": 4}, group=world(),
            replicas=(world(),),
        )  # fmt: skip
        if iteration == fails_at and dist.get_rank() == 3:
            (path / "state.json").unlink()
        if fails_at is not None and iteration > fails_at and dist.get_rank() == 3:
            shutil.rmtree(directory / "copy_of_rank_00001")
            (directory / "copy_of_rank_00001").write_text("")
        problems = local_checkpoints.copy_to_partners(path, directory, COPYING, world())
        found.append(problems)
        kept = {iteration, local_checkpoints.find_oldest(directory, world())} if problems else {iteration}
        local_checkpoints.remove_others(directory, kept, keeps_copies_of=partners)
    return found


def load_copies(root: str, places: Sequence[int]) -> tuple[int | None, list[str], tuple[str, ...]]:
    """Which iteration is found when the ranks are on these nodes, what was passed over, and what was fetched."""
    tensors, directory = state(fill=-1.0), own_directory(root, places)
    layout = compute_layout(tensors, {"dp": 4}, world())
    found, passed_over = local_checkpoints.find(directory, layout, world(), lambda offer: True)
    if found is None:
        return None, passed_over, ()
    assert found.checkpoint.path.parent == directory
    local_checkpoints.load(tensors, found, group=world(), replicas=(world(),))
    assert all(torch.equal(tensors[key].data, saved.data) for key, saved in state().items())
    assert not list(Path(root).rglob("*.tmp-*"))
    return found.checkpoint.manifest.iteration, passed_over, found.moved


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes with the parts of two ranks each, and the copies of the others'."""
    root = tmp_path_factory.mktemp("copied") / "nodes"
    assert run_distributed(save_copies, 4, str(root), [4, 5]) == [[[], []]] * 4
    parts = sorted(str(path.relative_to(root)) for path in root.rglob("iter_*"))
    assert parts == [
        f"node{rank // 2}/rank_{rank:05d}/{copy}iter_0000005"
        for rank in range(4)
        for copy in (f"copy_of_rank_{(rank + 2) % 4:05d}/", "")
    ], "and only the newest stays"
    return root


def lose(copied: Path, to: Path, *lost: str) -> str:
    """The nodes without some of what lies there."""
    shutil.copytree(copied, to)
    for name in lost:
        shutil.rmtree(to / name)
    return str(to)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_lost_node_costs_nothing(copied: Path, tmp_path: Path) -> None:
    root = lose(copied, tmp_path / "one", "node1")
    for found in run_distributed(load_copies, 4, root, (0, 0, 2, 2)):
        assert found == (
            5, [], tuple(f"rank {rank} takes its file of the local checkpoint of iteration 5 from rank {rank - 2}"
                         for rank in (2, 3)),
        )  # fmt: skip
    # What was fetched is there for the next time.
    assert run_distributed(load_copies, 4, root, (0, 0, 2, 2)) == [(5, [], ())] * 4
    # Ranks that have changed places see their files on the other node.
    moved = run_distributed(load_copies, 4, lose(copied, tmp_path / "moved"), (1, 1, 0, 0))
    assert [found[0] for found in moved] == [5] * 4 and len(moved[0][2]) == 4
    # Both nodes: nobody has anything, and that is no error.
    assert (
        run_distributed(load_copies, 4, lose(copied, tmp_path / "both", "node0", "node1"), (0, 0, 1, 1))
        == [(None, [], ())] * 4
    )


def save_here_and_there(root: str) -> tuple[int | None, list[str], tuple[str, ...]]:
    """Save while the ranks are at one place and then at another one, and load at the first."""
    # Twice: saves are counted by all of a node, and not by those alone who have parts of their own there.
    save_copies(root, [3, 4], places=(1, 1, 0, 0))
    save_copies(root, [5], places=(0, 0, 1, 1))
    return load_copies(root, (1, 1, 0, 0))


def test_a_newer_save_that_lies_elsewhere_is_taken_before_the_ranks_own(tmp_path: Path) -> None:
    """Ranks that are where they were two saves ago see their own older parts there, and the newer ones nowhere."""
    for iteration, passed_over, moved in run_distributed(save_here_and_there, 4, str(tmp_path)):
        assert (iteration, passed_over, len(moved)) == (5, [], 4)


def test_a_damaged_part_is_replaced_by_its_copy(copied: Path, tmp_path: Path) -> None:
    root = Path(lose(copied, tmp_path / "nodes", "node0/rank_00001"))
    damage(root / "node1/rank_00002/iter_0000005/__0_0.distcp")
    iteration, passed_over, moved = run_distributed(load_copies, 4, str(root), (0, 0, 1, 1))[3]
    assert (iteration, passed_over, len(moved)) == (5, [], 2)
    # A copy that is damaged as well, of a part that is gone.
    shutil.rmtree(root / "node0/rank_00001/iter_0000005")
    copy = root / "node1/rank_00003/copy_of_rank_00001/iter_0000005/__0_0.distcp"
    damage(copy)
    iteration, passed_over, _ = run_distributed(load_copies, 4, str(root), (0, 0, 1, 1))[0]
    assert iteration is None
    assert passed_over[0].startswith(f"the local checkpoint of iteration 5 cannot be loaded: {copy} is damaged")
    assert passed_over[0].count("is damaged") == 1, "two ranks see the same file"


def find_after_a_failed_fetch(root: str) -> tuple[bool, list[str]]:
    """Two saves of iteration 5, of which the ranks' own parts are: rank 0's of the second, the others' of the first.
    Of the second there are copies of the others' parts, one of them damaged; of the first one of rank 0's."""
    rank, place = dist.get_rank(), Path(root) / "now"
    directory = find_rank_directory(place / f"node{rank}", rank)
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("first", "second"):
        local_checkpoints.save(
            state(), directory, 5, documents={"state": 5}, since=None, layout={"dp": 3}, group=world()
        )  # fmt: skip
        dist.barrier()
        if rank == 0:
            shutil.copytree(place, Path(root) / name)
        dist.barrier()
    parts = [f"node{number}/rank_{number:05d}/iter_0000005" for number in range(3)]
    if rank == 0:
        for number, own in enumerate(parts):
            keeper = directory if number else find_rank_directory(place / "node1", 1)
            copy = keeper / f"copy_of_rank_{number:05d}" / "iter_0000005"
            shutil.copytree(Path(root) / ("second" if number else "first") / own, copy)
            if number:
                shutil.rmtree(place / own)
                shutil.copytree(Path(root) / "first" / own, place / own)
        damage(copy / "__0_0.distcp")
    dist.barrier()
    layout = compute_layout(state(), {"dp": 3}, world())
    found, passed_over = local_checkpoints.find(directory, layout, world(), lambda offer: True)
    return found is not None, passed_over


def test_parts_of_two_saves_are_never_mixed(tmp_path: Path) -> None:
    """The fetched part of a save that cannot be loaded after all has taken the place of the one before."""
    found, passed_over = run_distributed(find_after_a_failed_fetch, 3, str(tmp_path))[0]
    assert not found and len(passed_over) == 2
    assert "copy_of_rank_00002/iter_0000005/__0_0.distcp is damaged" in passed_over[0]
    assert passed_over[1].endswith("node1/rank_00001/iter_0000005 was replaced by another save's")


def test_without_all_copies_the_last_copied_save_stays_beside_the_newest(tmp_path: Path) -> None:
    problems = run_distributed(save_copies, 4, str(tmp_path), [4, 5, 6], 5)[0]
    assert problems[0] == [] and len(problems[1]) == 1 and len(problems[2]) == 1
    assert problems[1][0].startswith("rank 1 has no copy of the part of rank 3: ")
    assert problems[1][0].endswith("rank_00003/iter_0000005/state.json cannot be read: No such file or directory")
    assert problems[2][0].startswith("rank 3 has no copy of the part of rank 1: ")
    assert problems[2][0].endswith("rank_00003/copy_of_rank_00001: File exists")
    assert {path.name for path in tmp_path.glob("node?/rank_*/iter_*")} == {"iter_0000004", "iter_0000006"}
    for iteration in (4, 6):
        copies = tmp_path.glob(f"node?/rank_*/copy_of*/iter_000000{iteration}")
        assert sorted(path.parent.name[-1] for path in copies) == ["0", "2", "3"], "only rank 1's has no place"


def test_who_keeps_copies_of_whom() -> None:
    assert [Copying(2, 2).list_partners(rank) for rank in range(8)] == [[2], [3], [0], [1], [6], [7], [4], [5]]
    assert [Copying(1, 3).list_partners(rank) for rank in (3, 4, 5)] == [[4, 5], [5, 3], [3, 4]]
