# SPDX-License-Identifier: Apache-2.0
"""Buckets: the parts of a flat buffer that one collective carries, and when each is reduced and gathered.

| state divided over      | gradients                                                   | parameters              |
|-------------------------|-------------------------------------------------------------|-------------------------|
| nobody                  | all-reduce over `copies`                                    | stay                    |
| `shards`                | reduce-scatter over `shards`: each has its slice of the sum | all-gather over `shards`|
| `shards`, with `copies` | reduce-scatter, then all-reduce of the slice over `copies`  | all-gather over `shards`|

The second row is ZeRO-1 (Rajbhandari et al., 2020); the third keeps the state once for each group of processes, such
as the devices of a few nodes, so that the gather, and most of the reduction, stay inside the group.

Gradients come from the last layer to the first. During the last microbatch's backward every parameter reports; when all
of a bucket have, and all buckets before it have been started, the bucket's reduction starts while backward goes on:

    backward   | layer 4 | layer 3 | layer 2 | layer 1 | embedding |
    link                 | bucket 4,3        | bucket 2,1          | bucket embedding |

After the update the gathers of all buckets are started in the order in which forward needs them; before a layer runs, a
hook waits for the buckets that hold its parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.collectives import (
    Handle,
    Op,
    all_gather_in_place,
    all_reduce,
    reduce_scatter_in_fp32,
    reduce_scatter_in_place,
)
from megatron.core.compiling import outside_of_graphs
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import Group, ProcessGroupCollection, SingleRankGroup
from megatron.core.stacked_parameters import list_parameters


@dataclass(frozen=True)
class Reduction:
    """Over which processes gradients are combined, and into what."""

    shards: Group
    """The processes that divide the optimizer's state; a single one where it is not divided."""
    copies: Group
    """The processes that hold the same slice of it, this one among them."""
    op: Op = "sum"
    scale: float = 1.0
    """Factor on each process's gradients before they are summed."""
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


def choose_reduction(
    config: ModelParallelConfig, ddp_config: DistributedDataParallelConfig, groups: ProcessGroupCollection
) -> Reduction:
    """Choose how gradients are combined: a mean over the replicas, or, for a loss per token, a sum
    (finalize_model_grads divides by the number of tokens)."""
    whole: Group = groups.dp_cp
    instances = ddp_config.num_distributed_optimizer_instances
    if ddp_config.use_distributed_optimizer and instances not in (1, groups.optimizer_copies.size()):
        raise ConfigError(
            f"--num-distributed-optimizer-instances {instances}: the process groups were made for "
            f"{groups.optimizer_copies.size()}; build them from a RankGrid with as many optimizer_instances"
        )
    shards, copies = _choose_shards(ddp_config, whole, groups.optimizer_shards, groups.optimizer_copies)
    wide = ddp_config.reduce_scatter_with_fp32_accumulation
    if config.calculate_per_token_loss:
        return Reduction(shards, copies, sums_in_fp32=wide)
    if ddp_config.average_in_collective:
        return Reduction(shards, copies, op="avg", sums_in_fp32=wide)
    return Reduction(shards, copies, scale=1.0 / whole.size(), sums_in_fp32=wide)


def choose_expert_reduction(
    reduction: Reduction, ddp_config: DistributedDataParallelConfig, groups: ProcessGroupCollection
) -> Reduction:
    """The same for weights of experts: summed over the processes that hold the same shard of the same experts, whose
    tokens together are the tokens of all replicas, and divided by the number of the model's replicas, as for dense
    weights."""
    holders: Group = groups.expt_dp
    op, scale = reduction.op, reduction.scale
    if op == "avg":
        scale = holders.size() / groups.dp_cp.size()  # the collective divides by the holders
    shards, copies = _choose_shards(ddp_config, holders, groups.expert_optimizer_shards, groups.expert_optimizer_copies)
    return dataclasses.replace(reduction, shards=shards, copies=copies, op=op, scale=scale)


def _choose_shards(
    ddp_config: DistributedDataParallelConfig, whole: Group, shards: Group, copies: Group
) -> tuple[Group, Group]:
    """Return the processes that divide the optimizer's state, and the ones that hold copies of a slice, among the
    processes `whole`. shards, copies: the groups of several optimizer instances."""
    if not ddp_config.use_distributed_optimizer:
        return SingleRankGroup(), whole
    return (whole, SingleRankGroup()) if ddp_config.num_distributed_optimizer_instances == 1 else (shards, copies)


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
        # Before the sum, so that sums in 16 bits stay in range.
        if reduction.scale != 1.0:
            self.grads.mul_(reduction.scale)
        # Called one after the other, not now: the second collective reads what the first one writes, and to wait for it
        # here would hold up backward.
        if not isinstance(reduction.shards, SingleRankGroup):
            is_wide = reduction.sums_in_fp32 and self.grads.itemsize < 4
            reduce_scatter = reduce_scatter_in_fp32 if is_wide else reduce_scatter_in_place
            self._waiting.append(lambda: reduce_scatter(self.grads, reduction.shards, reduction.op, async_op=True))
        if not isinstance(reduction.copies, SingleRankGroup):
            # Only our slice: the reduce-scatter leaves the others undefined.
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


