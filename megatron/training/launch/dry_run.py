# SPDX-License-Identifier: Apache-2.0
"""--dry-run: the run's code for one step of any rank of any cluster, in one process, without a GPU.

Model, schedule, forward, backward and optimizer are the real ones, on tensors that have shapes and no values and with
groups whose other members are imagined. Each rank's peak memory, products, kernels and collectives are counted, and
the collectives of all ranks compared. Nothing is read but the datasets' first sample, and nothing is written but the
report.

A long step is shortened to as many microbatches as fill the pipeline twice: it holds as much, and its products are
multiplied up. What values would decide is assumed: experts get equally many tokens, and gradients are finite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from megatron.core.errors import format_bytes
from megatron.core.mesh import RankGrid
from megatron.core.paths import write_atomically
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.planner.step_time import shorten
from megatron.training.config.container import RunConfig
from megatron.training.config.gpu_needs import replace_gpu_settings
from megatron.training.launch.collective_order import CollectiveDeadlock, find_deadlock
from megatron.training.launch.dry_memo import OperationMemo
from megatron.training.launch.dry_recorder import DryRecorder, RecordedCall, ready
from megatron.training.launch.initialize import Process, build_rank_grid, set_seeds
from megatron.training.launch.launch import Launch
from megatron.training.recipes.recipe import Recipe
from megatron.training.run import Hook, Run
from megatron.training.step import train_step

_SLOW_SECONDS = 2.0
Build = Callable[[RunConfig, Process, Recipe, Sequence[Hook]], Run]
"""From settings to the parts of a run."""


class PretendedRank(NamedTuple):
    """A rank among the processes of a job."""

    grid: RankGrid
    rank: int
    memo: OperationMemo
    """Shared by all ranks: most do the same."""


@dataclasses.dataclass
class RankReport:
    """Report of what one rank does in a step."""

    rank: int
    peak_bytes: int
    """Of tensors, in the step."""
    flops: int
    """Of products and attention, in all microbatches of the step."""
    kernels: int
    """Operations that would be launched, in the microbatches that were run."""
    calls: list[RecordedCall]


def dry_run(config: RunConfig, recipe: Recipe, build: Build) -> int:
    """Run a step of each rank, print what was seen, and write --dry-run-json; returns the exit code: 0, or 1 where
    ranks would wait for each other for ever. build: setup.build_run, which is in a higher layer.

    Raises MegatronError for any problem with the run itself.
    """
    world_size = config.world_size
    grid = build_rank_grid(config, world_size)
    config, ran, whole = _shorten_step(config)
    replace_gpu_settings(config)
    ranks = range(world_size) if config.profiling.dry_run_ranks == "all" else choose_ranks(grid)
    reports: list[RankReport] = []
    memo = OperationMemo()
    began_at = told_at = time.monotonic()
    for rank in ranks:
        reports.append(run_rank(config, recipe, build, PretendedRank(grid, rank, memo), whole / ran))
        if time.monotonic() - told_at > _SLOW_SECONDS:
            told_at = time.monotonic()
            left = (told_at - began_at) / len(reports) * (len(ranks) - len(reports))
            print(f"dry run: {len(reports)} of {len(ranks)} ranks, {left:.0f} s left", file=sys.stderr, flush=True)
    deadlock = find_deadlock({report.rank: report.calls for report in reports})
    print("\n".join(describe(reports, world_size, ran, whole, deadlock)))
    if config.profiling.dry_run_json is not None:
        found = build_document(reports, world_size, ran, whole, deadlock)
        write_atomically(Path(config.profiling.dry_run_json), json.dumps(found, indent=1) + "\n")
    return 0 if deadlock is None else 1


def _shorten_step(config: RunConfig) -> tuple[RunConfig, int, int]:
    """Return a copy of the config whose step has few microbatches; their number, and the run's number."""
    training = config.training
    per_microbatch = (training.micro_batch_size or 1) * config.data_parallel_size
    whole = max(1, (training.global_batch_size or per_microbatch) // per_microbatch)
    few = shorten(config.model, whole) if config.world_size > 1 else min(whole, 2)
    changed = dataclasses.replace(training, global_batch_size=few * per_microbatch, rampup_batch_size=None)
    return config.with_groups(training=changed), few, whole


def choose_ranks(grid: RankGrid) -> list[int]:
    """Ranks that stand for all: of the first two and the last two pipeline stages one each, and on the first and the
    last the farthest neighbour on every axis."""
    stages = next(group for group in grid.groups("pp") if 0 in group)
    chosen = {*stages[:2], *stages[-2:], grid.world_size - 1}
    for stage in {stages[0], stages[-1]}:
        for axes in ("tp", "cp", "dp", "dp-cp", "ep", "etp", "edp"):
            chosen.add(next(group for group in grid.groups(axes) if stage in group)[-1])
    return sorted(chosen)


def run_rank(config: RunConfig, recipe: Recipe, build: Build, place: PretendedRank, scale: float) -> RankReport:
    """One step as this rank, whose partners are imagined. scale: microbatches of the run's step for each that runs."""
    grid, rank, memo = place
    world_size = grid.world_size
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    recorder = DryRecorder(lambda tensor: share_evenly(config, tensor), memo)
    try:
        groups = ProcessGroupCollection.build_alone(grid, rank)
        groups.set_current()
        process = Process(Launch(rank, world_size, 0), torch.device("cpu"), groups)
        # What a rank's set-up prints is the run's business, not the dry run's.
        with contextlib.redirect_stdout(io.StringIO()), ready(recorder):
            set_seeds(config.model.seed, groups)
            run = build(config, process, recipe, [])
            batches = make_batches(run)
            # The optimizer takes its state in the first update, which would miss from the peak before it.
            for chunk in run.model:
                chunk.zero_grad_buffer()
            run.optimizer.step()
            recorder.restart()
            train_step(run, batches)
        return RankReport(
            rank, recorder.peak_bytes, round(recorder.flops * scale), recorder.kernels, list(recorder.calls)
        )
    finally:
        ProcessGroupCollection.clear_current()
        if world_size > 1:
            dist.destroy_process_group()


def make_batches(run: Run) -> Iterator[dict[str, Tensor]]:
    """Yield microbatches without values, with the shapes of the dataset's first sample, or of a language model's."""
    rows, length = run.config.training.micro_batch_size or 1, run.config.data.seq_length or 1
    parts = run.data.parts("train")
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((length,), torch.float32 if name == "loss_mask" else torch.int64)
        for name in ("tokens", "labels", "position_ids", "loss_mask")
    }
    if parts and hasattr(parts[0], "__getitem__"):
        with _disable_current_modes():
            sample = {name: torch.as_tensor(value) for name, value in parts[0][0].items()}
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in sample.items()}
    while True:
        yield {name: torch.empty((rows, *shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}


def share_evenly(config: RunConfig, tensor: Tensor) -> Any:
    """Return what the host reads of experts: every rank sends and gets as many rows of tokens, and none is dropped."""
    model = config.model
    if model.num_moe_experts is None or tensor.dtype.is_floating_point or tensor.dtype.itemsize < 4:
        return None
    tokens = (config.training.micro_batch_size or 1) * (config.data.seq_length or 1) // model.context_parallel_size
    rows = tokens // model.tensor_model_parallel_size * model.moe_router_topk * (model.expert_tensor_parallel_size or 1)
    if tensor.dim() == 2:  # sent, received
        return [[rows // tensor.shape[1]] * tensor.shape[1]] * tensor.shape[0]
    if tensor.dim() == 1:  # where the rows of each expert end
        return [rows * number // len(tensor) for number in range(1, len(tensor) + 1)]
    return rows


def describe(
    reports: Sequence[RankReport], world_size: int, ran: int, whole: int, deadlock: CollectiveDeadlock | None
) -> list[str]:
    """The dry run in a few lines."""
    fullest = max(reports, key=lambda report: report.peak_bytes)
    calls = Counter[str]()
    size = Counter[str]()
    for call in fullest.calls:
        calls[call.op] += 1
        size[call.op] += call.bytes
    said = ", ".join(f"{n} x {op} ({format_bytes(size[op])})" for op, n in calls.items())
    shortened = f" ({ran} of {whole} microbatches)" if ran < whole else ""
    return [
        f"dry run: {len(reports)} of {world_size} ranks, one step each{shortened}",
        f"fullest rank {fullest.rank}: {format_bytes(fullest.peak_bytes)} of tensors, {fullest.flops:.4g} FLOPs, "
        f"{fullest.kernels} kernels",
        f"its communication: {said or 'none'}",
        "the ranks agree on every collective" if deadlock is None else f"error: {deadlock.sentence}",
    ]


def build_document(
    reports: Sequence[RankReport], world_size: int, ran: int, whole: int, deadlock: CollectiveDeadlock | None
) -> dict[str, Any]:
    """Build what --dry-run-json has."""
    ranks = []
    for report in reports:
        counted = Counter((call.ranks, call.op, call.bytes) for call in report.calls)
        collectives = [
            {"group": list(group), "op": op, "bytes": size, "count": count}
            for (group, op, size), count in counted.items()
        ]
        ranks.append(
            {"rank": report.rank, "peak_bytes": report.peak_bytes, "flops": report.flops, "kernels": report.kernels,
             "collectives": collectives}
        )  # fmt: skip
    found = None
    if deadlock is not None:
        found = {"ranks": list(deadlock.ranks), "group": list(deadlock.group), "sentence": deadlock.sentence}
    return {
        "world_size": world_size, "microbatches_run": ran, "microbatches": whole, "ranks": ranks, "deadlock": found,
    }  # fmt: skip
