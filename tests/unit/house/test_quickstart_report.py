# SPDX-License-Identifier: Apache-2.0
"""The picture at the end of the quickstart: raw and smoothed losses, validation, and what the axes count."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROGRAM = Path(__file__).parents[3] / "examples" / "quickstart" / "report.py"


@pytest.fixture(scope="module")
def report() -> Any:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("quickstart_report", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where dataclasses look for their module
        spec.loader.exec_module(module)
    return module


def write_metrics(directory: Path, losses: list[float | None]) -> None:
    rows: list[dict[str, Any]] = [
        {"iteration": i, "lm loss": loss, "tokens_per_second": 4096.0, "iteration_time_seconds": 0.5}
        for i, loss in enumerate(losses, 1)
    ]
    rows.insert(2, {"iteration": 2, "split": "validation", "eval": {"lm loss": 7.5}})
    rows.append({"iteration": len(losses), "split": "test", "eval": {"lm loss": 1.0}, "final": True})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_running_means_are_centred_and_do_not_lag(report: Any) -> None:
    line = [float(value) for value in range(20)]
    # A straight line is its own running mean; a lagging one would lie beside it.
    assert report.smooth(line, 5)[:18] == pytest.approx(line[:18])
    noisy = np.array(line) + np.tile([1.0, -1.0], 10)
    assert np.abs(report.smooth(noisy, 5)[2:-2] - line[2:-2]).max() < 0.25
    assert report.smooth([3.0], 5) == pytest.approx([3.0])
    assert [report.compute_window(points) for points in (1, 100, 300, 1000)] == [5, 5, 13, 41]


def test_the_picture_has_both_curves(report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    losses: list[float | None] = [8.0 - 0.05 * i + (-1) ** i for i in range(100)]
    losses[50] = None  # not a number: a skipped iteration
    write_metrics(tmp_path, losses)
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    report.draw(tmp_path / "loss.png", report.read_metrics(tmp_path), 7.0)
    (axes,) = figures[0].axes
    raw, smoothed, validation, entropy = axes.lines
    known = [loss for loss in losses if loss is not None]
    assert list(raw.get_ydata()) == known and len(raw.get_xdata()) == 99
    assert list(smoothed.get_ydata()) == pytest.approx(list(report.smooth(known, 5)))
    assert np.abs(np.diff(smoothed.get_ydata())[5:-5]).max() < np.abs(np.diff(raw.get_ydata())).max() / 3
    assert raw.get_linewidth() < smoothed.get_linewidth() and raw.get_alpha() < 0.5
    assert list(zip(validation.get_xdata(), validation.get_ydata(), strict=True)) == [(2, 7.5)], "not the test set's"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "training, each iteration", "training, mean over 5 iterations", "validation",
        "unigram entropy of the corpus, 7.00",
    ]  # fmt: skip
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("iteration (2,048 tokens each)", "loss (nats per token)")
    assert entropy.get_ydata()[0] == 7.0 and (tmp_path / "loss.png").stat().st_size > 5000
