# SPDX-License-Identifier: Apache-2.0
"""Parameters with their optimizer state as this process holds them, and put together where replicas divide them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.placement import Placement, get_placement
from megatron.core.process_groups_config import Group
from megatron.core.stacked_parameters import list_parameters
from megatron.training.run import Run


class ParameterShare(NamedTuple):
    """Part of a parameter and its state that this process has: all of a shard, or flat slices of it."""

    chunk: int
    local_name: str
    placement: Placement
    is_trained: bool
    shard: tuple[Tensor, int | None]
    state: Mapping[str, tuple[Tensor, int | None]]
    """Kind -> values, and where they start in the shard's flat memory; None where they are all of it."""


def list_held(run: Run, *, with_state: bool) -> Iterator[ParameterShare]:
    """Yield what this process has of the parameters, with_state: and of the optimizer's state, in the model's order."""
    slices = run.optimizer.named_slices() if with_state else {}
    for number, chunk in enumerate(run.model):
        chunk.finish_param_sync()
        for name, parameter in list_parameters(chunk.module):
            placement = get_placement(parameter, name)
            state: dict[str, tuple[Tensor, int | None]] = {}
            if (found := slices.get(placement.name)) is not None:
                start = None if found.is_whole else found.start
                state = {kind: (values, start) for kind, values in found.tensors.items()}
            # A tied embedding on the last stage is a separate parameter, also for upstream.
            yield ParameterShare(
                number, name, placement, parameter.requires_grad, chunk.get_held_part(parameter), state
            )


def complete(run: Run, held: list[ParameterShare]) -> dict[bool, TensorGather]:
    """Return what gathers divided parameters: of experts (True), and the others."""
    return {
        of_experts: TensorGather(
            run.groups.get_replicas(of_experts), [entry for entry in held if entry.placement.is_expert == of_experts]
        )
        for of_experts in (False, True)
    }


class TensorGather:
    """Puts slices of parameters together that the members of a group divide among them. All members make one, and
    finish the same parameters in the same order."""

    def __init__(self, group: Group, held: list[ParameterShare]) -> None:
        self.group = group
        ours = {
            (entry.chunk, entry.local_name): {
                kind: (values.dtype, start is None) for kind, (values, start) in _parts(entry)
            }
            for entry in held
        }
        everyone = all_gather_object(ours, group)
        self._formats = {
            key: {kind: dtype for theirs in everyone for kind, (dtype, _) in theirs[key].items()} for key in ours
        }
        self._divided = {
            (key, kind)
            for key, formats in self._formats.items()
            for kind in formats
            if not all(theirs[key].get(kind, (None, False))[1] for theirs in everyone)
        }

    def finish(self, entry: ParameterShare) -> tuple[Tensor, dict[str, Tensor]]:
        """The whole shard, and its state."""
        key = (entry.chunk, entry.local_name)
        parts = dict(_parts(entry))
        shape = entry.placement.local_shape
        found = {}
        for kind, dtype in self._formats[key].items():
            values, start = parts.get(kind, (None, 0))
            if (key, kind) in self._divided:
                found[kind] = self._put_together(values, start or 0, shape, dtype, entry.shard[0].device)
            else:
                assert values is not None, f"{entry.placement.name}: {kind} is nowhere"
                found[kind] = values.view(shape)
        return found.pop(_SHARD), found

    def _put_together(
        self, values: Tensor | None, start: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        whole = torch.zeros(shape, dtype=dtype, device=device)
        if values is not None:
            whole.view(-1)[start : start + values.numel()] = values.reshape(-1)
        # The largest of each byte: bit for bit its holder's, also where several hold it.
        all_reduce(whole.view(-1).view(torch.uint8), self.group, "max")
        # The memory of a GPU has no room for all of them.
        return whole.cpu()


_SHARD = "shard"


def _parts(entry: ParameterShare) -> list[tuple[str, tuple[Tensor, int | None]]]:
    return [(_SHARD, entry.shard), *entry.state.items()]
