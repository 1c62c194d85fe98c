# SPDX-License-Identifier: Apache-2.0
"""The line at the bottom of a terminal: rate and remaining time; log files never see it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from megatron.training.hooks.console import ProgressBar
from tests.functional.pretrain_runs import PRETRAIN, ROOT, TINY, environment, run


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(0, 200)
    assert bar.text(100) == f"iteration 0/200 [{'-' * 20}]"
    bar.show({"lm loss": 4.25})
    bar.advance(50, 0.5)
    assert bar.text(100) == f"iteration 50/200 [{'#' * 5}{'-' * 15}] 2.00 it/s, 1m15s left, lm loss 4.250"
    assert len(bar.text(40)) == 39, "a longer line would wrap and stay on the screen"
    assert "iteration 50/200" in capsys.readouterr().out


def test_rate_follows_slowly() -> None:
    bar = ProgressBar(0, 200)
    bar.advance(1, 0.5)
    bar.advance(2, 10.0)
    assert bar.seconds_per_step == pytest.approx(0.9 * 0.5 + 0.1 * 10)


def run_on_a_terminal(command: list[str], columns: int) -> str:
    """What the command writes to a terminal of so many columns, standard error included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    changes = {"COLUMNS": ""}  # of the terminal that the tests run in
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment(changes), cwd=ROOT)
    os.close(theirs)
    written = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux: the other end was closed
            break
        if not chunk:
            break
        written += chunk
    assert process.wait() == 0, written.decode()
    return written.decode()


def test_on_a_terminal(tmp_path: Path) -> None:
    """The bar is drawn in place; whatever is printed, warnings included, has rows of its own above it."""
    flags = ["--save", str(tmp_path), "--save-interval", "2", "--check-for-large-grads", "--eval-iters", "1",
             "--eval-interval", "5"]  # fmt: skip
    shown = run_on_a_terminal([sys.executable, PRETRAIN, *TINY, *flags], columns=100)
    assert "\r\x1b[Kiteration 5/5 [####################]" in shown
    assert "it/s, 0s left" in shown
    # What stays on the screen: of each row what was written last after the cursor had gone back to its beginning.
    rows = [row.split("\r\x1b[K")[-1].rstrip("\r") for row in shown.split("\n")]
    assert all("[#" not in row and "[-" not in row for row in rows[:-1]), "a bar was left behind"
    lines = [row for row in rows if re.match(r"\d/5  loss ", row)]
    assert [line.split("  ")[0] for line in lines] == [f"{number}/5" for number in range(1, 6)]
    assert all(len(line) < 100 and "MFU" in line and "ETA" in line for line in lines)
    assert len({line.index("lr ") for line in lines}) == 1
    starts = [row.split(" ")[0] for row in rows if row.startswith(("checkpoint:", "validation at", "test at"))]
    assert starts == ["checkpoint:", "checkpoint:", "validation", "checkpoint:", "validation", "test"]


def test_in_a_file() -> None:
    """Whole lines only, in upstream's wording."""
    done = run(TINY)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert "consumed samples:           20 |" in done.stdout
