# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions over the current process groups, for user code that calls them.

A facade: nothing inside megatron/ imports it. Code of ours is handed its ProcessGroupCollection.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from megatron.core.errors import ConfigError
from megatron.core.mesh import DEFAULT_ORDER, RankGrid
from megatron.core.process_groups_config import (
    Group,
    MeteredGroup,
    ProcessGroupCollection,
    SingleRankGroup,
    group_ranks,
    torch_group,
)
from megatron.core.upstream.process_tools import RankGenerator as RankGenerator
from megatron.core.upstream.process_tools import create_group as create_group


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: None = None,
    get_position_embedding_ranks: None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: Sequence[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> ProcessGroupCollection:
    """Make the process groups and keep them as the current ones.

    torch.distributed must be initialised first, unless there is one process. virtual_pipeline_model_parallel_size:
    remembered for `get_virtual_pipeline_model_parallel_world_size`. high_priority_stream_groups: names of groups that
    communicate on NCCL streams of high priority. create_gloo_process_groups: no separate group is needed. Raises
    ConfigError for what does not exist here, TopologyError when the sizes do not fit the number of processes,
    RuntimeError when groups exist already.
    """
    if ProcessGroupCollection.has_current():
        raise RuntimeError("the process groups exist already; call destroy_model_parallel() before making new ones")
    distributed = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if distributed else 1
    refused = {
        "pipeline_model_parallel_comm_backend": (pipeline_model_parallel_comm_backend, (None, "nccl")),
        "use_sharp": (use_sharp, (False, None)),
        "gtp_remat_size": (gtp_remat_size, (1, None)),
        "expert_gtp_remat_size": (expert_gtp_remat_size, (1, None)),
        "nccl_communicator_config_path": (nccl_communicator_config_path, (None,)),
        "get_embedding_ranks": (get_embedding_ranks, (None,)),
        "get_position_embedding_ranks": (get_position_embedding_ranks, (None,)),
        "sharp_enabled_group": (sharp_enabled_group, (None,)),
        "rank_offset": (rank_offset, (0, None)),
        "local_world_size": (local_world_size, (None, world)),
    }
    problems = [
        f"initialize_model_parallel() has no {name} {value!r}: {_WITHOUT.get(name, 'groups are those of torch')}; "
        "leave it out"
        for name, (value, neutral) in refused.items()
        if value not in neutral
    ]
    if problems:
        raise ConfigError(problems)
    replicas = world // (tensor_model_parallel_size * pipeline_model_parallel_size)  # and ranks of a sequence
    grid = RankGrid(
        world,
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        pp=pipeline_model_parallel_size,
        order=order,
        cp_levels=tuple(hierarchical_context_parallel_sizes or ()),
        hybrid_cp=replicas if hybrid_context_parallel else 0,
        optimizer_instances=num_distributed_optimizer_instances,
    )
    groups = ProcessGroupCollection.build(
        grid,
        dist.get_rank() if distributed else 0,
        timeout=timedelta(minutes=distributed_timeout_minutes),
        high_priority=high_priority_stream_groups or (),
    )
    groups.set_current()
    VirtualPipeline.size, VirtualPipeline.rank = virtual_pipeline_model_parallel_size, None
    return groups


_WITHOUT = {
    "get_embedding_ranks": "the layers of a stage say whether it has embeddings",
    "get_position_embedding_ranks": "the layers of a stage say whether it has embeddings",
    "rank_offset": "the groups are over all processes of the job",
    "local_world_size": "the groups are over all processes of the job",
}


class VirtualPipeline:
    """Memory of upstream's programs about interleaved chunks: how many a process has, and which one is built."""

    size: ClassVar[int | None] = None
    rank: ClassVar[int | None] = None


def destroy_model_parallel() -> None:
    """Forget the current process groups."""
    ProcessGroupCollection.clear_current()
    VirtualPipeline.size = VirtualPipeline.rank = None


def leave_job() -> None:
    """Wait for the other processes, and end the process groups of a program, its last call after `main()`.

    Nothing may be alive any more that holds a group, such as a model: then the groups' threads end here. A thread that
    outlives this may hold the last reference to a tensor while the interpreter is cleaned up, and Python before 3.14
    aborts the process when it lets go.
    """
    destroy_model_parallel()
    _make_single_group.cache_clear()
    if dist.is_initialized():
        # The first process may leave only when nobody needs it to answer any more.
        dist.barrier()
        dist.destroy_process_group()
    # Models are cycles of references.
    gc.collect()


def model_parallel_is_initialized() -> bool:
    """Return whether initialize_model_parallel was called."""
    return ProcessGroupCollection.has_current()


is_initialized = model_parallel_is_initialized


def _groups() -> ProcessGroupCollection:
    return ProcessGroupCollection.current()


def _find(field: str, check_initialized: bool) -> Any:
    """The group of a field of ProcessGroupCollection. check_initialized: raise RuntimeError where there are no groups
    yet; otherwise return None."""
    if not check_initialized and not ProcessGroupCollection.has_current():
        return None
    return _show(getattr(_groups(), field))


def _show(group: Group | None) -> Any:
    """A group as torch.distributed knows it, in which programs send: also one of a single process, which has none here
    (SingleRankGroup), as soon as torch.distributed is initialised."""
    if isinstance(group, SingleRankGroup) and dist.is_available() and dist.is_initialized():
        return _make_single_group(dist.group.WORLD)
    return torch_group(group) if isinstance(group, MeteredGroup) else group


@functools.lru_cache(maxsize=1)
def _make_single_group(world: Any) -> dist.ProcessGroup:
    """A group of only this process, made once in each job of torch.distributed."""
    if world.size() == 1:
        return world  # type: ignore[no-any-return]
    # Each process makes its group; the others need not take part.
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


# ---- tensor parallelism


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Any:
    """The processes that share each dense layer."""
    return _find("tp", check_initialized)


def get_tensor_model_parallel_world_size() -> int:
    """Return how many processes share each dense layer."""
    return _groups().tp.size()


def get_tensor_model_parallel_rank() -> int:
    """This process's place among those that share each dense layer."""
    return _groups().tp.rank()


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first process of the tensor-parallel group."""
    return group_ranks(_groups().tp)[0]


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> Any:
    """The processes of one stage that work on the same samples."""
    return _find("tp_cp", check_initialized)


def get_tensor_and_data_parallel_group(check_initialized: bool = True, with_context_parallel: bool = False) -> Any:
    """The processes that hold the same stage."""
    return _find("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


# ---- pipeline parallelism


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Any:
    """The processes that hold the stages of one pipeline."""
    return _find("pp", check_initialized)


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return _groups().pp.size()


def get_pipeline_model_parallel_rank() -> int:
    """This process's pipeline stage."""
    return _groups().pp.rank()


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this process holds the first stage; unless ignore_virtual, whether its chunk `vp_stage` does."""
    return _groups().is_first_stage and (ignore_virtual or vp_stage in (None, 0))


def is_pipeline_last_stage(
    ignore_virtual: bool = True, vp_stage: int | None = None, vp_size: int | None = None
) -> bool:
    """Return whether this process holds the last stage; unless ignore_virtual, whether chunk `vp_stage` of `vp_size`
    does, which is by default what initialize_model_parallel was told."""
    vp_size = vp_size or VirtualPipeline.size
    is_last_chunk = vp_size is None or vp_stage in (None, vp_size - 1)
    return _groups().is_last_stage and (ignore_virtual or is_last_chunk)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Number of chunks per process, as initialize_model_parallel was told; None where stages are not interleaved."""
    return VirtualPipeline.size


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Remember another number."""
    VirtualPipeline.size = world_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The chunk that was set last; None before."""
    return VirtualPipeline.rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Remember which chunk is being built or saved."""
    VirtualPipeline.rank = rank


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage of this pipeline."""
    return group_ranks(_groups().pp)[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage of this pipeline."""
    return group_ranks(_groups().pp)[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage, the first after the last."""
    return group_ranks(_groups().pp)[(_groups().pp.rank() + 1) % _groups().pp.size()]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage, the last before the first."""
    # Index -1 on the first stage is the last stage.
    return group_ranks(_groups().pp)[_groups().pp.rank() - 1]


def get_pipeline_model_parallel_split_rank() -> int | None:
    """Stage where the decoder of an encoder-decoder pipeline begins: None, there is no such pipeline."""
    return None


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Return whether a stage holds encoder layers, as far as there is a split: True without one."""
    return True


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Return whether a stage holds decoder layers, as far as there is a split: True without one."""
    return True


def get_tensor_and_context_parallel_rank() -> int:
    """This process's rank among the processes of one stage that work on the same samples."""
    return _groups().tp_cp.rank()


def get_model_parallel_group(check_initialized: bool = True) -> Any:
    """The processes that hold one replica of the model."""
    return _find("mp", check_initialized)


def get_embedding_group(check_initialized: bool = True) -> Any:
    """The processes that hold a copy of the tied embeddings; None on the middle stages."""
    return _find("embd", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> Any:
    """The processes that hold position embeddings; None on other stages."""
    return _find("pos_embd", check_initialized)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this process holds input or output embeddings; unless ignore_virtual, whether its chunk
    `vp_stage` does."""
    if ignore_virtual or _groups().embd is None:
        return _groups().embd is not None
    return is_pipeline_first_stage(False, vp_stage) or is_pipeline_last_stage(False, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this process holds position embeddings."""
    return _groups().pos_embd is not None


# ---- data and context parallelism


def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = False,
    partial_data_parallel: bool = False,
    check_initialized: bool = True,
) -> Any:
    """The processes that hold the same shard of the model. partial_data_parallel: that divide one copy of the
    optimizer's state. with_gtp_remat: the same here, where gtp_remat_size is always 1."""
    name = "dp_cp" if with_context_parallel else "dp"
    if partial_data_parallel:
        name = "optimizer_shards"
    return _find(name, check_initialized)


def get_data_parallel_group_gloo(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
    """The same processes, for objects that are gathered on the host: the one group that they have."""
    return get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel)


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = False, partial_data_parallel: bool = False
) -> int:
    """Number of processes that hold the same shard of the model; the arguments are get_data_parallel_group's."""
    size: int = get_data_parallel_group(with_context_parallel, with_gtp_remat, partial_data_parallel).size()
    return size


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = False, partial_data_parallel: bool = False
) -> int:
    """This process's place among those that hold the same shard of the model; arguments as above."""
    rank: int = get_data_parallel_group(with_context_parallel, with_gtp_remat, partial_data_parallel).rank()
    return rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first process that holds the same shard of the model."""
    return group_ranks(get_data_parallel_group(with_context_parallel))[0]


def get_context_parallel_group(check_initialized: bool = True) -> Any:
    """The processes that share each sequence."""
    return _find("cp", check_initialized)


def get_context_parallel_world_size() -> int:
    """Return how many processes share each sequence."""
    return _groups().cp.size()


def get_context_parallel_rank() -> int:
    """This process's place among those that share each sequence."""
    return _groups().cp.rank()


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the processes that share each sequence."""
    return group_ranks(_groups().cp)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[Any]:
    """The processes that share each sequence, by levels of a hierarchical exchange: neighbours first.
    check_initialized: raise RuntimeError where there are no groups yet; else return none."""
    if not (check_initialized or ProcessGroupCollection.has_current()):
        return []
    return [_show(group) for group in _groups().hcp]


def get_hybrid_data_context_parallel_groups(check_initialized: bool = True, group_size: int | None = None) -> Any:
    """The groups of 1, 2, 4, ... neighbours that may share a sequence with --hybrid-context-parallel; the one of
    `group_size` where it is given. Raises RuntimeError where there is none, unless check_initialized is False."""
    groups = [_show(group) for group in _groups().hybrid_cp]
    if group_size is None:
        if not groups and check_initialized:
            raise RuntimeError("there are no groups for --hybrid-context-parallel: the process groups have none")
        return groups
    found = next((group for group in groups if group.size() == group_size), None)
    if found is None:
        raise RuntimeError(f"no group of {group_size} processes may share a sequence; there are {len(groups)} sizes")
    return found


# ---- experts


def get_expert_model_parallel_group(check_initialized: bool = True) -> Any:
    """The processes that share the experts of a layer."""
    return _find("ep", check_initialized)


def get_expert_model_parallel_world_size() -> int:
    """Return how many processes share the experts of a layer."""
    return _groups().ep.size()


def get_expert_model_parallel_rank() -> int:
    """This process's place among those that share the experts of a layer."""
    return _groups().ep.rank()


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> Any:
    """The processes that share each expert."""
    return _find("expt_tp", check_initialized)


