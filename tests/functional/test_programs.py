# SPDX-License-Identifier: Apache-2.0
"""Programs that tests fork: arguments, surroundings, output and ends are those of a program that Python started."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.programs import Program

SCRIPT = """
import os, sys, time
print(__name__, sys.argv[1:], os.environ.get("COLOUR"), os.getcwd())
print("to the errors", file=sys.stderr)
if sys.argv[1] == "raise":
    raise ValueError("no good")
if sys.argv[1] == "exit":
    sys.exit("a sentence")
if sys.argv[1] == "code":
    sys.exit(75)
if sys.argv[1] == "wait":
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_how_programs_end(script: Path, tmp_path: Path) -> None:
    for how, code, errors in (
        ("well", 0, ""),
        ("code", 75, ""),
        ("exit", 1, "a sentence\n"),
        ("raise", 1, "ValueError: no good\n"),
    ):
        program = Program([script, how], {"COLOUR": "red"}, tmp_path)
        output, found = program.communicate(60)
        assert output == f"__main__ ['{how}'] red {tmp_path}\n"
        assert found.startswith("to the errors\n") and found.endswith(errors)
        assert ("Traceback" in found) == (how == "raise")
        assert program.returncode == program.poll() == code


def test_a_program_that_is_killed(script: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("a") as log:
        program = Program([script, "wait"], {}, tmp_path, log)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.05)
    assert program.poll() is None
    os.kill(program.pid, 0)
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == -signal.SIGTERM
    program.kill()  # has no effect any more
