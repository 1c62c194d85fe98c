"""How much arithmetic a step is, and how much of the machine it uses.

Floating-point operations are counted as multiplications and additions of the matrix products that the model needs, once
forward and twice backward (Narayanan et al., 2021, appendix; attention counted causally, so half of the full square).
Recomputation does not count: it is work, but not progress.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from megatron.core import device as device_module
from megatron.planner.memory import count_parameters

if TYPE_CHECKING:
    import torch

    from megatron.core.transformer.transformer_config import TransformerConfig

_FORWARD_AND_BACKWARD = 3
_MULTIPLY_AND_ADD = 2


def training_flops_per_token(model: TransformerConfig, *, seq_length: int, padded_vocab_size: int) -> int:
    """Floating-point operations of forward and backward for one token of a sequence of `seq_length` tokens.

    Of a layer's experts those count that work on a token, and the shared one; routers do not.
    """
    per_token, per_pair = products_of_model(model, padded_vocab_size=padded_vocab_size)
    return _FORWARD_AND_BACKWARD * _MULTIPLY_AND_ADD * (per_token + per_pair * seq_length // 2)


def products_of_model(model: TransformerConfig, *, padded_vocab_size: int) -> tuple[int, int]:
    """Multiplications in forward: of each token in the linear layers, and of each token with each one that it sees."""
    assert model.kv_channels is not None
    counts = count_parameters(model, padded_vocab_size=padded_vocab_size, untied=False)
    per_token = counts.layer_matrices + counts.active_expert_matrices + counts.embedding  # which is the output layer
    return per_token, model.num_layers * 2 * model.num_attention_heads * model.kv_channels


def measured_peak_flops(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.1) -> float:
    """FLOP/s of the fastest of a few square matrix products: the yardstick where no data sheet is known.

    Products grow from 128 x 128 to 1024 x 1024 as far as the time allows: a processor without 16-bit arithmetic would
    spend seconds on one large product.
    """
    import torch

    size, fastest, started_at = 64, 0.0, time.perf_counter()
    product_seconds = 0.0
    while (remaining := seconds - (time.perf_counter() - started_at)) > 0 or not fastest:
        if size < 1024 and 2 * 8 * product_seconds < remaining:  # twice as wide: 8 times the work, and once to warm up
            size *= 2
            a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
            out = torch.mm(a, b)
            device_module.synchronize()
        began_at = time.perf_counter()
        torch.mm(a, b, out=out)
        device_module.synchronize()
        product_seconds = time.perf_counter() - began_at
        fastest = max(fastest, _MULTIPLY_AND_ADD * size**3 / product_seconds)
    return fastest


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Dense peak FLOP/s of the device for `dtype`, and where the number comes from: a data sheet or a measurement."""
    named = device_module.dense_peak_flops(dtype)
    if named is not None:
        return named, f"dense peak of {device_module.device_name()}"
    return measured_peak_flops(device, dtype), "matrix product measured at start"
