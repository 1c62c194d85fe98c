# SPDX-License-Identifier: Apache-2.0
"""The ledger of consumed samples, and the comparison of a result with itself; runs are in tests/faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.rerun.ledger import Ledger
from megatron.training.rerun.validation import compare
from megatron.training.run import PassedOver


def test_results_are_compared_as_upstream_does() -> None:
    nan, inf = float("nan"), float("inf")
    assert [compare(1.0, 1.0), compare(nan, nan), compare(inf, inf)] == [0.0, 0.0, 0.0]
    assert compare(nan, 1.0) == compare(1.0, inf) == inf
    assert compare(1.0, 1.002) == pytest.approx(0.002 / 1.001)


def test_the_ledger_of_a_run_that_goes_back_forgets_what_came_after(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, ("a",))
    ledger.extend((0, 0), (5, 20), {3: PassedOver(8, 11, "x")})
    ledger.write()
    again = Ledger(tmp_path, ("b",))
    again.begin(4, 16)
    again.extend((4, 16), (6, 24), {})
    assert [(e.iterations, e.samples, e.blend, e.skipped) for e in again.entries] == [
        ((1, 2), (0, 7), ("a",), None), ((3, 3), (8, 11), ("a",), "x"),
        ((4, 4), (12, 15), ("a",), None), ((5, 6), (16, 23), ("b",), None),
    ]  # fmt: skip
