# SPDX-License-Identifier: Apache-2.0
"""A few random layouts on the fake device hold what the planner says; the program draws as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_device.device import build
from tests.fake_device.random_layouts import WITHIN, draw_legal, find_worst, measure_error, run

pytestmark = pytest.mark.timeout(600)


def test_random_layouts_hold_what_the_planner_says(tmp_path: Path) -> None:
    library = build(tmp_path)
    if library is None:
        pytest.skip("no C++ compiler")
    drawn = list(draw_legal(seed=9, count=5))
    for name, answer in run(library, drawn).items():
        assert isinstance(answer, list), f"{name}: {answer}"
        worst = find_worst(answer)
        assert abs(measure_error(worst)) <= WITHIN, f"{name}: {worst['peak_holders']}"
