# SPDX-License-Identifier: Apache-2.0
"""Place of each process in the layout: rank <-> coordinates on the parallel axes. Arithmetic only, no processes.

The ranks form two grids over the same processes, the first axis of `order` running fastest:

    dense layers    tp x cp x dp x pp          dp  = world / (tp * cp * pp)
    experts         etp x ep x edp x pp        edp = world / (etp * ep * pp)

so expert parallelism is carved out of the processes that data, context and tensor parallelism use elsewhere. A layer's
attention and its experts are on the same stage: the grid of the experts divides the processes of each dense stage
again, in the order of their ranks, wherever `order` puts pp.
A group along some axes is the set of ranks whose other coordinates agree. Order of ranks and of groups is upstream's.

Along a pipeline, VirtualStages says which process holds which stretch of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from megatron.core.config_base import name_divisors, name_multiples
from megatron.core.errors import TopologyError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
PIPELINE_BEFORE_DATA_ORDER = "tp-cp-ep-pp-dp"
"""With this order (--use-tp-pp-dp-mapping) the stages of one pipeline are close together."""

_EXPERT_AXES = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
"""The expert grid's name for each axis of `order`; it has no context parallelism."""

_FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}


@dataclass(frozen=True)
class RankGrid:
    """Sizes of the parallel axes. Raises TopologyError, with the arithmetic, when they do not fit the world size."""

    world_size: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallelism inside an expert; as `tp` when None."""
    pp: int = 1
    order: str = DEFAULT_ORDER
    folded: bool = False
    """Pipelines run forth and back again, so that their first process also holds the last layers."""
    cp_levels: tuple[int, ...] = ()
    """Division of `cp` by a hierarchical exchange: ranks of a group at each level, neighbours first; empty without
    one."""

    hybrid_cp: int = 0
    """Most ranks that share a sequence, where the number differs from sequence to sequence: 1, 2, 4, ... neighbours
    among the ranks of `dp` x `cp`, up to this number; 0 where all sequences are shared by `cp` ranks."""

    embedding_stages: tuple[int, ...] | None = None
    """Stages that hold a copy of the word embedding's weight; the first and the last one when None."""

    optimizer_instances: int = 1
    """Copies of the divided optimizer state among the replicas of the model."""

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise TopologyError(problems)

    # ---- sizes

    @property
    def dp(self) -> int:
        """Replicas of the model: processes that work on different samples."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism inside an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """Replicas of each expert."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    @cached_property
    def dense_sizes(self) -> dict[str, int]:
        """Axis -> size of the dense grid, the fastest axis first."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        # Expert parallelism has no separate ranks here: it uses the ranks of the other axes.
        return {axis: sizes[axis] for axis in self.order.split("-") if axis != "ep"}

    @cached_property
    def expert_sizes(self) -> dict[str, int]:
        """Axis -> size of the expert grid, the fastest axis first."""
        sizes = {"etp": self.expert_tp, "ep": self.ep, "edp": self.edp, "pp": self.pp}
        return {name: sizes[name] for axis in self.order.split("-") if (name := _EXPERT_AXES.get(axis))}

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size of both grids, in the order in which ranks are numbered: the position of a rank."""
        return self.dense_sizes | self.expert_sizes

    # ---- ranks

    @cached_property
    def _stage_by_stage(self) -> list[int]:
        """All ranks: the first stage's, in ascending order, then the second's, ..."""
        return list(itertools.chain.from_iterable(list_rank_groups(self.dense_sizes, self.dense_sizes.keys() - {"pp"})))

    @cached_property
    def _expert_sizes_by_stage(self) -> dict[str, int]:
        """Axis -> size of the expert grid over `_stage_by_stage`: pp runs slowest."""
        return {axis: size for axis, size in self.expert_sizes.items() if axis != "pp"} | {"pp": self.pp}

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index on every axis of both grids: tp, cp, dp, pp, etp, ep, edp."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is not in a world of {self.world_size} processes")
        # pp is in both with the same index.
        return _coordinates(rank, self.dense_sizes) | _coordinates(
            self._stage_by_stage.index(rank), self._expert_sizes_by_stage
        )

    def groups(self, axes: str) -> list[list[int]]:
        """All groups along the named axes: "tp", "dp-cp", "ep-etp-pp", ... The order of the names does not matter.

        Also "embd" (the stages that hold the input or the output embedding), "pos_embd" (those that hold position
        embeddings), and "world".
        """
        if axes == "world":
            return [list(range(self.world_size))]
        # No axes: some ranks are in none of these groups.
        if axes == "embd":
            held = self.embedding_stages or (0, self.pp - 1)
            return [[stages[place] for place in sorted(set(held))] for stages in self.groups("pp")]
        if axes == "pos_embd":
            return [stages[:1] for stages in self.groups("pp")]
        wanted = set(axes.split("-"))
        if wanted <= self.dense_sizes.keys():
            return list_rank_groups(self.dense_sizes, wanted)
        if wanted <= self.expert_sizes.keys():
            ranks = self._stage_by_stage
            # In ascending order, as torch.distributed numbers the members of a group.
            return sorted(
                sorted(ranks[i] for i in group) for group in list_rank_groups(self._expert_sizes_by_stage, wanted)
            )
        known = sorted(self.dense_sizes.keys() | self.expert_sizes.keys())
        raise ValueError(f"no groups along {axes!r}: name axes of one grid, among {known}, or embd, pos_embd, world")

    def cp_level_groups(self, level: int) -> list[list[int]]:
        """The groups of one level of a hierarchical context-parallel exchange; at level 0 they are neighbours."""
        # A rank's place on the levels is its index written in digits, one for each level, the lowest first.
        stride, size = prod(self.cp_levels[:level]), self.cp_levels[level]
        return [
            ranks[first : first + stride * size : stride]
            for ranks in self.groups("cp")
            for block in range(0, self.cp, stride * size)
            for first in range(block, block + stride)
        ]

    def hybrid_cp_groups(self, size: int) -> list[list[int]]:
        """Blocks of `size` neighbours, which together are all ranks: those that may share a sequence."""
        blocks = range(0, self.dp * self.cp, size)
        return [ranks[first : first + size] for ranks in self.groups("dp-cp") for first in blocks]

    @property
    def hybrid_cp_sizes(self) -> list[int]:
        """Sizes of these blocks, from 1 on."""
        return [2**level for level in range(self.hybrid_cp.bit_length())]

    def optimizer_groups(self, *, of_experts: bool = False) -> tuple[list[list[int]], list[list[int]]]:
        """Return the groups where `optimizer_instances` copies of the divided optimizer state exist: the processes that
        divide one copy (neighbours among those that hold the same shard of the model), and those that hold the same
        slice of it.

        of_experts: of the state of experts, of which there may be fewer replicas: then there are as many copies as
        divide both numbers.
        """
        wholes = self.groups("edp" if of_experts else "dp-cp")
        replicas = len(wholes[0])
        # Of dense weights this is the number of instances itself, which divides the replicas.
        size = replicas // gcd(self.optimizer_instances, replicas)
        # Neighbours divide a copy, so that the gathers of every step stay inside a node.
        shards = [ranks[first : first + size] for ranks in wholes for first in range(0, replicas, size)]
        copies = [ranks[first::size] for ranks in wholes for first in range(size)]
        return shards, copies

    # ---- checks

    def _problems(self) -> list[str]:
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep, "etp": self.expert_tp}
        problems = [f"{_FLAGS[axis]} {n} is not a positive number" for axis, n in sizes.items() if n < 1]
        if sorted(self.order.split("-")) != sorted(DEFAULT_ORDER.split("-")):
            problems.append(f"order {self.order!r} must name each axis of {DEFAULT_ORDER!r} once")
        if problems:
            return problems
        problems += size_problems(self.world_size, sizes)
        if self.cp_levels and prod(self.cp_levels) != self.cp:
            levels = " ".join(map(str, self.cp_levels))
            problems.append(
                f"--hierarchical-context-parallel-sizes {levels} multiply to {prod(self.cp_levels)}, not to "
                f"{_FLAGS['cp']} {self.cp}"
            )
        replicas = self.dp * self.cp
        if not problems and self.hybrid_cp and (self.hybrid_cp & (self.hybrid_cp - 1) or replicas % self.hybrid_cp):
            problems.append(
                f"--hybrid-context-parallel divides sequences over up to {self.hybrid_cp} ranks, which must be a power "
                f"of two and divide the {replicas} ranks of data and context parallelism; "
                "change --max-seqlen-per-dp-cp-rank"
            )
        instances_problem = find_instances_problem(self.optimizer_instances, replicas)
        if not problems and instances_problem is not None:
            problems.append(instances_problem)
        return problems


