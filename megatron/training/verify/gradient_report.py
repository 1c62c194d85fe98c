# SPDX-License-Identifier: Apache-2.0
"""A page about the gradients of a run: what was compared, what differs, what each comparison can see and what not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.training.config.container import RunConfig
from megatron.training.recipes.recipe import Recipe
from megatron.training.verify.gradients import DIRECTIONS, TOLERANCE, SlopeReport, check_slopes, widen_settings
from megatron.training.verify.own_format import FormatReport, check_own_format

_LISTED = 8


def report_gradients(
    read: Callable[[], RunConfig], build: Callable[[RunConfig], Recipe], show_all: bool = False
) -> tuple[list[str], bool]:
    """Check the gradients of one step of one process: the lines to print, and whether all is as it should be.

    read: returns new settings in each call. build: the recipe of settings that are final. show_all: every difference.
    """
    config = read()
    widen_settings(config)
    slopes = check_slopes(config, build(config))
    own = check_own_format(read, build)
    listed = None if show_all else _LISTED
    return [*_describe_slopes(slopes, listed), *_describe_format(own, listed)], not slopes.errors and not own.errors


def _describe_slopes(report: SlopeReport, listed: int | None) -> list[str]:
    title = f"differences of the loss in float64, {report.tensors} tensors in {DIRECTIONS} directions: "
    if report.errors:
        lines = [f"{title}{len(report.errors)} HAVE ANOTHER GRADIENT"]
        lines += _list_all([str(error) for error in report.errors], listed)
        lines.append("  in backward order: the mistake lies between the first and what reads it")
    else:
        lines = [f"{title}all agree, to {report.largest:.1e} of a typical slope"]
    if report.unseen:
        lines.append(f"  not seen, because the gradient is zero or nearly: {', '.join(report.unseen)}")
    if report.unjudged:
        lines.append(f"  not judged, because every step changed the choice of experts: {', '.join(report.unjudged)}")
    return [
        *lines,
        f"  sees:         a gradient that is not the derivative of the loss, from {TOLERANCE:g} of a typical slope on;"
        " a wrong scale of a loss, a microbatch or a balancing loss",
        "  does not see: a loss that is wrong together with its gradient; the optimizer; what runs on a GPU only, or "
        "in other number formats only; what a detached input should have had",
    ]


def _describe_format(report: FormatReport, listed: int | None) -> list[str]:
    if report.tolerance is None:
        title = f"products in few bits ({report.dtype}), {report.products} against a reference of the same rounding: "
        lines = [f"{title}{f'{len(report.errors)} DIFFER' if report.errors else 'all agree'}"]
        lines += _list_all([f"{name}: off by {size:.1e}" for name, size in report.errors.items()], listed)
        return [
            *lines,
            "  sees:         other scales, another rounding, a product or its straight-through gradient that is "
            "another, layer by layer; of rounding at random, a mean that is another",
            "  does not see: what rounding does to the training as a whole; scales from the third step on",
        ]
    title = f"gradients in {report.dtype} against those in float64: "
    if report.errors:
        lines = [f"{title}{len(report.errors)} DIFFER"]
        lines += _list_all([f"{name}: off by {size:.1e} of its norm" for name, size in report.errors.items()], listed)
    else:
        lines = [f"{title}all agree, to {report.largest:.1e} of a tensor's norm"]
    return [
        *lines,
        f"  sees:         what is computed in {report.dtype} only, from {report.tolerance:g} of a tensor's norm on",
        "  does not see: a smaller error; a mistake that float64 has, too; random numbers (dropout), which are off",
    ]


def _list_all(items: Sequence[str], listed: int | None) -> list[str]:
    hidden = 0 if listed is None else max(0, len(items) - listed)
    more = [f"    and {hidden} more; --all shows them"] if hidden else []
    return [*(f"    {item}" for item in items[:listed]), *more]