def get_expert_tensor_parallel_world_size() -> int:
    """Return how many processes share each expert."""
    return _groups().expt_tp.size()


def get_expert_tensor_parallel_rank() -> int:
    """This process's place among those that share each expert."""
    return _groups().expt_tp.rank()


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = False, partial_expert_data_parallel: bool = False
) -> Any:
    """The processes that hold the same expert shard. partial_expert_data_parallel: that divide one copy of its
    optimizer's state. with_gtp_remat: as for get_data_parallel_group."""
    return _find("expert_optimizer_shards" if partial_expert_data_parallel else "expt_dp", check_initialized)


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = False, partial_expert_data_parallel: bool = False
) -> int:
    """Return how many processes hold the same expert shard; arguments as above."""
    size: int = get_expert_data_parallel_group(True, with_gtp_remat, partial_expert_data_parallel).size()
    return size


def get_expert_data_parallel_rank(with_gtp_remat: bool = False, partial_expert_data_parallel: bool = False) -> int:
    """This process's place among those that hold the same expert shard; arguments as above."""
    rank: int = get_expert_data_parallel_group(True, with_gtp_remat, partial_expert_data_parallel).rank()
    return rank


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> Any:
    """The processes that hold one copy of a layer's experts."""
    return _find("tp_ep", check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> Any:
    """The processes that hold one replica of all experts."""
    return _find("tp_ep_pp", check_initialized)
