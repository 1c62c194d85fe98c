# SPDX-License-Identifier: Apache-2.0
"""Upstream's rotation of queries and keys, for programs with custom attention; a file, since they replace what is in
it.

Angles are [s, 1, 1, r], one for each of the r rotated channels (RotaryEmbedding.forward). Our attention rotates by
megatron/core/transformer/rotary.py, which nothing here changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel.sharding import list_pieces_of_rank, shard_sequence
from megatron.core.errors import UnsupportedError
from megatron.core.process_groups_config import Group, ProcessGroupCollection


def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: Group | None = None) -> Tensor:
    """The rows of a table of positions, [s, ...] along seq_dim, that belong to this rank's tokens."""
    group = cp_group if cp_group is not None else ProcessGroupCollection.current().cp
    return pos_emb if group.size() == 1 else shard_sequence(pos_emb, group.rank(), group.size(), seq_dim)


def _rotate_half(x: Tensor, rotary_interleaved: bool) -> Tensor:
    """(x1, x2) -> (-x2, x1): the halves of the last dimension, or its even and odd channels."""
    if not rotary_interleaved:
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((-x2, x1), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _apply_rotary_pos_emb_bshd(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    inverse: bool = False,
    mla_output_remove_interleaving: bool = False,
    multi_latent_attention: bool = False,
) -> Tensor:
    """Rotate the first r channels of t [s, b, h, d] by the angles [s, 1, 1, r], or back where `inverse`.

    mscale: factor on the rotated channels. mla_rotary_interleaved: pairs are neighbours before, halves afterwards, as
    latent attention has them; multi_latent_attention is its former name. Raises UnsupportedError for
    mla_output_remove_interleaving.
    """
    if mla_output_remove_interleaving:
        raise UnsupportedError("mla_output_remove_interleaving is not supported; reorder the channels afterwards")
    rotated, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    if mla_rotary_interleaved or multi_latent_attention:
        rotated = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
    cos, sin = (freqs.cos() * mscale).to(t.dtype), (freqs.sin() * mscale).to(t.dtype)
    sin = -sin if inverse else sin
    return torch.cat((rotated * cos + _rotate_half(rotated, rotary_interleaved) * sin, rest), dim=-1)


def _apply_rotary_pos_emb_thd(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    inverse: bool = False,
    mla_output_remove_interleaving: bool = False,
    cp_group: Group | None = None,
    multi_latent_attention: bool = False,
    max_seqlen: int | None = None,
) -> Tensor:
    """The same for packed sequences, t [t, h, d], each of which begins at angle 0. cu_seqlens: [n + 1], bounds in the
    whole sequence, of which this rank has two pieces of each document. max_seqlen: of upstream's signature."""
    rank, ranks = (0, 1) if cp_group is None else (cp_group.rank(), cp_group.size())
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    angles = []
    for length in lengths:
        if ranks == 1:
            angles.append(freqs[:length])
            continue
        piece = length // (2 * ranks)
        angles += [freqs[index * piece : (index + 1) * piece] for index in list_pieces_of_rank(rank, ranks)]
    return _apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), torch.cat(angles), rotary_interleaved, mla_rotary_interleaved, mscale, inverse,
        mla_output_remove_interleaving, multi_latent_attention,
    ).squeeze(1)  # fmt: skip


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: Any,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: Group | None = None,
    mla_rotary_interleaved: bool | None = None,
    inverse: bool = False,
    mla_output_remove_interleaving: bool = False,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate t [s, b, h, d], or [t, h, d] with cu_seqlens, as config.rotary_interleaved says. mla_rotary_interleaved:
    whether the config is of latent attention when None. cp_group: the current one when None."""
    latent = bool(config.multi_latent_attention) if mla_rotary_interleaved is None else mla_rotary_interleaved
    # Looked up when called: programs replace both functions.
    if cu_seqlens is None:
        return _apply_rotary_pos_emb_bshd(
            t, freqs, config.rotary_interleaved, latent, mscale, inverse, mla_output_remove_interleaving
        )
    group = cp_group if cp_group is not None else ProcessGroupCollection.current().cp
    return _apply_rotary_pos_emb_thd(
        t, cu_seqlens, freqs, config.rotary_interleaved, latent, mscale, inverse, mla_output_remove_interleaving,
        cp_group=group, max_seqlen=max_seqlen,
    )  # fmt: skip


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    """Rotate t [s, b, h, d]. transpose_output_memory: b outside of s in memory, [s, b, ...] all the same."""
    rotated = _apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)
    return rotated.transpose(0, 1).contiguous().transpose(0, 1) if transpose_output_memory else rotated
