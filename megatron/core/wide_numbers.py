# SPDX-License-Identifier: Apache-2.0
"""The number format of sums, statistics and probabilities: float32, or float64 where a whole model computes in it.

Nobody trains in float64. Gradients are checked in it (megatron/training/verify/gradients.py), and are then those of the
code that trains only if nothing on the way narrows what it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it has float64."""
    return x if x.dtype == torch.float64 else x.float()


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the number format of `at_least_float32(x)`."""
    return torch.promote_types(x.dtype, torch.float32)


def is_wide(x: Tensor) -> bool:
    """Whether x has that format already."""
    return x.dtype == wide_dtype(x)
