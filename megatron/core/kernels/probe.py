# SPDX-License-Identifier: Apache-2.0
"""The smallest kernel, which shows whether Triton works on this machine."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one(x):
    """Add one to the number at x."""
    tl.store(x, tl.load(x) + 1)
