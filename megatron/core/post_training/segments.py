# SPDX-License-Identifier: Apache-2.0
"""Packed sequences as segments: which of them a token belongs to, and sums over each, wherever its tokens are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce
from megatron.core.process_groups_config import Group


class Answers(NamedTuple):
    """The answers of packed sequences, as whole as they are before context parallelism cuts them. n: sequences."""

    targets: Tensor
    """int64 [1, t]: the next token of each token in its sequence; 0 behind the last one."""
    segments: Tensor
    """int64 [1, t]: the sequence whose answer the next token belongs to, -1 where it counts nowhere."""
    lengths: Tensor
    """float32 [n]: tokens of each answer."""


def find_answers(tokens: Tensor, bounds: Tensor, counts: Tensor) -> Answers:
    """What log-probabilities of packed sequences are asked for.

    tokens: int64 [1, t]. bounds: int [n + 1], where the sequences begin and the last one ends. counts: bool [1, t],
    the tokens that are of an answer. A sequence's first token is predicted by none and never counts.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    # The sequence of each place; places behind the last bound are in none.
    sequence = torch.searchsorted(bounds.to(places), places, right=True) - 1
    following = sequence.roll(-1)
    continues = (sequence == following) & (places < bounds[-1] - 1)
    segments = torch.where(continues & counts[0].roll(-1), sequence, -1)
    rows = torch.arange(len(bounds) - 1, device=tokens.device).unsqueeze(1)
    lengths = (segments == rows).sum(1).float()
    return Answers(torch.where(continues, tokens[0].roll(-1), 0).unsqueeze(0), segments.unsqueeze(0), lengths)


def sum_segments(values: Tensor, segments: Tensor, count: int, sequence: Group) -> Tensor:
    """Sums of the values of each segment, [count], over the ranks that share the sequences.

    values: this rank's, in any shape. segments: int64 in the same shape, the segment of each value, below 0 for none.
    sequence: the context-parallel ranks. The gradient of a sum reaches this rank's values only.
    """
    # Not index_add: on a GPU the order of its additions, and with it the last bits, differ from run to run.
    rows = torch.arange(count, device=values.device).unsqueeze(1)
    own = torch.where(segments.reshape(1, -1) == rows, values.reshape(1, -1), 0).sum(1)
    if sequence.size() == 1:
        return own
    total = own.detach().clone()
    all_reduce(total, sequence)
    return own + (total - own.detach())
