# SPDX-License-Identifier: Apache-2.0
"""Process groups built from the grid, and collectives over them, on gloo."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.collectives import (
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all_single,
    broadcast,
    broadcast_object,
    reduce_scatter_tensor,
)
from megatron.core.errors import ConfigError, TopologyError
from megatron.core.mesh import RankGrid
from megatron.core.process_groups_config import GROUP_AXES, ProcessGroupCollection, SingleRankGroup, group_ranks
from megatron.core.timers import Timers
from tests.parallel.harness import distributed


@distributed(world_size=4)
def test_every_group_has_the_members_the_grid_says() -> None:
    for sizes in ({"tp": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"cp": 2}, {"pp": 4}):
        grid = RankGrid(4, **sizes)
        groups = ProcessGroupCollection.build(grid, dist.get_rank())
        view = ProcessGroupCollection.pretend(grid, dist.get_rank())
        for field in GROUP_AXES:
            pretended = getattr(view, field)
            expected = None if pretended is None else group_ranks(pretended)
            group = getattr(groups, field)
            assert (None if group is None else group_ranks(group)) == expected, (sizes, field)
            if group is not None and expected is not None:
                assert group.size() == len(expected)
                assert group.rank() == expected.index(dist.get_rank())
                assert isinstance(group, SingleRankGroup) == (len(expected) == 1)
                total = torch.ones(1)
                all_reduce(total, group)
                assert total.item() == len(expected)


@distributed(world_size=4)
def test_only_the_named_groups_get_high_priority() -> None:
    from megatron.core import process_groups_config

    made: dict[tuple[int, ...], object] = {}
    new_group = dist.new_group

    def recorded(ranks: list[int], pg_options: object = None, **named: object) -> object:
        made[tuple(ranks)] = pg_options
        return new_group(ranks, **named)

    process_groups_config.make_communication_options = lambda high_priority: high_priority or None  # type: ignore[assignment]
    dist.new_group = recorded
    ProcessGroupCollection.build(RankGrid(4, tp=2), dist.get_rank(), high_priority=["tp", "world"])
    assert made == {(0, 1): True, (2, 3): True, (0, 2): None, (1, 3): None, (0, 1, 2, 3): True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("async_op", [False, True])
@distributed(world_size=2)
def test_collectives(dtype: torch.dtype, async_op: bool) -> None:
    group = ProcessGroupCollection.build(RankGrid(2), dist.get_rank()).dp
    rank = group.rank()

    def finish(handle: object) -> None:
        assert (handle is not None) == async_op
        if handle is not None:
            handle.wait()

    for op, expected in (("sum", 3.0), ("max", 2.0), ("min", 1.0), ("avg", 1.5)):
        value = torch.tensor([rank + 1.0], dtype=dtype)
        finish(all_reduce(value, group, op, async_op=async_op))
        assert value.item() == expected, op

    gathered = torch.empty(4, dtype=dtype)
    finish(all_gather_into_tensor(gathered, torch.tensor([rank, 10.0 + rank], dtype=dtype), group, async_op=async_op))
    assert gathered.tolist() == [0.0, 10.0, 1.0, 11.0]

    for op, divisor in (("sum", 1), ("avg", 2)):
        scattered = torch.empty(2, dtype=dtype)
        whole = torch.arange(4, dtype=dtype) + rank
        finish(reduce_scatter_tensor(scattered, whole, group, op, async_op=async_op))
        expected = (torch.arange(4) * 2 + 1)[2 * rank : 2 * rank + 2] / divisor
        assert scattered.tolist() == expected.tolist()

    exchanged = torch.empty(2, dtype=dtype)
    finish(
        all_to_all_single(
            exchanged, torch.tensor([10.0 * rank, 10.0 * rank + 1], dtype=dtype), group, async_op=async_op
        )
    )
    assert exchanged.tolist() == [float(rank), 10.0 + rank]

    value = torch.tensor([float(rank)], dtype=dtype)
    finish(broadcast(value, group, source=1, async_op=async_op))
    assert value.item() == 1.0

    assert all_gather_object({"rank": rank}, group) == [{"rank": 0}, {"rank": 1}]
    assert broadcast_object(f"from {rank}", group, source=1) == "from 1"


@distributed(world_size=4)
def test_collectives_take_ranks_within_the_group() -> None:
    groups = ProcessGroupCollection.build(RankGrid(4, tp=2), dist.get_rank())
    value = torch.tensor([float(dist.get_rank())])
    broadcast(value, groups.dp, source=1)
    assert value.item() == {0: 2.0, 1: 3.0, 2: 2.0, 3: 3.0}[dist.get_rank()]


@distributed(world_size=4)
def test_parallel_state_is_a_view_of_the_current_collection() -> None:
    with pytest.raises(RuntimeError, match="call parallel_state.initialize_model_parallel"):
        parallel_state.get_tensor_model_parallel_rank()
    with pytest.raises(TopologyError, match="does not divide the 4 processes"):
        parallel_state.initialize_model_parallel(3)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    rank = dist.get_rank()
    assert parallel_state.get_tensor_model_parallel_world_size() == 2
    assert parallel_state.get_tensor_model_parallel_rank() == rank % 2
    assert parallel_state.get_tensor_model_parallel_src_rank() == rank // 2 * 2
    assert parallel_state.get_pipeline_model_parallel_rank() == rank // 2
    assert parallel_state.get_pipeline_model_parallel_next_rank() == (rank + 2) % 4
    assert parallel_state.get_pipeline_model_parallel_prev_rank() == (rank + 2) % 4
    assert parallel_state.is_pipeline_first_stage() == (rank < 2)
    assert parallel_state.is_pipeline_last_stage() == (rank >= 2)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
    last = [parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk) for chunk in (0, 1)]
    assert last == [False, rank >= 2]
    assert parallel_state.get_data_parallel_world_size() == 1
    assert parallel_state.is_rank_in_position_embedding_group() == (rank < 2)
    with pytest.raises(RuntimeError, match="exist already"):
        parallel_state.initialize_model_parallel()
    parallel_state.destroy_model_parallel()
    assert not parallel_state.model_parallel_is_initialized()


@distributed(world_size=2)
def test_timers_report_the_slowest_and_the_fastest_rank() -> None:
    groups = ProcessGroupCollection.build(RankGrid(2), dist.get_rank())
    timers = Timers()
    timer = timers("step")
    with timer:
        pass
    timer._total_seconds = 1.0 + dist.get_rank()
    assert timers.min_max(["step"], groups.world) == {"step": (1.0, 2.0)}


@pytest.mark.flags("--distributed-timeout-seconds-after-init")
@distributed(world_size=2)
def test_a_shorter_limit_for_collectives() -> None:
    """Of all groups: those that were made with a limit of their own, too."""
    groups = ProcessGroupCollection.build(RankGrid(2, tp=2), dist.get_rank(), timedelta(minutes=10))
    groups.set_timeout(timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="[Tt]imed out"):
            all_reduce(torch.ones(1), groups.tp)
    else:
        time.sleep(2)


@distributed(world_size=2)
def test_programs_get_groups_of_torch() -> None:
    """Also those of one process, in which they send as in any other."""
    parallel_state.initialize_model_parallel(2, 1, None, None, False, 1, None, False, 1)
    getters = [name for name in dir(parallel_state) if name.startswith("get_") and name.endswith("_group")]
    sizes = {}
    for name in getters:
        group = getattr(parallel_state, name)()
        assert isinstance(group, dist.ProcessGroup), name
        values = [torch.zeros(1) for _ in range(group.size())]
        dist.all_gather(values, torch.ones(1), group=group)
        objects: list[object] = [None] * group.size()
        dist.all_gather_object(objects, name, group=group)
        assert dist.get_global_rank(group, group.rank()) == dist.get_rank() and objects == [name] * group.size()
        sizes[name] = int(sum(values))
    assert sizes["get_tensor_model_parallel_group"] == sizes["get_model_parallel_group"] == 2
    assert sizes["get_data_parallel_group"] == sizes["get_pipeline_model_parallel_group"] == 1
    parallel_state.destroy_model_parallel()
    assert parallel_state.get_context_parallel_group(check_initialized=False) is None
    parallel_state.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=2, use_sharp=False)
    assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 2
    assert parallel_state.get_virtual_pipeline_model_parallel_rank() is None
    parallel_state.set_virtual_pipeline_model_parallel_rank(1)
    assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 1
    parallel_state.destroy_model_parallel()
    with pytest.raises(ConfigError, match="no use_sharp True.*leave it out; .*no rank_offset 2"):
        parallel_state.initialize_model_parallel(use_sharp=True, rank_offset=2)
