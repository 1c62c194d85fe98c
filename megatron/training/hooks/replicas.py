# SPDX-License-Identifier: Apache-2.0
"""--check-weight-hash-across-dp-replicas-interval: do the processes that hold the same weights hold the same bits?

Data-parallel replicas never exchange weights without a distributed optimizer: they stay equal because each makes the
same update. A bit that flips in one of them, or a mistake in a collective, goes on unseen from there. One checksum for
each tensor is compared over every group of which all members hold the tensor; who holds what is read off its Placement.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor, all_gather_object, all_reduce
from megatron.core.device import is_cpu
from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.errors import DriftError
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.training.config.container import RunConfig
from megatron.training.run import Hook, HookContext, Run, StepResult

# 2^64 divided by the golden ratio, as a signed number: multiples of it differ in all of their bits.
MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
CHUNK = 2**22
"""Elements whose 64-bit products are in memory at a time: 32 MiB."""
_CHUNK_OF_CPU = 2**16
"""The same on a CPU, where they stay in its cache."""

Key = tuple[str, tuple[int, ...], int]
"""Name in the whole model, coordinate of the shard, first element where replicas divide the shard."""


class WeightHashHook(Hook):
    """Ends the run, on all ranks alike, where holders of the same weights hold different bits. Nothing is saved then:
    the phase comes before SAVE."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.agreed_at: int | None = None

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> WeightHashHook | None:
        """Return the hook for --check-weight-hash-across-dp-replicas-interval; None where it is not asked for."""
        interval = config.training.check_weight_hash_across_dp_replicas_interval
        return None if interval is None else cls(interval)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Compare in every iteration that the interval divides. Raises DriftError, the same on every rank."""
        iteration = run.progress.iteration
        if iteration % self.interval:
            return
        found = compare_weights(run.model, run.groups)
        if found is not None:
            since, checkpoint = "this is the first comparison", "an earlier checkpoint"
            if self.agreed_at is not None:
                since = f"all agreed after iteration {self.agreed_at}"
                checkpoint = f"a checkpoint of iteration {self.agreed_at} or earlier"
            raise DriftError(
                f"the weights of replicas differ after iteration {iteration}: {found}; {since}: start again from "
                f"{checkpoint}, and if it happens again, test the memory and the links of that machine"
            )
        self.agreed_at = iteration


# ---- who holds what


class _ReplicaSlice(NamedTuple):
    """A parameter, or the slice of it that this process holds."""

    key: Key
    values: Tensor
    groups: list[str]
    """Names of the groups of which all members hold the same."""


def _list_held(chunks: Sequence[ModelChunk]) -> Iterator[_ReplicaSlice]:
    """Everything this process holds, parameters without gradient included."""
    for chunk in chunks:
        # With --overlap-param-gather the gather of the last update may still be under way.
        chunk.finish_param_sync()
        for name, param in list_parameters(chunk.module):
            placement = get_placement(param, name)
            values, start = chunk.get_held_part(param)
            if start is not None:
                groups = ["expert_copies" if placement.is_expert else "copies"]
            else:
                groups = ["expt_dp" if placement.is_expert else "dp_cp"]
            shared_by = ("expt_tp", "etp") if placement.is_expert else ("tp", "tp")
            if shared_by[1] not in placement.axes:
                groups.append(shared_by[0])
            # Copies of tied embeddings on other stages.
            groups += [axis for axis in placement.partial_grad_axes if axis in ("embd", "pos_embd")]
            yield _ReplicaSlice((placement.name, placement.index, start or 0), values, groups)


def _find_groups(chunks: Sequence[ModelChunk], groups: ProcessGroupCollection) -> dict[str, Group]:
    """The groups over which something may be compared, in an order that is the same on every rank."""
    of_slices = {"copies": chunks[0].reductions[False].copies, "expert_copies": chunks[0].reductions[True].copies}
    found: dict[str, Group | None] = of_slices | {
        name: getattr(groups, name) for name in ("dp_cp", "expt_dp", "tp", "expt_tp", "embd", "pos_embd")
    }
    return {name: group for name, group in found.items() if group is not None and group.size() > 1}


# ---- comparing


def compute_checksum(values: Tensor) -> Tensor:
    """Return a 64-bit sum over the bits of all elements, each times a different odd number; a scalar on the device.

    Odd numbers have an inverse modulo 2^64, so that one changed element, in whichever bit, always changes the sum. NaN
    and -0.0 are bits like others.
    """
    bits = values.detach().reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    size = min(CHUNK, bits.numel(), _CHUNK_OF_CPU if is_cpu(values) else CHUNK)
    # An odd number for each place in a chunk, and one for each chunk: products of odd numbers are odd.
    factors = (torch.arange(size, device=values.device) * MULTIPLIER) | 1
    for number, part in enumerate(bits.split(size) if size else ()):
        # Sums of integers wrap around, and are the same in any order.
        total.add_((part * factors[: part.numel()]).sum(), alpha=2 * number + 1)
    return total


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_weights(chunks: Sequence[ModelChunk], groups: ProcessGroupCollection) -> str | None:
    """Compare all weights with every process that holds the same ones; every rank calls this.

    None where all agree. Otherwise who differs in what, the same words on every rank. The host waits once.
    """
    held = list(_list_held(chunks))
    device = chunks[0].device
    sums = torch.stack([compute_checksum(part.values) for part in held]) if held else torch.zeros(0, device=device)
    differs = torch.zeros(len(held), dtype=torch.int64, device=device)
    # The members of a group agree on what is unequal in it.
    compared: list[tuple[Group, list[int], Tensor]] = []
    for name, group in _find_groups(chunks, groups).items():
        shared = [index for index, part in enumerate(held) if name in part.groups]
        if shared:
            # Members hold the same parameters in the same order, so that no names need be exchanged.
            place = torch.tensor(shared, device=device)
            own = sums[place]
            gathered = own.new_empty(group.size() * len(shared))
            all_gather_into_tensor(gathered, own, group)
            unequal = (gathered.view(group.size(), -1) != own).any(dim=0)
            differs[place] |= unequal.long()
            compared.append((group, shared, unequal))
    any_differs = torch.cat([differs, differs.new_zeros(1)]).amax()
    all_reduce(any_differs, groups.world, op="max")
    if not any_differs.item():
        return None
    mine = {part.key: total for part, total, bad in zip(held, sums.tolist(), differs.tolist(), strict=True) if bad}
    distances: dict[str, float] = {}
    for group, shared, unequal in compared:
        for index in [shared[place] for place, is_unequal in enumerate(unequal.tolist()) if is_unequal]:
            name = held[index].key[0]
            distances[name] = max(distances.get(name, 0.0), _measure_distance(held[index].values, group))
    together = all_gather_object((platform.node(), mine, distances), groups.world)
    largest: dict[str, float] = {}
    for _, _, own_distances in together:
        for name, distance in own_distances.items():
            largest[name] = max(distance, largest.get(name, 0.0))
    return describe_drift([(host, found) for host, found, _ in together], largest)


def _measure_distance(values: Tensor, group: Group) -> float:
    """Return the largest distance of an element from the mean of the group, as a share of the tensor's root mean
    square; infinite where it is no number. Every member calls this."""
    own = values.detach().reshape(-1).double()
    mean = own.clone()
    all_reduce(mean, group)
    distance = (own - mean / group.size()).abs().max() / own.square().mean().sqrt().clamp(min=1e-30)
    return float(distance.nan_to_num(nan=math.inf))


def describe_drift(found: Sequence[tuple[str, Mapping[Key, int]]], distances: Mapping[str, float] | None = None) -> str:
    """In words: who holds other bits than most holders, in which tensors.

    found: for each rank its host and the checksums of the tensors in which it differs from somebody. distances: how far
    apart holders are, by name: the tensor of the largest is named first, as others follow from it (a gradient changes
    the norm that all are clipped by).
    """
    holders: dict[Key, dict[int, int]] = {}
    for rank, (_, sums) in enumerate(found):
        for key, total in sums.items():
            holders.setdefault(key, {})[rank] = total
    # (ranks that drifted, the others; no others where there is no majority) -> names of tensors
    drifts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for (name, _, _), by_rank in holders.items():
        (usual, count), *rest = Counter(by_rank.values()).most_common(2)
        right = tuple(rank for rank, total in by_rank.items() if total == usual)
        if rest and rest[0][1] == count:
            right = ()
        names = drifts.setdefault((tuple(rank for rank in by_rank if rank not in right), right), [])
        if name not in names:
            names.append(name)
    for names in drifts.values():
        names.sort(key=lambda name: -(distances or {}).get(name, 0.0))
    return "; ".join(
        _say_drift([f"rank {rank} ({found[rank][0]})" for rank in wrong], right, names)
        for (wrong, right), names in drifts.items()
    )


def _say_drift(wrong: list[str], right: tuple[int, ...], names: list[str]) -> str:
    what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    who = " and ".join([", ".join(wrong[:-1]), wrong[-1]] if len(wrong) > 1 else wrong)
    if right:
        usual = f"rank {right[0]}" if len(right) == 1 else f"ranks {', '.join(map(str, right))}"
        return f"{who} {'holds' if len(wrong) == 1 else 'hold'} other bits of {what} than {usual}"
    return f"{who} hold different bits of {what}, and no majority tells which of them drifted"
