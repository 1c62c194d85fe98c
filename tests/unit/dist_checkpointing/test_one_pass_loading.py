# SPDX-License-Identifier: Apache-2.0
"""Tensors are filled and their files verified in one pass; damage is found before anything is used."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import serialization, shard_files
from megatron.core.dist_checkpointing.manifest import DamagedCheckpointError, read_manifest, record_file
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.errors import CheckpointError
from megatron.core.placement import Part, Placement, Split
from tests.faults.test_checkpoint_damage import rewrite_manifest
from tests.support.small_checkpoints import ALONE
from tests.support.tiny_training import prepare, train_tiny

SHAPES: dict[str, tuple[int, ...]] = {
    "long rows": (5, 700),
    "rows": (130, 9),
    "cube": (6, 7, 50),
    "flat": (3001,),
    "one": (),
}


def values(key: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(key))
    return torch.randn(SHAPES[key], generator=generator)


def saved(root: Path) -> Path:
    tensors = {key: ShardedTensor.whole(key, values(key)) for key in SHAPES}
    return serialization.save(tensors, root, 1, documents={}, group=ALONE)


def shards() -> tuple[ShardedStateDict, dict[str, torch.Tensor]]:
    """Tensors to fill, of other strides, number formats and parts than what is saved, and what belongs into them."""
    cut = Placement("rows", (130, 9), (Split(0, "tp", 2, 1, (Part(60), Part(70))),))
    column = Placement("cube", (6, 7, 50), (Split(2, "tp", 2, 1),))
    empty = torch.full((700, 5), -1.0).t()
    wanted = {
        "long rows": (empty, values("long rows")),
        "flat": (torch.zeros(3001, dtype=torch.bfloat16), values("flat").bfloat16()),
        "one": (torch.zeros(()), values("one")),
    }
    tensors = {key: ShardedTensor.whole(key, target) for key, (target, _) in wanted.items()}
    for placement in (cut, column):
        target = torch.full(placement.local_shape, -1.0)
        tensors[placement.name] = ShardedTensor.from_placement(target, placement)
        wanted[placement.name] = (target, placement.take(values(placement.name)))
    return tensors, {key: content for key, (_, content) in wanted.items()}


def load(root: Path, tensors: ShardedStateDict) -> None:
    found = serialization.find(root, None, ALONE, leave_tensors=True)
    assert found is not None and list(found.unverified) == ["__0_0.distcp"]
    serialization.load(tensors, found, ALONE)


def test_parts_of_all_kinds_are_filled_by_reading_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    # Boxes of several pieces, rows longer and shorter than one.
    monkeypatch.setattr(shard_files, "_VERIFIED_PIECE_BYTES", 1000)
    counts = []
    read = shard_files._read_exactly
    monkeypatch.setattr(
        shard_files,
        "_read_exactly",
        lambda file, start, memory: (counts.append(len(memory)), read(file, start, memory)),
    )
    tensors, wanted = shards()
    load(tmp_path, tensors)
    assert all(torch.equal(tensors[key].data, content) for key, content in wanted.items())
    assert sum(counts) == (path / "__0_0.distcp").stat().st_size


def test_L2_every_damaged_bit_is_found(tmp_path: Path) -> None:
    file = saved(tmp_path) / "__0_0.distcp"
    whole, pick = file.read_bytes(), random.Random(3)
    # In heads and tails of the archives as well, which say where values are.
    heads = [offset for offset in range(len(whole)) if whole[offset : offset + 2] == b"PK"]
    for case in range(240):
        at = pick.choice(heads) + pick.randrange(40) if case % 2 else pick.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[min(at, len(whole) - 1)] ^= 1 << pick.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is damaged"):
            load(tmp_path, shards()[0])


def test_L2_damage_is_found_where_no_tensor_lies(tmp_path: Path) -> None:
    """Between two boxes and behind the last one, as where somebody has taken tensors out of the table of contents."""
    path = saved(tmp_path)
    table = read_metadata(path / ".metadata")
    places = sorted((place.offset, place.length, index) for index, place in table.storage_data.items())
    unlisted = [places[1], places[-1]]
    for _, _, index in unlisted:
        del table.storage_data[index], table.state_dict_metadata[index.fqn]
    (path / ".metadata").write_bytes(pickle.dumps(table))
    records = {name: record._asdict() for name, record in read_manifest(path).files.items()}
    rewrite_manifest(path, files=records | {".metadata": record_file(path / ".metadata")._asdict()})
    gone = {index.fqn for _, _, index in unlisted}
    tensors, wanted = shards()
    tensors = {key: tensor for key, tensor in tensors.items() if key not in gone}
    load(tmp_path, tensors)
    assert all(torch.equal(tensor.data, wanted[key]) for key, tensor in tensors.items())
    file = path / "__0_0.distcp"
    whole = file.read_bytes()
    for start, length, _ in unlisted:
        damaged = bytearray(whole)
        damaged[start + length // 2] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is damaged"):
            load(tmp_path, tensors)


def test_L2_of_what_a_damaged_checkpoint_has_filled_nothing_is_kept(tmp_path: Path) -> None:
    """The next one overwrites it, and is refused where it lacks a tensor that was to keep its initial values."""
    directories = ("--save", tmp_path, "--dist-ckpt-strictness", "log_all")
    for layers, iteration in ((2, 1), (3, 2)):
        train_tiny(*directories, "--num-layers", layers, "--train-iters", iteration, "--start-over")
    file = tmp_path / "iter_0000002" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(
        CheckpointError, match=r"iter_0000001 lacks decoder\.layers\.2\..*start again with --ckpt-step 1"
    ):
        prepare(*directories, "--load", tmp_path, "--num-layers", 3)
