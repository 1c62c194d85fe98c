"""The line at the bottom of a terminal: rate and remaining time; log files never see it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from megatron.training.hooks.console import ProgressBar, format_duration
from tests.functional.pretrain_runs import PRETRAIN, ROOT, TINY, environment, run


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(0, 200)
    assert bar.text(100) == f"iteration 0/200 [{'-' * 20}]"
    bar.show({"lm loss": 4.25})
    bar.advance(50, 0.5)
    assert bar.text(100) == f"iteration 50/200 [{'#' * 5}{'-' * 15}] 2.00 it/s, 1:15 left, lm loss 4.250"
    assert len(bar.text(40)) == 39, "a longer line would wrap and stay on the screen"
    assert "iteration 50/200" in capsys.readouterr().out


def test_rate_follows_slowly() -> None:
    bar = ProgressBar(0, 200)
    bar.advance(1, 0.5)
    bar.advance(2, 10.0)
    assert bar.seconds_per_step == pytest.approx(0.9 * 0.5 + 0.1 * 10)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (86, "1:26"), (3700, "1:01:40")])
def test_duration_is_readable(seconds: int, text: str) -> None:
    assert format_duration(seconds) == text


def test_on_a_terminal_and_in_a_file() -> None:
    """Standard output a terminal: the bar is drawn in place. A pipe: whole lines only."""
    command = [sys.executable, PRETRAIN, *TINY]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment({}), cwd=ROOT)
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux: the other end was closed
            break
        if not chunk:
            break
        shown += chunk
    assert process.wait() == 0
    assert b"\r\x1b[Kiteration 5/5 [####################]" in shown
    assert b"it/s, 0:00 left" in shown
    assert b"consumed samples:           20 |" in shown

    done = run(TINY)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
