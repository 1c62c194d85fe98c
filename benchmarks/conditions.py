# SPDX-License-Identifier: Apache-2.0
"""What a reader needs to judge a benchmark's numbers: machine, versions, load, command."""

from __future__ import annotations

import os
import platform
import sys

import torch


def print_conditions() -> None:
    """Three lines at the head of every report."""
    from megatron.core.device import device_name

    print(f"machine: {platform.machine()}, {device_name()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    print(f"command: {' '.join([os.path.basename(sys.executable), *sys.argv])}")
