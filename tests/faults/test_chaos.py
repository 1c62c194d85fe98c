# SPDX-License-Identifier: Apache-2.0
"""The chaos run in small: a kill during a save, the launcher killed, and a passing NaN."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import Strike, run_chaos


def test_three_faults_leave_no_trace(tmp_path: Path) -> None:
    strikes = [Strike(4, "save"), Strike(14, "launcher")]
    chaos, problems = run_chaos(
        tmp_path, steps=20, interval=5, ranks=2, layout="", strikes=strikes, faults="nan:1,9", seed=3
    )
    assert problems == []
    assert (chaos.launches, len(chaos.attempts)) == (2, 3)
    assert "Possible transient error" in "".join(chaos.log)
