# SPDX-License-Identifier: Apache-2.0
"""The page of a run: what is in it, what a hostile or damaged directory does to it, and that the run is left alone."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.cli.report import main
from megatron.core.errors import ConfigError
from megatron.report.live import build_server
from megatron.report.page import build_data, render
from megatron.report.run_record import open_runs
from megatron.report.series import smooth, thin

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\u2028\"'&"


def build_row(iteration: int, **more: Any) -> dict[str, Any]:
    return {
        "iteration": iteration, "lm loss": 10 / (1 + iteration / 50), "grad_norm": 1.0, "lr": 1e-4, "skipped": False,
        "iteration_time_seconds": 0.5, "tokens_per_second": 1e4, "mfu": 0.4, "peak_memory_bytes": 2**30, **more,
    }  # fmt: skip


def write_lines(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def read_data(*roots: Path) -> dict[str, Any]:
    data = build_data(open_runs(list(roots)))
    # What a browser does with the page: find the element, and parse what is in it.
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', render(data), re.S)
    assert text is not None
    assert json.loads(text[1]) == json.loads(json.dumps(data))
    return data


def find_chart(data: dict[str, Any], title: str) -> dict[str, Any]:
    return next(chart for chart in data["charts"] if chart["title"] == title)


def test_a_run_with_all_its_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rows = [build_row(i, **{f"expert_load layer {n}": n + 0.1 for n in (1, 2)}) for i in range(1, 41)]
    rows.append({"iteration": 40, "split": "validation", "eval": {"lm loss": 5.5}, "generated": "once upon"})
    rows.append({"iteration": 40, "split": "validation", "eval": {"lm loss": 5.0}, "final": True})
    write_lines(run / "metrics" / "metrics.jsonl", rows)
    write_lines(run / "metrics" / "metrics.redone.jsonl", [build_row(i, **{"lm loss": 9.0}) for i in range(21, 31)])
    write_lines(run / "metrics" / "events.jsonl", [
        {"event": "start", "iteration": 0, "text": "", "settings": {"training": {"train_iters": 40}}},
        {"event": "error", "iteration": 30, "text": "the same"}, {"event": "restart", "iteration": 20, "text": "again"},
        {"event": "alert", "iteration": 33, "text": "spike"},
        {"event": "ranks", "iteration": 40, "ranks": [{"rank": 3, "host": "h", "forward_ms": 7.5, "data_ms": 0.1}]},
    ])  # fmt: skip
    write_lines(run / "save" / "failures.jsonl", [{"attempt": 1, "iteration": 31, "sentence": "disk", "settings": "x"}])
    write_lines(run / "save" / "ledger.jsonl", [
        {"iterations": [1, 30], "samples": [0, 9], "skipped": None},
        {"iterations": [31, 32], "samples": [10, 12], "skipped": "NaN"},
    ])  # fmt: skip
    (run / "save" / "iter_0000020").mkdir()
    data = read_data(run)
    (found,) = data["runs"]
    marks = {mark["kind"]: mark for mark in found["marks"]}
    assert set(marks) == {"start", "restart", "alert", "fault", "skip", "save"}
    assert marks["fault"]["x"] == 31 and "disk" in marks["fault"]["text"]
    assert (marks["skip"]["x"], marks["skip"]["end"], marks["save"]["x"]) == (31, 32, 20)
    assert found["samples"] == [{"iteration": 40, "text": "once upon"}]
    assert found["ranks"][0]["rank"] == 3
    (loss,) = find_chart(data, "Loss")["curves"]
    lost, kept = loss["segments"]
    assert lost["redone"] and [x for x, _ in lost["points"]] == list(range(21, 31))
    assert not kept["redone"] and kept["points"][0] == (1.0, pytest.approx(10 / 1.02))
    assert loss["evaluations"] == [
        {"name": "lm loss validation", "points": [(40, 5.5)]},
        {"name": "lm loss validation-final", "points": [(40, 5.0)]},
    ]
    assert len(loss["smooth"]) == 40 and ["loss, validation", "5.5000"] in found["tiles"]
    (heat,) = data["heat"]
    assert heat["labels"] == ["layer 1", "layer 2"] and heat["cells"][1] == pytest.approx([2.1] * 40)
    assert ["iteration", "40 of 40"] in found["tiles"] and ["restarts", "1"] in found["tiles"]


def test_iterations_done_again_in_one_file(tmp_path: Path) -> None:
    """A rollback within a process appends them: what it undid is drawn apart, and does not count in the mean."""
    rows = [build_row(i, **{"lm loss": 100.0 if i > 5 else 1.0}) for i in range(1, 11)]
    write_lines(tmp_path / "metrics.jsonl", rows + [build_row(i, **{"lm loss": 1.0}) for i in range(6, 13)])
    (loss,) = find_chart(read_data(tmp_path), "Loss")["curves"]
    spans = [(s["redone"], s["points"][0][0], s["points"][-1][0]) for s in loss["segments"]]
    assert spans == [(False, 1.0, 5.0), (True, 5.0, 10.0), (False, 6.0, 12.0)]
    for run in open_runs([tmp_path]):
        assert run.metrics is not None and run.metrics.find_redone().sum() == 5


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    run = tmp_path / "a<b>&\"x'"
    write_lines(run / "metrics.jsonl", [
        {"iteration": 1, HOSTILE: 3.0, f"{HOSTILE} layer 1": 1.0, "lm loss": 2.0},
        {"iteration": 2, "split": HOSTILE, "eval": {HOSTILE: 1.0}, "generated": HOSTILE},
    ])  # fmt: skip
    write_lines(run / "events.jsonl", [
        {"event": HOSTILE, "iteration": 1, "text": HOSTILE},
        {"event": "start", "iteration": 0, "settings": {HOSTILE: {HOSTILE: HOSTILE}}},
        {"event": "ranks", "iteration": 1, "ranks": [{"rank": 1, "host": HOSTILE, "forward_ms": 1.0}]},
    ])  # fmt: skip
    write_lines(run / "failures.jsonl", [{"attempt": HOSTILE, "iteration": 1, "sentence": HOSTILE, "settings": ""}])
    data = read_data(run, run)
    page = render(data)
    own = render(build_data([]))
    # As many elements that a parser opens as the page of nothing has, and none of the texts' own.
    assert page.count("<script") == own.count("<script") and page.count("</script") == own.count("</script")
    assert "<img" not in page and "onerror=alert(1)>" not in page and "a<b>" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", page)


@pytest.mark.parametrize(
    "lines",
    [
        ["garbage", "[1]", '{"iteration": "3"}', '{"iteration": NaN}', '{"iteration": 1e999}', "[" * 9_999, "\x00\xff"],
        [{"iteration": 1, "lm loss": None}, {"iteration": 2, "lm loss": "x"}, {"iteration": 3, "lm loss": 10**400}],
        [{"iteration": 5, "eval": 3}, {"iteration": 5, "eval": {"lm loss": None}, "split": 4}, {"iteration": 0}],
        [{"iteration": -5, "lm loss": 1e308}, {"iteration": -5, "lm loss": -1e299}, {"iteration": 2.5, "lm loss": 1}],
        [],
    ],
)  # fmt: skip
def test_damaged_metrics(lines: list[Any], tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [*lines])
    for name in ("events.jsonl", "times.jsonl", "failures.jsonl", "ledger.jsonl", "stage-0.jsonl", "rank-0.json.gz"):
        write_lines(tmp_path / name, [*lines, {"event": 3}, {"iterations": [1], "skipped": 2}])
    data = read_data(tmp_path)
    assert data["runs"][0]["notes"]


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for name, words in (("empty", "holds no metrics.jsonl"), ("absent", "does not exist")):
        with pytest.raises(ConfigError, match=words):
            open_runs([tmp_path / name])
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path / "empty")])
    assert main() == 2
    assert capsys.readouterr().err.startswith("error: ")
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path), "--port", "70000"])
    assert main() == 2
    (tmp_path / "saves" / "iter_0000007").mkdir(parents=True)
    assert read_data(tmp_path / "saves")["runs"][0]["marks"][0]["x"] == 7


def test_the_run_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = tmp_path / "run", tmp_path / "out.html"
    write_lines(run / "metrics.jsonl", [build_row(i, **{"$expert_load layer 1": 1.0}) for i in range(1, 9)])
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*")}
    monkeypatch.setattr("sys.argv", ["report", str(run), "--output", str(output)])
    assert main() == 0
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*")} == before
    assert output.read_text().startswith("<!doctype html>")
    assert f"page: {output}" in capsys.readouterr().out
    pictures = sorted((tmp_path / "out_png").iterdir())
    assert len(pictures) == 8 and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    monkeypatch.setattr("sys.argv", ["report", str(run), "--no-png", "--output", str(tmp_path / "no" / "out.html")])
    assert main() != 0 and "cannot be written" in capsys.readouterr().err


def test_a_growing_file_is_read_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    write_lines(file, [build_row(1)])
    (run,) = open_runs([tmp_path])
    assert run.metrics is not None
    with file.open("a") as stream:
        stream.write(json.dumps(build_row(2)) + "\n" + json.dumps(build_row(3))[:20])
    run.refresh()
    assert list(run.metrics.iterations) == [1, 2] and run.metrics.is_cut
    with file.open("a") as stream:
        stream.write(json.dumps(build_row(3))[20:] + "\n")
    run.refresh()
    assert list(run.metrics.iterations) == [1, 2, 3] and not run.metrics.unreadable
    # A restart writes the file anew: what was read before is forgotten.
    write_lines(tmp_path / "new", [build_row(1)])
    os.replace(tmp_path / "new", file)
    run.refresh()
    assert list(run.metrics.iterations) == [1]


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    for name, width in (("a", 1), ("b", 2)):
        write_lines(tmp_path / name / "metrics.jsonl", [build_row(i) for i in range(1, 4)])
        settings = {"model": {"hidden_size": width, "num_layers": 2}, "logger": {"alert_webhook": name}}
        write_lines(tmp_path / name / "events.jsonl", [{"event": "start", "iteration": 0, "settings": settings}])
    for data in (read_data(tmp_path / "a", tmp_path / "b"), read_data(tmp_path)):
        assert [run["name"] for run in data["runs"]] == ["a", "b"]
        assert [curve["run"] for curve in find_chart(data, "Loss")["curves"]] == [0, 1]
        assert data["settings"] == [["model.hidden_size", "1", "2"]]


def test_many_points_are_thinned_and_peaks_stay(tmp_path: Path) -> None:
    x = np.arange(1.0, 200_001.0)
    y = np.sin(x / 1000)
    y[123_456], y[7], y[50_000:50_003] = 50.0, -50.0, math.nan
    points = thin(x, y, 1500)
    assert len(points) <= 1501
    assert {(123_457.0, 50.0), (8.0, -50.0)} <= set(points) and any(value is None for _, value in points)
    assert smooth(np.array([1.0, 3.0, math.nan, 5.0, 9.0]), 3) == pytest.approx([1.0, 2.0, 4.0, 7.0, 9.0])
    write_lines(tmp_path / "metrics.jsonl", [build_row(i) for i in range(1, 20_001)])
    assert len(render(read_data(tmp_path))) < 500_000


def test_live_follows_and_answers_nobody_else(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [build_row(1)])
    server = build_server(open_runs([tmp_path]), 0)
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def fetch(path: str, **headers: str) -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())

    try:
        assert "const LIVE = true;" in fetch("/")
        write_lines(tmp_path / "metrics.jsonl", [build_row(i) for i in range(1, 6)])
        assert ["iteration", "5"] in json.loads(fetch("/data.json"))["runs"][0]["tiles"]
        for path, headers in (
            ("/../metrics.jsonl", {}),
            ("/metrics.jsonl", {}),
            ("/", {"Host": f"evil.example:{port}"}),
        ):
            with pytest.raises(urllib.error.HTTPError):
                fetch(path, **headers)
    finally:
        server.shutdown()
        server.server_close()
