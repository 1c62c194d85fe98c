# SPDX-License-Identifier: Apache-2.0
"""One configuration under several layouts: is it the same run?

    layout "tp2,sp,pp2"  ->  flags and processes  ->  a RankTrace on every rank  ->  join  ->  Trace
    two Traces  ->  comparison.py: what differs, in the order in which it arose  ->  report.py: a page about it

A Trace holds what must not depend on the layout: each iteration's loss and gradient norm, the gradients of the first
iteration and the weights after the last, as full tensors under their global names; in detail also what flows through
the model in the first iteration (activations.py) and the weights after the first update. Joining also checks that
processes which hold the same elements agree on them bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.collectives import all_reduce
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.distributed.sharded_params import ShardedParamBuffer
from megatron.core.placement import Placement, get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.core.tensor_parallel.products import at_least_float32
from megatron.training.config.container import RunConfig
from megatron.training.config.gpu_needs import replace_gpu_settings
from megatron.training.hooks.activations import Point, PointRecord, join_points, record_activations
from megatron.training.launch.initialize import Process, build_rank_grid, set_seeds
from megatron.training.launch.launch import Launch
from megatron.training.recipes.recipe import Recipe
from megatron.training.run import Hook, Run
from megatron.training.setup import setup
from megatron.training.step import get_learning_rate, train_step

# ---- on every rank


class HeldParameter(NamedTuple):
    """One parameter as this process holds it."""

    placement: Placement
    grad: Tensor
    """Of the first iteration, summed over microbatches and replicas, before clipping."""
    weight: Tensor
    """After the last iteration."""
    first_weight: Tensor | None = None
    """After the first update; None where it was not kept."""
    bucket: str = ""
    """Bucket of gradients that has it; empty where there is only one."""


class HeldUntrained(NamedTuple):
    """A parameter without gradient (the biases of a router), or a buffer, as this process holds it."""

    placement: Placement
    weight: Tensor
    """After the last iteration."""
    first_weight: Tensor
    """After the first iteration."""


@dataclass(frozen=True)
class RankTrace:
    """Record of one process: losses and gradient norms of every iteration, and the parameters it holds."""

    losses: list[dict[str, float]]
    grad_norms: list[float]
    held: list[HeldParameter]
    untrained: list[HeldUntrained] = field(default_factory=list)
    points: list[PointRecord] = field(default_factory=list)
    """Activations of the first iteration and their gradients, in forward order; empty where they were not asked for."""
    coordinates: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Axis of the layout -> (place of this process along it, size), for the axes that are longer than one."""
    first_update: int = 1
    """The iteration of the first update that moves weights: where the learning rate begins at zero, the second one."""


@contextlib.contextmanager
def open_local_run(config: RunConfig, recipe: Recipe, rank: int, hooks: Sequence[Hook] = ()) -> Iterator[Run]:
    """A run on this machine's CPU, ready to step, in a process whose torch.distributed is initialised if there are
    several; closed afterwards."""
    groups = ProcessGroupCollection.build(build_rank_grid(config, config.world_size), rank)
    # As `initialize` does: a model or a script may ask for the current groups.
    groups.set_current()
    set_seeds(config.model.seed, groups)
    replace_gpu_settings(config)
    launch = Launch(rank=rank, world_size=config.world_size, local_rank=rank)
    run = setup(config, Process(launch, torch.device("cpu"), groups), recipe, hooks)
    try:
        yield run
    finally:
        run.hooks.on_close(run)
        run.data.close()
        ProcessGroupCollection.clear_current()


def trace_rank(config: RunConfig, recipe: Recipe, *, rank: int, iterations: int, in_detail: bool = False) -> RankTrace:
    """Train for some iterations and keep what must not depend on the layout.

    in_detail: also what flows through the model in the first iteration, and the weights after the first update.
    """
    first = FirstGradients()
    with open_local_run(config, recipe, rank, [first]) as run:
        return _train(run, iterations, first, in_detail)


class FirstGradients(Hook):
    """Keeps the gradients of the first step, as full tensors of this process's placed parameters, in their order."""

    def __init__(self) -> None:
        self.grads: list[Tensor] = []

    def on_gradients(self, run: Run) -> None:
        """Keep the gradients of the first step. Every rank takes part."""
        if not self.grads:
            # Copies, because the buffers are cleared with the next step.
            self.grads = _gather_grads(run)


