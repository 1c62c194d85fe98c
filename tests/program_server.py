# SPDX-License-Identifier: Apache-2.0
"""The process that programs are forked from in tests: it has imported the trainer (see programs.py).

Requests come over a socket: a length and three file descriptors (standard output, standard error, and a socket to
answer on), then the request as JSON. For each, a keeper is forked; it forks the program, answers its process id, waits
for it and answers its exit status. Whoever loses its parent is killed, so that nothing outlives pytest.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork programs until pytest ends. Returns in each program, with what it is to do."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        header, files, _, _ = socket.recv_fds(requests, 4, 3)
        if not header:
            os._exit(0)
        request = json.loads(receive(requests, struct.unpack("!i", header)[0]))
        if os.fork() == 0:
            requests.close()
            keep(request, files)
            return request
        for file in files:
            os.close(file)


def receive(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size and (part := connection.recv(size - len(content))):
        content += part
    return content


def keep(request: dict[str, Any], files: list[int]) -> None:
    """Fork the program and return in it; stay behind until it ends."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answer = socket.socket(fileno=files[2])
    program = os.fork()
    if program != 0:
        answer.sendall(struct.pack("!i", program))
        _, status = os.waitpid(program, 0)
        answer.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
        os._exit(0)
    die_with_parent()
    answer.close()
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files[:2])):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if "TEST_NETWORK_NAMESPACE" in os.environ:
        importlib.import_module("tests.emulated_network").enter_namespace(os.environ["TEST_NETWORK_NAMESPACE"])


def die_with_parent() -> None:
    """Linux: be killed when the process that forked this one ends."""
    if Path("/proc/self").exists():
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    importlib.import_module("tests.preload")
    task = serve(socket.socket(fileno=int(sys.argv[1])))
    # From here on this is the program, at the top of its stack as if Python had just started.
    sys.argv = [task["program"], *task["arguments"]]
    if "TEST_SPEAK_AT_ONCE" in os.environ:
        # There is no launcher that ends the others while they let rank 0 speak.
        importlib.import_module("megatron.training.launch.launch").RANK_0_SPEAKS_FIRST_SECONDS = 0.0
    sys.path[0] = str(Path(task["program"]).parent)
    runpy.run_path(task["program"], run_name="__main__")
