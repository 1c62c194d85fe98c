"""Optimizer state over the flat buffers, and the groups of parameters that share learning rate and weight decay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.distributed.buffer_layout import GroupKey, group_key
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.flat_ranges import Range, common
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class StateSlice(NamedTuple):
    """State of one parameter, or of the part of it that this process updates."""

    start: int
    """First element, counted in the parameter's flat memory."""
    is_whole: bool
    tensors: dict[str, Tensor]
    """exp_avg, exp_avg_sq and, where it is other memory than the parameter, main_param: views in the parameter's shape
    where they are whole, else one-dimensional."""


class BufferState:
    """The optimizer's state for what this process updates of one buffer: float32, its ranges one after another.

    main: the values that are updated. In float32 training they are the model's parameters themselves; otherwise a
    float32 copy, so that small updates are not rounded away (Micikevicius et al., 2018, section 3.1).
    """

    def __init__(self, buffer: ParamAndGradBuffer) -> None:
        self.buffer = buffer
        self.has_main_params = buffer.dtype != torch.float32
        self.owned = buffer.owned
        lengths = [stop - start for start, stop in self.owned]
        self._places = list(itertools.accumulate(lengths, initial=0))[:-1]
        self.exp_avg = torch.zeros(sum(lengths), dtype=torch.float32, device=buffer.device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.main = self._take() if self.has_main_params else None

    def pieces(self, ranges: Sequence[Range]) -> Iterator[tuple[Range, slice]]:
        """What this process updates of some ranges of the buffer, in ascending order: where it lies there, and where in
        the state."""
        for (start, stop), place in zip(self.owned, self._places, strict=True):
            for first, last in common([(start, stop)], ranges):
                yield (first, last), slice(place + first - start, place + last - start)

    def values(self, piece: Range, place: slice) -> Tensor:
        """The values to update of one of the `pieces`: a view."""
        return self.buffer.values(*piece) if self.main is None else self.main[place]

    def copy_main_to_model(self) -> None:
        """Round the updated values into the network's parameters, as far as this process updates them."""
        if self.main is not None:
            for (start, stop), place in zip(self.owned, self._places, strict=True):
                self.buffer.values(start, stop).copy_(self.main[place : place + stop - start])

    def copy_model_to_main(self) -> None:
        """Take the network's parameters as the values to update."""
        if self.main is not None:
            self.main.copy_(self._take())

    def named_slices(self) -> Iterator[tuple[str, StateSlice]]:
        """(name in the whole model, state) of every parameter of which this process updates something."""
        buffer = self.buffer
        places = zip(buffer.names, buffer.params, buffer.layout.slots, buffer.starts, strict=True)
        for name, param, slot, first in places:
            for (start, stop), place in self.pieces([(slot.start, slot.start + slot.numel)]):
                is_whole = stop - start == param.numel()
                shape = param.shape if is_whole else (stop - start,)
                flats = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
                if self.main is not None:
                    flats["main_param"] = self.main
                tensors = {kind: flat[place].view(shape) for kind, flat in flats.items()}
                if buffer.holds_main_params:
                    tensors["main_param"] = buffer.values(start, stop).view(shape)
                yield name, StateSlice(first + start - slot.start, is_whole, tensors)

    def _take(self) -> Tensor:
        """A float32 copy of the parameters that this process updates."""
        return torch.cat([self.buffer.values(start, stop).float() for start, stop in self.owned])


class FlatShard(NamedTuple):
    """A contiguous slice of one buffer's parameters, gradients and state: what one fused kernel updates."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class ParamGroup:
    """The parameters of one key.

    options: what the scheduler and checkpoints see, with upstream's keys; the scheduler sets `lr` and `weight_decay`
    before each step.
    """

    def __init__(self, key: GroupKey, states: Sequence[BufferState], config: OptimizerConfig) -> None:
        self.key = key
        self.states = [state for state in states if key in state.buffer.layout.segments]
        wd_mult = 1.0 if key.has_weight_decay else 0.0
        self.options: dict[str, Any] = {
            "params": [
                param
                for state in self.states
                for name, param in zip(state.buffer.names, state.buffer.params, strict=True)
                if group_key(name, param.shape) == key
            ],
            "wd_mult": wd_mult,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "lr": config.lr or 0.0,
            "weight_decay": config.weight_decay * wd_mult,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
        }

    def shards(self) -> Iterator[FlatShard]:
        """What this process updates of the group; gradients in float32 (a copy where they are kept in another
        format)."""
        for state in self.states:
            segment = state.buffer.layout.segments[self.key]
            for piece, place in state.pieces([(segment.start, segment.stop)]):
                grad = state.buffer.grad_data[slice(*piece)].float()
                yield FlatShard(state.values(piece, place), grad, state.exp_avg[place], state.exp_avg_sq[place])


def make_param_groups(states: Sequence[BufferState], config: OptimizerConfig) -> list[ParamGroup]:
    """One group for each key that occurs, decayed parameters first."""
    keys = sorted({key for state in states for key in state.buffer.layout.segments}, reverse=True)
    return [ParamGroup(key, states, config) for key in keys]
