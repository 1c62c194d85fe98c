# SPDX-License-Identifier: Apache-2.0
"""Layers as CUDA graphs under every kind of layout: bit for bit the run without, by a stand-in for a GPU's graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training import setup
from megatron.training.step import train_step
from megatron.training.verify import parity
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training
from tests.support.graph_stand_in import StandInRecorder

STEPS, WARM_UP = 3, 1
SIZES = "--num-layers 2 --global-batch-size 8"
# Of two processes: collectives inside of recordings, several micro-batches in flight, hooks beside them.
LAYOUTS = [
    ("gpt2", "tp2,sp,--hidden-dropout=0.1,--attention-dropout=0.1", 1),
    ("llama", "tp2,--recompute-granularity=full,--recompute-method=uniform,--recompute-num-layers=1", 1),
    ("llama", "pp2", 2),
    ("gpt2", "pp2,vpp2,--num-layers=4,--hidden-dropout=0.1", 4),
    ("gpt2", "dp2,dist-opt,overlap-all,--ddp-bucket-size=5000", 1),
    ("moe", "dp2,ep2,--moe-token-dispatcher-type=alltoall,--cuda-graph-modules attn mlp moe_router", 1),
]


def train(style: str, layout: str, flags: str) -> tuple[list[torch.Tensor], int]:
    """One rank's losses, gradient norms, and weights of some steps; the most micro-batches with recordings."""
    layout = layout if flags else ",".join(part for part in layout.split(",") if "cuda" not in part)
    config, recipe = training(f"{(STYLES | EXPERTS)[style]} {SIZES} {flags}", layout)
    with parity.open_local_run(config, recipe, own_rank(config)) as run:
        batches, found = run.data.open("train", 0), []
        for _ in range(STEPS):
            result = train_step(run, batches)
            found += [*result.losses.values(), torch.as_tensor(result.grad_norm)]
            found += [buffer.grad_data.clone() for chunk in run.model for buffer in chunk.flat_buffers]
        for chunk in run.model:
            chunk.finish_param_sync()
            found += [param.detach().clone() for param in chunk.parameters()]
        blocks = [m for chunk in run.model for m in chunk.modules() if isinstance(m, TransformerBlock)]
        slots = max(block.passes.slots if block.passes is not None else 0 for block in blocks)
    return found, slots


def plain_and_recorded(layouts: list[tuple[str, str, int]]) -> list[Any]:
    """For each layout: which values differ, slots, replays."""
    recorders: list[StandInRecorder] = []

    def make_recorder() -> StandInRecorder:
        recorders.append(StandInRecorder())
        return recorders[-1]

    parity.replace_gpu_settings = lambda config: []  # type: ignore[assignment]
    setup.GraphRecorder = make_recorder  # type: ignore[assignment,misc]
    results = []
    for style, layout, _ in layouts:
        plain, _ = train(style, layout, "")
        recorders.clear()
        recorded, slots = train(style, layout, f"--cuda-graph-impl local --cuda-graph-warmup-steps {WARM_UP}")
        differing = [
            i for i, (one, other) in enumerate(zip(plain, recorded, strict=True)) if not torch.equal(one, other)
        ]
        results.append((differing, slots, sum(recorder.replays for recorder in recorders)))
    return results


@pytest.mark.flags("--cuda-graph-impl", "--cuda-graph-modules")
def test_recorded_layers_train_as_others_do_in_every_layout() -> None:
    ranks = run_distributed(plain_and_recorded, 2, LAYOUTS, timeout=400.0)
    for number, (style, layout, most) in enumerate(LAYOUTS):
        assert [rank[number][0] for rank in ranks] == [[], []], (style, layout)
        assert max(rank[number][1] for rank in ranks) == most, (style, layout)
        assert all(rank[number][2] > 0 for rank in ranks), (style, layout)
