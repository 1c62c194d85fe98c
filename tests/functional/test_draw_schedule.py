# SPDX-License-Identifier: Apache-2.0
"""tools/draw_schedule.py as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def draw(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "draw_schedule.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")


def test_terminal_drawing() -> None:
    result = draw("--schedule", "1f1b", "--stages", "3", "--microbatches", "3")
    assert result.returncode == 0, result.stderr
    title, *ranks = result.stdout.splitlines()
    assert title == "1f1b, 3 stages, 3 microbatches: 15 time units, 40.0 % idle, at most 3 microbatches in flight"
    assert ranks == [
        "rank 0  F0 F1 F2 ············B0--- ···B1--- ···B2---   peak 3",
        "rank 1  ···F0 F1 ······B0--- F2 B1--- ···B2--- ······  peak 2",
        "rank 2  ······F0 B0--- F1 B1--- F2 B2--- ············  peak 1",
    ]


def test_backwards_beside_forwards() -> None:
    drawn = draw("--stages", "2", "--microbatches", "2", "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
    assert drawn.stdout.splitlines() == [
        "1f1b side by side, 2 stages, 2 microbatches: 9 time units, 33.3 % idle, at most 2 microbatches in flight",
        "rank 0  F0------ F1------ ···························B0+W0------------ B1+W1------------   peak 2",
        "rank 1  ·········F0------ F1+B0+W0------------------ B1+W1------------ ··················  peak 2",
    ]


def test_all_schedules_with_their_closed_forms() -> None:
    """S = 4 stages, M = 8 microbatches, V = 2 chunks."""
    titles = [line for line in draw("--schedule", "all").stdout.splitlines() if "% idle" in line]
    idle = {title.split(",")[0]: float(title.split("units, ")[1].split(" %")[0]) for title in titles}
    assert idle == {
        "1f1b": round(100 * 3 / (8 + 3), 1),
        "gpipe": round(100 * 3 / (8 + 3), 1),
        "interleaved": round(100 * 1.5 / (8 + 1.5), 1),
        "zb-h1": round(100 * 3 / (24 + 3), 1),
        "zb-v": round(100 * 3 / (48 + 3), 1),
    }


def makespan(*arguments: str) -> float:
    return float(draw(*arguments).stdout.split(": ")[1].split(" time")[0])


def test_slow_links_cost_time() -> None:
    """Of one microbatch: there and back once."""
    assert makespan("--stages", "2", "--microbatches", "1") == 6
    assert makespan("--stages", "2", "--microbatches", "1", "--transfer-cost", "0.5") == 7


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"schedule{suffix}"
    result = draw("--schedule", "all", "--stages", "2", "--microbatches", "3", "--group-size", "3", "--output", path)
    assert result.returncode == 0, result.stderr
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--stages 0", "--stages 0 is out of range; give a number from 1 to 256"),
        ("--weight-cost 0", "--weight-cost 0.0 is out of range"),
        ("--schedule zb-v --overlap-moe-expert-parallel-comm", "zb-v; use 1f1b or interleaved"),
        ("--delay-wgrad-compute", "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm"),
        ("--schedule zb-v --chunks 3", "--chunks 3 does not fit --schedule zb-v, which has 2"),
        ("--schedule interleaved --microbatches 9", "makes 8 or 12 microbatches"),
        ("--microbatches 500", "use fewer microbatches, or --output FILE.svg"),
        ("--output /nowhere/schedule.svg", "cannot be written"),
    ],
)
def test_what_cannot_be_drawn(arguments: str, sentence: str) -> None:
    if "--output" in arguments:
        pytest.importorskip("matplotlib")
    result = draw(*arguments.split())
    assert result.returncode == 2
    assert sentence in result.stderr and "Traceback" not in result.stderr
