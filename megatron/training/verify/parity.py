"""One configuration under several layouts: is it the same run?

    layout "tp2,sp,pp2"  ->  flags and processes  ->  a RankTrace on every rank  ->  join  ->  Trace  ->  compare

A Trace holds what must not depend on the layout: each iteration's loss and gradient norm, the gradients of the first
iteration and the weights after the last, as full tensors under their global names. Joining also checks that processes
which hold the same elements agree on them bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from megatron.training.config.container import RunConfig
from megatron.training.config.gpu_needs import replace_gpu_settings
from megatron.training.launch.initialize import Process, build_rank_grid, set_seeds
from megatron.training.launch.launch import Launch
from megatron.training.recipes.recipe import Recipe
from megatron.training.run import Hook, Run
from megatron.training.setup import setup
from megatron.training.step import train_step

# ---- on every rank


class HeldParameter(NamedTuple):
    """One parameter as this process holds it."""

    placement: Placement
    grad: Tensor
    """Of the first iteration, summed over microbatches and replicas, before clipping."""
    weight: Tensor
    """After the last iteration."""


@dataclass(frozen=True)
class RankTrace:
    """What one process saw: losses and gradient norms of every iteration, and the parameters it holds."""

    losses: list[dict[str, float]]
    grad_norms: list[float]
    held: list[HeldParameter]


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


def trace_rank(config: RunConfig, recipe: Recipe, *, rank: int, iterations: int) -> RankTrace:
    """Train for some iterations and keep what must not depend on the layout."""
    first = FirstGradients()
    with open_local_run(config, recipe, rank, [first]) as run:
        return _train(run, iterations, first)


class FirstGradients(Hook):
    """Keeps the gradients of the first step, as full tensors of this process's placed parameters, in their order."""

    def __init__(self) -> None:
        self.grads: list[Tensor] = []

    def on_gradients(self, run: Run) -> None:
        """Keep the gradients of the first step. Every rank takes part."""
        if not self.grads:
            # Copies, because the buffers are cleared with the next step.
            self.grads = _gather_grads(run)


def _train(run: Run, iterations: int, first: FirstGradients) -> RankTrace:
    losses, grad_norms = [], []
    batches = run.data.open("train", 0)
    for _ in range(iterations):
        result = train_step(run, batches)
        losses.append({name: float(loss) for name, loss in result.losses.items()})
        grad_norms.append(float("nan") if result.grad_norm is None else float(result.grad_norm))
    for chunk in run.model:
        chunk.finish_param_sync()
    held = [
        HeldParameter(placement, grad, _gather_whole(param).float().clone())
        for (placement, param), grad in zip(list_placed_parameters(run), first.grads, strict=True)
    ]
    return RankTrace(losses, grad_norms, held)


def _gather_grads(run: Run) -> list[Tensor]:
    """Gradients of the placed parameters, in their order. Where a replica has only those of its own slice, slices are
    put together."""
    grads = []
    for chunk in run.model:
        views: dict[str, Tensor] = {}
        for buffer in chunk.flat_buffers:
            if isinstance(buffer, ShardedParamBuffer):
                views |= buffer.gather_whole([param.main_grad.float() for param in buffer.params])  # type: ignore[attr-defined]
                continue
            assert isinstance(buffer, ParamAndGradBuffer), f"{type(buffer).__name__} cannot be put together"
            values = buffer.grad_data.detach().float().clone()
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
        grads += [views[get_placement(p, n).name] for n, p in chunk.module.named_parameters() if p.requires_grad]
    return grads


def _gather_whole(param: torch.nn.Parameter) -> Tensor:
    """The values, where replicas divide them those of all replicas; every process calls this."""
    detached = param.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def list_placed_parameters(run: Run) -> list[tuple[Placement, torch.nn.Parameter]]:
    """This process's trained parameters and which part of the model they are."""
    return [
        (get_placement(param, name), param)
        for chunk in run.model
        for name, param in chunk.module.named_parameters()
        if param.requires_grad
    ]


# ---- together


