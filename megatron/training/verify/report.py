# SPDX-License-Identifier: Apache-2.0
"""A page about a layout that is another run: where it begins, what follows from it, who disagrees with whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.training.hooks.activations import Point
from megatron.training.verify.comparison import Moment, ParityFinding
from megatron.training.verify.parity import Disagreement, Trace

_LISTED, _LISTED_DISAGREEMENTS = 8, 3
_ORDER = {Moment.FORWARD: " in forward order", Moment.BACKWARD: " in backward order"}
_BETWEEN = {
    "input": " (bias, dropout, residual)",
    "query": " (bias, heads, their norms, rotary positions)",
    "key": " (bias, heads, their norms, rotary positions)",
    "value": " (bias, heads)",
}
"""Modules between the output of a module and the input of the next one that is compared, by its part."""
_PLURAL = {
    Moment.DATA: "{} tensors that were read",
    Moment.FORWARD: "{} activations",
    Moment.LOSS: "the loss of the first iteration",
    Moment.BACKWARD: "{} gradients",
    Moment.NORM: "the gradient norm",
    Moment.UPDATE: "{} values after the first iteration",
    Moment.LATER: "{} losses and weights of later iterations",
}


def write_report(
    reference: Trace, found: Trace, findings: Sequence[ParityFinding], *, show_all: bool = False
) -> list[str]:
    """Lines about what differs, nearest to its cause first; empty where nothing does.

    findings: of `find_differences`. show_all: every one of them in full, instead of the first ones.
    """
    lines = []
    if findings:
        first = findings[0]
        together = [item for item in findings if item.moment is first.moment]
        where, agreeing = _locate(reference, found, first)
        lines.append(f"it begins {where}")
        lines += [f"    agrees:  {agreeing}"] if agreeing else []
        lines += [f"    differs: {first.subject}", f"             {first.text}"]
        if trait := _find_common_trait(reference, found, together):
            lines.append(f"             {trait}")
        lines += _list_rest(together[1:], f"then{_ORDER.get(first.moment, '')}", show_all)
        later = [item for item in findings if item.moment is not first.moment]
        if show_all:
            lines += [f"later: {item}" for item in later]
        elif later:
            counts = (sum(item.moment is moment for item in later) for moment in Moment)
            parts = (_PLURAL[moment].format(n) for moment, n in zip(Moment, counts, strict=True) if n)
            lines.append(f"what comes after it differs, too: {', '.join(parts)}")
    return lines + _list_disagreements(found.disagreements, show_all)


def _list_disagreements(disagreements: Sequence[Disagreement], show_all: bool) -> list[str]:
    if not disagreements:
        return []
    # As everything else, the earliest first: gradients in backward order, then what was made of them.
    gradients = [item for item in disagreements if item.what == "gradient"]
    ordered = gradients[::-1] + [item for item in disagreements if item.what != "gradient"]
    listed = ordered if show_all else ordered[:_LISTED_DISAGREEMENTS]
    title = "ranks that should hold the same, and do not:"
    return [title, *(f"    {item}" for item in listed), *_count_hidden(len(ordered) - len(listed))]


def _list_rest(rest: Sequence[ParityFinding], title: str, show_all: bool) -> list[str]:
    if not rest:
        return []
    listed = rest if show_all else rest[:_LISTED]
    lines = [f"    {item}" if show_all else f"    {item.subject} (relative {item.size:.1e})" for item in listed]
    return [f"{title}:", *lines, *_count_hidden(len(rest) - len(listed))]


def _count_hidden(number: int) -> list[str]:
    return [f"    and {number} more; --all shows them"] if number else []


# ---- where it begins


def _locate(reference: Trace, found: Trace, first: ParityFinding) -> tuple[str, str]:
    """The end of the sentence `it begins ...`, and the nearest that agrees; empty where nothing does."""
    if first.moment is Moment.FORWARD:
        return _locate_forward(reference, found, first)
    if first.moment is Moment.BACKWARD and first.is_parameter:
        return _locate_gradient(reference, found, first)
    if first.moment is Moment.BACKWARD:
        return _locate_backward(reference, found, first)
    flows = ["activations"] if reference.points else []
    if first.moment is Moment.LATER and first.iteration > reference.first_update:
        agreeing = [*flows, "losses", "gradients", *(["weights"] if found.first_weights else [])]
        return "after the first update", f"{', '.join(agreeing)} up to the first update"
    makes = "what the optimizer or the gathering of parameters makes of the gradients"
    if first.tensor in reference.untrained:
        makes = "what moves at the end of a step without a gradient (finish_step of its module)"
    places: dict[Moment, tuple[str, list[str]]] = {
        Moment.DATA: ("with the data: the ranks read other samples than one process", []),
        Moment.LOSS: ("with the loss of the tokens, or its mean over tokens, microbatches and replicas", flows),
        Moment.NORM: ("with the gradient norm", [*flows, "losses", "gradients"]),
        Moment.UPDATE: (f"with the first update: {makes}", [*flows, "losses", "gradients"]),
        Moment.LATER: (
            f"with the first update (iteration {first.iteration}): {makes}",
            [*flows, "losses", "gradients"],
        ),
    }
    where, agreeing = places[first.moment]
    return where, ", ".join(agreeing)


def _locate_forward(reference: Trace, found: Trace, first: ParityFinding) -> tuple[str, str]:
    point = reference.points[first.tensor]
    before = _find_neighbour(reference, point, -1, lambda other: not _are_siblings(point, other))
    start = "in the forward pass of the first iteration"
    if before is None:
        return f"{start}, in {_describe(found, point)}", "what the ranks read"
    border = _describe_border(found, before, point)
    if point.part == "output":
        return f"{start}, in {_describe(found, point)}{border}", before.name
    return f"{start}, between two modules{_BETWEEN[point.part]}{border}", before.name


def _locate_backward(reference: Trace, found: Trace, first: ParityFinding) -> tuple[str, str]:
    point = reference.points[first.tensor]
    after = _find_neighbour(
        reference, point, +1, lambda other: other.grads is not None and not _are_siblings(point, other)
    )
    start = "in the backward pass of the first iteration"
    if after is None:
        return f"{start}, with the gradient of the loss", "activations and losses"
    border = _describe_border(found, after, point)
    agreeing = f"activations and losses; gradient of the {after.name}"
    if after.part == "output":
        return f"{start}, in {_describe(found, after)}{border}", agreeing
    return f"{start}, between two modules{_BETWEEN[after.part]}{border}", agreeing


def _locate_gradient(reference: Trace, found: Trace, first: ParityFinding) -> tuple[str, str]:
    name = first.tensor
    placement = found.placements.get(name)
    sums = [f"its sum over {axis}" for axis in (placement.partial_grad_axes if placement else ())]
    if axes := _find_shared_axes(found, name):
        sums.append(f"the sum over {axes} of the keys and values that several ranks hold")
    sizes = found.coordinates[0] if found.coordinates else {}
    if "dp" in sizes or "cp" in sizes:
        where = found.buckets.get(name)
        sums.append("its reduction over the replicas" + (f" in {where}" if where else ""))
    # Ranks that disagree have not summed; where they agree, each may have made the same mistake.
    disagree = any(item.what == "gradient" and item.name == name for item in found.disagreements)
    causes = sums if disagree and sums else ["its product or accumulation", *sums]
    where = f"in the backward pass of the first iteration, with a weight's own gradient: {', or '.join(causes)}"
    flows = "activations and losses; the gradient of its layer's output" if reference.points else "losses"
    return where, flows


def _find_shared_axes(found: Trace, name: str) -> str:
    """Axes over which a parameter is divided so that several ranks hold one part of it; empty where there are none."""
    placement = found.placements.get(name)
    splits = placement.splits if placement is not None else ()
    shared = (s.axis for s in splits if placement is not None and s.replicated_parts(placement.full_shape[s.dim]))
    return ", ".join(shared)


def _find_neighbour(reference: Trace, point: Point, step: int, fits: Callable[[Point], bool]) -> Point | None:
    """The next point in forward order (step 1) or the one before (step -1) that fits; None at the end."""
    points = [other for other in reference.points.values() if other.module]
    index = next(i for i, other in enumerate(points) if other.name == point.name) + step
    while 0 <= index < len(points):
        if fits(points[index]):
            return points[index]
        index += step
    return None


def _are_siblings(point: Point, other: Point) -> bool:
    """Query, key and value come from one layer, none from the other."""
    return point.module == other.module and "output" not in (point.part, other.part)


def _describe(found: Trace, point: Point) -> str:
    return f"{point.module} ({found.points[point.name].what})" if point.name in found.points else point.module


def _describe_border(found: Trace, one: Point, other: Point) -> str:
    """Return where a stage of the pipeline ends between two points: who sends to whom."""
    ranks = [
        {rank for rank, _ in found.points[p.name].holders} if p.name in found.points else set() for p in (one, other)
    ]
    if not all(ranks) or ranks[0] & ranks[1]:
        return ""
    sender, receiver = (", ".join(map(str, sorted(group))) for group in ranks)
    return f"; or on the way between two stages of the pipeline: rank {sender} sends to rank {receiver}"


# ---- what they have in common


def _find_common_trait(reference: Trace, found: Trace, together: Sequence[ParityFinding]) -> str:
    """Return what sets the parameters that differ apart from those that agree; empty where nothing does."""
    parameters = [item for item in together if item.is_parameter]
    if len(parameters) < 2 or len(parameters) < len(together):
        return ""
    names = {item.tensor for item in parameters}
    factors = {f"{item.ratio:.3g}" if item.ratio is not None else "" for item in parameters}
    ends = f", each {factors.pop()} times what it should be" if len(factors) == 1 and "" not in factors else ""
    traits: list[tuple[str, Callable[[str], str]]] = [
        ("move without {}", lambda name: "" if name in reference.grads else "gradients"),
        ("are of the kind {}", lambda name: str(found.placements[name].kind)),
        ("have gradients that are summed over {}", lambda name: ", ".join(found.placements[name].partial_grad_axes)),
        ("have parts that several ranks of {} hold", lambda name: _find_shared_axes(found, name)),
        ("lie in {}", lambda name: found.buckets.get(name, "")),
        ("are divided over {}", lambda name: ", ".join(split.axis for split in found.placements[name].splits)),
    ]
    everything = reference.grads if together[0].moment is Moment.BACKWARD else reference.weights
    if names >= set(everything):
        return f"all {len(names)} of them differ{ends}"
    for text, trait in traits:
        values = {trait(name) for name in names}
        value = values.pop()
        alike = [name for name in everything if trait(name) == value]
        # A bucket is worth naming also where some of its gradients are zero and agree.
        if not values and value and (len(alike) == len(names) or "bucket" in value):
            how_many = "exactly those" if len(alike) == len(names) else f"{len(names)} of the {len(alike)}"
            return f"those that differ are {how_many} that {text.format(value)}{ends}"
    return f"the {len(names)} that differ are{ends.removeprefix(',')}" if ends else ""
