# SPDX-License-Identifier: Apache-2.0
"""Differences between two traces of a run, in the order in which it arose.

    data -> activations, in forward order -> losses -> gradients, in backward order -> their norm -> the first update
         -> everything later

Whatever is wrong makes all that follows wrong, too: in this order the first difference is the nearest to its cause.
Gradients of activations and of parameters are merged: a layer's weights come after the gradient of its output, from
which theirs follow, and before the gradient of its input.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.hooks.activations import DATA, Point, find_place
from megatron.training.verify.parity import Trace


@dataclass(frozen=True)
class Tolerances:
    """Largest relative difference; of a tensor, relative to its largest element."""

    loss: float = 1e-5
    grad: float = 1e-4
    weight: float = 1e-4
    activation: float = 1e-4
    """Also of the gradients of activations."""
    negligible: float = 1e-6
    """Share of the largest element of all tensors below which a difference is rounding: gradients that would be zero
    (the bias of keys) have no scale."""


TOLERANCES_IN_16_BITS = Tolerances(loss=1e-2, grad=0.1, weight=0.1, activation=0.1, negligible=1e-2)
"""Rounding depends on the order of every sum, and an update of Adam makes whole steps of it."""
TOLERANCES_BY_RANK = Tolerances(loss=1e-2, grad=0.5, weight=0.5, activation=0.5, negligible=1e-2)
"""In 8 and 4 bits with scales of what each process multiplies: a layout has other scales, and all values round
differently."""


def choose_tolerances(config: TransformerConfig) -> Tolerances:
    """Return the tolerances for rounding in the dtype of the settings."""
    if config.few_bits_recipe is None:
        return Tolerances() if config.compute_dtype_name == "float32" else TOLERANCES_IN_16_BITS
    # Delayed scales are the same as on one process, but a value halfway between two rounds to either side.
    return TOLERANCES_IN_16_BITS if config.few_bits_recipe == "delayed" else TOLERANCES_BY_RANK


class Moment(enum.IntEnum):
    """Moment at which a difference shows, in the order of a run."""

    DATA = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    NORM = 4
    UPDATE = 5
    LATER = 6


class ParityFinding(NamedTuple):
    """One difference."""

    moment: Moment
    subject: str
    """Name of the thing that differs, as in `gradient of the output of decoder.layers.1.mlp.linear_fc1`."""
    text: str
    """The worst element, what it should be, where it is."""
    size: float
    """Relative to the largest element."""
    tensor: str
    """Name of the parameter or of the point; empty for a loss."""
    is_parameter: bool = False
    ratio: float | None = None
    """The whole tensor is so many times what it should be; None where it is not one factor."""
    iteration: int = 1
    """In which it shows."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


def compare(reference: Trace, found: Trace, tolerances: Tolerances | None = None) -> list[str]:
    """Return what differs, the earliest first, in sentences; nothing when both are the same run."""
    findings = find_differences(reference, found, tolerances)
    return [str(item) for item in [*findings, *found.disagreements]]


def find_differences(reference: Trace, found: Trace, tolerances: Tolerances | None = None) -> list[ParityFinding]:
    """Return what differs by more than rounding, in the order in which it arose."""
    limits = tolerances or Tolerances()
    findings = list(_compare_points(reference, found, limits))
    for iteration, (ours, theirs) in enumerate(zip(reference.losses, found.losses, strict=True), start=1):
        moment = Moment.LOSS if iteration == 1 else Moment.LATER
        for name, loss in ours.items():
            size = _measure_relative(theirs.get(name, math.nan), loss)
            # Not `size > limit`: a NaN compares false, and must count as a difference.
            if not size <= limits.loss:
                text = f"{theirs.get(name)} instead of {loss} (relative {size:.1e})"
                findings.append(
                    ParityFinding(moment, f"{name} at iteration {iteration}", text, size, "", iteration=iteration)
                )
    for norm, wanted in zip(found.grad_norms[:1], reference.grad_norms[:1], strict=True):
        size = _measure_relative(norm, wanted)
        if not size <= limits.grad and not math.isnan(wanted):
            text = f"{norm} instead of {wanted} (relative {size:.1e})"
            findings.append(ParityFinding(Moment.NORM, "gradient norm of the first iteration", text, size, ""))
    findings += _compare_parameters(reference, found, limits)
    order = _BackwardOrder(reference)
    # Stable: findings without a place keep the order in which they were found.
    return sorted(findings, key=lambda item: (item.moment, item.iteration, order.find_place(item)))


