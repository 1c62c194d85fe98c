# SPDX-License-Identifier: Apache-2.0
"""Dtypes in which sites send each other what they have learnt.

| name | bits of an element                         | error                                                     |
|------|--------------------------------------------|-----------------------------------------------------------|
| fp32 | 32                                         | none                                                      |
| bf16 | 16                                         | 2^-9 of the element                                       |
| int8 | 8 and a float32 scale for each BLOCK       | 1/254 of the largest element of the block                 |
| e3m0 | 4 and a float32 scale for each BLOCK       | 0.42 of the element: a sign and one of seven powers of 2|

What is lost is kept and added next time (error feedback; Seide et al., 2014), which is the caller's part.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale."""
LOSSY = ("bf16", "int8", "e3m0")
_LEVELS = 7


def count_padded(numel: int, form: str) -> int:
    """Elements that a piece of `numel` takes among others: whole blocks where these have scales, so that the same piece
    is rounded in the same way wherever it lies."""
    return -(-numel // BLOCK) * BLOCK if form in ("int8", "e3m0") else numel


def encode(flat: Tensor, form: str) -> bytes:
    """A float32 vector on the CPU, padded as `count_padded` says, in bytes."""
    if form == "fp32":
        return flat.numpy().tobytes()
    if form == "bf16":
        return flat.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    blocks = flat.view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    if form == "int8":
        scales = largest / 127
        codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127).to(torch.int8)
        return scales.numpy().tobytes() + codes.numpy().tobytes()
    shares = blocks.abs() / largest.clamp(min=torch.finfo(torch.float32).tiny)
    # Codes 0 to 6 are the largest element times 2^-code, 7 is zero; in between the nearer power, by its exponent.
    exponents = (-torch.log2(shares)).round().clamp(max=_LEVELS).to(torch.uint8)
    nibbles = (exponents | ((blocks < 0).to(torch.uint8) << 3)).view(-1, 2)
    return largest.numpy().tobytes() + (nibbles[:, 0] | (nibbles[:, 1] << 4)).numpy().tobytes()


def decode(content: bytes, numel: int, form: str) -> Tensor:
    """The float32 vector [numel] of `encode`. Raises ValueError for content of another length."""
    if len(content) != count_bytes(numel, form):
        raise ValueError(f"{len(content)} bytes are not {numel} elements in {form}")
    if form == "fp32":
        return torch.from_numpy(np.frombuffer(content, np.float32).copy())
    if form == "bf16":
        return torch.from_numpy(np.frombuffer(content, np.int16).copy()).view(torch.bfloat16).float()
    count = numel // BLOCK
    scales = torch.from_numpy(np.frombuffer(content, np.float32, count).copy())[:, None]
    codes = torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 * count).copy())
    if form == "int8":
        return (codes.view(torch.int8).view(-1, BLOCK).float() * scales).flatten()
    nibbles = torch.stack([codes & 15, codes >> 4], dim=1).view(-1, BLOCK)
    exponents = (nibbles & 7).float()
    sizes = torch.where(exponents == _LEVELS, 0.0, torch.exp2(-exponents))
    return (torch.where(nibbles > 7, -sizes, sizes) * scales).flatten()


def count_bytes(numel: int, form: str) -> int:
    """Length of `encode` for a vector [numel], padded."""
    if form in ("fp32", "bf16"):
        return numel * (4 if form == "fp32" else 2)
    return numel // BLOCK * 4 + (numel if form == "int8" else numel // 2)
