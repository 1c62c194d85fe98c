# SPDX-License-Identifier: Apache-2.0
"""The page: a run's record as numbers for the browser, and both in one file that needs no network.

page.html draws them. What comes from a run's files reaches it as JSON in which no character can end the element it
stands in, or as escaped text; the script sets text only, never markup.
"""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.report.metrics_reader import MetricsReader
from megatron.report.run_record import RunRecord
from megatron.report.series import average, smooth, thin
from megatron.report.verdict import RECENT_ROWS, Verdict, judge

_MOST_POINTS = 1500
_LEAST_WINDOW = 5
"""Steps of which a smoothed value is the mean, at least."""
_MOST_MARKS = 400
_MOST_OTHERS = 24
_MOST_TASK_TILES = 4
_HEAT_COLUMNS = 200
_HEAT_ROWS = 256
_MOST_EVENTS = 6000
_MOST_RANKS = 32
_MOST_SAMPLES = 8
_GIB = 1 << 30


class Chart(NamedTuple):
    """A curve over iterations: its column in metrics.jsonl, how it is called, in which unit, and a factor into that."""

    column: str
    title: str
    unit: str
    factor: float = 1.0
    is_smoothed: bool = False
    starts_at_zero: bool = False


LOSSES = ("lm loss", "dpo loss")
"""What a run makes smaller, on tokens or on pairs of answers."""
CHARTS = (
    Chart("lm loss", "Loss", "nats per token", is_smoothed=True),
    Chart("dpo loss", "Loss of pairs", "", is_smoothed=True),
    Chart("lr", "Learning rate", ""),
    Chart("grad_norm", "Gradient norm", "", is_smoothed=True, starts_at_zero=True),
    Chart("tokens_per_second", "Throughput", "tokens per second", is_smoothed=True, starts_at_zero=True),
    Chart("mfu", "MFU", "% of peak", 100.0, is_smoothed=True, starts_at_zero=True),
    Chart("iteration_time_seconds", "Time of a step", "seconds", is_smoothed=True, starts_at_zero=True),
    Chart("data_seconds", "Waiting for data", "seconds a step", is_smoothed=True, starts_at_zero=True),
    Chart("peak_memory_bytes", "Peak memory, first rank", "GiB", 1 / _GIB, starts_at_zero=True),
)
_PLAIN = {"consumed_samples", "skipped", "memory_bytes", "tflops", "loss_scale", "global_batch_size"}
"""Columns that have a chart only if their values change, or none at all."""