def _train(run: Run, iterations: int, first: FirstGradients, in_detail: bool) -> RankTrace:
    losses, grad_norms = [], []
    batches = run.data.open("train", 0)
    points: list[PointRecord] = []
    first_update = 0
    after_first: list[Tensor | None] = [None] * len(list_placed_parameters(run))
    untrained_after_first: list[Tensor] = []
    for iteration in range(1, iterations + 1):
        moves = get_learning_rate(run) > 0.0
        with record_activations(run) if in_detail and iteration == 1 else contextlib.nullcontext() as recorder:
            result = train_step(run, batches)
        losses.append({name: float(loss) for name, loss in result.losses.items()})
        grad_norms.append(float("nan") if result.grad_norm is None else float(result.grad_norm))
        if iteration == 1:
            untrained_after_first = [_gather_whole(*held) for held in list_untrained(run)]
        if recorder is not None:
            points = recorder.list_records()
        if moves and not first_update:
            first_update = iteration
            # Where gathers overlap with forward, waiting for them here would hide a forward that does not wait.
            if in_detail and not run.config.ddp.overlap_param_gather:
                after_first = [_gather_whole(*placed) for placed in list_placed_parameters(run)]
    for chunk in run.model:
        chunk.finish_param_sync()
    buckets = _name_buckets(run)
    held = [
        HeldParameter(placement, grad, _gather_whole(placement, param), weight, buckets.get(placement.name, ""))
        for (placement, param), grad, weight in zip(list_placed_parameters(run), first.grads, after_first, strict=True)
    ]
    untrained = [
        HeldUntrained(placement, _gather_whole(placement, tensor), weight)
        for (placement, tensor), weight in zip(list_untrained(run), untrained_after_first, strict=True)
    ]
    axes = {"tp": run.groups.tp, "cp": run.groups.cp, "dp": run.groups.dp, "pp": run.groups.pp}
    coordinates = {axis: (group.rank(), group.size()) for axis, group in axes.items() if group.size() > 1}
    return RankTrace(losses, grad_norms, held, untrained, points, coordinates, first_update)


def _gather_grads(run: Run) -> list[Tensor]:
    """Return gradients of the placed parameters, in their order. Where a replica has only its slice, slices are put
    together."""
    grads = []
    for chunk in run.model:
        views: dict[str, Tensor] = {}
        for buffer in chunk.flat_buffers:
            if isinstance(buffer, ShardedParamBuffer):
                views |= buffer.gather_whole([at_least_float32(param.main_grad) for param in buffer.params])  # type: ignore[attr-defined]
                continue
            assert isinstance(buffer, ParamAndGradBuffer), f"{type(buffer).__name__} cannot be put together"
            values = at_least_float32(buffer.grad_data.detach()).clone()
            # After a reduce-scatter only the owned ranges are complete; the rest holds partial sums, which are set to
            # zero before slices are added up.
            if sum(stop - start for start, stop in buffer.owned) < values.numel():
                holders = torch.zeros_like(values)
                for start, stop in buffer.owned:
                    holders[start:stop] = 1.0
                values *= holders
                all_reduce(values, run.groups.get_replicas(buffer.is_expert))
                all_reduce(holders, run.groups.get_replicas(buffer.is_expert))
                # Several replicas may own the same range: its sum is divided by their number.
                values /= holders.clamp(min=1.0)
            views |= buffer.named_views(values)
        grads += [views[get_placement(p, n).name] for n, p in list_parameters(chunk.module) if p.requires_grad]
    return grads


def _gather_whole(placement: Placement, param: Tensor) -> Tensor:
    """A float32 copy of this process's shard, where replicas divide it put together; every process calls this."""
    detached = param.detach()
    whole = detached.full_tensor() if isinstance(detached, DTensor) else detached
    return whole.to(torch.float32, copy=True).view(placement.local_shape)


def list_placed_parameters(run: Run) -> list[tuple[Placement, torch.nn.Parameter]]:
    """This process's trained parameters and which part of the model they are."""
    return [
        (get_placement(param, name), param)
        for chunk in run.model
        for name, param in list_parameters(chunk.module)
        if param.requires_grad
    ]


def list_untrained(run: Run) -> list[tuple[Placement, Tensor]]:
    """This process's parameters without gradient, and buffers of numbers, which every process holds whole."""
    found = []
    for chunk in run.model:
        found += [(get_placement(p, n), p.data) for n, p in list_parameters(chunk.module) if not p.requires_grad]
        for name, buffer in chunk.module.named_buffers():
            if buffer.is_floating_point():
                found.append((Placement(find_global_name(chunk.module, name), tuple(buffer.shape)), buffer))
    return found


