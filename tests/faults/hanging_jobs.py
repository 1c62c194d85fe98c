# SPDX-License-Identifier: Apache-2.0
"""Jobs whose processes say that they are there and then hang, for tests that kill the caller. Without torch: a process
that is started anew, and not forked, imports this."""

from __future__ import annotations

import multiprocessing
import os
import struct
import time
from typing import Any

from megatron.training.launch.local_job import run_job_locally


def hang(rank: int, pipe: Any) -> None:
    """Send the process id and sleep for ten minutes."""
    pipe.send_bytes(struct.pack("!i", os.getpid()))
    time.sleep(600)


def run_hanging(pipe: Any) -> None:
    """A program that compares layouts; its workers are forked by a server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    run_job_locally(hang, 2, (pipe,), 600.0, context)
