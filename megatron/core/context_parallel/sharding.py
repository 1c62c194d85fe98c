# SPDX-License-Identifier: Apache-2.0
"""Division of a sequence among context-parallel (CP) ranks: two pieces, one from either end.

    pieces      0   1   2   3   4   5   6   7           cp = 4: 2 x 4 pieces of s / 8 tokens
    rank        0   1   2   3   3   2   1   0           rank r holds pieces r and 2 cp - 1 - r

Under a causal mask early tokens see little and late ones much; so paired, every rank has the same work. (Zigzag or
"striped" split; Brandon et al., "Striped Attention", 2023, balance the same way with single tokens.)

Gathered from all ranks, the pieces lie in rank order (0 7 1 6 2 5 3 4); `to_sequence_order` puts them right.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.core.context_parallel.planning import cutting_problem
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import Group

_SEQUENCE_DIM = {"attention_mask": 2}
"""Dimension of the queries in a batch's tensors; 1 in all others, which are [b, s, ...]."""
_WHOLE = {"cu_seqlens", "cu_seqlens_argmin", "max_seqlen"}
"""Fields that every rank needs whole: they describe the documents of the whole sequence."""


def list_pieces_of_rank(rank: int, size: int) -> tuple[int, int]:
    """Return the two pieces, of 2 x `size`, that a rank holds, in the order in which it holds them."""
    # An early piece and its mirror image: i + 1 and 2 cp - i pieces of keys to see, the same sum on every rank.
    return rank, 2 * size - 1 - rank


def shard_sequence(x: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    """A rank's pieces of a whole sequence: [.., s, ..] -> [.., s / size, ..]. Raises ConfigError for an s that cannot
    be cut."""
    if size == 1:
        return x
    pieces = _pieces(x, size, dim)
    return torch.cat([pieces[piece] for piece in list_pieces_of_rank(rank, size)], dim)


def to_sequence_order(x: Tensor, size: int, dim: int = 0) -> Tensor:
    """Put pieces in rank order, as a gather over `size` ranks leaves them, into the order of the sequence."""
    if size == 1:
        return x
    pieces = _pieces(x, size, dim)
    # By slices, whose bounds the host knows: an index tensor would first have to be copied to the device.
    where = {piece: index for index, piece in enumerate(_rank_order(size))}
    return torch.cat([pieces[where[piece]] for piece in range(2 * size)], dim)


def to_rank_order(x: Tensor, size: int, dim: int = 0) -> Tensor:
    """Put the pieces of a whole sequence into rank order; the inverse of `to_sequence_order`."""
    if size == 1:
        return x
    pieces = _pieces(x, size, dim)
    return torch.cat([pieces[piece] for piece in _rank_order(size)], dim)


def list_positions_of_rank(length: int, rank: int, size: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of this rank's tokens in the full sequence of `length` tokens: int64 [length / size]."""
    return shard_sequence(torch.arange(length, device=device), rank, size)


def get_batch_on_this_cp_rank(batch: Mapping[str, Tensor], cp_group: Group) -> dict[str, Tensor]:
    """This rank's tokens of a batch that all ranks of the group have loaded alike.

    batch: tensors [b, s, ...], cut along s; attention_mask [b, 1, s, s], cut along its queries, keeping all keys.
    Bounds of documents (cu_seqlens, max_seqlen) stay whole. position_ids keep their values: positions in the whole
    sequence. Raises ConfigError for a sequence that cannot be cut.
    """
    if cp_group.size() == 1:
        return dict(batch)
    # No communication: each rank has loaded the full batch, and cuts out its part.
    rank, size = cp_group.rank(), cp_group.size()
    # A batch may carry None for what its dataset does not give, as upstream's do.
    own = {name: value for name, value in batch.items() if name in _WHOLE or value is None}
    cut = {name: value for name, value in batch.items() if name not in own}
    return own | {name: shard_sequence(x, rank, size, _SEQUENCE_DIM.get(name, 1)) for name, x in cut.items()}


def _rank_order(size: int) -> list[int]:
    return [piece for rank in range(size) for piece in list_pieces_of_rank(rank, size)]


def _pieces(x: Tensor, size: int, dim: int) -> tuple[Tensor, ...]:
    length = x.shape[dim]
    problem = cutting_problem(f"a sequence of {length} tokens", length, size)
    if problem is not None:
        raise ConfigError(problem)
    return x.split(length // (2 * size), dim)
