# SPDX-License-Identifier: Apache-2.0
"""Comparisons, as in comparisons.py, of what a training step is made of: the update, and whole models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.tensor_parallel.parameters import parameter_dtype
from tests.kernels import comparisons, norm_comparisons, state_comparisons  # noqa: F401 - they enter theirs, too
from tests.kernels.harness import COMPARISONS, assert_close, compared, kernels_chosen, randn, without_kernels
from tests.support.gpt_models import build_model, token_batch
from tests.support.run_flags import run_config
from tests.unit.optimizer.test_megatron_optimizer import tiny_network

# ---- Adam


def _build_optimizer(flags: str, device: str) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    config = run_config(flags)
    network = tiny_network(parameter_dtype(config.model)).to(device)
    model = DistributedDataParallel(config.model, config.ddp, network)
    return model, get_megatron_optimizer(config.optimizer, [model])


def _train_network(flags: str, device: str, steps: int) -> list[Tensor]:
    """Weights and states of a small network after some steps."""
    model, optimizer = _build_optimizer(flags, device)
    for step in range(steps):
        for index, buffer in enumerate(model.flat_buffers):
            noise = randn(buffer.grad_data.numel(), dtype=torch.float32, device=device, scale=0.1 * (step + 1))
            buffer.grad_data.copy_(noise.roll(37 * (index + step)))
        optimizer.step()
    kept = [tensor for kinds in optimizer.named_state().values() for tensor in kinds.values()]
    return [tensor.clone() for tensor in (*(buffer.param_data for buffer in model.flat_buffers), *kept)]


@compared
def adam(device: str) -> None:
    """Against torch's operator over float32 copies, which the CPU uses; 16-bit states agree to their last digit."""
    plain = "--weight-decay 0.1 --lr 0.01 --clip-grad 0.5"
    reduced = "--use-precision-aware-optimizer --use-distributed-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    for flags, tolerance in ((plain, 2e-6), (f"{plain} --bf16", 8e-3), (f"{plain} --bf16 {reduced}", 8e-3),
                             (f"{plain} --bf16 {reduced} --main-grads-dtype bf16", 8e-3)):  # fmt: skip
        with without_kernels():
            expected = _train_network(flags, device, 3)
        with kernels_chosen() as launched:
            found = _train_network(flags, device, 3)
        assert len(launched) >= 6, launched
        assert_close(found, expected, tolerance)


@compared
def adam_keeps_still(device: str) -> None:
    with kernels_chosen():
        model, optimizer = _build_optimizer("--bf16 --no-check-for-nan-in-loss-and-grad", device)
        before = [buffer.param_data.clone() for buffer in model.flat_buffers]
        model.flat_buffers[0].grad_data[1] = float("nan")
        assert optimizer.step().skipped
    assert all(torch.equal(x, buffer.param_data) for x, buffer in zip(before, model.flat_buffers, strict=True))


# ---- together

_LLAMA = """
    --num-layers 1 --hidden-size 72 --num-attention-heads 6 --group-query-attention --num-query-groups 3 --swiglu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights
"""
_EXPERTS = f"{_LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 40"
_BIASES = "--num-layers 1 --position-embedding-type rope --rotary-percent 0.5"
_MODELS = {
    "dense": _LLAMA, "with biases": _BIASES,
    "parallel residual": f"{_BIASES} --parallel-residual",
    "norms before and behind": f"{_LLAMA} --norm-placement both --apply-layernorm-1p",
    "normalised stream": f"{_BIASES} --apply-residual-connection-post-layernorm",
    "activation recomputed": f"{_BIASES} --recompute-granularity selective --recompute-modules mlp_act",
    "norms of queries and keys": f"{_LLAMA} --qk-layernorm", "experts": _EXPERTS,
    "experts, dropping": f"{_EXPERTS} --moe-expert-capacity-factor 0.5",
    "recomputed": f"{_EXPERTS} --recompute-granularity selective --recompute-modules moe_act layernorm",
    "recomputed whole": f"{_LLAMA} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}  # fmt: skip


@compared
def whole_models(device: str) -> None:
    """Losses and the gradient of every parameter, with kernels and without."""
    for flags in _MODELS.values():
        model = build_model(flags).to(device)
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1:  # biases begin at zero, and one that is forgotten would not show
                    param.add_(randn(*param.shape, dtype=param.dtype, device=device, scale=0.1))
        tokens, positions, labels = (x.to(device) for x in token_batch())

        def loss_and_grads(model: Any = model, batch: tuple[Tensor, ...] = (tokens, positions, labels)) -> list[Tensor]:
            model.zero_grad()
            losses = model(batch[0], batch[1], labels=batch[2])
            losses.mean().backward()
            return [losses.detach(), *(param.grad.clone() for param in model.parameters())]

        with without_kernels():
            expected = loss_and_grads()
        with kernels_chosen() as launched:
            found = loss_and_grads()
        names = {kernel.__name__ for kernel in launched}
        assert {"norm_forward", "norm_backward", "loss_forward", "loss_backward"} <= names and len(launched) >= 12
        assert_close(found, expected, 1e-4)


ALL_COMPARISONS = COMPARISONS
"""These, those of comparisons.py, of norm_comparisons.py and of state_comparisons.py."""
