# SPDX-License-Identifier: Apache-2.0
"""Adam with decoupled weight decay over flat memory, in one pass, in any dtypes of gradients and states.

For each element: divide the gradient, widen the moments, update, round them back, and write the network's rounded copy
of the parameter, too. The gradient is only read. Where a gradient somewhere is not finite, nothing is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import launching

_BLOCK = 1024


@triton.jit
def adam_update(
    params, grads, exp_avgs, exp_avg_sqs, weights, divisor, found_inf, corrections,
    count, lr, decay, new_share, new_square_share, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    # 64 bits: a flat buffer may have more elements than 32 can count.
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < tl.where(tl.load(found_inf) > 0.0, 0, count)
    grad = tl.load(grads + places, mask=mask, other=0.0).to(tl.float32)
    if divisor is not None:
        grad = grad / tl.load(divisor)
    param = tl.load(params + places, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(exp_avgs + places, mask=mask, other=0.0).to(tl.float32)
    square = tl.load(exp_avg_sqs + places, mask=mask, other=0.0).to(tl.float32)
    mean += (grad - mean) * new_share
    square += (grad * grad - square) * new_square_share
    root = tl.sqrt(square) / tl.load(corrections + 1) + eps
    param -= decay * param
    param -= lr / tl.load(corrections) * mean / root
    tl.store(params + places, param, mask=mask)
    tl.store(exp_avgs + places, mean, mask=mask)
    tl.store(exp_avg_sqs + places, square, mask=mask)
    if weights is not None:
        tl.store(weights + places, param, mask=mask)


def compute_corrections(step: Tensor, betas: tuple[float, float]) -> Tensor:
    """Return what Adam divides by because the moments begin at zero: 1 - beta1^step and the root of 1 - beta2^step.

    step: a scalar on the device. Returns [2] float32, computed in float64.
    """
    wide = step.double()
    return torch.stack((1.0 - betas[0] ** wide, (1.0 - betas[1] ** wide).sqrt())).float()


def update_adam(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], weight: Tensor | None, options: dict[str, float],
    betas: tuple[float, float], corrections: Tensor, divisor: Tensor | None, found_inf: Tensor,
) -> None:  # fmt: skip
    """Update `param`, its state (exp_avg, exp_avg_sq) and its rounded copy `weight`, all flat and of one length.

    options: lr, weight_decay, eps. divisor, found_inf: float32 scalars on the device.
    """
    lr, eps = options["lr"], options["eps"]
    new_share, new_square_share = (1.0 - beta for beta in betas)
    launching.launch(
        adam_update, (triton.cdiv(param.numel(), _BLOCK),), param, grad, state["exp_avg"], state["exp_avg_sq"], weight,
        divisor, found_inf, corrections, param.numel(), lr, lr * options["weight_decay"], new_share, new_square_share,
        eps, BLOCK=_BLOCK,
    )  # fmt: skip
