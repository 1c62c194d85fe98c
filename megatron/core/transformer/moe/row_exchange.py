# SPDX-License-Identifier: Apache-2.0
"""All-to-all of rows in two differentiable halves, so that a rank computes something else while its rows travel.

    forward     start: rows leave          ... what is computed in between ...     finish: wait until all are there
    backward    finish: gradients leave    ... its backward ...                    start: wait until all are there

Autograd runs the youngest operation first. What was computed between the halves in forward therefore has its backward
between them, too. Collectives are torch's; on CUDA they run on the communicator's stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.auxiliary_loss import is_recomputing
from megatron.core.collectives import Handle, all_to_all_single
from megatron.core.exchange_gap import ExchangeGap
from megatron.core.fp8 import pack_rows, unpack_rows
from megatron.core.process_groups_config import Group


class RowExchange:
    """One exchange: consecutive rows go to the ranks of the group, sends[i] of them to rank i, which sends receives[i]
    in return; backward sends gradients the other way.

    Several tensors may travel together. Each object serves one forward and its backward. gap: called before the end of
    each direction is waited for. packs_forward, packs_backward: rows of vectors travel in 8 bits (MXFP8) that way.
    """

    def __init__(
        self,
        group: Group,
        sends: list[int],
        receives: list[int],
        gap: ExchangeGap,
        *,
        packs_forward: bool = False,
        packs_backward: bool = False,
    ) -> None:
        self.group, self.sends, self.receives, self.gap = group, sends, receives, gap
        self.packs_forward, self.packs_backward = packs_forward, packs_backward
        self._under_way: list[_UnderWay] = []

    def start(self, *tensors: Tensor) -> Tensor:
        """Send the rows of tensors [sum(sends), ...] off. What it returns stands for them until `finish` gets it."""
        ticket: Tensor = _Start.apply(self, *tensors)
        return ticket

    def finish(self, ticket: Tensor) -> tuple[Tensor, ...]:
        """Wait until the rows of the others are there: [sum(receives), ...] for each tensor."""
        # A forward that backward repeats runs with that micro-batch's random numbers: no other may come in between.
        if not is_recomputing():
            self.gap()
        arrived: tuple[Tensor, ...] = _Finish.apply(self, ticket)
        return arrived

    def run(self, tensor: Tensor) -> Tensor:
        """Exchange the rows of one tensor at once."""
        return self.finish(self.start(tensor))[0]

    def _begin(self, tensors: Sequence[Tensor], sends: list[int], receives: list[int], packs: bool) -> None:
        assert not self._under_way, "an exchange begins before its other direction is over"
        for tensor in tensors:
            is_packed = packs and tensor.dim() == 2  # not the weights, of which each row has one
            leaving = pack_rows(tensor) if is_packed else tensor.contiguous()
            arriving = leaving.new_empty(sum(receives), *leaving.shape[1:])
            work = all_to_all_single(arriving, leaving, self.group, receives, sends, async_op=True)
            self._under_way.append(_UnderWay(work, leaving, arriving, tensor.dtype if is_packed else None))

    def _end(self) -> tuple[Tensor, ...]:
        arrived, self._under_way = self._under_way, []
        for one in arrived:
            if one.work is not None:
                one.work.wait()
        return tuple(one.arriving if one.packed is None else unpack_rows(one.arriving, one.packed) for one in arrived)


class _UnderWay(NamedTuple):
    work: Handle | None
    leaving: Tensor
    """Kept until it has left."""
    arriving: Tensor
    packed: torch.dtype | None
    """Dtype of the rows that travel as bytes; None where they travel as they are."""


# Rows that travel have no values yet, and as gradients not the shape of what they stand for. So the graph between the
# halves has a scalar in their place, in both directions.


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, *tensors: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange._begin(tensors, exchange.sends, exchange.receives, exchange.packs_forward)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, ticket: Tensor) -> Any:
        ctx.exchange.gap()
        return None, *ctx.exchange._end()


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, ticket: Tensor) -> Any:
        ctx.exchange = exchange
        return exchange._end()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        exchange = ctx.exchange
        exchange._begin(grads, exchange.receives, exchange.sends, exchange.packs_backward)
        return None, grads[0].new_zeros(())
