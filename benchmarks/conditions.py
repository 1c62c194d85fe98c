# SPDX-License-Identifier: Apache-2.0
"""What a reader needs to judge a benchmark's numbers: machine, versions, load, command."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch


def describe_conditions() -> dict[str, Any]:
    """Machine, device, versions and command, as JSON has them."""
    from megatron.core.device import device_name

    return {
        "machine": platform.machine(),
        "device": device_name(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        # Its suffix names the release of CUDA that it was built for.
        "torch": torch.__version__,
        "command": describe_command(),
    }


def describe_command() -> str:
    """How this program was started."""
    program, *arguments = sys.argv
    if os.path.basename(program) == "__main__.py":  # python -m PACKAGE
        program = f"-m {os.path.basename(os.path.dirname(program))}"
    return " ".join([os.path.basename(sys.executable), program, *arguments])


def print_conditions() -> None:
    """Three lines at the head of every report."""
    found = describe_conditions()
    print(f"machine: {found['machine']}, {found['device']}, {found['cpus']} CPUs, load {found['load']:.1f}")
    print(f"python {found['python']}, torch {found['torch']}, {found['threads']} thread(s)")
    print(f"command: {found['command']}")
