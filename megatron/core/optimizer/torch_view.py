# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state as programs of upstream know it: main parameters as keys, tensors that may be moved away.

    optimizer.optimizer.state[main]["exp_avg"].zero_()                           reaches the state
    state["exp_avg"] = state["exp_avg"].to("cpu")                                frees its memory, once all have left
    for main in shard_fp32_from_float16_groups[0]: main.data = main.data.to("cpu")
    state["exp_avg"] = state["exp_avg"].to("cuda"), main.data = ...              brings it back

The state itself stays one flat tensor for each group and kind (group_state.py); here are views of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron.core.device import is_cpu
from megatron.core.optimizer.group_state import GroupState
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.placement import get_placement


class TorchView:
    """Stand-in for upstream's `optimizer.optimizer`: a torch optimizer by its attributes.

    param_groups: the optimizer's dictionaries themselves, whose `params` become the main parameters. state: main
    parameter -> {"exp_avg": ..., "exp_avg_sq": ..., "step": ...}, of what this process updates.
    """

    def __init__(self, groups: Sequence[ParamGroup], step: Tensor) -> None:
        self.param_groups = [group.options for group in groups]
        self.state: dict[Tensor, _State] = {}
        self.copies: list[list[Tensor]] = []
        """Of each group the main parameters that are copies of parameters in 16 bits."""
        self._homes: list[_Home] = []
        for group in groups:
            homes = [_Home(state, step) for state in group.states]
            self._homes += homes
            self.copies.append([main for home in homes if home.state.main is not None for main in home.mains])
            group.options["params"] = [main for home in homes for main in home.mains]
            for home in homes:
                self.state |= dict(zip(home.mains, home.entries, strict=True))

    def collect(self) -> None:
        """Bring back what was moved away or replaced; before anything of ours reads the state."""
        for home in self._homes:
            home.collect()


class _Home:
    """One group's state in one buffer, and what of it has left."""

    def __init__(self, state: GroupState, step: Tensor) -> None:
        self.state, self.step = state, step
        self.mains: list[Tensor] = []
        self.entries: list[_State] = []
        self._places: list[tuple[slice, tuple[int, ...]]] = []
        for name, param, slot, _ in state.members:
            for piece, place in state.pieces([(slot.start, slot.start + slot.numel)]):
                is_whole = piece[1] - piece[0] == param.numel()
                shape = get_placement(param, name).local_shape if is_whole else (piece[1] - piece[0],)
                self._places.append((place, shape))
                # Where the network's values are updated, unsharded, the parameter is the main parameter.
                own = param if is_whole and param.shape == shape else state.values(piece, place).view(shape)
                self.mains.append(own if state.main is None else self._view("main", len(self.mains)))
        self.away: dict[str, dict[int, Tensor]] = {kind: {} for kind in state.tensors}
        self.entries = [_State(self, index) for index in range(len(self.mains))]

    def put(self, kind: str, index: int, value: Tensor) -> Tensor:
        """Take another tensor for a parameter's state; returns the one to show."""
        flat, away = self.state.tensors[kind], self.away[kind]
        if value.device == flat.device:
            _regain(flat)
            view = self._view(kind, index)
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
            away.pop(index, None)
            return view
        away[index] = value
        if len(away) == len(self._places):
            flat.untyped_storage().resize_(0)
            moved = self.state.main is not None and all(main.device != flat.device for main in self.mains)
            if moved and self.state.main is not None:
                self.state.main.untyped_storage().resize_(0)
        return value

    def collect(self) -> None:
        """See TorchView."""
        for kind, away in self.away.items():
            for index, value in list(away.items()):
                self.entries[index][kind] = value.to(self.state.tensors[kind].device)
        if self.state.main is None:
            return
        _regain(self.state.main)
        for index, main in enumerate(self.mains):
            view = self._view("main", index)
            if main.data_ptr() != view.data_ptr():
                view.copy_(main)
                main.data = view

    def _view(self, kind: str, index: int) -> Tensor:
        flat = self.state.main if kind == "main" else self.state.tensors[kind]
        assert flat is not None
        place, shape = self._places[index]
        return flat[place].view(shape)


class _State(dict[str, Tensor]):
    """The state of one parameter."""

    def __init__(self, home: _Home, index: int) -> None:
        super().__init__({kind: home._view(kind, index) for kind in home.state.tensors} | {"step": home.step})
        self._home, self._index = home, index

    def __setitem__(self, kind: str, value: Any) -> None:
        if kind == "step":
            self._home.step.copy_(value) if isinstance(value, Tensor) else self._home.step.fill_(value)
        else:
            super().__setitem__(kind, self._home.put(kind, self._index, value))


def park(states: Sequence[GroupState]) -> list[tuple[Tensor, Tensor]]:
    """Move state to the host's memory, as far as it is not there; returns what `unpark` takes."""
    parked = [(flat, flat.cpu()) for flat in _list_flats(states) if not is_cpu(flat)]
    for flat, _ in parked:
        flat.untyped_storage().resize_(0)
    return parked


def unpark(parked: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Bring it back."""
    for flat, values in parked:
        _regain(flat)
        flat.copy_(values)


def _list_flats(states: Sequence[GroupState]) -> Iterator[Tensor]:
    for state in states:
        yield from state.tensors.values()
        if state.main is not None:
            yield state.main


def _regain(flat: Tensor) -> None:
    """Give a tensor whose storage was freed its memory again."""
    storage = flat.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(flat.numel() * flat.element_size())
