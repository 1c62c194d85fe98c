# SPDX-License-Identifier: Apache-2.0
"""Memory of a training run by formula, before anything is started.

    WORLD_SIZE=64 python tools/report_theoretical_memory.py <the flags of pretrain_gpt.py>

Prints the figures of the reference system (megatron/planner/memory.py): the parameters of the model and of a process,
and the bytes of weights with optimizer state and of activations on the most loaded process; before that, on standard
error, what a step of this program holds on the fullest stage of the pipeline (megatron/planner/step_memory.py says what
counts), and behind it (of a decoder of letters on standard output, for which the reference system has no report) the
exact number of parameters, and the floating-point operations of a global batch, as the reference
system counts (megatron/planner/batch_flops.py) and as this one does. WORLD_SIZE is the number of processes of the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import torch

from megatron.core.errors import command_line
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.planner.batch_flops import count_batch_flops
from megatron.planner.memory import MemoryEstimate, Workload, describe_memory, estimate_memory
from megatron.planner.step_memory import describe_step_memory, predict_step_memory
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.launch import add_world_size
from megatron.training.recipes.gpt import build_gpt_model, describe_gpt_workload
from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size


def describe_workload(config: RunConfig) -> Workload:
    """Return what a process of the run works on. Raises ConfigError or DataError for an unusable tokenizer."""
    return describe_gpt_workload(config, compute_padded_vocab_size(config, build_tokenizer(config)))


def estimate(config: RunConfig) -> MemoryEstimate:
    """Return what the formulas of the reference system say of a run; raises as `describe_workload`."""
    return estimate_memory(config.model, config.ddp, describe_workload(config))


def read(flags: Sequence[str], environment: Mapping[str, str]) -> RunConfig:
    """The settings of a job with these flags; WORLD_SIZE of the environment is its number of processes."""
    return read_run_config(list(flags), add_world_size(environment))


def describe_totals(config: RunConfig) -> str:
    """Exact numbers: elements of all parameters, with biases and positions, and FLOPs of a global batch."""
    workload = describe_workload(config)
    with torch.device("meta"):
        settings = config.with_groups(model=config.model.on_one_process(init_model_with_meta_device=True))
        model = build_gpt_model(settings, workload.padded_vocab_size, pg_collection=ProcessGroupCollection.single())
    batch = config.training.global_batch_size or workload.micro_batch_size * config.data_parallel_size
    elements = sum(parameter.numel() for parameter in model.parameters())
    theirs, ours = (
        count_batch_flops(
            config.model, seq_length=workload.seq_length, padded_vocab_size=workload.padded_vocab_size,
            global_batch_size=batch, as_reference=as_reference,
        )
        for as_reference in (True, False)
    )  # fmt: skip
    return (
        f"Number of parameters in total: {elements}\n"
        f"FLOPs of a global batch (as upstream counts): {theirs}\n"
        f"FLOPs of a global batch (of this model's products, as MFU counts): {ours}"
    )


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
    # Of a GPT the report is the reference system's, line by line; for a hybrid it has none that this could contradict.
    print(describe_totals(config), file=sys.stderr if config.model.hybrid_layer_pattern is None else sys.stdout)
    return 0