def build_data(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Everything the page shows, as plain numbers and texts: of a few hundred kilobytes, however long the runs are."""
    verdicts = [judge(record) for record in records]
    return {
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "runs": [_describe_run(record, verdict) for record, verdict in zip(records, verdicts, strict=True)],
        "charts": _build_charts(records),
        "heat": [heat for record in records for heat in _build_heat(record)],
        "pipeline": next((_describe_pipeline(record) for record in records if record.pipeline is not None), None),
        "settings": _compare_settings(records),
    }


def render(data: Mapping[str, Any], *, is_live: bool = False) -> str:
    """The page as one HTML text. Raises nothing for any content of the files."""
    names = ", ".join(run["name"] for run in data["runs"])
    sentences = "".join(
        f"<p><b>{html.escape(run['name'])}</b>: {html.escape(run['verdict']['sentence'])}</p>" for run in data["runs"]
    )
    # In a script element only "<" can begin something else; the others are for readers that look for markup.
    content = json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    before, after = page.split("<!--data-->")
    for name, text in (
        ("title", html.escape(names)),
        ("fallback", sentences),
        ("live", json.dumps(is_live)),
    ):
        before, after = (part.replace(f"<!--{name}-->", text) for part in (before, after))
    return before + content + after


# ---- parts


def _describe_run(record: RunRecord, verdict: Verdict) -> dict[str, Any]:
    saves = [mark for mark in record.marks if mark.kind == "save"]
    others = [mark for mark in record.marks if mark.kind != "save"]
    # Of many checkpoints some are enough; what went wrong is rare, and its latest count.
    marks = [*saves[:: 1 + len(saves) // _MOST_MARKS], *others[-_MOST_MARKS:]]
    samples = record.metrics.samples[-_MOST_SAMPLES:] if record.metrics is not None else []

    def order(part: str) -> tuple[bool, float]:
        return part == "everything else", -verdict.shares[part]

    return {
        "name": record.name,
        "tiles": _list_tiles(record),
        "notes": record.notes,
        "marks": [{"kind": m.kind, "x": m.iteration, "end": m.end, "text": m.text} for m in marks],
        "samples": [{"iteration": sample.iteration, "text": sample.text} for sample in reversed(samples)],
        "ranks": sorted(_list_ranks(record), key=lambda rank: -rank["forward_ms"])[:_MOST_RANKS],
        "verdict": {
            "sentence": verdict.sentence, "cause": verdict.cause, "source": verdict.source,
            "shares": [[part, verdict.shares[part]] for part in sorted(verdict.shares, key=order)],
            "findings": [
                {"cause": f.cause, "share": f.share, "sentence": f.sentence, "flags": list(f.flags)}
                for f in verdict.findings
            ],
        },
    }  # fmt: skip


def _list_tiles(record: RunRecord) -> list[list[str]]:
    """Label and value of the numbers at the top."""
    reader, tiles = record.metrics, []
    if reader is not None and len(reader.iterations):
        target = record.setting("train_iters", 0)
        of = f" of {target:,.0f}" if target else ""
        tiles.append(["iteration", f"{reader.iterations[-1]:,.0f}{of}"])
        # Of the same steps, and in the same way, as in the verdict.
        for name, label, form, reduce in (
            ("lm loss", "loss", lambda v: f"{v:.4f}", lambda values: np.mean(values[-50:])),
            ("dpo loss", "loss of pairs", lambda v: f"{v:.4f}", lambda values: np.mean(values[-50:])),
            ("tokens_per_second", "tokens per second", lambda v: f"{v:,.0f}", np.median),
            ("mfu", "MFU", lambda v: f"{100 * v:.1f} %", np.median),
            ("peak_memory_bytes", "peak memory", lambda v: f"{v / _GIB:.2f} GiB", np.max),
        ):
            column = reader.column(name)[-RECENT_ROWS:]
            known = column[np.isfinite(column)]
            if len(known):
                tiles.append([label, form(float(reduce(known)))])
        for name, points in reader.evaluations.items():
            loss = next((loss for loss in LOSSES if loss in name), None)
            if "validation" in name and loss is not None and "final" not in name:
                tiles.insert(2, [name.replace(loss, "loss,"), f"{points[-1][1]:.4f}"])
        tiles += [[name, f"{points[-1][1]:.4f}"] for name, points in [*reader.tasks.items()][:_MOST_TASK_TILES]]
    events = [(label, sum(m.kind in kinds for m in record.marks)) for label, kinds in (
        ("checkpoints", ("save",)), ("restarts", ("restart",)), ("rollbacks", ("rollback",)),
        ("failures", ("fault", "error")), ("alerts", ("alert",)),
    )]  # fmt: skip
    return tiles + [[label, str(count)] for label, count in events if count]


def _list_ranks(record: RunRecord) -> list[dict[str, Any]]:
    return [
        {"rank": int(row["rank"]), "host": str(row.get("host", ""))[:80], "forward_ms": float(row["forward_ms"])}
        for row in record.ranks
        if all(isinstance(row.get(key), int | float) for key in ("rank", "forward_ms"))
    ]


def _build_charts(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for r in records if r.metrics for name in r.metrics.names))
    fixed = {chart.column for chart in CHARTS}
    others = [name for name in names if name not in fixed and name not in _PLAIN and " layer " not in name]
    moving = [name for name in ("global_batch_size", "loss_scale") if any(_moves(r.metrics, name) for r in records)]
    tasks = list(dict.fromkeys(name for r in records if r.metrics for name in r.metrics.tasks))[:_MOST_OTHERS]
    more = [*tasks, *moving, *others[:_MOST_OTHERS]]
    wanted = [*CHARTS, *(Chart(name, name.replace("_", " "), "") for name in more)]
    charts = []
    for number, chart in enumerate(wanted):
        curves = [curve for place, record in enumerate(records) for curve in _build_curves(chart, place, record)]
        if curves:
            charts.append({
                "id": f"{number:02d}-{re.sub('[^a-z]+', '-', chart.title.lower())}" if number < len(CHARTS)
                else f"{number:02d}-other",
                "title": chart.title, "unit": chart.unit, "zero": chart.starts_at_zero,
                "more": number >= len(CHARTS), "curves": curves,
            })  # fmt: skip
    return charts


def _moves(reader: MetricsReader | None, name: str) -> bool:
    column = reader.column(name) if reader is not None else np.empty(0)
    known = column[np.isfinite(column)]
    return len(known) > 0 and bool((known != known[0]).any())


def _build_curves(chart: Chart, place: int, record: RunRecord) -> list[dict[str, Any]]:
    """The curve of a run, in segments: what was done again is apart. None where the column has no value."""
    segments, smoothed = [], []
    if record.redone is not None:
        # What restarts have dropped from the file of metrics; a file may hold the rests of several attempts.
        lost = record.redone
        edges = [0, *lost.breaks, len(lost.iterations)]
        x, y = np.array(lost.iterations), lost.column(chart.column) * chart.factor
        segments += [
            {"redone": True, "points": thin(x[a:b], y[a:b], _MOST_POINTS // 4)}
            for a, b in zip(edges, edges[1:], strict=False)
            if np.isfinite(y[a:b]).any()
        ][-8:]
    reader = record.times if chart.column == "data_seconds" else record.metrics
    if reader is not None:
        x, y, redone = np.array(reader.iterations), reader.column(chart.column) * chart.factor, reader.find_redone()
        edges = sorted({0, *reader.breaks, *(int(i) + 1 for i in np.flatnonzero(redone[1:] != redone[:-1])), len(x)})
        for a, b in zip(edges, edges[1:], strict=False):
            if np.isfinite(y[a:b]).any():
                # One more point, so that what was kept and what was done again are joined.
                begin = max(0, a - 1) if a not in reader.breaks and redone[a] else a
                most = max(8, _MOST_POINTS * (b - a) // len(x))
                segments.append({"redone": bool(redone[a]), "points": thin(x[begin:b], y[begin:b], most)})
        count = int((~redone).sum())
        window = max(_LEAST_WINDOW, count // 50)
        if chart.is_smoothed and count >= 4 * window:
            smoothed = thin(x[~redone], smooth(y[~redone], window), _MOST_POINTS // 2)
    evaluations: list[dict[str, Any]] = []
    if record.metrics is not None:
        of_loss = record.metrics.evaluations.items() if chart.column in LOSSES else ()
        evaluated = {name: points for name, points in of_loss if name.startswith(chart.column)}
        evaluated |= {name: points for name, points in record.metrics.tasks.items() if name == chart.column}
        evaluations = [
            {"name": name, "points": points[:: 1 + len(points) // 500]} for name, points in evaluated.items()
        ]
    if not segments and not evaluations:
        return []
    return [{"run": place, "segments": segments, "smooth": smoothed, "evaluations": evaluations}]


def _build_heat(record: RunRecord) -> list[dict[str, Any]]:
    """Maps of what differs by layer, such as expert_load: a row for a layer, a column for a range of iterations."""
    reader = record.metrics
    if reader is None:
        return []
    families: dict[str, list[tuple[int, str]]] = {}
    for name in reader.names:
        family, separator, number = name.rpartition(" layer ")
        if separator and number.isdecimal() and len(number) < 9:
            families.setdefault(family, []).append((int(number), name))
    found = []
    for family, layers in families.items():
        kept = ~reader.find_redone()
        rows, labels = [], []
        for place, name in sorted(layers)[:_HEAT_ROWS]:
            values = reader.column(name)[kept]
            known = np.isfinite(values)
            if known.any():
                rows.append(average(list(values[known]), min(_HEAT_COLUMNS, int(known.sum()))))
                labels.append(f"layer {place}")
        widths = {len(row) for row in rows}
        if len(widths) == 1:
            iterations = np.array(reader.iterations)[kept]
            found.append({
                "run": record.name, "title": family.replace("_", " "), "labels": labels,
                "first": float(iterations[0]), "last": float(iterations[-1]),
                "cells": [[None if math.isnan(v) else round(v, 5) for v in row] for row in rows],
            })  # fmt: skip
    return found


def _describe_pipeline(record: RunRecord) -> dict[str, Any]:
    step = record.pipeline
    assert step is not None
    return {
        "run": record.name, "iteration": step.iteration, "schedule": step.schedule, "stages": step.shape.stages,
        "makespan": step.timeline.makespan, "bubble": step.timeline.bubble,
        "events": [
            [event.rank, event.action.kind, event.action.microbatch, event.action.chunk, event.start, event.end]
            for event in step.timeline.events[:_MOST_EVENTS]
        ],
    }  # fmt: skip


def _compare_settings(records: Sequence[RunRecord]) -> list[list[str]]:
    """Rows of a setting and its values in each run, where they differ."""
    if len(records) < 2:
        return []
    names = list(dict.fromkeys(name for record in records for name in record.settings))
    rows = [[name, *(_format(record.settings.get(name)) for record in records)] for name in names]
    # An address of a service may hold a key.
    return [row for row in rows if len(set(row[1:])) > 1 and "webhook" not in row[0]][:200]


def _format(value: Any) -> str:
    return "" if value is None else str(value)[:200]
