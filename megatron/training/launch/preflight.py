# SPDX-License-Identifier: Apache-2.0
"""--preflight: the checks of `python -m megatron doctor`, over the groups and for the checkpoints of a run that is
about to begin."""

from __future__ import annotations

import math
from pathlib import Path

import torch.distributed as dist

from megatron.core.collectives import all_gather_object
from megatron.core.dist_checkpointing.save_plan import list_boxes
from megatron.core.errors import PreflightError, say
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.checkpoint.run_tensors import select_tensors
from megatron.training.launch.launch import Launch
from megatron.training.launch.machine_checks import judge, measure_machine, write_table
from megatron.training.run import Run

_KINDS = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp_cp", "experts": "ep"}
"""Kinds of groups in the table, and their field."""


def check_before_training(run: Run, launch: Launch, groups: ProcessGroupCollection) -> None:
    """Measure, compare, and print the table on the first rank; every rank calls this before the first step.

    groups: the run's, whose calls are not counted. Raises PreflightError on every rank where a check fails.
    """
    save = run.config.checkpoint.save
    count = count_kept_checkpoints(run)
    needed = 0 if save is None else count * count_checkpoint_bytes(run)
    own = measure_machine(launch, None if save is None else Path(save), list_kinds(groups))
    measured = all_gather_object(own, groups.world)
    wanted = "" if save is None else f"{count} checkpoint{'' if count == 1 else 's'}"
    checks = list(judge(measured, needed, wanted))
    if launch.rank == 0:
        hosts = len({m.host for m in measured})
        say(f"--preflight: {len(measured)} ranks on {hosts} host{'' if hosts == 1 else 's'}\n{write_table(checks)}")
    failed = [f"{check.name} ({check.found}) on {check.where or 'all'}" for check in checks if not check.is_good]
    if failed:
        raise PreflightError(
            f"--preflight: {'; '.join(failed)}; mend it or take that host out of the job, then start again"
        )


def list_kinds(groups: ProcessGroupCollection) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group of each kind that has several members."""
    return {kind: group for kind, field in _KINDS.items() for group in groups.list_distinct([field])}


def count_kept_checkpoints(run: Run) -> int:
    """Checkpoints that the run will leave in --save at one time: all that it writes, or those that --keep-last and
    --save-retain-interval keep, and the one under way."""
    settings, progress = run.config.checkpoint, run.progress
    left = progress.target_iterations - progress.iteration
    every = settings.save_interval or max(1, left)
    written = max(1, math.ceil(left / every))
    if settings.keep_last is None and settings.save_retain_interval is None:
        return written
    kept = left // settings.save_retain_interval if settings.save_retain_interval else 0
    return min(written, kept + (settings.keep_last or 1) + 1)


def count_checkpoint_bytes(run: Run) -> int:
    """Bytes of the tensors of one checkpoint of all ranks, each once. Every rank calls this."""
    sizes = {}
    for item in list_boxes(select_tensors(run, with_optimizer=not run.config.checkpoint.no_save_optim)).items:
        assert item.tensor_data is not None and item.tensor_data.chunk is not None, "all boxes are of tensors"
        itemsize = item.tensor_data.properties.dtype.itemsize
        sizes[item.index.fqn, item.index.offset] = math.prod(item.tensor_data.chunk.sizes) * itemsize
    together = {box: size for found in all_gather_object(sizes, run.groups.world) for box, size in found.items()}
    return sum(together.values())
