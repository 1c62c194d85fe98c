# SPDX-License-Identifier: Apache-2.0
"""Memory of a training run by formula, before anything is started.

    WORLD_SIZE=64 python tools/report_theoretical_memory.py <the flags of pretrain_gpt.py>

Prints the figures of the reference system (megatron/planner/memory.py): the parameters of the model and of a process,
and the bytes of weights with optimizer state and of activations on the most loaded process; before that, on standard
error, what a step of this program holds on the fullest stage of the pipeline (megatron/planner/step_memory.py says what
counts). WORLD_SIZE is the number of processes of the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from megatron.core.errors import command_line
from megatron.planner.memory import MemoryEstimate, Workload, describe_memory, estimate_memory
from megatron.planner.step_memory import describe_step_memory, predict_step_memory
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.launch import add_world_size
from megatron.training.recipes.gpt import describe_gpt_workload
from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size


def describe_workload(config: RunConfig) -> Workload:
    """What a process of the run works on. Raises ConfigError or DataError for an unusable tokenizer."""
    return describe_gpt_workload(config, compute_padded_vocab_size(config, build_tokenizer(config)))


def estimate(config: RunConfig) -> MemoryEstimate:
    """What the formulas of the reference system say of a run; raises as `describe_workload`."""
    return estimate_memory(config.model, config.ddp, describe_workload(config), as_reference=True)


def read(flags: Sequence[str], environment: Mapping[str, str]) -> RunConfig:
    """The settings of a job with these flags; WORLD_SIZE of the environment is its number of processes."""
    return read_run_config(list(flags), add_world_size(environment))


@command_line
def main() -> int:
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(__doc__.strip())
        return 0
    config = read([item for item in sys.argv[1:] if item != "--traceback"], os.environ)
    stages = predict_step_memory(config.model, config.ddp, config.optimizer, describe_workload(config))
    # Apart from the report, which other programs read as they do the reference system's.
    print(describe_step_memory(stages), file=sys.stderr)
    print(describe_memory(estimate(config), config.model))
    return 0
