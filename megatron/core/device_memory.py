# SPDX-License-Identifier: Apache-2.0
"""Blocks of the GPU's memory, as its allocator tells of them itself: settings in the environment may come too late for
it, or be unknown to it."""

from __future__ import annotations

import functools

import torch

from megatron.core.device import is_cuda


@functools.cache
def has_expandable_segments(device: torch.device) -> bool | None:
    """Return whether blocks of memory grow where they are; None on the CPU. Asked once."""
    if not is_cuda(device):
        return None
    # There has to be a block to look at.
    held = torch.empty(1, device=device)
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    del held
    return any(segment.get("is_expandable", False) for segment in segments)
