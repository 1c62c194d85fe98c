# SPDX-License-Identifier: Apache-2.0
"""Gradients of whole models in float64 against differences of their losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from tests.support.gpt_models import build_model, token_batch
from tests.unit.transformer.test_compressed_attention import COMPRESSED, LATENT, LOSS

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 12 --moe-router-score-function "
    "sqrtsoftplus --moe-router-enable-expert-bias --swiglu --activation-func-clamp-value 1 --init-method-std 0.4"
)
DEEPSEEK_V4 = (
    f"{COMPRESSED} {LOSS} {EXPERTS} --moe-n-hash-layers 1 --actual-vocab-size 64 --enable-hyper-connections "
    "--num-residual-streams 3 --mhc-init-gating-factor 0.5 --mtp-num-layers 1 --csa-compress-ratios [0,4,6,4]"
)
SPARSE = (
    f"{LATENT.partition('--csa')[0]} --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 "
    f"--experimental-attention-variant dsa --kv-lora-rank 11 --qk-head-dim 6 --qk-layernorm {LOSS} --mtp-num-layers 1"
)
STEP = 1e-6


def measure_losses(model: GPTModel) -> tuple[Tensor, Tensor]:
    """The loss of language modelling with that of further tokens, and the indexers'."""
    ids, positions, labels = token_batch()
    loss = model(ids, positions, labels=labels).mean()
    sums = model.mtp_loss.take_sums()
    assert sums is not None
    loss = loss + model.config.mtp_loss_scaling_factor * (sums[:, 0] / sums[:, 1]).mean()
    cores = (part for part in model.modules() if getattr(part, "learns", False) and hasattr(part, "take_loss"))
    found = torch.stack([core.take_loss() for core in cores])
    assert loss.dtype == found.dtype == torch.float64
    return loss, found.sum()


@pytest.mark.parametrize("flags", [DEEPSEEK_V4, SPARSE], ids=["DeepSeek-V4", "sparse attention"])
def test_gradients_are_differences_of_losses(flags: str) -> None:
    """Along a random direction for the indexers, for mixtures of streams, and for all else; in so small steps no choice
    and no clamp changes."""
    model = build_model(flags).double()
    sum(measure_losses(model), start=torch.zeros(())).backward()
    parts: dict[str, list[torch.nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if "tid2eid" not in name and "expert_bias" not in name:
            assert param.grad is not None and param.grad.abs().max() > 0, name
            parts.setdefault(next((part for part in ("indexer", "hyper") if part in name), "others"), []).append(param)
    generator = torch.Generator().manual_seed(5)
    for part, params in parts.items():
        steps = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in params]
        slopes = [(x.grad * step).sum().item() for x, step in zip(params, steps, strict=True) if x.grad is not None]
        found = []
        for factor in (STEP, -2 * STEP):
            with torch.no_grad():
                torch._foreach_add_(params, steps, alpha=factor)
            found.append(measure_losses(model)[part == "indexer"].item())
        torch._foreach_add_([x.data for x in params], steps, alpha=STEP)
        size = sum(abs(slope) for slope in slopes)
        assert (found[0] - found[1]) / (2 * STEP) == pytest.approx(sum(slopes), rel=0, abs=1e-6 * size), part
