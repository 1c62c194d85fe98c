# SPDX-License-Identifier: Apache-2.0
"""Optimizer state over flat buffers: what this process updates of one group of parameters in one buffer.

    buffer   | group A ............ | group B ..... | group A .. |
    owned        [=====================)      what this process updates (all, unless the state is divided)
    state A      [=============)              one flat tensor of each kind, the pieces one after another

Everything is float32, and updated in place, unless a smaller format is asked for; that is widened and rounded again a
chunk at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.distributed.model_chunk import FlatBuffer
from megatron.core.distributed.param_and_grad_buffer import Slot
from megatron.core.flat_ranges import Range, intersect_ranges
from megatron.core.placement import get_placement

CHUNK = 2**24
"""Elements that are in a temporary float32 format at a time: 64 MiB each."""


class StateSlice(NamedTuple):
    """State of one parameter, or of the part of it that this process updates."""

    start: int
    """First element, counted in the parameter's flat memory."""
    is_whole: bool
    tensors: dict[str, Tensor]
    """The rule's kinds (exp_avg, ...) and, where it is other memory than the parameter, main_param: views in the
    parameter's shape where they are whole, else one-dimensional."""


class FlatShard(NamedTuple):
    """A contiguous slice of one buffer's parameters, gradients and state in float32: what one kernel updates."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    """Name of a state tensor, such as exp_avg -> its slice."""


class FlatMemory(NamedTuple):
    """A contiguous slice of one buffer's parameters, gradients and state in the formats in which they are kept."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    """Name of a state tensor, such as exp_avg -> its slice."""
    weight: Tensor | None
    """The network's values, of which `param` is the unrounded copy; None where `param` is the network's."""


class Member(NamedTuple):
    """A parameter of the group."""

    name: str
    param: nn.Parameter
    slot: Slot
    start: int
    """First element in the buffer, counted in the flattened parameter."""


