# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py with a clock that the machine's other programs do not disturb: a rank's work takes the processor time
that it uses, and the time by which a simulated fault makes it slower."""

from __future__ import annotations

import os
import sys
import time
import types

from megatron.cli.train import train
from megatron.core.errors import command_line
from megatron.training.flags.read import read_run_config
from megatron.training.hooks import simulated_faults, work_clock
from megatron.training.launch.launch import add_world_size, leave, run_job


@command_line
def main() -> int:
    slept: list[float] = []
    simulated_faults.time = types.SimpleNamespace(process_time=time.thread_time, sleep=slept.append)  # type: ignore[assignment]
    work_clock.mark = lambda: time.thread_time() + sum(slept)
    train(read_run_config(sys.argv[1:], add_world_size(os.environ)))
    return 0


if __name__ == "__main__":
    leave(run_job(main, os.environ))
