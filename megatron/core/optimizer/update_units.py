# SPDX-License-Identifier: Apache-2.0
"""The units of an update: model chunks whose parameters are gathered as soon as they are updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.optimizer.param_groups import ParamGroup


class UpdateUnit(NamedTuple):
    """Chunks that are updated together."""

    chunks: Sequence[ModelChunk]
    groups: list[ParamGroup]
    """The parts of the parameter groups that lie in these chunks."""
    on_device: list[ParamGroup]
    """Of these groups, what the device updates."""
    offloaded: list[ParamGroup]
    """Groups that the host updates."""

    def update(self, step: Tensor, divisors: Sequence[Tensor | None], found_inf: Tensor) -> None:
        """Update once, on the device and on the host. divisors: of the gradients, and of those that are clipped by
        themselves, if there are any."""
        # The device first: it works on its part while the host is busy with its own.
        for group in self.on_device:
            group.rule.update(group, step, divisors[group.key.is_clipped_apart], found_inf)
        if not self.offloaded:
            return
        # Read once for all groups: the host waits for the device here.
        scalars = [step, found_inf, *(each for each in divisors if each is not None)]
        step, found_inf, *own = torch.stack(scalars).cpu().unbind()
        for group in self.offloaded:
            group.rule.update(group, step, own[group.key.is_clipped_apart] if own else None, found_inf)


def make_update_units(chunks: Sequence[ModelChunk], groups: Sequence[ParamGroup]) -> Iterator[UpdateUnit]:
    """All chunks together, or with overlap_param_gather_with_optimizer_step one after the other."""
    # One after the other, the gather of a chunk overlaps the update of the next.
    in_turn = any(chunk.ddp_config.overlap_param_gather_with_optimizer_step for chunk in chunks)
    for together in [[chunk] for chunk in chunks] if in_turn else [chunks]:
        buffers = [buffer for chunk in together for buffer in chunk.flat_buffers]
        parts = [group.part(buffers) for group in groups]
        places = [part.split_by_place() for part in parts]
        # A group of another place has no state here, and a frozen stage has no groups.
        kinds = (parts, [on_device for on_device, _ in places], [offloaded for _, offloaded in places])
        yield UpdateUnit(together, *([part for part in found if part.states] for found in kinds))
