# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on a CPU: a Recorder that notes every operation with the very tensors it ran on, and repeats them.

As on a GPU, what is recorded leaves no trace: memory that existed before, and random numbers, are as they were. A
replay calls the same operations on the same memory and puts results where the first ones were, so that a decision that
the host took while recording, an address that somebody has left, or a value that nobody wrote, gives wrong numbers:
fresh memory is filled with NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron.core.device_graphs import Recording

_READS_ON_HOST = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::nonzero", "aten::masked_select"}


class StandInRecorder:
    """A Recorder without a GPU. launches: operations of all recordings; replays: how often one was repeated."""

    def __init__(self) -> None:
        self.pools = self.launches = self.replays = self.sessions = 0

    def open_pool(self) -> int:
        """Count the pools."""
        self.pools += 1
        return self.pools

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Count the sessions."""
        self.sessions += 1
        yield

    def record(self, function: Callable[[], Any], pool: int) -> Recording[Any]:
        """Call the function, note its operations, and undo what they did."""
        tape, state = _Tape(), torch.get_rng_state()
        with tape:
            result = function()
        torch.set_rng_state(state)
        tape.undo()
        self.launches += len(tape.calls)

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return Recording(replay, result)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        assert name not in _READS_ON_HOST, f"{name} makes the host wait, which no graph can"
        for tensor in _written(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._before:
                self._before[storage._cdata] = storage, storage.clone()
        result = _run(func, args, kwargs)
        read = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in read:
                self._made.add(tensor.untyped_storage()._cdata)
                if "empty" in name:
                    _spoil(tensor)
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before = {}

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, first in self.calls:
            result = _run(func, args, kwargs)
            read = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
            for target, tensor in zip(_tensors(first), _tensors(result), strict=True):
                if tensor.untyped_storage()._cdata in read:
                    continue
                if "empty" in func._schema.name:
                    _spoil(target)
                else:
                    target.detach().copy_(tensor)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation's result; of communication, when it is there: gloo copies what came while the host waits, and does
    so again for each wait, which would be recorded as something of its own."""

    def finish(value: Any) -> Any:
        if not isinstance(value, torch.ScriptObject):
            return value
        dist.Work.unbox(value).wait()  # type: ignore[attr-defined]
        return dist.Work.boxed(FakeWork())  # type: ignore[attr-defined]

    return tree_map(finish, func(*args, **kwargs))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What the operation writes into."""
    if func.namespace == "c10d":
        yield from _tensors((args, kwargs))
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from _tensors(given)


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.detach().fill_(float("nan"))