def find_largest_differences(reference: Trace, found: Trace) -> dict[str, float]:
    """Largest relative difference of losses, gradient norms, gradients and weights, and of activations where both
    traces have them."""
    losses = [
        _measure_relative(theirs[name], loss)
        for ours, theirs in zip(reference.losses, found.losses, strict=True)
        for name, loss in ours.items()
        if name in theirs
    ]
    norms = [_measure_relative(*pair) for pair in zip(found.grad_norms, reference.grad_norms, strict=True)]
    sizes = {"loss": max(losses, default=0.0), "gradient norm": max(norms, default=0.0)}
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {
        "gradient": [(reference.grads[n], found.grads[n]) for n in reference.grads if n in found.grads],
        "weight": [(reference.weights[n], found.weights[n]) for n in reference.weights if n in found.weights],
    }
    if reference.points and found.points:
        both = [(point, found.points[name]) for name, point in reference.points.items() if name in found.points]
        pairs["activation"] = [(point.values, other.values) for point, other in both]
    for what, tensors in pairs.items():
        errors = (
            float((_cut_padding(wanted, given) - _cut_padding(given, wanted)).abs().max() / _find_largest(wanted))
            for wanted, given in tensors
            if wanted.shape[1:] == given.shape[1:]
        )
        sizes[what] = max(errors, default=0.0)
    return sizes


# ---- in which order


class _BackwardOrder:
    """Places of gradients in backward, by what one process recorded."""

    def __init__(self, reference: Trace) -> None:
        self.points = {name: index for index, name in enumerate(reference.points)}
        self.parameters = {name: index for index, name in enumerate(reference.grads)}
        self.outputs = {point.module: self.points[point.name] for point in reference.points.values() if point.module}
        """Module -> its last point, which is its output."""

    def find_place(self, finding: ParityFinding) -> tuple[float, float]:
        """A key to sort by."""
        if finding.moment is not Moment.BACKWARD:
            return 0.0, 0.0
        if not finding.is_parameter:
            return -float(self.points[finding.tensor]), 0.0
        # Parameters of one module, and all where no points were recorded, from the last one to the first.
        return -self._find_point_before(finding.tensor), -float(self.parameters.get(finding.tensor, -1))

    def _find_point_before(self, parameter: str) -> float:
        """A place between two points: after the gradient that the parameter's gradient was made from."""
        module = parameter.rpartition(".")[0]
        if module in self.outputs:
            return self.outputs[module] - 0.5
        # Norms of queries, experts: after all points of the smallest part of the model around them.
        while module:
            inside = [index for name, index in self.outputs.items() if f"{name}.".startswith(f"{module}.")]
            if inside:
                return min(inside) - 0.5
            module = module.rpartition(".")[0]
        return -0.5


# ---- what


def _compare_points(reference: Trace, found: Trace, limits: Tolerances) -> Iterator[ParityFinding]:
    """Activations, and their gradients, where both traces have them."""
    both = [(point, found.points[name]) for name, point in reference.points.items() if name in found.points]
    for what in ("values", "grads"):
        # Of what the model computes: token numbers are no scale for anything.
        wanted = [getattr(point, what) for point, _ in both if point.module]
        scale = max((float(tensor.abs().max()) for tensor in wanted if tensor is not None), default=0.0)
        for point, other in both:
            if getattr(point, what) is not None and getattr(other, what) is not None:
                finding = _compare_point(point, other, what, limits, scale, found.coordinates)
                if finding is not None:
                    yield finding


def _compare_point(
    point: Point,
    other: Point,
    what: str,
    limits: Tolerances,
    scale: float,
    coordinates: Sequence[Mapping[str, tuple[int, int]]],
) -> ParityFinding | None:
    """One point's `values` or `grads`. scale: the largest element of all points."""
    expected, given = getattr(point, what), getattr(other, what)
    moment = Moment.BACKWARD if what == "grads" else Moment.DATA if point.part in DATA else Moment.FORWARD
    is_exact = moment is Moment.DATA
    subject = f"gradient of the {point.name}" if what == "grads" else point.name
    if expected.shape != given.shape:
        text = f"shape {tuple(given.shape)} instead of {tuple(expected.shape)}"
        return ParityFinding(moment, subject, text, math.nan, point.name)
    # Of several holders the one that is furthest off.
    worst = max(given, other.contrary[what], key=lambda tensor: _measure_error(tensor, expected))
    limit, floor = (0.0, 0.0) if is_exact else (limits.activation, limits.negligible * scale)
    difference = _find_difference(expected, worst, limit, floor)
    if difference is None:
        return None
    place = _describe_holders(other, (worst - expected).abs(), difference, coordinates)
    sample, position = divmod(difference.element[0], point.length)
    element = f"element [sample {sample}, position {position}"
    element += "]" if is_exact else f", channel {difference.element[1]}]"
    text = f"{_text_of(expected, worst, difference, element)}, {place}"
    if not torch.equal(given, other.contrary[what]):
        text += "; its holders differ from each other"
    return ParityFinding(moment, subject, text, difference.relative, point.name, ratio=difference.ratio)


