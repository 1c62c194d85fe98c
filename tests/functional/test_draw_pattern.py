# SPDX-License-Identifier: Apache-2.0
"""tools/draw_pattern.py as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def draw(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "draw_pattern.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_stages_have_their_layers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "pattern.svg"
    done = draw("M-M*-|MEM*E/*E/*E", "--output", picture)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == "stage 0 M - M * - layers 1 to 5".split()
    assert lines[1].split() == "stage 1 M E M * E layers 6 to 10".split()
    assert lines[2].startswith("2 x prediction") and "M  mamba, keeps one state: 4" in lines
    assert picture.read_text().count("<path") > 12


def test_a_letter_without_a_kind_is_one_sentence() -> None:
    done = draw("M-Q")
    assert done.returncode == 2 and "has the letter 'Q'" in done.stderr and "Traceback" not in done.stderr
