# SPDX-License-Identifier: Apache-2.0
"""Recomputation and offloading under every kind of layout: the same run as without them, to the last bit."""

from __future__ import annotations

import torch

from megatron.training.verify.parity import RankTrace, trace_rank
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training

SELECTIVE = "--recompute-granularity selective,--recompute-modules core_attn layernorm mlp"
UNIFORM = "--recompute-granularity full,--recompute-method uniform,--recompute-num-layers"
BLOCK = "--recompute-granularity full,--recompute-method block,--recompute-num-layers 1"
OFFLOADING = (
    "--fine-grained-activation-offloading,--min-offloaded-tensor-size 0,--offload-modules attn_norm qkv_linear "
    "core_attn attn_proj mlp_norm mlp_fc1 mlp_act"
)
STATE_OFFLOADING = "--optimizer-cpu-offload,--optimizer-offload-fraction 0.6"
CASES = [
    ("gpt2", "tp2", [SELECTIVE, f"{UNIFORM} 1,--distribute-saved-activations"]),
    ("llama", "tp2,sp,--bf16", [SELECTIVE, f"{UNIFORM} 3", OFFLOADING]),
    ("gpt2", "pp2,--pipeline-schedule=zb-h1", [f"{UNIFORM} 1", SELECTIVE, f"{OFFLOADING},{SELECTIVE}"]),
    ("gpt2", "pp2,vpp2", [BLOCK, f"{OFFLOADING},{BLOCK}", "--cpu-offloading-num-layers 1"]),
    ("llama", "cp2", [f"{UNIFORM} 2"]),
    ("gpt2", "dp2,dist-opt,overlap-all", [BLOCK, f"{STATE_OFFLOADING},--overlap-cpu-optimizer-d2h-h2d"]),
    ("llama", "dp2,fsdp2", [f"{UNIFORM} 2", SELECTIVE, OFFLOADING, STATE_OFFLOADING]),
    ("moe", "dp2,ep2", [f"{OFFLOADING} expert_fc1 moe_act"]),
]


def share(style: str, layout: str) -> RankTrace:
    dropout = "--hidden-dropout=0.1,--attention-dropout=0.1,--attention-backend=local"
    config, recipe = training((STYLES | EXPERTS)[style], f"{layout},{dropout}" if "cp2" not in layout else layout)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=2)


def differing() -> list[str]:
    """What is another run with recomputation on this rank."""
    found = []
    for style, layout, ways in CASES:
        plain = share(style, layout)
        assert len({losses["lm loss"] for losses in plain.losses}) == 2
        for way in ways:
            other = share(style, f"{layout},{way}")
            same = other.losses == plain.losses and other.grad_norms == plain.grad_norms
            same = same and all(
                torch.equal(mine.grad, theirs.grad) and torch.equal(mine.weight, theirs.weight)
                for mine, theirs in zip(plain.held, other.held, strict=True)
            )
            found += [] if same else [f"{layout} {way}"]
    return found


def test_recomputation_changes_no_bit_of_any_layout() -> None:
    assert run_distributed(differing, 2, timeout=240.0) == [[], []]
