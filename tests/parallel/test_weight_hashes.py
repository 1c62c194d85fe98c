# SPDX-License-Identifier: Apache-2.0
"""--check-weight-hash-across-dp-replicas-interval finds a flipped bit in any layout, and nothing without one."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron.core.errors import TemporaryError
from megatron.core.placement import get_placement
from megatron.training.loop import train
from megatron.training.run import Hook, Phase, Run, StepResult
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training

FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
EMBEDDING, EXPERTS_FC2 = "embedding.word_embeddings.weight", "decoder.layers.2.mlp.experts.linear_fc2.weight"


class FlipBit(Hook):
    """Flips the lowest bit of the tensor's last element here, after the third step."""

    phase = Phase.MEASURE

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.progress.iteration != 3:
            return
        for chunk in run.model:
            chunk.finish_param_sync()
            for name, param in chunk.module.named_parameters():
                if get_placement(param, name).name == self.name:
                    held = param.detach()
                    local = held.to_local() if isinstance(held, DTensor) else held
                    local.view(-1).view({2: torch.int16, 4: torch.int32}[local.element_size()])[-1] ^= 1
                    return
        raise AssertionError(f"no {self.name} here")


def find_drift(style: str, layout: str, rank: int, tensor: str) -> str:
    """What the run ends with; it compares after each of four iterations."""
    flags = f"{(STYLES | EXPERTS)[style]} --check-weight-hash-across-dp-replicas-interval 1 --train-iters 4"
    config, recipe = training(flags, layout)
    hooks: list[Any] = [FlipBit(tensor)] if own_rank(config) == rank else []
    with open_local_run(config, recipe, own_rank(config), hooks) as run:
        try:
            train(run)
        except TemporaryError as error:
            return str(error)
    return "no drift"


@pytest.mark.flags("--check-weight-hash-across-dp-replicas-interval")
@pytest.mark.parametrize(
    ("style", "layout", "rank", "tensor", "expected"),
    [
        ("gpt2", "dp2", 1, FC1, "rank 0 and rank 1 hold different bits of {}, and no majority tells"),
        ("llama", "dp3,dist-opt,overlap-all,--bf16", 2, FC1, "rank 2 holds other bits of {} than ranks 0, 1"),
        ("llama", "tp2,sp,dp2", 1, "decoder.final_layernorm.weight", "rank 1 holds other bits of {} than ranks 0, 3"),
        ("gpt2", "tp2,pp2", 2, EMBEDDING, "rank 0 and rank 2 hold different bits of {}"),
        ("picky", "dp3", 1, "decoder.layers.0.mlp.router.expert_bias", "rank 1 holds other bits of {} than ranks 0, 2"),
        ("moe", "dp4,ep2,--micro-batch-size=1", 3, EXPERTS_FC2, "rank 1 and rank 3 hold different bits of {}"),
        (
            "llama",
            "dp4,--use-megatron-fsdp,--num-distributed-optimizer-instances=2,--micro-batch-size=1",
            3,
            FC1,
            "rank 1 and rank 3 hold different",
        ),
    ],
)
def test_the_drifted_rank_and_tensor_are_named(style: str, layout: str, rank: int, tensor: str, expected: str) -> None:
    found = run_distributed(find_drift, parse_layout(layout).world_size, style, layout, rank, tensor)
    assert len(set(found)) == 1, "all ranks end with the same sentence"
    words = found[0].replace(f" ({platform.node()})", "")
    assert words.startswith(f"the weights of replicas differ after iteration 3: {expected.format(tensor)}")
    assert "all agreed after iteration 2: start again from a checkpoint of iteration 2 or earlier" in words
    assert " more" not in words, "one tensor"
