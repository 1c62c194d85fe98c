# SPDX-License-Identifier: Apache-2.0
"""RankGrid: coordinates, groups and refusals, by example and by property."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.errors import TopologyError
from megatron.core.mesh import DEFAULT_ORDER, PIPELINE_BEFORE_DATA_ORDER, RankGrid

SIZE = st.sampled_from([1, 2, 3, 4])


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    """Legal grids: expert sizes are drawn so that they fit the processes the dense sizes need."""
    tp, cp, dp, pp = (draw(SIZE) for _ in range(4))
    per_stage = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, per_stage + 1) if per_stage % n == 0]))
    rest = per_stage // etp
    ep = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    order = draw(st.sampled_from([DEFAULT_ORDER, PIPELINE_BEFORE_DATA_ORDER]))
    return RankGrid(per_stage * pp, tp=tp, cp=cp, ep=ep, etp=etp, pp=pp, order=order)


def test_one_process_is_the_smallest_grid() -> None:
    grid = RankGrid(1)
    assert grid.coordinates(0) == {"tp": 0, "cp": 0, "dp": 0, "pp": 0, "etp": 0, "ep": 0, "edp": 0}
    assert all(
        grid.groups(axes) == [[0]] for axes in ("tp", "dp-cp", "tp-pp", "ep", "edp", "embd", "pos_embd", "world")
    )


def test_coordinates_by_example() -> None:
    grid = RankGrid(16, tp=2, cp=2, pp=2)
    assert (grid.dp, grid.edp) == (2, 4)
    assert grid.coordinates(13) == {"tp": 1, "cp": 0, "dp": 1, "pp": 1, "etp": 1, "ep": 0, "edp": 2}


def test_pipeline_before_data_order() -> None:
    grid = RankGrid(8, tp=2, pp=2, order=PIPELINE_BEFORE_DATA_ORDER)
    assert grid.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_experts_divide_the_processes_of_a_stage_whatever_the_order() -> None:
    dense = RankGrid(8, cp=2, pp=2, order=PIPELINE_BEFORE_DATA_ORDER)
    assert dense.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dense.groups("edp") == dense.groups("dp-cp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    spread = RankGrid(8, ep=4, pp=2, order=PIPELINE_BEFORE_DATA_ORDER)
    assert spread.groups("ep") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert spread.groups("pp") == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_embedding_groups_are_the_ends_of_each_pipeline() -> None:
    grid = RankGrid(8, tp=2, pp=4)
    assert grid.groups("embd") == [[0, 6], [1, 7]]
    assert grid.groups("pos_embd") == [[0], [1]]


@given(grids())
def test_groups_partition_the_world(grid: RankGrid) -> None:
    sizes = grid.dense_sizes | grid.expert_sizes
    for axes in (
        "tp",
        "cp",
        "dp",
        "pp",
        "dp-cp",
        "tp-cp",
        "tp-dp",
        "tp-dp-cp",
        "tp-pp",
        "ep",
        "etp",
        "edp",
        "ep-etp-pp",
    ):
        groups = grid.groups(axes)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
        assert {len(group) for group in groups} == {prod(sizes[axis] for axis in axes.split("-"))}


@given(grids())
def test_members_of_a_group_differ_only_on_its_axes(grid: RankGrid) -> None:
    for axes in ("tp", "dp-cp", "pp"):
        fixed = set(grid.dense_sizes) - set(axes.split("-"))
        for group in grid.groups(axes):
            where = [grid.coordinates(rank) for rank in group]
            assert len({tuple(place[axis] for axis in sorted(fixed)) for place in where}) == 1
    for group in grid.groups("ep"):
        where = [grid.coordinates(rank) for rank in group]
        assert [place["ep"] for place in where] == list(range(grid.ep))
        assert len({(place["etp"], place["edp"], place["pp"]) for place in where}) == 1


@given(grids())
def test_coordinates_tell_the_ranks_apart_on_either_grid(grid: RankGrid) -> None:
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    for axes in ("ep", "etp", "edp"):
        for group in grid.groups(axes):
            assert len({places[rank]["pp"] for rank in group}) == 1, "a layer's experts are on one stage"
    for axes in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
        assert len({tuple(place[axis] for axis in axes) for place in places}) == grid.world_size


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"world_size": 6, "tp": 2, "pp": 2},
            "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 x --context-parallel-size 1 = 4 "
            "processes per model copy does not divide the 6 processes of the job (WORLD_SIZE); use sizes whose product "
            "is 3 or 6, or start 4 or 8 processes",
        ),
        (
            {"world_size": 1, "tp": 2},
            "= 2 processes per model copy, and the job has 1 (WORLD_SIZE); start it with torchrun --nproc_per_node 2",
        ),
        ({"world_size": 8, "ep": 3}, "--expert-tensor-parallel-size 1 x --expert-model-parallel-size 3"),
        ({"world_size": 8, "tp": 0}, "--tensor-model-parallel-size 0 is not a positive number"),
        ({"world_size": 8, "order": "tp-dp"}, "must name each axis"),
    ],
)
def test_impossible_layouts_are_refused_with_the_arithmetic(arguments: dict, sentence: str) -> None:
    with pytest.raises(TopologyError) as caught:
        RankGrid(**arguments)
    assert sentence in str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(TopologyError) as caught:
        RankGrid(6, tp=4, ep=5)
    assert len(caught.value.problems) == 2


def test_mixed_and_unknown_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="no groups along 'tp-ep'"):
        RankGrid(4, tp=2).groups("tp-ep")
    with pytest.raises(TopologyError, match="rank 4 is not in a world of 4"):
        RankGrid(4).coordinates(4)


def test_blocks_that_may_share_a_sequence() -> None:
    grid = RankGrid(16, tp=2, cp=2, hybrid_cp=4)
    assert grid.hybrid_cp_sizes == [1, 2, 4]
    assert grid.hybrid_cp_groups(4) == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]
    assert grid.hybrid_cp_groups(2)[:2] == [[0, 2], [4, 6]], "those of context parallelism are neighbours"
    assert RankGrid(16).hybrid_cp_sizes == []
    for size in (3, 16):
        with pytest.raises(TopologyError, match=f"up to {size} ranks, which must be a power of two and divide the 8 r"):
            RankGrid(16, tp=2, hybrid_cp=size)