class GradSync:
    """Starts the buckets of one model chunk, and finishes them.

    buckets: in the order in which backward completes them, each with its parameters.
    """

    def __init__(self, buckets: Sequence[tuple[Bucket, Sequence[nn.Parameter]]]) -> None:
        self.buckets = [bucket for bucket, _ in buckets]
        self._sizes = [len(params) for _, params in buckets]
        self._place: Mapping[nn.Parameter, int] = {
            param: position for position, (_, params) in enumerate(buckets) for param in params
        }
        self.reset()

    def reset(self) -> None:
        """Forget the last step: from now on gradients are only accumulated."""
        # Gradients that have not arrived, by bucket. A parameter that gets none in this step leaves its bucket, and the
        # ones after it, to `finish`.
        self._missing = list(self._sizes)
        self._next = 0
        self.is_last = False
        for bucket in self.buckets:
            bucket.is_started = False

    def expect_last(self) -> None:
        """From now on each gradient that arrives is its parameter's last of this step."""
        self.is_last = True

    def report_arrival(self, param: nn.Parameter) -> None:
        """Note that a gradient has been added to its buffer; starts the reduction of buckets that are complete now."""
        if not self.is_last:
            return
        position = self._place[param]
        assert not self.buckets[position].is_started, (
            f"a gradient of shape {tuple(param.shape)} arrived after its bucket was reduced; grad sync was enabled "
            "before the last microbatch"
        )
        self._missing[position] -= 1
        # All processes must start a group's collectives in the same order, but gradients may arrive in another
        # (branches of the graph): a bucket that is complete early waits for those before it.
        while self._next < len(self.buckets) and self._missing[self._next] == 0:
            self._start_next()

    def start(self) -> None:
        """Start whatever has not been started; all gradients must be there."""
        while self._next < len(self.buckets):
            self._start_next()

    def finish(self) -> None:
        """Start what has not been started and wait for all of it."""
        self.start()
        # In rounds: each begins the next collective of every bucket, so that one bucket's all-reduce over the copies
        # overlaps the next one's reduce-scatter.
        unfinished = self.buckets
        while unfinished:
            unfinished = [bucket for bucket in unfinished if bucket.advance()]

    def _start_next(self) -> None:
        self.buckets[self._next].start_reduce()
        self._next += 1


class ParamGather:
    """Gathers the buckets of one model chunk.

    buckets: in the order in which forward needs them, each with its parameters. With `overlap`, hooks on the module's
    layers wait for them; otherwise `finish` must be called before the parameters are used.

    A gather begins when the one before it has been waited for, and so overlaps the layers of that one. Begun all at
    once they would hold up the kernels after them, too, where a GPU has a single queue (CUDA_DEVICE_MAX_CONNECTIONS=1,
    which the order of tensor parallelism's collectives needs).
    """

    def __init__(
        self, module: nn.Module, buckets: Sequence[tuple[Bucket, Sequence[nn.Parameter]]], *, overlap: bool
    ) -> None:
        self.buckets = [bucket for bucket, _ in buckets]
        self._next = len(self.buckets)
        if not overlap:
            return
        # A bucket may end in the middle of a layer: a layer waits for all buckets that hold some of it.
        owner = {param: number for number, (_, params) in enumerate(buckets) for param in params}
        for unit in _find_waiting_units(module):
            needed = sorted({owner[param] for _, param in list_parameters(unit) if param in owner})
            if needed:
                unit.register_forward_pre_hook(self._make_wait_hook(needed))

    def start(self) -> None:
        """Begin to gather; the parameters must be updated."""
        self._next = 0
        self._start_up_to(0)

    def finish(self) -> None:
        """Wait until all parameters are there."""
        self._start_up_to(len(self.buckets) - 1)
        for bucket in self.buckets:
            bucket.finish_gather()

    def _start_up_to(self, number: int) -> None:
        while self._next <= min(number, len(self.buckets) - 1):
            self.buckets[self._next].start_gather()
            self._next += 1

    def _make_wait_hook(self, needed: list[int]) -> Callable[..., Any]:
        """A forward pre-hook that waits for the buckets of these numbers; a compiler leaves it as it is."""

        @outside_of_graphs
        def wait(module: nn.Module, inputs: Any) -> None:
            self._start_up_to(needed[-1])
            for number in needed:
                self.buckets[number].finish_gather()
            self._start_up_to(needed[-1] + 1)

        return wait


def _find_waiting_units(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of module lists (layers) as units, and otherwise the modules that directly hold parameters.

    A layer waits as a whole, because it may use a part's weight without calling the part.
    """
    if next(module.parameters(recurse=False), None) is not None:
        yield module
        return
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _find_waiting_units(child)