class GroupState:
    """State of one group in one buffer.

    ranges: of the buffer, ascending, that hold the group's parameters and the gaps between them. kinds: name of each
    state tensor and its dtype. main_dtype: dtype of the main parameters, the values that are updated. Where it is the
    model's dtype they are the model's parameters themselves; otherwise a copy, so that small updates are not rounded
    away (Micikevicius et al., 2018, section 3.1).
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        members: Sequence[Member],
        ranges: Sequence[Range],
        kinds: Mapping[str, torch.dtype],
        main_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.buffer = buffer
        self.members = list(members)
        self.owned = intersect_ranges(ranges, buffer.owned)
        lengths = [stop - start for start, stop in self.owned]
        # State tensors hold the owned ranges one after another, without the gaps of the buffer; here each range begins.
        self._places = list(itertools.accumulate(lengths, initial=0))[:-1]
        self.tensors = {kind: self.allocate(sum(lengths), dtype) for kind, dtype in kinds.items()}
        self.companions: dict[str, Tensor] = {}
        """Tensors like the state's that no update rule knows: checkpoints keep them with it."""
        self.mirrors_model = False
        """True if the main parameters are copies of the network's in other memory, and hold no state."""
        # Filled piece by piece: with a list of copies to join, all of it would be in memory twice for a moment.
        self.main = self.allocate_main(sum(lengths), main_dtype)
        self.copy_model_to_main()
        kept = [buffer.dtype if self.main is None else main_dtype, buffer.grad_data.dtype, *kinds.values()]
        self.is_float32 = all(dtype == torch.float32 for dtype in kept)
        """True if `shards` hands out the memory itself, so that all may be asked for before one is updated."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros [numel] in the memory of the state."""
        return torch.zeros(numel, dtype=dtype, device=self.buffer.device)

    def add_companions(self, kinds: Sequence[str]) -> None:
        """Keep further float32 tensors, zeros at first, of each element that is updated here."""
        numel = sum(stop - start for start, stop in self.owned)
        self.companions |= {kind: self.allocate(numel, torch.float32) for kind in kinds}

    def allocate_main(self, numel: int, main_dtype: torch.dtype) -> Tensor | None:
        """Memory [numel] for main parameters; None where the network's are updated."""
        return torch.empty(numel, dtype=main_dtype, device=self.buffer.device) if self.needs_main(main_dtype) else None

    def needs_main(self, main_dtype: torch.dtype) -> bool:
        """Return whether the values that are updated are not the network's."""
        # A sharded buffer holds main parameters itself; a copy in the same format would be the same values twice.
        return self.buffer.dtype not in (torch.float32, main_dtype) and not self.buffer.is_updated_as_it_is

    def pieces(self, ranges: Sequence[Range]) -> Iterator[tuple[Range, slice]]:
        """Yield what this process updates of some ranges of the buffer, in ascending order: where it lies there, and
        where in the state."""
        for (start, stop), place in zip(self.owned, self._places, strict=True):
            for first, last in intersect_ranges([(start, stop)], ranges):
                yield (first, last), slice(place + first - start, place + last - start)

    def _own_pieces(self) -> Iterator[tuple[Range, slice]]:
        for (start, stop), place in zip(self.owned, self._places, strict=True):
            yield (start, stop), slice(place, place + stop - start)

    def values(self, piece: Range, place: slice) -> Tensor:
        """The values to update of one of the `pieces`: a view."""
        return self.buffer.values(*piece) if self.main is None else self.main[place]

    def shards(self, ranges: Sequence[Range] | None = None, longest: int | None = None) -> Iterator[FlatShard]:
        """Yield what this process updates, or of it what lies in `ranges`; at most `longest` elements at a time.

        The caller updates param and state in place and may overwrite the gradient.
        """
        for piece, place in self._own_pieces() if ranges is None else self.pieces(ranges):
            if self.is_float32 and longest is None:
                state = {kind: tensor[place] for kind, tensor in self.tensors.items()}
                # The memory itself: no copies, and the caller may collect many of these before it updates one.
                yield FlatShard(self.values(piece, place), self.buffer.grad_data[slice(*piece)], state)
                continue
            kept = [self.values(piece, place), self.buffer.grad_data[slice(*piece)]]
            kept += [tensor[place] for tensor in self.tensors.values()]
            # In pieces, because float32 copies of everything at once would cost the memory that 16-bit state saves.
            limit = longest or CHUNK
            for parts in zip(*(tensor.split(limit) for tensor in kept), strict=True):
                wide = [part.float() for part in parts]  # the same tensor where it is float32
                yield FlatShard(wide[0], wide[1], dict(zip(self.tensors, wide[2:], strict=True)))
                # Rounded back once the caller has updated the float32 copies; the gradient (index 1) is spent.
                for index, (part, result) in enumerate(zip(parts, wide, strict=True)):
                    if result is not part and index != 1:
                        part.copy_(result)

    def memory(self) -> Iterator[FlatMemory]:
        """Yield what this process updates, as it lies there, for kernels that read and write its formats themselves."""
        for piece, place in self._own_pieces():
            state = {kind: tensor[place] for kind, tensor in self.tensors.items()}
            weight = None if self.main is None else self.buffer.values(*piece)
            yield FlatMemory(self.values(piece, place), self.buffer.grad_data[slice(*piece)], state, weight)

    def copy_main_to_model(self) -> None:
        """Round the main parameters that this process updates into the network's parameters."""
        if self.main is not None:
            for piece, place in self._own_pieces():
                self.buffer.values(*piece).copy_(self.main[place])

    def copy_model_to_main(self) -> None:
        """Take the network's parameters as the values to update."""
        if self.main is not None:
            for piece, place in self._own_pieces():
                self.main[place].copy_(self.buffer.values(*piece))

    def note_change(self) -> None:
        """Note that the main parameters were changed outside of the update."""

    def take_loaded(self) -> None:
        """Make main parameters and the network's agree after a loader has written what `named_slices` names."""
        self.copy_main_to_model()

    def named_slices(self) -> Iterator[tuple[str, StateSlice]]:
        """(name in the whole model, state) of every parameter of which this process updates something."""
        flats = self.tensors | self.companions
        if self.main is not None and not self.mirrors_model:
            flats = flats | {"main_param": self.main}
        for name, param, slot, first in self.members:
            for (start, stop), place in self.pieces([(slot.start, slot.start + slot.numel)]):
                # A whole parameter's state keeps its shape, so that a checkpoint shows tensors like the model's.
                is_whole = stop - start == param.numel()
                shape = get_placement(param, name).local_shape if is_whole else (stop - start,)
                tensors = {kind: flat[place].view(shape) for kind, flat in flats.items()}
                if self.buffer.model_dtype != self.buffer.dtype:  # these are main parameters
                    tensors["main_param"] = self.buffer.values(start, stop).view(shape)
                yield name, StateSlice(first + start - slot.start, is_whole, tensors)
