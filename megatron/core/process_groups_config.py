"""Every process group by name, in one object that is handed to whoever needs a group.

| field     | the processes that ...                                  | upstream's name                        |
|-----------|---------------------------------------------------------|----------------------------------------|
| tp        | share each dense layer                                  | TENSOR_MODEL_PARALLEL                  |
| pp        | hold the stages of one pipeline                         | PIPELINE_MODEL_PARALLEL                |
| cp        | share each sequence                                     | CONTEXT_PARALLEL                       |
| hcp       | ... at each level of a hierarchical exchange            | HIERARCHICAL_CONTEXT_PARALLEL_GROUPS   |
| hybrid_cp | may share a sequence: 1, 2, 4, ... neighbours in dp_cp  | HYBRID_DP_CP_GROUPS                    |
| dp        | hold the same shard and see other samples               | DATA_PARALLEL                          |
| dp_cp     | hold the same shard: gradients are averaged here        | DATA_PARALLEL_WITH_CP                  |
| tp_cp     | work on the same samples in one stage                   | TENSOR_AND_CONTEXT_PARALLEL            |
| tp_dp     | ... of one stage and one sequence shard                 | TENSOR_AND_DATA_PARALLEL               |
| tp_dp_cp  | hold the same stage                                     | TENSOR_AND_DATA_PARALLEL_WITH_CP       |
| mp        | hold one replica of the model                           | MODEL_PARALLEL                         |
| embd      | hold a copy of tied embeddings (first and last stage)   | EMBEDDING                              |
| pos_embd  | hold position embeddings                                | POSITION_EMBEDDING                     |
| ep        | share the experts of a layer                            | EXPERT_MODEL_PARALLEL                  |
| expt_tp   | share each expert                                       | EXPERT_TENSOR_PARALLEL                 |
| expt_dp   | hold the same expert shard                              | EXPERT_DATA_PARALLEL                   |
| tp_ep     | hold one copy of a layer's experts                      | EXPERT_TENSOR_AND_MODEL_PARALLEL       |
| tp_ep_pp  | hold one replica of all experts                         | EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL  |
| world     | all                                                     | INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE   |
| optimizer_shards | divide one copy of the optimizer's state         | INTRA_PARTIAL_DATA_PARALLEL_WITH_CP    |
| optimizer_copies | hold the same slice of it                        | INTER_PARTIAL_DATA_PARALLEL_WITH_CP    |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias

import torch.distributed as dist

from megatron.core.device import communication_options
from megatron.core.mesh import RankGrid
from megatron.core.traffic import Traffic


@dataclass(frozen=True)
class SingleRankGroup:
    """A group of one process: collectives over it do nothing, so it needs no torch.distributed."""

    global_rank: int = 0

    def size(self) -> int:
        """Always 1."""
        return 1

    def rank(self) -> int:
        """Always 0."""
        return 0


@dataclass(frozen=True, eq=False)
class MeteredGroup:
    """A group whose members count what they send over it, as traffic of an axis. Collectives see the group inside."""

    group: dist.ProcessGroup
    axis: str
    traffic: Traffic

    def size(self) -> int:
        """Number of members."""
        return self.group.size()

    def rank(self) -> int:
        """This process's place among them."""
        return self.group.rank()


Group: TypeAlias = "dist.ProcessGroup | MeteredGroup | SingleRankGroup"
"""What a collective runs over: has size() and rank()."""

GROUP_AXES: dict[str, str] = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "dp": "dp",
    "dp_cp": "dp-cp",
    "tp_cp": "tp-cp",
    "tp_dp": "tp-dp",
    "tp_dp_cp": "tp-dp-cp",
    "mp": "tp-pp",
    "embd": "embd",
    "pos_embd": "pos_embd",
    "ep": "ep",
    "expt_tp": "etp",
    "expt_dp": "edp",
    "tp_ep": "etp-ep",
    "tp_ep_pp": "etp-ep-pp",
    "world": "world",
}
"""Field -> the axes of RankGrid.groups() it runs along."""
_TRAFFIC_OF = GROUP_AXES | {
    "dp_cp": "dp",
    "embd": "pp",
    "pos_embd": "pp",
    "optimizer_shards": "dp",
    "optimizer_copies": "dp",
}
"""Field -> the axis whose traffic it is: replicas average gradients, copies of embeddings belong to stages."""


