# SPDX-License-Identifier: Apache-2.0
"""Placement on its six hard cases, by example and by property, before anything is built on it.

1 fewer key-value heads than shards   2 tied copies   3 experts   4 vocabulary padding   5 block scales   6 Muon's parts
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.errors import TopologyError
from megatron.core.placement import Part, Placement, Split, get_placement, make_grouped_parts, place

SHARDS = (1, 2, 4, 8)


def numbered(*shape: int) -> torch.Tensor:
    """A tensor whose elements are all different."""
    count = int(torch.tensor(shape).prod())
    return torch.arange(count, dtype=torch.float64).reshape(shape)


def shards_of(placement: Placement, full: torch.Tensor) -> list[torch.Tensor]:
    return [placement.at(coordinate).take(full) for coordinate in placement.coordinates()]


def column(rows: int, columns: int, tp: int, parts: tuple[Part, ...] | None = None) -> Placement:
    return Placement("w", (rows, columns), (Split(0, "tp", tp, 0, parts),))


def assert_round_trip(placement: Placement) -> None:
    """take, then join, is the identity; owned pieces cover every element exactly once; boxes say what take takes."""
    full = numbered(*placement.full_shape)
    shards = shards_of(placement, full)
    assert torch.equal(placement.join(shards), full)
    assert torch.equal(placement.join(dict(zip(placement.coordinates(), shards, strict=True))), full)
    owners = torch.zeros(placement.full_shape, dtype=torch.int64)
    for coordinate, shard in zip(placement.coordinates(), shards, strict=True):
        here = placement.at(coordinate)
        assert tuple(shard.shape) == here.local_shape
        seen = torch.zeros(here.local_shape, dtype=torch.int64)
        for piece in here.pieces():
            there = tuple(slice(start, start + length) for start, length in piece.box)
            local = tuple(slice(start, start + length) for start, length in piece.local_box)
            assert torch.equal(full[there], shard[local])
            owners[there] += int(piece.owned)
            seen[local] += 1
        assert bool((seen == 1).all())
    assert bool((owners == 1).all())


# ---- ordinary cuts


def test_column_and_row_by_example() -> None:
    full = numbered(4, 6)
    assert torch.equal(Placement("w", (4, 6), (Split(0, "tp", 2, 1),)).take(full), full[2:4])
    assert torch.equal(Placement("w", (4, 6), (Split(1, "tp", 3, 2),)).take(full), full[:, 4:6])
    assert Placement("w", (4, 6), (Split(1, "tp", 3, 2),)).boxes() == [((0, 4), (4, 2))]


def test_gate_and_up_are_cut_one_by_one() -> None:
    placement = column(8, 3, 2, (Part(4, name="gate"), Part(4, name="up"))).at((1,))
    full = numbered(8, 3)
    assert torch.equal(placement.take(full), torch.cat([full[2:4], full[6:8]]))
    assert placement.boxes() == [((2, 2), (0, 3)), ((6, 2), (0, 3))]


def test_replicated_parameter_is_taken_whole() -> None:
    full = numbered(5)
    placement = Placement("decoder.final_layernorm.weight", (5,))
    assert placement.take(full) is not None and torch.equal(placement.take(full), full)
    assert placement.boxes() == [((0, 5),)]
    assert placement.coordinates() == [()]


def test_a_scalar_has_a_placement() -> None:
    placement = Placement("scale", ())
    assert placement.boxes() == [()]
    assert torch.equal(placement.join([placement.take(torch.tensor(3.0))]), torch.tensor(3.0))


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    tp=st.sampled_from(SHARDS),
    dim=st.integers(0, 1),
    pieces=st.integers(1, 3),
)
def test_round_trips(rows: int, columns: int, tp: int, dim: int, pieces: int) -> None:
    shape = [rows, columns]
    shape[dim] *= tp * pieces
    parts = None if pieces == 1 else tuple(Part(shape[dim] // pieces) for _ in range(pieces))
    assert_round_trip(Placement("w", tuple(shape), (Split(dim, "tp", tp, 0, parts),)))


@given(before=st.sampled_from(SHARDS), after=st.sampled_from(SHARDS), gated=st.booleans())
def test_resharding_goes_through_the_full_tensor(before: int, after: int, gated: bool) -> None:
    parts = (Part(8, name="gate"), Part(8, name="up")) if gated else None
    full = numbered(16, 2)
    rejoined = column(16, 2, before, parts).join(shards_of(column(16, 2, before, parts), full))
    for new, direct in zip(
        shards_of(column(16, 2, after, parts), rejoined), shards_of(column(16, 2, after, parts), full), strict=True
    ):
        assert torch.equal(new, direct)


# ---- 1: fewer key-value heads than shards


def qkv(groups: int, heads: int, width: int, tp: int) -> Placement:
    """Group-interleaved queries, key, value: for each group, heads/groups query heads, one key, one value head."""
    queries = heads // groups * width
    blocks = (Part(queries, name="q"), Part(width, replicated=True, name="k"), Part(width, replicated=True, name="v"))
    rows = groups * (queries + 2 * width)
    return Placement("qkv", (rows, 3), (Split(0, "tp", tp, 0, make_grouped_parts(groups, blocks, tp)),))


def test_shards_that_share_a_key_value_head_cut_queries_and_copy_keys() -> None:
    placement = qkv(groups=2, heads=8, width=1, tp=4)  # rows: q q q q k v | q q q q k v
    full = numbered(12, 3)
    rows = [[0, 1, 4, 5], [2, 3, 4, 5], [6, 7, 10, 11], [8, 9, 10, 11]]
    for shard, expected in zip(shards_of(placement, full), rows, strict=True):
        assert torch.equal(shard, full[expected])
    owned = [sum(p.box[0][1] for p in placement.at((i,)).pieces() if p.owned) for i in range(4)]
    assert owned == [4, 2, 4, 2]


def test_whole_groups_are_one_block_for_the_checkpoint() -> None:
    assert qkv(groups=4, heads=8, width=2, tp=2).at((1,)).boxes() == [((16, 16), (0, 3))]


@given(
    groups=st.sampled_from(SHARDS),
    per_group=st.sampled_from(SHARDS),
    width=st.integers(1, 3),
    tp=st.sampled_from(SHARDS),
)
def test_qkv_round_trips_and_reshards(groups: int, per_group: int, width: int, tp: int) -> None:
    heads = groups * per_group
    if tp > groups and per_group * width % (tp // groups):
        with pytest.raises(TopologyError, match="'q'"):
            qkv(groups, heads, width, tp)
        return
    placement = qkv(groups, heads, width, tp)
    assert_round_trip(placement)
    whole = qkv(groups, heads, width, 1)
    full = numbered(*placement.full_shape)
    assert torch.equal(whole.take(placement.join(shards_of(placement, full))), full)


def test_parts_that_several_shards_hold_whole() -> None:
    """Their gradients are summed over the holders: every shard lists all of them, with its own places."""
    blocks = (Part(4, name="query"), Part(2, replicated=True, name="key"))
    held = [Split(0, "tp", 4, index, make_grouped_parts(2, blocks, 4)).replicated_parts(12) for index in range(4)]
    assert held == [[(2, 2), (2, None)]] * 2 + [[(2, None), (2, 2)]] * 2
    assert Split(0, "tp", 2, 1, make_grouped_parts(2, blocks, 2)).replicated_parts(12) == []
    assert Split(0, "tp", 2, 1).replicated_parts(12) == []


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TopologyError, match="3 groups cannot be shared by 2 shards"):
        make_grouped_parts(3, (Part(1),), 2)


# ---- 2: tied embeddings


def test_a_tied_copy_is_the_same_shard_under_another_name() -> None:
    first = Placement("embedding.word_embeddings.weight", (16, 4), (Split(0, "tp", 2, 1),), valid_rows=13)
    last = dataclasses.replace(first.renamed("output_layer.weight"), is_copy=True)
    full = numbered(16, 4)
    assert torch.equal(last.take(full), first.take(full))
    assert last.boxes() == first.boxes()
    assert (first.is_copy, last.is_copy) == (False, True)
    stages = [first, Placement("decoder.final_layernorm.weight", (4,)), last]
    assert [p.name for p in stages if not p.is_copy] == [
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
    ]
    assert last.at((0,)).is_copy and last.renamed("x").is_copy


def test_partial_gradients_are_part_of_the_description() -> None:
    norm = Placement("decoder.layers.0.input_layernorm.weight", (8,), partial_grad_axes=("tp",))
    assert norm.partial_grad_axes == ("tp",) and norm.axes == ()
    assert column(8, 2, 2).axes == ("tp",)


# ---- 3: experts


def experts(count: int, rows: int, columns: int, ep: int, etp: int, gated: bool = False) -> Placement:
    parts = (Part(rows // 2, name="gate"), Part(rows // 2, name="up")) if gated else None
    return Placement("fc1", (count, rows, columns), (Split(0, "ep", ep, 0), Split(1, "etp", etp, 0, parts)))


def test_experts_are_cut_over_two_axes() -> None:
    placement = experts(4, 4, 2, ep=2, etp=2).at((1, 0))
    full = numbered(4, 4, 2)
    assert placement.local_shape == (2, 2, 2)
    assert torch.equal(placement.take(full), full[2:4, 0:2])
    assert placement.index == (1, 0)
    assert experts(4, 4, 2, ep=2, etp=2).coordinates() == [(0, 0), (0, 1), (1, 0), (1, 1)]


@given(ep=st.sampled_from(SHARDS), etp=st.sampled_from(SHARDS), per_rank=st.integers(1, 2), gated=st.booleans())
def test_experts_round_trip(ep: int, etp: int, per_rank: int, gated: bool) -> None:
    assert_round_trip(experts(ep * per_rank, etp * 4, 2, ep, etp, gated))


def test_experts_reshard_between_any_layouts() -> None:
    full = numbered(8, 8, 2)
    for (ep, etp), (new_ep, new_etp) in itertools.permutations([(1, 1), (2, 2), (8, 1), (1, 4), (4, 2)], 2):
        before, after = experts(8, 8, 2, ep, etp, True), experts(8, 8, 2, new_ep, new_etp, True)
        joined = before.join(shards_of(before, full))
        assert all(map(torch.equal, shards_of(after, joined), shards_of(after, full)))


# ---- 4: vocabulary padding


def vocabulary(padded: int, tp: int, valid: int = 13) -> Placement:
    return Placement("embedding.word_embeddings.weight", (padded, 2), (Split(0, "tp", tp, 0),), valid_rows=valid)


def test_rows_of_another_padding_are_taken_up_to_the_valid_ones() -> None:
    full = numbered(16, 2)
    assert vocabulary(24, 2).logical_shape == (13, 2)
    shards = shards_of(vocabulary(24, 2), full)
    assert torch.equal(torch.cat(shards)[:13], full[:13])
    assert torch.count_nonzero(torch.cat(shards)[13:]) == 0


def test_the_same_padding_is_kept_bit_for_bit() -> None:
    full = numbered(16, 2)
    assert torch.equal(torch.cat(shards_of(vocabulary(16, 4), full)), full)


@given(tp=st.sampled_from(SHARDS), new_tp=st.sampled_from(SHARDS), valid=st.integers(1, 16), new_pad=st.integers(0, 2))
def test_vocabulary_moves_between_paddings(tp: int, new_tp: int, valid: int, new_pad: int) -> None:
    padded, new_padded = -(-valid // tp) * tp, (-(-valid // new_tp) + new_pad) * new_tp
    full = numbered(padded, 2)
    before, after = vocabulary(padded, tp, valid), vocabulary(new_padded, new_tp, valid)
    assert_round_trip(after)
    moved = after.join(shards_of(after, before.join(shards_of(before, full))))
    assert tuple(moved.shape) == (new_padded, 2)
    assert torch.equal(moved[:valid], full[:valid])


def test_too_few_rows_and_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has shape \(12, 2\); expected \(16, 2\)"):
        vocabulary(16, 2).take(numbered(12, 2))
    with pytest.raises(ValueError, match=r"has shape \(16, 3\)"):
        vocabulary(16, 2).take(numbered(16, 3))
    with pytest.raises(TopologyError, match="17 valid rows"):
        vocabulary(16, 2, valid=17)


# ---- 5: Muon's parts


def test_local_parts_are_the_whole_heads_of_the_shard() -> None:
    blocks = (Part(4, name="q"), Part(2, replicated=True, name="k"), Part(2, replicated=True, name="v"))
    placement = Placement("qkv", (16, 3), (Split(0, "tp", 2, 1, make_grouped_parts(2, blocks, 2)),))
    assert placement.local_parts() == [("q", 0, 4), ("k", 4, 2), ("v", 6, 2)]
    shared = Placement("qkv", (16, 3), (Split(0, "tp", 4, 1, make_grouped_parts(2, blocks, 4)),))
    assert shared.local_parts() == [("q", 0, 2), ("k", 2, 2), ("v", 4, 2)]
    assert placement.local_parts(dim=1) == [("", 0, 3)]


@given(groups=st.sampled_from(SHARDS), tp=st.sampled_from(SHARDS), width=st.integers(1, 3))
def test_updating_part_by_part_is_the_same_in_any_layout(groups: int, tp: int, width: int) -> None:
    """An update of each named part by itself (here: minus its first row) agrees with the one-process update."""
    if tp > groups:
        tp = groups

    def updated(placement: Placement, tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        for _, start, length in placement.local_parts():
            result[start : start + length] -= tensor[start]
        return result

    placement, whole = qkv(groups, groups * 2, width, tp), qkv(groups, groups * 2, width, 1)
    full = numbered(*placement.full_shape)
    shards = [updated(placement.at((i,)), placement.at((i,)).take(full)) for i in range(tp)]
    assert torch.equal(placement.join(shards), updated(whole, full))


# ---- on parameters, and refusals


def test_parameters_carry_their_placement() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 6))
    placement = Placement("w", (4, 6), (Split(0, "tp", 2, 0),))
    place(parameter, placement)
    assert get_placement(parameter) is placement
    with pytest.raises(ValueError, match=r"shape \(2, 6\); its placement says \(4, 6\)"):
        place(parameter, Placement("w", (4, 6)))
    plain = torch.nn.Parameter(torch.zeros(3))
    assert get_placement(plain, name="bias") == Placement("bias", (3,))
    with pytest.raises(ValueError, match="carries no Placement"):
        get_placement(plain)


@pytest.mark.parametrize(
    ("splits", "sentence"),
    [
        ((Split(0, "tp", 3, 0),), "w: dimension 0 of size 4 cannot be split over tp: size 4 does not divide by 3"),
        ((Split(0, "tp", 2, 2),), "found shard 2"),
        ((Split(2, "tp", 2, 0),), "do not fit the shape"),
        ((Split(0, "tp", 2, 0), Split(0, "ep", 2, 0)), "do not fit the shape"),
        ((Split(0, "tp", 2, 0, (Part(2), Part(4))),), "add up to another size"),
        ((Split(0, "tp", 2, 0, (Part(2, (1, 3)), Part(2))),), r"shards \[1, 3\) of 2"),
        ((Split(0, "tp", 2, 0, (Part(3, name="gate"), Part(1, name="up"))),), "part 'gate' of size 3"),
    ],
)
def test_impossible_cuts_are_refused(splits: tuple[Split, ...], sentence: str) -> None:
    with pytest.raises(TopologyError, match=sentence):
        Placement("w", (4, 6), splits)


def test_join_refuses_missing_and_misshapen_shards() -> None:
    placement = column(4, 2, 2)
    with pytest.raises(ValueError, match="2 shards make the full tensor; found 1"):
        placement.join([numbered(2, 2)])
    with pytest.raises(ValueError, match=r"shard \(1,\) has shape \(1, 2\); expected \(2, 2\)"):
        placement.join([numbered(2, 2), numbered(1, 2)])