def _compare_parameters(reference: Trace, found: Trace, limits: Tolerances) -> Iterator[ParityFinding]:
    last, update = len(reference.losses), reference.first_update
    kinds: list[tuple[str, int, Mapping[str, Tensor], Mapping[str, Tensor], float]] = [
        ("gradient of the first iteration", 0, reference.grads, found.grads, limits.grad),
        ("value after iteration 1", 1, reference.untrained, found.untrained, limits.weight),
        (f"weight after iteration {update}", update, reference.first_weights, found.first_weights, limits.weight),
        (f"weight after iteration {last}", last, reference.weights, found.weights, limits.weight),
    ]
    for what, iteration, wanted, given, limit in kinds:
        # What is held at the end is in the last row.
        if iteration == last and wanted is not reference.weights:
            continue
        moment = Moment.BACKWARD if iteration == 0 else Moment.UPDATE if iteration == 1 else Moment.LATER
        scale = max((float(tensor.abs().max()) for tensor in wanted.values()), default=0.0)
        # Kept at the end in any case; earlier values are kept where the layout allows it.
        for name in sorted(wanted.keys() ^ given.keys()) if wanted is reference.weights else ():
            yield ParityFinding(Moment.BACKWARD, name, "exists in one of the layouts only", math.nan, name, True)
        for name in (name for name in wanted if name in given):
            subject = f"{what} of {name}"
            if wanted[name].shape != given[name].shape:
                text = f"shape {tuple(given[name].shape)} instead of {tuple(wanted[name].shape)}"
                yield ParityFinding(moment, subject, text, math.nan, name, True, iteration=max(1, iteration))
                continue
            difference = _find_difference(wanted[name], given[name], limit, limits.negligible * scale)
            if difference is not None:
                text = _text_of(wanted[name], given[name], difference)
                text += f", {_describe_place(difference.element, found.placements[name])}"
                if difference.ratio is not None:
                    text += f"; the whole tensor is {difference.ratio:.3g} times what it should be"
                size, ratio = difference.relative, difference.ratio
                yield ParityFinding(moment, subject, text, size, name, True, ratio, max(1, iteration))


class _Difference(NamedTuple):
    element: list[int]
    relative: float
    limit: float
    """Errors up to it are rounding."""
    ratio: float | None


def _find_difference(expected: Tensor, found: Tensor, limit: float, floor: float) -> _Difference | None:
    """By how much a tensor is off; None where it is not.

    limit: error that is rounding, relative to the tensor's largest element. floor: error that is rounding in any case.
    """
    error = (found - expected).abs()
    size = float(error.max())
    bound = max(limit * float(expected.abs().max()), floor)
    if size <= bound:
        return None
    worst = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    # A sum that was taken twice, or a missing division, makes one factor for the whole tensor: the commonest mistake in
    # a layout, and worth naming.
    ratio = float((found * expected).sum() / (expected * expected).sum().clamp(min=1e-30))
    residual = float((found - ratio * expected).abs().max())
    is_factor = residual < 0.01 * size and abs(ratio - 1) > 1e-3
    return _Difference(worst, size / float(_find_largest(expected)), bound, ratio if is_factor else None)


def _text_of(expected: Tensor, found: Tensor, difference: _Difference, element: str = "") -> str:
    """The worst element and what it should be. element: which one it is, where its indices have names."""
    at = tuple(difference.element)
    shown = element or (f"element {difference.element}" if at else "the value")
    return (
        f"{shown} is {float(found[at]):.6g} instead of {float(expected[at]):.6g} (relative {difference.relative:.1e})"
    )


def _describe_holders(
    point: Point, error: Tensor, difference: _Difference, coordinates: Sequence[Mapping[str, tuple[int, int]]]
) -> str:
    """Return which ranks hold what is off."""
    wrong = [rank for rank, record in point.holders if not float(error[find_place(record)].max()) <= difference.limit]
    ranks = [
        f"rank {rank} ({', '.join(f'{axis} {own}' for axis, (own, _) in coordinates[rank].items())})"
        for rank in wrong
    ]  # fmt: skip
    others = len(point.holders) - len(wrong)
    if not others:
        return "on all ranks that hold it" if len(wrong) > 1 else f"on {ranks[0].replace(' ()', '')}"
    return f"only on {', '.join(ranks)}: what {others} other rank{'s hold' if others > 1 else ' holds'} of it agrees"


def _describe_place(element: Sequence[int], placement: Placement) -> str:
    """Return which axis holds the element: `in shard 1 of 2 over tp`."""
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


# ---- measures


def _measure_relative(found: float, expected: float) -> float:
    # 1e-30: below every value that matters, above zero.
    return abs(found - expected) / max(abs(expected), 1e-30)


def _measure_error(tensor: Tensor, expected: Tensor) -> float:
    error = float((tensor - expected).abs().max())
    return math.inf if math.isnan(error) else error


def _find_largest(tensor: Tensor) -> Tensor:
    return tensor.abs().max().clamp(min=1e-30)


def _cut_padding(tensor: Tensor, other: Tensor) -> Tensor:
    """The rows that both have: padding of the vocabulary depends on the layout."""
    return tensor if tensor.shape == other.shape else tensor[: other.shape[0]]
