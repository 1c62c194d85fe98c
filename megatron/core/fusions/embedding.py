"""Table look-up whose gradient is added straight into the gradient buffer.

The ordinary gradient of an embedding is a zero-filled temporary the size of the table (12 MB for 8192 x 384 in float32,
gigabytes for large vocabularies) of which a microbatch touches a few rows. Reference: torch.nn.functional.embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _EmbeddingIntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # itself, with its main_grad: hooks for saved tensors would hand back another tensor
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        rows = grad.reshape(-1, grad.shape[-1])  # [s, b, h] -> [tokens, h]
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            return None, torch.ops.aten.embedding_dense_backward(grad, ids, weight.shape[0], -1, False)
        main_grad.index_add_(0, ids.reshape(-1), rows.to(main_grad.dtype))
        return None, None


def embedding_into_main_grad(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` [rows, h] at `ids` [...] -> [..., h]; the gradient goes into `weight.main_grad` if it exists."""
    result: Tensor = _EmbeddingIntoMainGrad.apply(ids, weight)
    return result
