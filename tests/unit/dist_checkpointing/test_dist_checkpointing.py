# SPDX-License-Identifier: Apache-2.0
"""Saving and loading by placements: who writes what, other layouts, what does not fit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedTensor, SlicedTensor, model_state
from megatron.core.dist_checkpointing.save_plan import choose_writers, list_boxes
from megatron.core.dist_checkpointing.validation import KeyReport, ModelMismatchError, shorten_list
from megatron.core.errors import CheckpointError, MegatronError
from megatron.core.placement import Part, Placement, Split
from tests.support.small_checkpoints import ALONE, find


def plan_of(*placements: Placement, prefix: str = "") -> SavePlan:
    tensors = [ShardedTensor.from_placement(torch.zeros(p.local_shape), p, prefix=prefix) for p in placements]
    return list_boxes({tensor.key: tensor for tensor in tensors})


def boxes(plan: SavePlan) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [
        (item.index.fqn, tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
        for item in plan.items
        if item.tensor_data is not None
    ]


def test_replicas_share_the_writing_evenly() -> None:
    weights = [Placement(f"w{i}", (rows, 4)) for i, rows in enumerate((8, 4, 2, 1, 1))]
    plans = choose_writers([plan_of(*weights), plan_of(*weights)])
    assert sorted(boxes(plans[0]) + boxes(plans[1])) == sorted(boxes(plan_of(*weights)))
    assert [sum(rows for _, _, (rows, _) in boxes(plan)) for plan in plans] == [8, 8]


def test_key_value_heads_that_several_shards_hold_are_written_once() -> None:
    parts = (Part(8, (0, 2)), Part(4, (0, 2), replicated=True), Part(4, (0, 2), replicated=True))
    shards = [Placement("qkv", (16, 3), (Split(0, "tp", 2, index, parts),)) for index in range(2)]
    plans = choose_writers([plan_of(shard) for shard in shards])
    written = sorted(box for plan in plans for box in boxes(plan))
    assert sum(sizes[0] for _, _, sizes in written) == 16


def test_copies_are_loaded_but_not_saved(tmp_path: Path) -> None:
    original = Placement("embedding", (4, 2))
    copy = Placement("embedding", (4, 2), is_copy=True)
    assert boxes(plan_of(copy)) == []
    weight = torch.arange(8.0).view(4, 2)
    both = model_state([(torch.zeros(4, 2), copy), (weight, original)])
    assert both["embedding"].data is not None and torch.equal(both["embedding"].data, weight)
    serialization.save(both, tmp_path, 1, documents={}, group=ALONE)
    target = torch.zeros(4, 2)
    load(tmp_path, model_state([(target, copy)]))
    assert torch.equal(target, weight)


def load(root: Path, tensors: dict[str, ShardedTensor], **options: bool) -> None:
    found = find(root)
    assert found is not None
    serialization.load(tensors, found, ALONE, **options)


def placements(tp: int, index: int) -> dict[str, Placement]:
    gate_up = (Part(6, name="gate"), Part(6, name="up"))
    return {
        "fc1": Placement("fc1", (12, 4), (Split(0, "tp", tp, index, gate_up),)),
        "fc2": Placement("fc2", (4, 6), (Split(1, "tp", tp, index),)),
        "experts": Placement("experts", (4, 6, 2), (Split(0, "ep", 2, 1), Split(1, "etp", tp, index))),
        "norm": Placement("norm", (4,)),
        "scale": Placement("scale", ()),
    }


def full(placement: Placement) -> Tensor:
    generator = torch.Generator().manual_seed(len(placement.name))
    return torch.randn(placement.full_shape, generator=generator)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_one_process_checkpoint_into_any_layout(tmp_path: Path, tp: int) -> None:
    whole = [Placement(p.name, p.full_shape) for p in placements(1, 0).values()]
    serialization.save(model_state((full(p), p) for p in whole), tmp_path, 1, documents={}, group=ALONE)
    for index in range(tp):
        shards = {name: torch.full(p.local_shape, torch.nan) for name, p in placements(tp, index).items()}
        load(tmp_path, model_state((shards[name], p) for name, p in placements(tp, index).items()))
        for name, placement in placements(tp, index).items():
            assert torch.equal(shards[name], placement.take(full(placement))), (name, index)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
)
def test_values_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    values = (torch.randn(33) * 50).to(dtype)
    if dtype.is_floating_point:
        values[:4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-7]).to(dtype)
    serialization.save({"x": ShardedTensor.whole("x", values)}, tmp_path, 1, documents={}, group=ALONE)
    loaded = torch.zeros_like(values)
    load(tmp_path, {"x": ShardedTensor.whole("x", loaded)})
    assert torch.equal(values.view(torch.uint8), loaded.view(torch.uint8))


def test_a_view_of_a_large_buffer_is_saved_alone(tmp_path: Path) -> None:
    buffer = torch.zeros(1_000_000)
    serialization.save({"x": ShardedTensor.whole("x", buffer[10:20])}, tmp_path, 1, documents={}, group=ALONE)
    assert (tmp_path / "iter_0000001" / "__0_0.distcp").stat().st_size < 10_000


def test_L12_everything_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    saved = {name: ShardedTensor.whole(name, torch.zeros(2, 3)) for name in ("same", "shape", "gone")}
    serialization.save(saved, tmp_path, 1, documents={}, group=ALONE)
    wanted = {
        "same": ShardedTensor.whole("same", torch.ones(2, 3)),
        "shape": ShardedTensor.whole("shape", torch.ones(3, 2)),
        "new": ShardedTensor.whole("new", torch.ones(1)),
    }
    with pytest.raises(ModelMismatchError) as found:
        load(tmp_path, wanted)
    text = str(found.value)
    assert "shape is (2, 3) in the checkpoint, (3, 2) in the model" in text
    assert "new is missing (the model's shape is (1,))" in text
    assert torch.equal(wanted["same"].data, torch.ones(2, 3)), "nothing is loaded when something does not fit"
    with pytest.raises(ModelMismatchError, match="gone is in the checkpoint only"):
        load(tmp_path, {name: wanted.get(name, saved[name]) for name in ("same",)})
    load(tmp_path, {"same": wanted["same"]}, may_have_more=True)
    assert not wanted["same"].data.any()


def test_what_is_tolerated_is_reported(tmp_path: Path) -> None:
    ours = lambda value, *keys: {key: ShardedTensor.whole(key, torch.full((2, 3), value)) for key in keys}  # noqa: E731
    saved = ours(1.0, "a", "b", "optimizer.state.exp_avg.a", "rng_state.0.cpu")
    serialization.save(saved, tmp_path, 1, documents={}, group=ALONE)
    found = find(tmp_path)
    assert found is not None
    new = ("new", "optimizer.state.exp_avg.new", "optimizer.state.exp_avg_sq.a")
    wanted = ours(5.0, "a", *new)
    report = serialization.load(wanted, found, ALONE, may_lack=True, may_have_more=True)
    assert report == KeyReport(("new (2, 3)", "optimizer.state.exp_avg_sq.a (2, 3)"), ("b",))
    assert bool((wanted["a"].data == 1).all()) and all(bool((wanted[key].data == 5).all()) for key in new)
    for tensors, options, words in (
        (wanted, {"may_lack": True}, "b is in the checkpoint only$"),
        (wanted, {"may_have_more": True}, "new is missing .*; optimizer.state.exp_avg_sq.a is missing"),
        (ours(5.0, "a", "b", "rng_state.1.cpu"), {"may_lack": True}, "rng_state.1.cpu is missing"),
        (ours(5.0, "x", "y"), {"may_lack": True, "may_have_more": True}, "x is missing .*; y is missing"),
    ):
        with pytest.raises(ModelMismatchError, match=words):
            load(tmp_path, tensors, **options)


def test_layers_are_listed_together() -> None:
    lines = [f"a.layers.{n}.b is {what}" for n in (11, 0, 1, 2, 5) for what in ("missing", "late")]
    assert shorten_list([*lines, "c"]) == ["a.layers.0-2,5,11.b is missing", "a.layers.0-2,5,11.b is late", "c"]
    assert shorten_list(f"t{n}" for n in range(33))[-2:] == ["t29", "and 3 more"]


def test_boxes_that_leave_a_hole_are_refused(tmp_path: Path) -> None:
    half = Placement("w", (4, 2), (Split(0, "tp", 2, 0),))
    with pytest.raises((CheckpointError, MegatronError), match="w: the shards of all processes hold 4 elements"):
        serialization.save(model_state([(torch.zeros(2, 2), half)]), tmp_path, 1, documents={}, group=ALONE)
    assert list(tmp_path.iterdir()) == []


def test_upstream_names_of_documents(tmp_path: Path) -> None:
    path = serialization.save({}, tmp_path, 7, documents={"state": {"a": [1, None, 0.1]}}, group=ALONE)
    assert path.name == "iter_0000007"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_bytes() == b"7"
    assert serialization.read_document(path, "state") == {"a": [1, None, 0.1]}
    assert serialization.read_document(path, "metadata") == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
    }


@given(st.data())
def test_flat_slices_of_a_shard_are_blocks_that_make_up_the_full_tensor(data: st.DataObject) -> None:
    """Every shard is cut into slices anywhere; each element of the full tensor is in one owned block."""
    parts = (Part(4), Part(3, shards=(0, 2), replicated=True), Part(2))
    split = data.draw(st.sampled_from([None, Split(0, "tp", 2, 0, parts), Split(1, "tp", 2, 0, parts)]))
    shape = data.draw(st.sampled_from([(9, 9), (9, 9, 2), (9, 9, 1, 3)]))
    placement = Placement("w", shape, () if split is None else (split,))
    full = torch.arange(math.prod(shape)).float().view(shape)
    seen = torch.zeros(shape, dtype=torch.int)
    for coordinate in placement.coordinates():
        shard = placement.at(coordinate)
        flat = shard.take(full).reshape(-1).clone()
        cut = data.draw(st.integers(0, flat.numel()))
        for start, stop in ((0, cut), (cut, flat.numel())):
            piece = SlicedTensor.from_slice(flat[start:stop], start, shard)
            assert sum(math.prod(n for _, n in block.box) for block in piece.blocks) == stop - start
            for index, block in enumerate(piece.blocks):
                where = tuple(slice(s, s + n) for s, n in block.box)
                assert torch.equal(piece.block(index), full[where])
                piece.block(index).mul_(1)  # a view that can be written to
                assert piece.index_at(s for s, _ in block.box) == index
                seen[where] += block.owned
    assert (seen == 1).all()


def test_a_slice_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="is no slice of a shard"):
        SlicedTensor.from_slice(torch.zeros(3), 4, Placement("w", (2, 3)))
