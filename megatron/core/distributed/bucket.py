"""A bucket: the part of a flat buffer that one collective carries, and the communication over it.

| state divided over      | gradients                                                   | parameters              |
|-------------------------|-------------------------------------------------------------|-------------------------|
| nobody                  | all-reduce over `copies`                                    | stay                    |
| `shards`                | reduce-scatter over `shards`: each has its slice of the sum | all-gather over `shards`|
| `shards`, with `copies` | reduce-scatter, then all-reduce of the slice over `copies`  | all-gather over `shards`|

The second row is ZeRO-1 (Rajbhandari et al., 2020); the third keeps the state once for each group of processes, such
as the devices of a few nodes, so that the gather, and most of the reduction, stay inside the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron.core.collectives import (
    Handle,
    Op,
    all_gather_in_place,
    all_reduce,
    reduce_scatter_in_place,
    reduce_scatter_wide,
)
from megatron.core.process_groups_config import Group, SingleRankGroup


@dataclass(frozen=True)
class Reduction:
    """Over which processes gradients are combined, and into what."""

    shards: Group
    """The processes that divide the optimizer's state; a single one where nobody does."""
    copies: Group
    """The processes that hold the same slice of it, this one among them."""
    op: Op = "sum"
    scale: float = 1.0
    """What each process's gradients are multiplied by before they are summed."""
    sums_in_fp32: bool = False
    """Over `shards`, add 16-bit gradients in float32."""

    @property
    def is_needed(self) -> bool:
        """False for a process that sees the whole batch."""
        return not (isinstance(self.shards, SingleRankGroup) and isinstance(self.copies, SingleRankGroup))

    def own(self, flat: Tensor) -> Tensor:
        """This process's slice of a bucket: a view."""
        share = flat.numel() // self.shards.size()
        return flat.narrow(0, self.shards.rank() * share, share)


class Bucket:
    """Reduces one part of the gradients and gathers the same part of the parameters, in steps that may overlap others.

    grads, params: flat views of the buffers, as long as each other and divisible by the number of shards.
    """

    def __init__(self, grads: Tensor, params: Tensor, reduction: Reduction) -> None:
        self.grads = grads
        self.params = params
        self.reduction = reduction
        self._reducing: Handle | None = None
        self._gathering: Handle | None = None
        self._waiting: list[Callable[[], Handle | None]] = []
        self.is_started = False

    def start_reduce(self) -> None:
        """Begin to combine the gradients; they must be complete, and stay untouched until `advance` says False."""
        reduction = self.reduction
        self.is_started = True
        if reduction.scale != 1.0:
            self.grads.mul_(reduction.scale)
        if not isinstance(reduction.shards, SingleRankGroup):
            is_wide = reduction.sums_in_fp32 and self.grads.itemsize < 4
            reduce_scatter = reduce_scatter_wide if is_wide else reduce_scatter_in_place
            self._waiting.append(lambda: reduce_scatter(self.grads, reduction.shards, reduction.op, async_op=True))
        if not isinstance(reduction.copies, SingleRankGroup):
            own = reduction.own(self.grads)
            self._waiting.append(lambda: all_reduce(own, reduction.copies, reduction.op, async_op=True))
        self._begin()

    def advance(self) -> bool:
        """Wait for the collective under way and begin the next; False when none was left to begin."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
        return self._begin()

    def start_gather(self) -> None:
        """Begin to send everyone the slice of the parameters that this process has updated."""
        if not isinstance(self.reduction.shards, SingleRankGroup):
            self._gathering = all_gather_in_place(self.params, self.reduction.shards, async_op=True)

    def finish_gather(self) -> None:
        """Wait until all parameters are there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _begin(self) -> bool:
        if not self._waiting:
            return False
        self._reducing = self._waiting.pop(0)()
        return True
