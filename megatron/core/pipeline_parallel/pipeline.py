"""The plan of a pipeline: its shape, its schedule, and every rank's program for a number of microbatches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from megatron.core.pipeline_parallel.communication import Program, programs
from megatron.core.pipeline_parallel.schedules import (
    DEFERS_WEIGHT_GRADIENTS,
    Action,
    ScheduleName,
    forward_tables,
    interleaved_problem,
    tables,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.virtual_stages import VirtualStages


@dataclass(frozen=True)
class Pipeline:
    """Everything that decides what the ranks do in a step."""

    shape: VirtualStages
    schedule: ScheduleName
    group_size: int | None = None
    """Of the interleaved schedule: consecutive microbatches of a chunk; the number of stages when None."""
    overlap: bool = True
    """Receives are posted early, and sends are not waited for at once."""
    head_deferral: int | None = None
    """Microbatches whose output layer gets its weight gradient after the last backward; 0: all; None: none."""

    @classmethod
    def of(cls, config: Any, groups: ProcessGroupCollection, chunks: int) -> Pipeline:
        """The pipeline that a model's config asks for; 1F1B, or interleaved with several chunks, where it is silent."""
        asked: ScheduleName | None = getattr(config, "pipeline_schedule", None)
        name: ScheduleName = asked or ("1f1b" if chunks == 1 else "interleaved")
        if groups.pp.size() == 1 and chunks == 1:
            name = "1f1b"
        return cls(
            shape=VirtualStages(groups.pp.size(), chunks, folded=name == "zb-v"),
            schedule=name,
            group_size=getattr(config, "microbatch_group_size_per_vp_stage", None),
            overlap=getattr(config, "overlap_p2p_comm", True),
            head_deferral=config.wgrad_deferral_limit
            if getattr(config, "defer_embedding_wgrad_compute", False)
            else None,
        )

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether weight gradients are computed by actions of their own."""
        return self.schedule in DEFERS_WEIGHT_GRADIENTS

    def defers_head(self, rank: int) -> bool:
        """Whether this rank has the output layer and computes its weight gradient later than the others."""
        return self.head_deferral is not None and rank == self.shape.holder(self.shape.count - 1)[0]

    def program(self, rank: int, microbatches: int, forward_only: bool = False) -> Program:
        """What a rank does in a step. Raises ConfigError where the schedule does not exist for this number."""
        return _plan(self, microbatches, forward_only)[rank]

    def problem(self, microbatches: int) -> str | None:
        """Why a step of so many microbatches cannot run; None where it can."""
        if self.schedule != "interleaved":
            return None
        return interleaved_problem(self.shape.stages, microbatches, self.group_size or self.shape.stages)


@functools.lru_cache(maxsize=8)
def _plan(pipeline: Pipeline, microbatches: int, forward_only: bool) -> list[Program]:
    """All ranks' programs; planning takes up to a second, and most runs have two numbers of microbatches."""
    actions = (
        forward_tables(pipeline.shape, microbatches)
        if forward_only
        else tables(pipeline.schedule, pipeline.shape, microbatches, pipeline.group_size)
    )
    plan = programs(actions, pipeline.shape, overlap=pipeline.overlap)
    if pipeline.head_deferral is not None and not forward_only:
        rank, chunk = pipeline.shape.holder(pipeline.shape.count - 1)
        plan[rank] = _with_head_gradients(plan[rank], chunk, pipeline.head_deferral or microbatches)
    return plan


def _with_head_gradients(program: Program, chunk: int, deferred: int) -> Program:
    """The output layer's weight gradients as actions: of the first microbatches at the end, others after backward."""
    steps: Program = []
    waiting: Program = []
    for step in program:
        steps.append(step)
        if isinstance(step, Action) and step.kind == "B" and step.chunk == chunk:
            product = Action("W", step.microbatch, chunk)
            (waiting if len(waiting) < deferred else steps).append(product)
    return steps + waiting