DEFERS_WEIGHT_GRADIENTS = ("zb-h1", "zb-v")
"""Pipeline schedules that compute weight gradients apart from input gradients."""


def schedule_problem(schedule: str, chunks: int) -> str | None:
    """Return why a pipeline schedule cannot have so many chunks of layers on each stage; None where it can."""
    written = f"--pipeline-schedule {schedule}"
    if schedule == "interleaved" and chunks == 1:
        return f"{written} needs several chunks per stage; add --num-virtual-stages-per-pipeline-rank"
    if schedule == "zb-v" and chunks != 2:
        return f"{written} lays 2 chunks on each stage, not {chunks}; leave the number out"
    if schedule not in ("interleaved", "zb-v") and chunks > 1:
        return (
            f"{written} has one chunk per stage, but the settings ask for {chunks}; "
            "use --pipeline-schedule interleaved, or leave the chunks out"
        )
    return None


@dataclass(frozen=True)
class VirtualStages:
    """Shape of a pipeline: `stages` processes with `chunks` stretches of layers each, its virtual stages.

        looped   rank 0: 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7      (interleaved, Narayanan et al., 2021)
        folded   rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4      (V shape, Qi et al., 2024)

    With one chunk both are the plain pipeline.
    """

    stages: int
    """Processes in a row."""
    chunks: int = 1
    """Stretches of layers on each."""
    folded: bool = False
    """Every second round runs backwards, so that the first process also holds the last layers."""

    @property
    def count(self) -> int:
        """Virtual stages in all."""
        return self.stages * self.chunks

    def index(self, rank: int, chunk: int) -> int:
        """The virtual stage that is this chunk of this process."""
        # Called a million times for a plan: without a second call for the turn.
        return chunk * self.stages + (self.stages - 1 - rank if self.folded and chunk % 2 else rank)

    def holder(self, index: int) -> tuple[int, int]:
        """(rank, chunk) of a virtual stage."""
        chunk, place = divmod(index, self.stages)
        return self.stages - 1 - place if self.folded and chunk % 2 else place, chunk


