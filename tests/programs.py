# SPDX-License-Identifier: Apache-2.0
"""Programs of this repository as their users run them, without the seconds that importing torch takes.

    job = Program(["pretrain_gpt.py", "--num-layers", "2"], environment, directory)
    output, errors = job.communicate()       # and the rest of what tests use of subprocess.Popen

How: one server (program_server.py) per pytest session imports the trainer; a program is a process forked from it that
has its own arguments, environment, directory and standard streams (files). Starting for real, with python and torchrun,
is what test_launch.py, test_quickstart.py and the commands in docs/ show.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]


class Program:
    """A running program; what it prints goes to `log`, or is returned by `communicate`."""

    def __init__(
        self, command: Sequence[str | Path], environment: Mapping[str, str], directory: Path, log: IO[str] | None = None
    ) -> None:
        self.args = [str(part) for part in command]
        self.returncode: int | None = None
        self._output = log or tempfile.TemporaryFile("w+", newline="")  # noqa: SIM115
        self._errors = log or tempfile.TemporaryFile("w+", newline="")  # noqa: SIM115
        program, *arguments = self.args
        request = {
            "program": str(ROOT / program),
            "arguments": arguments,
            "environment": dict(environment),
            "directory": str(directory),
        }
        self._answers, theirs = socket.socketpair()
        with theirs:
            content = json.dumps(request).encode()
            files = [self._output.fileno(), self._errors.fileno(), theirs.fileno()]
            socket.send_fds(_server(), [struct.pack("!i", len(content))], files)
            _server().sendall(content)
        # The first one waits for the server to have imported torch.
        self.pid = self._answer(240.0)

    def poll(self) -> int | None:
        """The exit code, minus the signal's number for a death by signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._answer(timeout)
            self._answers.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Standard output and standard error, when it has ended."""
        self.wait(timeout)
        texts = []
        for file in (self._output, self._errors):
            file.seek(0)
            texts.append(file.read())
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _answer(self, timeout: float | None) -> int:
        self._answers.settimeout(None if timeout is None else max(timeout, 0.001))
        try:
            content = self._answers.recv(4)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
        assert len(content) == 4, f"the server of programs is gone: {self.args}"
        return int(struct.unpack("!i", content)[0])


def _server() -> socket.socket:
    """The connection to the server."""
    return _started_server()[0]


@functools.cache
def _started_server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """It ends when this process does, with everything it started."""
    ours, theirs = socket.socketpair()
    variables = os.environ | {"OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with theirs:
        command = [sys.executable, str(ROOT / "tests" / "program_server.py"), str(theirs.fileno())]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=variables)
