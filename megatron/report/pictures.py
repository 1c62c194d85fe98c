# SPDX-License-Identifier: Apache-2.0
"""The page's drawings as PNG files, by matplotlib: its curves with what happened, the maps by layer, the pipeline."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_MARKS = {
    "restart": ("tab:purple", "--"), "rollback": ("tab:purple", ":"), "fault": ("tab:red", "-"),
    "error": ("tab:red", "-"), "alert": ("tab:orange", "-"),
}  # fmt: skip
"""Kind of event -> colour and dashes of its line."""
_ACTIONS = {"F": ("tab:blue", "forward"), "B": ("tab:orange", "backward"), "W": ("tab:green", "weight gradient")}
_MOST_LABELS = 40


def write_pictures(data: Mapping[str, Any], folder: Path, pyplot: Any) -> list[Path]:
    """Write each drawing of the page's data into the folder. Raises OSError."""
    written = []
    for name, figure in _draw_all(data, pyplot):
        path = folder / f"{name}.png"
        # A text in dollars would be taken for a formula, and a wrong one would end the program.
        for text in figure.findobj(lambda artist: hasattr(artist, "set_parse_math")):
            text.set_parse_math(False)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written


def _draw_all(data: Mapping[str, Any], pyplot: Any) -> Iterator[tuple[str, Any]]:
    for chart in data["charts"]:
        figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
        _draw_chart(axes, chart, data["runs"])
        yield chart["id"], figure
    for number, heat in enumerate(data["heat"]):
        figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.2 * len(heat["labels"])), layout="constrained")
        _draw_heat(axes, heat)
        yield f"layers-{number:02d}-{re.sub('[^a-z]+', '-', heat['title'].lower())[:40]}", figure
    if data["pipeline"] is not None:
        figure, axes = pyplot.subplots(figsize=(11, 1.4 + 0.4 * data["pipeline"]["stages"]), layout="constrained")
        _draw_pipeline(axes, data["pipeline"])
        yield "pipeline", figure


def _draw_chart(axes: Any, chart: Mapping[str, Any], runs: list[Any]) -> None:
    def plot(points: Any, label: str | None, **style: Any) -> None:
        known = [(x, math.nan if y is None else y) for x, y in points]
        axes.plot(*zip(*known, strict=True), label=label, **style)

    for curve in chart["curves"]:
        number, name = curve["run"], runs[curve["run"]]["name"]
        color = f"C{number}"
        for mark in runs[number]["marks"]:
            if mark["kind"] in _MARKS:
                paint, dashes = _MARKS[mark["kind"]]
                axes.axvline(mark["x"], color=paint, linestyle=dashes, linewidth=1, alpha=0.6, label=mark["kind"])
            elif mark["kind"] == "save":
                axes.plot([mark["x"]], [0.0], "|", color=color, transform=axes.get_xaxis_transform(), markersize=9)
        for segment in curve["segments"]:
            style, more = (":", ", done again") if segment["redone"] else ("-", "")
            faint = 0.4 if curve["smooth"] else 1.0
            plot(segment["points"], name + more, linestyle=style, linewidth=1, alpha=faint, color=color)
        if curve["smooth"]:
            plot(curve["smooth"], f"{name}, smoothed", linewidth=2, color=color)
        for evaluation in curve["evaluations"]:
            plot(evaluation["points"], f"{name}, {evaluation['name']}", linestyle="", marker="D", color=color,
                 markerfacecolor="white")  # fmt: skip
    axes.set(xlabel="iteration", title=chart["title"], ylabel=chart["unit"])
    axes.grid(alpha=0.3)
    # Each label once: a run has many stretches and events of a kind.
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels[::-1], handles[::-1], strict=True))
    axes.legend(list(once.values())[::-1], list(once)[::-1], fontsize="small")


def _draw_heat(axes: Any, heat: Mapping[str, Any]) -> None:
    cells = [[math.nan if cell is None else cell for cell in row] for row in heat["cells"]]
    labels = heat["labels"]
    extent = (heat["first"] - 0.5, heat["last"] + 0.5, len(labels) - 0.5, -0.5)
    image = axes.imshow(cells, aspect="auto", cmap="cividis", interpolation="nearest", extent=extent)
    shown = range(0, len(labels), 1 + len(labels) // _MOST_LABELS)
    axes.set_yticks(shown, [labels[place] for place in shown])
    axes.set(xlabel="iteration", title=f"{heat['title']}, {heat['run']}")
    axes.figure.colorbar(image, ax=axes)


def _draw_pipeline(axes: Any, pipeline: Mapping[str, Any]) -> None:
    for kind, (paint, name) in _ACTIONS.items():
        shown = [event for event in pipeline["events"] if event[1] == kind]
        if shown:
            stages, starts = [event[0] for event in shown], [event[4] for event in shown]
            widths = [event[5] - event[4] for event in shown]
            axes.barh(stages, widths, left=starts, height=0.8, color=paint, edgecolor="white", label=name)
    axes.set_yticks(range(pipeline["stages"]), [f"stage {stage}" for stage in range(pipeline["stages"])])
    axes.invert_yaxis()
    title = f"{pipeline['schedule']}, iteration {pipeline['iteration']}: idle {pipeline['bubble']:.0%}"
    axes.set(xlabel="milliseconds", title=title)
    axes.legend(fontsize="small")
