# SPDX-License-Identifier: Apache-2.0
"""Every process group by name, in one object that is passed to all code that needs a group.

A row of ProcessGroupCollection says everything about a group: its members, the ranks of the grid it runs along, and the
axis whose traffic it is. What builds, pretends, meters and limits groups reads these rows; a new axis is a new row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch.distributed as dist

from megatron.core.device import make_communication_options
from megatron.core.mesh import RankGrid
from megatron.core.traffic import Meter


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
    """A group whose members tell a meter what they send over it, as traffic of an axis. Collectives see the group
    inside."""

    group: dist.ProcessGroup
    axis: str
    traffic: Meter

    def size(self) -> int:
        """Number of members."""
        return self.group.size()

    def rank(self) -> int:
        """This process's place among them."""
        return self.group.rank()


@dataclass(frozen=True)
class PretendGroup:
    """A group as one of its members would see it, without processes: sizes and ranks, and no communication."""

    ranks: tuple[int, ...]
    global_rank: int

    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def rank(self) -> int:
        """The place among them of the process whose view this is."""
        return self.ranks.index(self.global_rank)


Group: TypeAlias = "dist.ProcessGroup | MeteredGroup | PretendGroup | SingleRankGroup"
"""Participants of a collective: has size() and rank()."""


class _Row(NamedTuple):
    """Facts about a field of ProcessGroupCollection."""

    lists: Callable[[RankGrid], list[list[list[int]]]]
    """Lists of groups; a process is in at most one group of each list. One list, except for fields that hold a
    tuple."""
    traffic: str
    """The axis that its traffic is counted for."""
    axes: str | None = None
    """Name of it in RankGrid.groups(); None where the grid has a separate function for it."""
    is_tuple: bool = False
    is_apart: bool = False
    """True if it has a separate communicator even where another group has the same members."""


def _along(axes: str, traffic: str | None = None) -> Any:
    """A field whose groups run along axes of the grid. traffic: where it is not the traffic of these axes."""
    row = _Row(lambda grid: [grid.groups(axes)], traffic or axes, axes)
    return dataclasses.field(metadata={_ROW: row})


def _listed(
    lists: Callable[[RankGrid], list[list[list[int]]]], traffic: str, default: Any, *, is_apart: bool = False
) -> Any:
    """A field whose groups a function of the grid lists."""
    row = _Row(lists, traffic, is_tuple=isinstance(default, tuple), is_apart=is_apart)
    return dataclasses.field(default=default, metadata={_ROW: row})


# Where a field's metadata keep its row.
_ROW = "row"