@dataclass
class Trace:
    """What a layout must not change, as full tensors."""

    losses: list[dict[str, float]]
    grad_norms: list[float]
    grads: dict[str, Tensor] = field(default_factory=dict)
    """Global name -> full tensor, in the model's order where one process held all."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    disagreements: list[str] = field(default_factory=list)
    """Processes that hold other values of the same elements, in words."""


def join(shares: Sequence[RankTrace]) -> Trace:
    """All ranks' shares as full tensors. Losses are taken from rank 0; the others' must be equal."""
    trace = Trace(shares[0].losses, shares[0].grad_norms)
    for rank, share in enumerate(shares):
        if (share.losses, share.grad_norms) != (trace.losses, trace.grad_norms):
            trace.disagreements.append(f"rank {rank} reports other losses or gradient norms than rank 0")
    by_name: dict[str, list[tuple[int, HeldParameter]]] = {}
    for rank, share in enumerate(shares):
        for held in share.held:
            by_name.setdefault(held.placement.name, []).append((rank, held))
    for name, holders in by_name.items():
        # A copy (the tied output layer of the last stage) goes by the original's name; the original says where it lies.
        placement = next((held.placement for _, held in holders if not held.placement.is_copy), holders[0][1].placement)
        trace.placements[name] = placement
        for what, into in (("grad", trace.grads), ("weight", trace.weights)):
            shards: dict[tuple[int, ...], Tensor] = {}
            for _, held in holders:
                shards.setdefault(held.placement.index, getattr(held, what))
            into[name] = placement.join(shards)
            for rank, held in holders:
                # Bit for bit: holders of one element have the same history, rounding included.
                if not torch.equal(held.placement.take(into[name]), getattr(held, what)):
                    word = "gradient" if what == "grad" else what
                    trace.disagreements.append(f"rank {rank} holds another {word} of {name} than the first holder")
    return trace


@dataclass(frozen=True)
class Tolerances:
    """Largest relative difference; of a tensor, relative to its largest element."""

    loss: float = 1e-5
    grad: float = 1e-4
    weight: float = 1e-4


def compare(reference: Trace, found: Trace, tolerances: Tolerances | None = None) -> list[str]:
    """What differs, the earliest first, in sentences; nothing when both are the same run."""
    limits = tolerances or Tolerances()
    differences = list(found.disagreements)
    for iteration, (ours, theirs) in enumerate(zip(reference.losses, found.losses, strict=True), start=1):
        for name, loss in ours.items():
            size = _measure_relative(theirs.get(name, float("nan")), loss)
            # Not `size > limit`: a NaN compares false, and must count as a difference.
            if not size <= limits.loss:
                differences.append(
                    f"{name} at iteration {iteration}: {theirs.get(name)} instead of {loss} (relative {size:.1e})"
                )
    for what, limit in (("grad", limits.grad), ("weight", limits.weight)):
        wanted, given = getattr(reference, f"{what}s"), getattr(found, f"{what}s")
        missing = sorted(wanted.keys() ^ given.keys())
        differences += [f"{name} exists in one of the layouts only" for name in missing]
        scale = max((float(tensor.abs().max()) for tensor in wanted.values()), default=0.0)
        for name in (name for name in wanted if name in given):
            text = _describe_difference(wanted[name], given[name], found.placements[name], limit, scale)
            if text:
                moment = "of the first iteration" if what == "grad" else "after the last iteration"
                differences.append(f"{'gradient' if what == 'grad' else what} {moment} of {name}: {text}")
    return differences


def find_largest_differences(reference: Trace, found: Trace) -> dict[str, float]:
    """Largest relative difference of losses, gradient norms, gradients and weights."""
    losses = [
        _measure_relative(theirs[name], loss)
        for ours, theirs in zip(reference.losses, found.losses, strict=True)
        for name, loss in ours.items()
        if name in theirs
    ]
    norms = [_measure_relative(*pair) for pair in zip(found.grad_norms, reference.grad_norms, strict=True)]
    sizes = {"loss": max(losses, default=0.0), "gradient norm": max(norms, default=0.0)}
    for what, name_of in (("grads", "gradient"), ("weights", "weight")):
        wanted, given = getattr(reference, what), getattr(found, what)
        both = [name for name in wanted if name in given]
        sizes[name_of] = max(
            (
                float((wanted[n] - _cut_padding(given[n], wanted[n])).abs().max() / _find_largest(wanted[n]))
                for n in both
            ),
            default=0.0,
        )
    return sizes


def _measure_relative(found: float, expected: float) -> float:
    # 1e-30: below every value that matters, above zero.
    return abs(found - expected) / max(abs(expected), 1e-30)


def _find_largest(tensor: Tensor) -> Tensor:
    return tensor.abs().max().clamp(min=1e-30)


def _cut_padding(tensor: Tensor, other: Tensor) -> Tensor:
    """The rows that both have: padding of the vocabulary depends on the layout."""
    return tensor if tensor.shape == other.shape else tensor[: other.shape[0]]


def _describe_difference(
    expected: Tensor, found: Tensor, placement: Placement, limit: float, scale: float
) -> str | None:
    """Where and by how much a tensor is off; None where it is not.

    scale: the largest element of all tensors; what is a millionth of it is rounding.
    """
    if expected.shape != found.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    error = (found - expected).abs()
    size = float(error.max())
    # Gradients that are zero but for rounding (the bias of keys) have no scale of their own: the second condition is
    # for them.
    if size <= limit * float(expected.abs().max()) or size <= 1e-6 * scale:
        return None
    worst = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    shown = f"element {worst}" if worst else "the value"
    text = f"{shown} is {float(found[tuple(worst)]):.6g} instead of {float(expected[tuple(worst)]):.6g}"
    text += f" (relative {size / float(_find_largest(expected)):.1e}), {_describe_place(worst, placement)}"
    # A sum that was taken twice, or a missing division, makes one factor for the whole tensor: the commonest mistake in
    # a layout, and worth naming.
    ratio = float((found * expected).sum() / (expected * expected).sum().clamp(min=1e-30))
    residual = float((found - ratio * expected).abs().max())
    if residual < 0.01 * size and abs(ratio - 1) > 1e-3:
        text += f"; the whole tensor is {ratio:.3g} times what it should be"
    return text


def _describe_place(element: Sequence[int], placement: Placement) -> str:
    """Which axis holds the element: `in shard 1 of 2 over tp`."""
    places = []
    for split in placement.splits:
        for index in range(split.num_shards):
            runs = dataclasses.replace(split, index=index).runs(placement.full_shape[split.dim])
            if any(run.owned and run.start <= element[split.dim] < run.start + run.length for run in runs):
                places.append(f"in shard {index} of {split.num_shards} over {split.axis}")
    if not places:
        places.append("held whole by all ranks of a stage")
    if placement.partial_grad_axes:
        places.append(f"its gradient is summed over {', '.join(placement.partial_grad_axes)}")
    return ", ".join(places)