def size_problems(world_size: int, sizes: dict[str, int]) -> list[str]:
    """Return the problems of so many processes with these sizes of tp, cp, pp, ep and etp.

    Experts are carved out of tensor x context x data parallelism; they do not multiply the world size.
    """

    def written(*axes: str) -> str:
        return " x ".join(f"{_FLAGS[axis]} {sizes[axis]}" for axis in axes)

    problems = []
    per_copy = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if world_size == 1 and per_copy > 1:
        # A script for several processes, started like one for a single one: the commonest mistake of all.
        problems.append(
            f"{written('tp', 'pp', 'cp')} = {per_copy} processes per model copy, and the job has 1 (WORLD_SIZE); start "
            f"it with torchrun --nproc_per_node {per_copy} in place of python, or use sizes of 1"
        )
    elif world_size < 1 or world_size % per_copy:
        problems.append(
            f"{written('tp', 'pp', 'cp')} = {per_copy} processes per model copy does not divide the {world_size} "
            f"processes of the job (WORLD_SIZE); use sizes whose product is {name_divisors(world_size, per_copy)}, or "
            f"start {name_multiples(world_size, per_copy)} processes"
        )
    available, per_expert = world_size // sizes["pp"], sizes["etp"] * sizes["ep"]
    if available % per_expert and (not problems or per_expert != sizes["tp"]):
        problems.append(
            f"{written('etp', 'ep')} = {per_expert} does not divide the {available} "
            f"process{'' if available == 1 else 'es'} of a pipeline stage "
            f"({world_size} / {written('pp')}); use sizes whose product is {name_divisors(available, per_expert)}"
        )
    return problems


def find_instances_problem(instances: int, replicas: int) -> str | None:
    """Return why so many copies of a divided optimizer state are not possible among these replicas of the model; None
    where they are."""
    if instances >= 1 and replicas % instances == 0:
        return None
    return (
        f"--num-distributed-optimizer-instances {instances} does not divide the {replicas} model copies; "
        f"use {name_divisors(replicas, instances)}"
    )


def _coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    found = {}
    # A rank is a number in a mixed base whose first digit is the fastest axis.
    for axis, size in sizes.items():
        rank, found[axis] = divmod(rank, size)
    return found


def list_rank_groups(sizes: dict[str, int], wanted: Set[str]) -> list[list[int]]:
    """Ranks that differ only on the wanted axes; within a group and among groups the fastest axis runs first."""
    # Two neighbours on an axis are as many ranks apart as all faster axes have together.
    strides = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=1, func=int.__mul__), strict=False))

    def offsets(axes: list[str]) -> list[int]:
        # itertools.product lets its last factor run fastest.
        slowest_first = [range(0, sizes[axis] * strides[axis], strides[axis]) for axis in reversed(axes)]
        return [sum(steps) for steps in itertools.product(*slowest_first)]

    inside = offsets([axis for axis in sizes if axis in wanted])
    starts = offsets([axis for axis in sizes if axis not in wanted])
    return [[start + step for step in inside] for start in starts]


def side_by_side_problem(schedule: str) -> str | None:
    """Return why the backwards of a pipeline schedule cannot overlap its forwards; None where they can."""
    if schedule in ("1f1b", "interleaved"):
        return None
    return (
        f"--overlap-moe-expert-parallel-comm does not work with --pipeline-schedule {schedule}; use 1f1b or "
        "interleaved, in which forwards and backwards take turns"
    )
