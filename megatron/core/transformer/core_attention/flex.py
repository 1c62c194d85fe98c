# SPDX-License-Identifier: Apache-2.0
"""torch's flex attention on a GPU: bands of any kind, two widths, and softcap * tanh(score / softcap) in its kernel.

What is visible is said twice: by blocks of 128 queries and 128 keys, of which the kernel skips those that no query
sees, and within a block that is seen in part by a function of query and key. The blocks follow from the bounds of
documents, chunks and windows on the host, without a mask of all queries and keys, which torch's create_block_mask makes
on its way. Sinks are added to the result, by the logarithm of each query's sum.

(Dong et al., "Flex Attention", 2024.) Not yet run on a GPU: tests replace `run_flex` by its definition, and run torch's
uncompiled form forward.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.core_attention.block_kernels import add_sinks
from megatron.core.transformer.core_attention.interface import AttentionInputs, AttentionOptions, KeptByShape, Visible

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
_NARROWEST = 16
"""Channels of a head, at least."""


def run_flex(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """O [b, n, s, dv] and L [b, n, s], both differentiable; q [b, n, s, d], k [b, g, t, d], v [b, g, t, dv]."""
    return _call_flex(_compile_flex(), q, k, v, blocks, scale, softcap)


def _call_flex(
    flex: Any, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    def bound(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    change, wanted = (None if softcap is None else bound), AuxRequest(lse=True)
    out, more = flex(q, k, v, change, blocks, scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=wanted)
    return out, more.lse


@functools.cache
def _compile_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # For the shapes at hand: training has few, and a kernel for every shape is slower.
    return torch.compile(flex_attention, dynamic=False)


class FlexAttention:
    """Attention with bounded scores, sinks, windows, documents and chunks; for sequences of training."""

    def __init__(self, options: AttentionOptions) -> None:
        self.options = options
        self.name = "torch's flex attention, compiled"
        if options.softcap is not None:
            self.name += ", with bounded scores"
        self._blocks: KeptByShape[BlockMask] = KeptByShape()

    def takes(self, inputs: AttentionInputs) -> bool:
        """Return whether it has what is asked for: no given masks and no dropout, and only the few lengths of training,
        for each of which a kernel is compiled."""
        return inputs.training and inputs.visible.mask is None and not self.options.dropout

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        operands = (inputs.query, inputs.key, inputs.value)
        q, k, v = (_widen(x).permute(1, 2, 0, 3) for x in operands)  # [s, b, n, d] -> [b, n, s, d]
        out, log_sum = run_flex(q, k, v, self._find_blocks(inputs), self.options.scale, self.options.softcap)
        out = out[..., : inputs.value.shape[-1]]
        if inputs.sinks is not None:
            out = add_sinks(out, log_sum, inputs.sinks)[0].to(inputs.query.dtype)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _find_blocks(self, inputs: AttentionInputs) -> BlockMask:
        """Made once for the documents of a micro-batch, and else once for each length."""
        visible, lengths, device = inputs.visible, (inputs.query.shape[0], inputs.key.shape[0]), inputs.query.device

        def build() -> BlockMask:
            return build_block_mask(visible, *lengths, device)

        key = ("flex", lengths, visible.causal, visible.window, visible.chunk, device)
        if visible.documents is not None:
            return visible.documents.keep(key, build)
        return self._blocks.find(key, build, training=inputs.training)


def build_block_mask(visible: Visible, queries: int, keys: int, device: torch.device) -> BlockMask:
    """Return what flex attention needs to know of what is visible without a mask; the queries are the last of the
    keys."""
    from torch.nn.attention.flex_attention import BlockMask

    before = keys - queries
    positions = torch.arange(before, keys, device="cpu")
    first = visible.find_first_seen(positions) if visible.causal else torch.zeros_like(positions)
    last = positions if visible.causal else torch.full_like(positions, keys - 1)
    # The first and the last row of each block of queries: what one of them sees begins and ends ever later.
    top = torch.arange(0, queries, BLOCK, device="cpu")
    bottom = (top + BLOCK - 1).clamp_max(queries - 1)
    column = torch.arange(-(-keys // BLOCK), device="cpu")
    begin, end = column * BLOCK, (column + 1) * BLOCK - 1
    is_seen = (end >= first[top].unsqueeze(1)) & (begin <= last[bottom].unsqueeze(1))
    is_full = (begin >= first[bottom].unsqueeze(1)) & (end <= last[top].unsqueeze(1))
    # Blocks that the ends of the sequences cut are never whole ones to the kernel.
    is_full &= (end < keys) & (top + BLOCK <= queries).unsqueeze(1)
    counts, indices = _list_blocks(is_seen & ~is_full, device)
    full_counts, full_indices = _list_blocks(is_full, device)
    start, stop = (x.int().to(device, non_blocking=True) for x in (first, last))

    def is_visible(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= start[query]) & (key <= stop[query])

    blocks: BlockMask = BlockMask.from_kv_blocks(
        counts,
        indices,
        full_kv_num_blocks=full_counts,
        full_kv_indices=full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(queries, keys),
    )
    return blocks


def _list_blocks(chosen: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row of bool [queries / 128, keys / 128] how many are chosen, and these first: int32 [1, 1, rows] and
    [1, 1, rows, columns] on the device."""
    order = torch.argsort(chosen.int(), dim=1, descending=True, stable=True)
    counts, order = chosen.sum(1).int(), order.int()
    return counts[None, None].to(device, non_blocking=True), order[None, None].to(device, non_blocking=True)


def _widen(x: Tensor) -> Tensor:
    width = x.shape[-1]
    return x if width >= _NARROWEST else F.pad(x, (0, _NARROWEST - width))