@dataclass(frozen=True, kw_only=True)
class ProcessGroupCollection:
    """This process's groups. Each has .size() and .rank(); `embd` and `pos_embd` are None where it is no member."""

    tp: Group
    pp: Group
    cp: Group
    dp: Group
    dp_cp: Group
    tp_cp: Group
    tp_dp: Group
    tp_dp_cp: Group
    mp: Group
    embd: Group | None
    pos_embd: Group | None
    ep: Group
    expt_tp: Group
    expt_dp: Group
    tp_ep: Group
    tp_ep_pp: Group
    world: Group
    hcp: tuple[Group, ...] = ()
    """Neighbours first; empty without --hierarchical-context-parallel-sizes."""
    hybrid_cp: tuple[Group, ...] = ()
    """The smallest first; empty without --hybrid-context-parallel."""
    optimizer_shards: Group = SingleRankGroup()
    """As dp_cp, unless the grid has several optimizer_instances."""
    optimizer_copies: Group = SingleRankGroup()
    grid: RankGrid = dataclasses.field(default_factory=lambda: RankGrid(1))
    """The arithmetic the groups were built from."""

    _current: ClassVar[ProcessGroupCollection | None] = None

    @classmethod
    def single(cls) -> ProcessGroupCollection:
        """The groups of a process that trains alone; torch.distributed is not needed."""
        alone: dict[str, Any] = dict.fromkeys(GROUP_AXES, SingleRankGroup())
        return cls(**alone, grid=RankGrid(1))

    @classmethod
    def build(
        cls, grid: RankGrid, rank: int, timeout: timedelta | None = None, high_priority: Collection[str] = ()
    ) -> ProcessGroupCollection:
        """Create all groups of the grid; every process must call this at the same moment.

        rank: this process's global rank. A group of one is a SingleRankGroup; groups with the same members are one
        group. With more than one process, torch.distributed must have been initialised with the grid's world size.
        high_priority: fields whose groups communicate on NCCL streams of high priority.
        """
        if grid.world_size == 1:
            alone = tuple(SingleRankGroup() for _ in grid.hybrid_cp_sizes)
            return dataclasses.replace(cls.single(), grid=grid, hybrid_cp=alone)
        if not dist.is_initialized() or dist.get_world_size() != grid.world_size:
            found = dist.get_world_size() if dist.is_initialized() else "none"
            raise RuntimeError(f"the grid has {grid.world_size} processes; torch.distributed has {found}")
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        urgent = {tuple(sorted(ranks)) for field in high_priority for ranks in grid.groups(GROUP_AXES[field])}

        def create(ranks: list[int], description: str) -> dist.ProcessGroup | None:
            options = communication_options(high_priority=tuple(sorted(ranks)) in urgent)
            return _create(ranks, made, description, grid.world_size, timeout, options)

        fields: dict[str, Any] = dict.fromkeys(GROUP_AXES)
        for field, axes in GROUP_AXES.items():
            for ranks in grid.groups(axes):
                group = create(ranks, f"{field}:{ranks[0]}")
                if rank in ranks:
                    fields[field] = group or SingleRankGroup(rank)
        levels: list[Group] = []
        for level in range(len(grid.cp_levels)):
            for ranks in grid.cp_level_groups(level):
                group = create(ranks, f"hcp{level}:{ranks[0]}")
                if rank in ranks:
                    levels.append(group or SingleRankGroup(rank))
        blocks: list[Group] = []
        for size in grid.hybrid_cp_sizes:
            for ranks in grid.hybrid_cp_groups(size):
                group = create(ranks, f"hybrid_cp{size}:{ranks[0]}")
                if rank in ranks:
                    blocks.append(group or SingleRankGroup(rank))
        instances = zip(("optimizer_shards", "optimizer_copies"), grid.optimizer_groups(), strict=True)
        for field, lists in instances:
            for ranks in lists:
                group = create(ranks, f"{field}:{ranks[0]}")
                if rank in ranks:
                    fields[field] = group or SingleRankGroup(rank)
        return cls(**fields, hcp=tuple(levels), hybrid_cp=tuple(blocks), grid=grid)

    @classmethod
    def current(cls) -> ProcessGroupCollection:
        """The collection that initialisation made, for user code that hands over none; a single process needs no
        initialisation. Inside the library only the outermost public constructors may ask."""
        if ProcessGroupCollection._current is not None:
            return ProcessGroupCollection._current
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{dist.get_world_size()} processes run, but no process groups were made; "
                "call parallel_state.initialize_model_parallel() first, or hand over pg_collection"
            )
        return cls.single()

    def set_current(self) -> None:
        """Make this the collection that `current()` returns."""
        ProcessGroupCollection._current = self

    @staticmethod
    def clear_current() -> None:
        """Forget the current collection."""
        ProcessGroupCollection._current = None

    @staticmethod
    def has_current() -> bool:
        """Whether a collection was set."""
        return ProcessGroupCollection._current is not None

    def metered(self, traffic: Traffic) -> ProcessGroupCollection:
        """The same groups, which from now on count into `traffic`."""

        def meter(group: Any, axis: str) -> Any:
            return MeteredGroup(group, axis, traffic) if isinstance(group, dist.ProcessGroup) else group

        fields: dict[str, Any] = {field: meter(getattr(self, field), axis) for field, axis in _TRAFFIC_OF.items()}
        levels, blocks = (tuple(meter(group, "cp") for group in groups) for groups in (self.hcp, self.hybrid_cp))
        return dataclasses.replace(self, **fields, hcp=levels, hybrid_cp=blocks)

    def set_timeout(self, limit: timedelta) -> None:
        """From now on no collective of these groups waits longer."""
        members = [*(getattr(self, field) for field in _TRAFFIC_OF), *self.hcp]
        groups = {torch_group(group) for group in members if isinstance(group, dist.ProcessGroup | MeteredGroup)}
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(limit, group)

    # ---- questions that many ask

    @property
    def is_first_stage(self) -> bool:
        """Whether this process holds the first layers of its pipeline."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the last layers of its pipeline."""
        return self.pp.rank() == self.last_stage

    def replicas(self, of_experts: bool) -> Group:
        """The processes that hold the same shard of a dense weight, or of a weight of experts."""
        return self.expt_dp if of_experts else self.dp_cp

    def copy_of_model(self, of_experts: bool) -> Group:
        """The processes that together hold one copy of all dense weights, or of all experts."""
        return self.tp_ep_pp if of_experts else self.mp

    @property
    def last_stage(self) -> int:
        """Rank in `pp` of the process that holds the last layers, and with them the loss."""
        return 0 if self.grid.folded else self.pp.size() - 1


def group_ranks(group: Group) -> list[int]:
    """Global ranks of the group's members, in group order."""
    if isinstance(group, SingleRankGroup):
        return [group.global_rank]
    return list(dist.get_process_group_ranks(torch_group(group)))


def torch_group(group: dist.ProcessGroup | MeteredGroup) -> dist.ProcessGroup:
    """What torch.distributed knows it as."""
    return group.group if isinstance(group, MeteredGroup) else group


def _create(
    ranks: list[int],
    made: dict[tuple[int, ...], dist.ProcessGroup],
    description: str,
    world_size: int,
    timeout: timedelta | None,
    options: Any = None,
) -> dist.ProcessGroup | None:
    """The torch group of these ranks, made once; None for a single rank. options: of the backend, where it has any."""
    key = tuple(sorted(ranks))
    if len(key) == 1:
        return None
    if key not in made:
        everyone = len(key) == world_size and options is None
        # Every process must take part in making every group, also of those it is no member of.
        group = (
            dist.group.WORLD
            if everyone
            else dist.new_group(list(key), timeout=timeout, pg_options=options, group_desc=description)
        )
        assert group is not None
        made[key] = group
    return made[key]
