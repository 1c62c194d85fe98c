# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py with a clock that the machine's other programs do not disturb: each module's forward takes about a
millisecond of it, and a simulated fault the time by which it makes a rank slower."""

from __future__ import annotations

import os
import random
import sys
import types

from torch.nn.modules.module import register_module_forward_hook

from megatron.cli.train import train
from megatron.core.errors import command_line
from megatron.training.flags.read import read_run_config
from megatron.training.hooks import simulated_faults, work_clock
from megatron.training.launch.launch import add_world_size, leave, run_job


@command_line
def main() -> int:
    now, noise = [0.0], random.Random(os.environ["RANK"])

    def wait(seconds: float) -> None:
        now[0] += seconds

    register_module_forward_hook(lambda *_: wait(noise.uniform(0.9e-3, 1.1e-3)))
    simulated_faults.time = types.SimpleNamespace(process_time=lambda: now[0], sleep=wait)  # type: ignore[assignment]
    work_clock.mark = lambda: now[0]
    work_clock.ProcessorQueue.read_seconds = lambda _: 0.0  # type: ignore[method-assign]
    train(read_run_config(sys.argv[1:], add_world_size(os.environ)))
    return 0


if __name__ == "__main__":
    leave(run_job(main, os.environ))
