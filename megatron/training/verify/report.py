"""A page about a layout that is another run: where it begins, what follows from it, who disagrees with whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.training.verify.activations import Point
from megatron.training.verify.comparison import Finding, Moment
from megatron.training.verify.parity import Trace

_LISTED, _LISTED_DISAGREEMENTS = 8, 3
_ORDER = {Moment.FORWARD: " in forward order", Moment.BACKWARD: " in backward order"}
_PLURAL = {
    Moment.DATA: "tensors that were read",
    Moment.FORWARD: "activations",
    Moment.LOSS: "losses of the first iteration",
    Moment.BACKWARD: "gradients",
    Moment.NORM: "gradient norm",
    Moment.UPDATE: "weights after the first iteration",
    Moment.LATER: "losses and weights of later iterations",
}


def write_report(reference: Trace, found: Trace, findings: Sequence[Finding], *, show_all: bool = False) -> list[str]:
    """Lines about what differs, nearest to its cause first; empty where nothing does.

    findings: of `find_differences`. show_all: every one of them in full, instead of the first ones.
    """
    lines = []
    if findings:
        first = findings[0]
        together = [item for item in findings if item.moment is first.moment]
        lines += [f"it begins {text}" for text in _locate(reference, found, first)]
        lines.append(f"first{_ORDER.get(first.moment, '')}: {first}")
        if trait := _find_common_trait(reference, found, together):
            lines.append(trait)
        lines += _list_rest(together[1:], f"then{_ORDER.get(first.moment, '')}", show_all)
        later = [item for item in findings if item.moment is not first.moment]
        if show_all:
            lines += [f"later: {item}" for item in later]
        elif later:
            counts = (sum(item.moment is moment for item in later) for moment in Moment)
            parts = (f"{n} {_PLURAL[moment]}" for moment, n in zip(Moment, counts, strict=True) if n)
            lines.append(f"what comes after it differs, too: {', '.join(parts)}")
    if found.disagreements:
        listed = found.disagreements if show_all else found.disagreements[:_LISTED_DISAGREEMENTS]
        lines.append("ranks that should hold the same, and do not:")
        lines += [f"    {item}" for item in listed]
        lines += _count_hidden(len(found.disagreements) - len(listed))
    return lines


def _list_rest(rest: Sequence[Finding], title: str, show_all: bool) -> list[str]:
    if not rest:
        return []
    listed = rest if show_all else rest[:_LISTED]
    lines = [f"    {item}" if show_all else f"    {item.subject} (relative {item.size:.1e})" for item in listed]
    return [f"{title}:", *lines, *_count_hidden(len(rest) - len(listed))]


def _count_hidden(number: int) -> list[str]:
    return [f"    and {number} more; --all shows them"] if number else []


# ---- where it begins


def _locate(reference: Trace, found: Trace, first: Finding) -> list[str]:
    """The end of the sentence `it begins ...`."""
    if first.moment is Moment.FORWARD:
        return [_locate_forward(reference, found, first)]
    if first.moment is Moment.BACKWARD and not first.is_parameter:
        return [_locate_backward(reference, found, first)]
    if first.moment is Moment.BACKWARD:
        return [_locate_gradient(reference, found, first)]
    followed = "activations and losses" if reference.points else "losses"
    kept = " and weights" if found.first_weights else ""
    places = {
        Moment.DATA: "with the data: the ranks read other samples than one process",
        Moment.LOSS: "with the loss: "
        + ("activations agree, " if reference.points else "")
        + "the loss of the tokens or its mean over tokens, microbatches and replicas does not",
        Moment.NORM: f"with the gradient norm: {followed} and gradients of the first iteration agree",
        Moment.UPDATE: f"with the first update: {followed} and gradients agree, what is made of them does not",
        Moment.LATER: f"after the first update: {followed} and gradients{kept} of the first iteration agree",
    }
    return [places[first.moment]]


def _locate_forward(reference: Trace, found: Trace, first: Finding) -> str:
    point = reference.points[first.tensor]
    before = _find_neighbour(reference, point, -1, lambda other: not _are_siblings(point, other))
    text = f"in the forward pass of the first iteration, in {_describe(found, point)}"
    if before is None:
        return f"{text}: what the ranks read agrees"
    return f"{text}: the {before.name} agrees{_describe_border(found, before, point)}"


def _locate_backward(reference: Trace, found: Trace, first: Finding) -> str:
    point = reference.points[first.tensor]
    after = _find_neighbour(
        reference, point, +1, lambda other: other.grads is not None and not _are_siblings(point, other)
    )
    if after is None:
        return (
            "in the backward pass of the first iteration, with the gradient of the loss: activations and losses agree"
        )
    return (
        f"in the backward pass of the first iteration, in {_describe(found, after)}: activations and losses agree, "
        f"and so does the gradient of the {after.name}{_describe_border(found, after, point)}"
    )


def _locate_gradient(reference: Trace, found: Trace, first: Finding) -> str:
    name, placement = first.tensor, found.placements.get(first.tensor)
    agreeing = (
        "activations, losses and the gradients that come into its layer agree" if reference.points else "losses agree"
    )
    sums = [f"its sum over {axis}" for axis in (placement.partial_grad_axes if placement else ())]
    sizes = found.coordinates[0] if found.coordinates else {}
    if "dp" in sizes or "cp" in sizes:
        where = found.buckets.get(name)
        sums.append("its reduction over the replicas" + (f" in {where}" if where else ""))
    where = " or ".join(["its product or accumulation", *sums])
    return f"in the backward pass of the first iteration, with the gradient of {name} itself ({where}): {agreeing}"


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
    """Where a stage of the pipeline ends between two points: who sends to whom."""
    ranks = [
        {rank for rank, _ in found.points[p.name].holders} if p.name in found.points else set() for p in (one, other)
    ]
    if not all(ranks) or ranks[0] & ranks[1]:
        return ""
    sender, receiver = (", ".join(map(str, sorted(group))) for group in ranks)
    return f"; between the two, stages of the pipeline meet: rank {sender} sends to rank {receiver}"


# ---- what they have in common


def _find_common_trait(reference: Trace, found: Trace, together: Sequence[Finding]) -> str:
    """What sets the parameters that differ apart from those that agree; empty where nothing does."""
    parameters = [item for item in together if item.is_parameter]
    if len(parameters) < 2 or len(parameters) < len(together):
        return ""
    names = {item.tensor for item in parameters}
    factors = {f"{item.ratio:.3g}" if item.ratio is not None else "" for item in parameters}
    ends = f", each {factors.pop()} times what it should be" if len(factors) == 1 and "" not in factors else ""
    traits: list[tuple[str, Callable[[str], str]]] = [
        ("are of the kind {}", lambda name: str(found.placements[name].kind)),
        ("lie in {}", lambda name: found.buckets.get(name, "")),
        ("are summed over {}", lambda name: ", ".join(found.placements[name].partial_grad_axes)),
        ("are divided over {}", lambda name: ", ".join(s.axis for s in found.placements[name].splits)),
    ]
    everything = reference.grads if together[0].moment is Moment.BACKWARD else reference.weights
    if names >= set(everything):
        return f"all {len(names)} differ{ends}"
    for text, trait in traits:
        values = {trait(name) for name in names}
        if len(values) == 1 and (value := values.pop()):
            alike = [name for name in everything if trait(name) == value]
            how_many = "exactly those" if len(alike) == len(names) else f"{len(names)} of the {len(alike)}"
            return f"those that differ are {how_many} that {text.format(value)}{ends}"
    return f"the {len(names)} that differ are{ends.removeprefix(',')}" if ends else ""
