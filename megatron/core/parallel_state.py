# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions over the current process groups, for user code that calls them.

A facade: nothing inside megatron/ imports it. Code of ours is handed its ProcessGroupCollection.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron.core.mesh import DEFAULT_ORDER, RankGrid
from megatron.core.process_groups_config import Group, ProcessGroupCollection, group_ranks


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    order: str = DEFAULT_ORDER,
    distributed_timeout_minutes: int = 30,
) -> ProcessGroupCollection:
    """Make the process groups and keep them as the current ones.

    torch.distributed must be initialised first, unless there is one process. Raises TopologyError when the sizes do not
    fit the number of processes, RuntimeError when groups exist already.
    """
    if ProcessGroupCollection.has_current():
        raise RuntimeError("the process groups exist already; call destroy_model_parallel() before making new ones")
    distributed = dist.is_available() and dist.is_initialized()
    grid = RankGrid(
        dist.get_world_size() if distributed else 1,
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        pp=pipeline_model_parallel_size,
        order=order,
        cp_levels=tuple(hierarchical_context_parallel_sizes or ()),
    )
    rank = dist.get_rank() if distributed else 0
    groups = ProcessGroupCollection.build(grid, rank, timeout=timedelta(minutes=distributed_timeout_minutes))
    groups.set_current()
    return groups


def destroy_model_parallel() -> None:
    """Forget the current process groups."""
    ProcessGroupCollection.clear_current()


def model_parallel_is_initialized() -> bool:
    """Whether initialize_model_parallel was called."""
    return ProcessGroupCollection.has_current()


is_initialized = model_parallel_is_initialized


def _groups() -> ProcessGroupCollection:
    return ProcessGroupCollection.current()


# ---- tensor parallelism


def get_tensor_model_parallel_group() -> Group:
    """The processes that share each dense layer."""
    return _groups().tp


def get_tensor_model_parallel_world_size() -> int:
    """How many processes share each dense layer."""
    return _groups().tp.size()


def get_tensor_model_parallel_rank() -> int:
    """This process's place among those that share each dense layer."""
    return _groups().tp.rank()


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first process of the tensor-parallel group."""
    return group_ranks(_groups().tp)[0]


def get_tensor_and_context_parallel_group() -> Group:
    """The processes of one stage that work on the same samples."""
    return _groups().tp_cp


def get_tensor_and_data_parallel_group(with_context_parallel: bool = False) -> Group:
    """The processes that hold the same stage."""
    return _groups().tp_dp_cp if with_context_parallel else _groups().tp_dp


# ---- pipeline parallelism


def get_pipeline_model_parallel_group() -> Group:
    """The processes that hold the stages of one pipeline."""
    return _groups().pp


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return _groups().pp.size()


def get_pipeline_model_parallel_rank() -> int:
    """This process's pipeline stage."""
    return _groups().pp.rank()


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this process holds the first stage; unless ignore_virtual, whether its chunk `vp_stage` does."""
    return _groups().is_first_stage and (ignore_virtual or vp_stage in (None, 0))


def is_pipeline_last_stage(
    ignore_virtual: bool = True, vp_stage: int | None = None, vp_size: int | None = None
) -> bool:
    """Whether this process holds the last stage; unless ignore_virtual, whether chunk `vp_stage` of `vp_size` does."""
    is_last_chunk = vp_size is None or vp_stage in (None, vp_size - 1)
    return _groups().is_last_stage and (ignore_virtual or is_last_chunk)


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


def get_model_parallel_group() -> Group:
    """The processes that hold one replica of the model."""
    return _groups().mp


def get_embedding_group() -> Group | None:
    """The processes that hold a copy of the tied embeddings; None on the middle stages."""
    return _groups().embd


def get_position_embedding_group() -> Group | None:
    """The processes that hold position embeddings; None on other stages."""
    return _groups().pos_embd


def is_rank_in_embedding_group() -> bool:
    """Whether this process holds input or output embeddings."""
    return _groups().embd is not None


def is_rank_in_position_embedding_group() -> bool:
    """Whether this process holds position embeddings."""
    return _groups().pos_embd is not None


# ---- data and context parallelism


def get_data_parallel_group(with_context_parallel: bool = False) -> Group:
    """The processes that hold the same shard of the model."""
    return _groups().dp_cp if with_context_parallel else _groups().dp


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Number of processes that hold the same shard of the model."""
    return get_data_parallel_group(with_context_parallel).size()


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """This process's place among those that hold the same shard of the model."""
    return get_data_parallel_group(with_context_parallel).rank()


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first process that holds the same shard of the model."""
    return group_ranks(get_data_parallel_group(with_context_parallel))[0]


def get_context_parallel_group(check_initialized: bool = True) -> Group | None:
    """The processes that share each sequence. check_initialized: raise RuntimeError where there are no groups yet;
    otherwise return None."""
    if not check_initialized and not ProcessGroupCollection.has_current():
        return None
    return _groups().cp


def get_context_parallel_world_size() -> int:
    """How many processes share each sequence."""
    return _groups().cp.size()


def get_context_parallel_rank() -> int:
    """This process's place among those that share each sequence."""
    return _groups().cp.rank()


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the processes that share each sequence."""
    return group_ranks(_groups().cp)


def get_hierarchical_context_parallel_groups() -> list[Group]:
    """The processes that share each sequence, by levels of a hierarchical exchange: neighbours first."""
    return list(_groups().hcp)


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> list[Group] | Group:
    """The groups of 1, 2, 4, ... neighbours that may share a sequence with --hybrid-context-parallel; the one of
    `group_size` where it is given. Raises RuntimeError where there is none, unless check_initialized is False."""
    groups = list(_groups().hybrid_cp)
    if group_size is None:
        if not groups and check_initialized:
            raise RuntimeError("there are no groups for --hybrid-context-parallel: the process groups have none")
        return groups
    found = next((group for group in groups if group.size() == group_size), None)
    if found is None:
        raise RuntimeError(f"no group of {group_size} processes may share a sequence; there are {len(groups)} sizes")
    return found


# ---- experts


def get_expert_model_parallel_group() -> Group:
    """The processes that share the experts of a layer."""
    return _groups().ep


def get_expert_model_parallel_world_size() -> int:
    """How many processes share the experts of a layer."""
    return _groups().ep.size()


def get_expert_model_parallel_rank() -> int:
    """This process's place among those that share the experts of a layer."""
    return _groups().ep.rank()


def get_expert_tensor_parallel_group() -> Group:
    """The processes that share each expert."""
    return _groups().expt_tp


def get_expert_tensor_parallel_world_size() -> int:
    """How many processes share each expert."""
    return _groups().expt_tp.size()


def get_expert_tensor_parallel_rank() -> int:
    """This process's place among those that share each expert."""
    return _groups().expt_tp.rank()


def get_expert_data_parallel_group() -> Group:
    """The processes that hold the same expert shard."""
    return _groups().expt_dp


def get_expert_data_parallel_world_size() -> int:
    """How many processes hold the same expert shard."""
    return _groups().expt_dp.size()


def get_expert_data_parallel_rank() -> int:
    """This process's place among those that hold the same expert shard."""
    return _groups().expt_dp.rank()


def get_expert_tensor_and_model_parallel_group() -> Group:
    """The processes that hold one copy of a layer's experts."""
    return _groups().tp_ep


def get_expert_tensor_model_pipeline_parallel_group() -> Group:
    """The processes that hold one replica of all experts."""
    return _groups().tp_ep_pp