@dataclass(frozen=True, kw_only=True)
class ProcessGroupCollection:
    """This process's groups. Each has .size() and .rank(); `embd` and `pos_embd` are None where it is no member.

    The docstring of each field: the processes that ..., and upstream's name for the group.
    """

    tp: Group = _along("tp")
    """Share each dense layer (TENSOR_MODEL_PARALLEL)."""
    pp: Group = _along("pp")
    """Hold the stages of one pipeline (PIPELINE_MODEL_PARALLEL)."""
    pp_directions: tuple[Group, Group] = _listed(
        lambda grid: [grid.groups("pp")] * 2, "pp", (SingleRankGroup(), SingleRankGroup()), is_apart=True
    )
    """The same processes, only for transfers between stages: to higher ranks, and to lower ones."""
    cp: Group = _along("cp")
    """Share each sequence (CONTEXT_PARALLEL)."""
    dp: Group = _along("dp")
    """Hold the same shard and see other samples (DATA_PARALLEL)."""
    # Replicas average gradients over dp_cp, and copies of embeddings belong to stages: their traffic is that axis's.
    dp_cp: Group = _along("dp-cp", traffic="dp")
    """Hold the same shard: gradients are averaged here (DATA_PARALLEL_WITH_CP)."""
    tp_cp: Group = _along("tp-cp")
    """Work on the same samples in one stage (TENSOR_AND_CONTEXT_PARALLEL)."""
    tp_dp: Group = _along("tp-dp")
    """Hold one stage and one part of the sequences (TENSOR_AND_DATA_PARALLEL)."""
    tp_dp_cp: Group = _along("tp-dp-cp")
    """Hold the same stage (TENSOR_AND_DATA_PARALLEL_WITH_CP)."""
    mp: Group = _along("tp-pp")
    """Hold one replica of the model (MODEL_PARALLEL)."""
    embd: Group | None = _along("embd", traffic="pp")
    """Hold a copy of tied embeddings, on the first and the last stage (EMBEDDING)."""
    pos_embd: Group | None = _along("pos_embd", traffic="pp")
    """Hold position embeddings (POSITION_EMBEDDING)."""
    ep: Group = _along("ep")
    """Share the experts of a layer (EXPERT_MODEL_PARALLEL)."""
    expt_tp: Group = _along("etp")
    """Share each expert (EXPERT_TENSOR_PARALLEL)."""
    expt_dp: Group = _along("edp")
    """Hold the same expert shard (EXPERT_DATA_PARALLEL)."""
    tp_ep: Group = _along("etp-ep")
    """Hold one copy of a layer's experts (EXPERT_TENSOR_AND_MODEL_PARALLEL)."""
    tp_ep_pp: Group = _along("etp-ep-pp")
    """Hold one replica of all experts (EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL)."""
    world: Group = _along("world")
    """All processes of the run (INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE)."""
    hcp: tuple[Group, ...] = _listed(
        lambda grid: [grid.cp_level_groups(level) for level in range(len(grid.cp_levels))], "cp", ()
    )
    """Share each sequence at each level of a hierarchical exchange, neighbours first; empty without
    --hierarchical-context-parallel-sizes (HIERARCHICAL_CONTEXT_PARALLEL_GROUPS)."""
    hybrid_cp: tuple[Group, ...] = _listed(
        lambda grid: [grid.hybrid_cp_groups(size) for size in grid.hybrid_cp_sizes], "cp", ()
    )
    """May share a sequence: 1, 2, 4, ... neighbours in dp_cp, the smallest first; empty without
    --hybrid-context-parallel (HYBRID_DP_CP_GROUPS)."""
    optimizer_shards: Group = _listed(lambda grid: [grid.optimizer_groups()[0]], "dp", SingleRankGroup())
    """Divide one copy of the optimizer's state: dp_cp, unless the grid has several optimizer_instances
    (INTRA_PARTIAL_DATA_PARALLEL_WITH_CP)."""
    optimizer_copies: Group = _listed(lambda grid: [grid.optimizer_groups()[1]], "dp", SingleRankGroup())
    """Hold the same slice of the optimizer's state (INTER_PARTIAL_DATA_PARALLEL_WITH_CP)."""
    expert_optimizer_shards: Group = _listed(
        lambda grid: [grid.optimizer_groups(of_experts=True)[0]], "dp", SingleRankGroup()
    )
    """Divide one copy of the optimizer's state of experts: expt_dp, unless the grid has several optimizer_instances
    (INTRA_PARTIAL_EXPERT_DATA_PARALLEL)."""
    expert_optimizer_copies: Group = _listed(
        lambda grid: [grid.optimizer_groups(of_experts=True)[1]], "dp", SingleRankGroup()
    )
    """Hold the same slice of the optimizer's state of experts (INTER_PARTIAL_EXPERT_DATA_PARALLEL)."""
    grid: RankGrid = dataclasses.field(default_factory=lambda: RankGrid(1))
    """The arithmetic the groups were built from."""

    _current: ClassVar[ProcessGroupCollection | None] = None

    @classmethod
    def single(cls) -> ProcessGroupCollection:
        """The groups of a process that trains alone; torch.distributed is not needed."""
        return cls.pretend(RankGrid(1), 0)

    @classmethod
    def pretend(cls, grid: RankGrid, rank: int) -> ProcessGroupCollection:
        """The view that a rank of the grid would have, without any processes: for plans and tests.

        Sizes and ranks of all groups are right; a collective over a group of several raises RuntimeError.
        """

        def view(ranks: list[int], description: str, is_apart: bool) -> Group:
            return SingleRankGroup(rank) if len(ranks) == 1 else PretendGroup(tuple(ranks), rank)

        return cls._make_all(grid, rank, view)

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
            return cls.pretend(grid, rank)
        if not dist.is_initialized() or dist.get_world_size() != grid.world_size:
            found = dist.get_world_size() if dist.is_initialized() else "none"
            raise RuntimeError(f"the grid has {grid.world_size} processes; torch.distributed has {found}")
        # A communicator takes memory and time to set up, and in most layouts several axes have the same members.
        made: dict[tuple[Any, ...], dist.ProcessGroup] = {}
        urgent = {tuple(sorted(ranks)) for field in high_priority for ranks in grid.groups(GROUP_AXES[field])}

        def create(ranks: list[int], description: str, is_apart: bool) -> Group:
            options = make_communication_options(high_priority=tuple(sorted(ranks)) in urgent)
            group = _create(ranks, made, description, grid.world_size, timeout, options, is_apart=is_apart)
            return group or SingleRankGroup(rank)

        return cls._make_all(grid, rank, create)

    @classmethod
    def build_alone(cls, grid: RankGrid, rank: int) -> ProcessGroupCollection:
        """The groups of one rank whose partners are imagined: torch.distributed must have been initialised with its
        fake backend, which meets nobody, so that groups of others need not be made."""
        if grid.world_size == 1:
            return cls.pretend(grid, rank)
        made: dict[tuple[Any, ...], dist.ProcessGroup] = {}

        def create(ranks: list[int], description: str, is_apart: bool) -> Group:
            if rank not in ranks:
                return SingleRankGroup(rank)
            group = _create(ranks, made, description, grid.world_size, None, is_apart=is_apart)
            return group or SingleRankGroup(rank)

        return cls._make_all(grid, rank, create)

    @classmethod
    def _make_all(
        cls, grid: RankGrid, rank: int, make: Callable[[list[int], str, bool], Group]
    ) -> ProcessGroupCollection:
        """The rank's groups. make: (global ranks, description, whether it is one apart) -> group."""
        fields: dict[str, Any] = {}
        for field, row in _ROWS.items():
            ours: list[Group | None] = []
            for number, groups in enumerate(row.lists(grid)):
                ours.append(None)
                for ranks in groups:
                    # Also groups this rank is no member of, in the same order everywhere: torch.distributed needs every
                    # process to take part in making every group.
                    group = make(ranks, f"{field}{number if row.is_tuple else ''}:{ranks[0]}", row.is_apart)
                    if rank in ranks:
                        ours[-1] = group
            fields[field] = tuple(ours) if row.is_tuple else ours[0]
        return cls(**fields, grid=grid)

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
        """Return whether a collection was set."""
        return ProcessGroupCollection._current is not None

    def metered(self, choose: Callable[[dist.ProcessGroup, str], Meter]) -> ProcessGroupCollection:
        """The same groups, each of which from now on tells its calls to a meter. choose: (group, axis) -> meter."""

        def meter(group: Any, axis: str) -> Any:
            if isinstance(group, tuple):
                return tuple(meter(member, axis) for member in group)
            # Only plain groups: one that is metered already would be counted twice, and the others send nothing.
            return MeteredGroup(group, axis, choose(group, axis)) if isinstance(group, dist.ProcessGroup) else group

        return dataclasses.replace(
            self, **{field: meter(getattr(self, field), r.traffic) for field, r in _ROWS.items()}
        )

    def list_distinct(self, fields: Iterable[str] | None = None) -> list[dist.ProcessGroup]:
        """torch's groups of several processes in these fields, or in all, each once, in the order of the fields."""
        members: list[Any] = []
        for field in _ROWS if fields is None else fields:
            members += getattr(self, field) if _ROWS[field].is_tuple else [getattr(self, field)]
        # Several fields may hold one group.
        return list(dict.fromkeys(torch_group(g) for g in members if isinstance(g, dist.ProcessGroup | MeteredGroup)))

    def set_timeout(self, limit: timedelta) -> None:
        """From now on no collective of these groups waits longer."""
        for group in self.list_distinct():
            # torch has no public function for groups that exist already.
            dist.distributed_c10d._set_pg_timeout(limit, group)

    # ---- questions that many ask

    @property
    def is_first_stage(self) -> bool:
        """True if this process holds the first layers of its pipeline."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this process holds the last layers of its pipeline."""
        return self.pp.rank() == self.last_stage

    def get_replicas(self, of_experts: bool) -> Group:
        """The processes that hold the same shard of a dense weight, or of a weight of experts."""
        return self.expt_dp if of_experts else self.dp_cp

    def get_model_copy(self, of_experts: bool) -> Group:
        """The processes that together hold one copy of all dense weights, or of all experts."""
        return self.tp_ep_pp if of_experts else self.mp

    @property
    def last_stage(self) -> int:
        """Rank in `pp` of the process that holds the last layers, and with them the loss."""
        # A folded pipeline ends where it began.
        return 0 if self.grid.folded else self.pp.size() - 1


