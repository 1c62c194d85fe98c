"""Bias, dropout and residual at the end of attention and MLP: residual + dropout(x + b).

The fused form works in the memory of x, which is the fresh output of a matrix product that nothing else keeps.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool) -> Tensor:
    """residual + dropout(x + b) in x's memory; x, residual [s, b, h], bias [h] or None, prob of dropping an element."""
    if bias is not None:
        x = x.add_(bias)
    if training and prob > 0.0:
        x = F.dropout(x, p=prob)
    return x.add_(residual)


def bias_dropout_add_reference(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool) -> Tensor:
    """residual + dropout(x + b), out of place."""
    if bias is not None:
        x = x + bias
    return residual + F.dropout(x, p=prob, training=training)