def _name_buckets(run: Run) -> dict[str, str]:
    """Name of a parameter -> the bucket that carries its gradient, where gradients travel in several."""
    stage = f" of stage {run.groups.pp.rank()}" if run.groups.pp.size() > 1 else ""
    names: dict[str, str] = {}
    for number, chunk in enumerate(run.model):
        where = f"{stage}, chunk {number}" if len(run.model) > 1 else stage
        for buffer in chunk.flat_buffers:
            buckets = buffer.layout.buckets if buffer.reduction.is_needed else []
            what = f"of {'the experts' if buffer.is_expert else 'the'} {buffer.model_dtype} gradients".replace(
                "torch.", ""
            )
            for index, bucket in enumerate(buckets if len(buckets) > 1 else [], start=1):
                names |= {buffer.names[i]: f"bucket {index} of {len(buckets)} {what}{where}" for i in bucket.params}
    return names


# ---- together


class Disagreement(NamedTuple):
    """Processes that hold other values of the same elements than the first holder."""

    what: str
    """gradient or weight; empty where it is no tensor that they disagree on."""
    name: str
    """Of the tensor, or what else it is."""
    first: int
    others: list[int]
    """Ranks."""

    def __str__(self) -> str:
        ranks = " and ".join(str(rank) for rank in self.others)
        who = f"ranks {ranks} have" if len(self.others) > 1 else f"rank {ranks} has"
        return f"{who} {f'another {self.what} of' if self.what else 'other'} {self.name} than rank {self.first}"


@dataclass
class Trace:
    """Quantities that a layout must not change, as full tensors."""

    losses: list[dict[str, float]]
    grad_norms: list[float]
    grads: dict[str, Tensor] = field(default_factory=dict)
    """Global name -> full tensor, in the model's order where one process held all."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    first_weights: dict[str, Tensor] = field(default_factory=dict)
    """After the first update, where they were kept."""
    untrained: dict[str, Tensor] = field(default_factory=dict)
    """Parameters without gradient and buffers after the first iteration; `weights` has them after the last."""
    first_update: int = 1
    """The iteration of the first update that moves weights."""
    points: dict[str, Point] = field(default_factory=dict)
    """Tensors that flow through the model, in forward order where one process had all."""
    buckets: dict[str, str] = field(default_factory=dict)
    """Name of a parameter -> the bucket that carries its gradient."""
    coordinates: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """For each rank: axis -> (place along it, size)."""
    disagreements: list[Disagreement] = field(default_factory=list)


def join(shares: Sequence[RankTrace]) -> Trace:
    """All ranks' shares as full tensors. Losses are taken from rank 0; the others' must be equal."""
    trace = Trace(shares[0].losses, shares[0].grad_norms, first_update=shares[0].first_update)
    trace.points = join_points([share.points for share in shares])
    trace.coordinates = [share.coordinates for share in shares]
    others = [r for r, s in enumerate(shares) if (s.losses, s.grad_norms) != (trace.losses, trace.grad_norms)]
    if others:
        trace.disagreements.append(Disagreement("", "losses or gradient norms", 0, others))
    by_name: dict[str, list[tuple[int, HeldParameter | HeldUntrained]]] = {}
    for rank, share in enumerate(shares):
        every: list[HeldParameter | HeldUntrained] = [*share.held, *share.untrained]
        for held in every:
            by_name.setdefault(held.placement.name, []).append((rank, held))
    for name, holders in by_name.items():
        # A copy (the tied output layer of the last stage) has the original's name; the original says where it is.
        placement = next((held.placement for _, held in holders if not held.placement.is_copy), holders[0][1].placement)
        trace.placements[name] = placement
        trace.buckets[name] = getattr(holders[0][1], "bucket", "")
        early = trace.untrained if isinstance(holders[0][1], HeldUntrained) else trace.first_weights
        kinds = (("grad", trace.grads), ("first_weight", early), ("weight", trace.weights))
        for what, into in kinds:
            if all(getattr(held, what, None) is not None for _, held in holders):
                into[name], others = _join_parameter(
                    placement, [(r, h.placement, getattr(h, what)) for r, h in holders]
                )
                if others and what != "first_weight":
                    word = "gradient" if what == "grad" else what
                    trace.disagreements.append(Disagreement(word, name, holders[0][0], others))
    return trace


def _join_parameter(placement: Placement, holders: Sequence[tuple[int, Placement, Tensor]]) -> tuple[Tensor, list[int]]:
    """The full tensor of the first holders' shards, and the ranks that hold something else.

    holders: (rank, which part it has, values).
    """
    shards: dict[tuple[int, ...], Tensor] = {}
    for _, part, values in holders:
        shards.setdefault(part.index, values)
    full = placement.join(shards)
    # Bit for bit: holders of one element have the same history, rounding included.
    return full, [rank for rank, part, values in holders if not torch.equal(part.take(full), values)]