_ROWS: dict[str, _Row] = {
    field.name: field.metadata[_ROW] for field in dataclasses.fields(ProcessGroupCollection) if _ROW in field.metadata
}
GROUP_AXES: dict[str, str] = {field: row.axes for field, row in _ROWS.items() if row.axes is not None}
"""Field -> the axes of RankGrid.groups() it runs along."""


def group_ranks(group: Group) -> list[int]:
    """Global ranks of the group's members, in group order."""
    if isinstance(group, SingleRankGroup):
        return [group.global_rank]
    if isinstance(group, PretendGroup):
        return list(group.ranks)
    # torch's order, which is the one that rank() and collectives count in.
    return list(dist.get_process_group_ranks(torch_group(group)))


def rendezvous_store() -> dist.Store:
    """The key-value store at which the processes of the job have met: messages that are no collectives."""
    # torch has no public name for it.
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def torch_group(group: dist.ProcessGroup | MeteredGroup | PretendGroup) -> dist.ProcessGroup:
    """The group as torch.distributed knows it. Raises RuntimeError for a group without processes."""
    if isinstance(group, PretendGroup):
        raise RuntimeError(
            f"nothing can be sent over ranks {list(group.ranks)}: ProcessGroupCollection.pretend() made rank "
            f"{group.global_rank}'s view of the groups without processes; use ProcessGroupCollection.build()"
        )
    return group.group if isinstance(group, MeteredGroup) else group


def _create(
    ranks: list[int],
    made: dict[tuple[Any, ...], dist.ProcessGroup],
    description: str,
    world_size: int,
    timeout: timedelta | None,
    options: Any = None,
    is_apart: bool = False,
) -> dist.ProcessGroup | None:
    """The torch group of these ranks, made once; None for a single rank. options: of the backend, where it has any.
    is_apart: one that no other field shares."""
    # Sorted, because torch numbers the members of a group in ascending order in any case.
    members = sorted(ranks)
    if len(members) == 1:
        return None
    key = (description, *members) if is_apart else tuple(members)
    if key not in made:
        # The group of all exists already, but it cannot get options any more.
        everyone = len(members) == world_size and options is None and not is_apart
        group = (
            dist.group.WORLD
            if everyone
            else dist.new_group(members, timeout=timeout, pg_options=options, group_desc=description)
        )
        assert group is not None
        made[key] = group
    return made[key]
