# SPDX-License-Identifier: Apache-2.0
"""Activations saved for backward in the memory of the host.

    forward     computation  | layer 1 | layer 2 | layer 3 |          to the host      | 1 | 2 |
    backward    computation      | layer 3 | layer 2 | layer 1 |      to the device  | 2 | 1 |

What an operation keeps is copied to the host in a separate queue, and leaves the device when the layer behind it has
been computed: from then on the computation goes on behind the copy, so that the memory can be given to its next kernel,
however far ahead the host is. What the last layer has sent stays, since backward begins with it. In backward the first
need of a group, all that one block of `offload` has kept, starts the copies of the groups before it, which backward
needs next. The host never waits; the computation does where a copy is late. Copies are exact, and so are gradients.

The bytes of one layer may thus be under way. Where the bus carries them in the time of a layer, every copy has come
before anybody waits for it. Where it does not, the bus is never idle, which is as fast as it can be, and more under way
would take memory for nothing.

What is copied is the memory that a tensor is a view of, once for all of its views: queries, keys and values usually lie
in one. On the CPU the same code copies within the host's memory, which saves nothing and shows that it works.

transformer/execution/activation_policy.py decides what is offloaded. Sources: Rhu et al., vDNN, 2016; Megatron-LM's
fine-grained activation offloading, whose names the flags have.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.device import CopyQueue, allocate_host_memory, hold_computation_until, is_cuda
from megatron.core.errors import MemoryShortageError, format_bytes
from megatron.core.host_memory import count_pinned_bytes
from megatron.core.tensor_parallel.kept_activations import Way, keep_all_as

PREFETCHED_GROUPS = 2
"""One is on its way while the other is waited for."""
_LARGEST_SHARE = 64  # times as large as a view the memory may be that is moved for it


@dataclass(frozen=True)
class OffloadChoice:
    """Choice of the parts of a pipeline stage's forward pass that go to the host."""

    parts: frozenset[str] = frozenset()
    """Of every layer, what these parts keep (`offload`)."""
    whole_layers: int = 0
    """The first layers of the stage, of which everything goes."""
    smallest_numel: int = 0
    """Elements of the smallest memory that is worth a copy."""
    fraction: float = 1.0
    """Of the bytes of a pass, from its beginning: what was kept first waits longest."""
    kept_bytes: int = 0
    """Further bytes of a pass that stay on the device."""
    most_groups_in_flight: int | None = None
    """Groups whose copies to the host may be under way before the computation waits for the oldest."""
    keeps_buffers: bool = True
    """True if the host's memory stays allocated between steps."""


class Offloader:
    """Moves activations of one pipeline stage, or chunk of it, to the host and back."""

    def __init__(self, choice: OffloadChoice) -> None:
        self.choice = choice
        self.offloaded_bytes = 0
        """On the host now."""
        self.buffer_bytes = 0
        """Memory of the host that is allocated, in use or not; beside a GPU as torch hands out pinned memory."""
        self._free: dict[torch.dtype, list[tuple[Tensor, Any]]] = defaultdict(list)
        self._queues: tuple[CopyQueue, CopyQueue] | None = None
        self._in_flight: deque[_Offloaded] = deque()
        """Sent, and still on the device; the newest last."""
        self._read: list[_Offloaded] = []
        """Of these, what backward is done with."""
        self._layers = 0
        """Layers that have ended."""
        self._layer_bytes = self._most_layer_bytes = 0
        """That the layer under way has sent, and the most of any layer."""
        self._pass_bytes: int | None = None

    @contextlib.contextmanager
    def open_pass(self) -> Iterator[None]:
        """Around the layers of one forward pass: in it `offload` has its effect."""
        if not torch.is_grad_enabled():
            yield
            return
        self.release_read()
        current = _Pass(self)
        token = _PASS.set(current)
        try:
            yield
        finally:
            _PASS.reset(token)
            # Known after the first pass, from which on the share that goes is counted by it.
            self._pass_bytes = current.bytes or self._pass_bytes

    @contextlib.contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Around the stage's layer of this number, from 0."""
        current = _PASS.get()
        if current is None:  # it is computed again
            yield
            return
        with keep_all_as(_OnHost(current)) if index < self.choice.whole_layers else contextlib.nullcontext():
            yield
        self.end_layer()

    def end_layer(self) -> None:
        """Free what was sent before the layer, or the layers that are recomputed together, that end here."""
        self._release(lambda oldest: oldest.layer < self._layers)
        self._layers, self._layer_bytes = self._layers + 1, 0

    def has_room_for(self, bytes_before: int, number: int) -> bool:
        """Return whether so many further bytes of a pass go to the host, after those before them."""
        choice = self.choice
        # What experts keep differs from pass to pass: all of it is never more than there was.
        if self._pass_bytes is None or (choice.fraction == 1.0 and choice.kept_bytes == 0):
            return True
        return bytes_before + number <= int(self._pass_bytes * choice.fraction) - choice.kept_bytes

    def send(self, values: Tensor, group: int, of: _Pass) -> _Offloaded:
        """Begin to copy flat values [n] of the device to the host."""
        to_host, _ = self._open_queues(values.device)
        memory, free = self._take_memory(values.numel(), values.dtype, values.device)
        sent = _Offloaded(self, of, group, memory, values.numel(), values.device)
        self.offloaded_bytes += sent.buffer.nbytes
        sent.arrived = to_host.copy(sent.buffer, values, free)
        if sent.arrived is not None:
            # Until the copy is done the memory must not be given to anybody else.
            sent.on_device, sent.layer = values, self._layers
            self._in_flight.append(sent)
            self._layer_bytes += sent.buffer.nbytes
            self._most_layer_bytes = max(self._most_layer_bytes, self._layer_bytes)
            self._release(lambda oldest: self._is_beyond_limits())
        return sent

    def fetch(self, sent: _Offloaded) -> None:
        """Begin to copy what was sent back to the device, where it is not there."""
        if sent.on_device is not None:
            return
        _, to_device = self._open_queues(sent.device)
        sent.on_device = torch.empty_like(sent.buffer, device=sent.device, pin_memory=False)
        sent.returned = to_device.copy(sent.on_device, sent.buffer, sent.arrived)

    def free(self, sent: _Offloaded) -> None:
        """Take the host's memory of what nobody needs any more."""
        self.offloaded_bytes -= sent.buffer.nbytes
        self._free[sent.memory.dtype].append((sent.memory, sent.returned or sent.arrived))
        if self.offloaded_bytes == 0 and not self.choice.keeps_buffers:
            self._free.clear()
            self.buffer_bytes = 0

    def _is_beyond_limits(self) -> bool:
        """Return whether more is under way than one layer sends, or than was allowed."""
        most = self.choice.most_groups_in_flight
        return sum(sent.buffer.nbytes for sent in self._in_flight) > self._most_layer_bytes or (
            most is not None and len({sent.group for sent in self._in_flight}) > most
        )

    def _release(self, is_due: Callable[[_Offloaded], bool]) -> None:
        """Free the device's memory of the oldest that are due, in the order of the computation: what it is given from
        now on begins when they are on the host."""
        due = []
        while self._in_flight and is_due(self._in_flight[0]):
            due.append(self._in_flight.popleft())
        if due:
            hold_computation_until(due[-1].arrived)  # copies to the host come one after the other
        for sent in due:
            sent.leave_device()

    def release_read(self) -> None:
        """Free what backward has read where it was; before it reads anything else."""
        for sent in self._read:
            hold_computation_until(sent.arrived)
            sent.leave_device()
            if sent in self._in_flight:
                self._in_flight.remove(sent)
        self._read.clear()

    def note_read(self, sent: _Offloaded) -> None:
        """Note that the next reader of what was sent, and is still on the device, is the last."""
        self._read.append(sent)

    def _open_queues(self, device: torch.device) -> tuple[CopyQueue, CopyQueue]:
        # When the first activation is there: a model may be built before its device is chosen.
        if self._queues is None:
            self._queues = CopyQueue(device), CopyQueue(device)
        return self._queues

    def _take_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Any]:
        """Memory of the host, of at least so many elements, and the moment from which it is free."""
        free = self._free[dtype]
        # What experts keep has another size in each pass, so that what is free need not fit exactly.
        fitting = [index for index, (memory, _) in enumerate(free) if numel <= memory.numel() <= 2 * numel]
        if fitting:
            return free.pop(min(fitting, key=lambda index: free[index][0].numel()))
        number = numel * dtype.itemsize
        # Beside a CPU nothing is pinned.
        number = count_pinned_bytes(number) if is_cuda(device) else number
        try:
            memory = allocate_host_memory(numel, dtype, pinned=True)
            self.buffer_bytes += number
            return memory, None
        except RuntimeError as error:
            raise MemoryShortageError(
                f"the host has no further {format_bytes(number)} for offloaded activations, beside "
                f"{format_bytes(self.buffer_bytes)} of them; name fewer --offload-modules or layers, or recompute some"
            ) from error


class _Offloaded:
    """Values that are on the host, in the first `numel` elements of `memory`. on_device: them, where they are on the
    device as well."""

    def __init__(
        self, offloader: Offloader, of: _Pass, group: int, memory: Tensor, numel: int, device: torch.device
    ) -> None:
        self.offloader, self.of, self.group, self.device = offloader, of, group, device
        self.memory, self.buffer = memory, memory[:numel]
        self.on_device: Tensor | None = None
        self.layer = 0
        """By the offloader's count."""
        self.arrived: Any = None
        self.returned: Any = None
        self.readers = 0
        """Times that somebody will still ask for it."""

    def read(self) -> Tensor:
        """The values on the device, [n]."""
        self.of.fetch_around(self)
        values = self.on_device
        assert values is not None
        hold_computation_until(self.returned)
        self.readers -= 1
        if self.readers <= 0:
            # What may still be read for its copy to the host stays: overwritten by others, it would give a caller
            # once more than was counted (what is computed again from it, twice) other values.
            if self.returned is None and self.arrived is not None:
                self.offloader.note_read(self)
            else:
                self.on_device = None
        return values

    def leave_device(self) -> None:
        """Forget the memory that was sent, unless it has come back."""
        if self.returned is None:
            self.on_device = None

    def __del__(self) -> None:
        # A copy that was begun for nobody still writes into memory that others may get.
        if self.on_device is not None and self.returned is not None:
            hold_computation_until(self.returned)
        self.offloader.free(self)


class _Pass:
    """Tensors that one forward pass has sent, in its order."""

    def __init__(self, offloader: Offloader) -> None:
        self.offloader = offloader
        self.groups = 0
        self.bytes = 0
        """Bytes that were eligible so far."""
        self._sent: list[weakref.ref[_Offloaded]] = []
        # A weak reference keeps the number of a storage from being given to another one.
        self._by_storage: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[_Offloaded]]] = {}

    def send(self, value: Tensor, group: int) -> _Offloaded | None:
        """Return what holds the memory that `value` is a view of on the host; None where it stays on the device."""
        storage = value.untyped_storage()
        key = storage._cdata, value._version
        known = self._by_storage.get(key)
        sent = None if known is None else known[1]()
        if sent is None:
            numel = storage.nbytes() // value.element_size()
            if not self._takes(value, numel):
                return None
            with torch.no_grad():
                flat = value.detach().as_strided((numel,), (1,), 0)
            sent = self.offloader.send(flat, group, self)
            self._by_storage[key] = StorageWeakRef(storage), weakref.ref(sent)
            self._sent.append(weakref.ref(sent))
        sent.readers += 1
        return sent

    def fetch_around(self, sent: _Offloaded) -> None:
        """Begin to fetch what was sent, with its group and those that backward comes to next."""
        self.offloader.release_read()
        self.offloader.fetch(sent)
        # Backward comes from the end; what it is done with need not be looked at again.
        while self._sent and self._sent[-1]() is None:
            self._sent.pop()
        groups = {sent.group}
        for reference in reversed(self._sent):
            other = reference()
            if other is None or other.group > sent.group or other.readers <= 0:
                continue
            groups.add(other.group)
            if len(groups) > PREFETCHED_GROUPS + 1:
                break
            self.offloader.fetch(other)

    def _takes(self, value: Tensor, numel: int) -> bool:
        # Weights live anyway; of large memory with a small view most may be somebody else's.
        if isinstance(value, nn.Parameter) or isinstance(value._base, nn.Parameter):
            return False
        if numel < max(1, self.offloader.choice.smallest_numel) or numel > _LARGEST_SHARE * value.numel():
            return False
        number = numel * value.element_size()
        before, self.bytes = self.bytes, self.bytes + number
        return self.offloader.has_room_for(before, number)


class _OnHost(Way):
    def __init__(self, current: _Pass, storages: frozenset[int] | None = None) -> None:
        self.current, self.storages = current, storages
        current.groups += 1
        self.group = current.groups

    def takes(self, value: Tensor) -> bool:
        return self.storages is None or value.untyped_storage()._cdata in self.storages

    def pack(self, value: Tensor) -> Any:
        sent = self.current.send(value, self.group)
        return None if sent is None else (sent, value.dtype, value.stride(), value.storage_offset())

    def unpack(self, waiting: Any, shape: Sequence[int]) -> Tensor:
        sent, dtype, stride, offset = waiting
        return sent.read().view(dtype).as_strided(tuple(shape), stride, offset)


# The innermost open pass of this thread, like the stack of hooks for saved tensors that it decides about.
_PASS: ContextVar[_Pass | None] = ContextVar("the forward pass whose activations may be offloaded", default=None)


def _find_pass(part: str) -> _Pass | None:
    current = _PASS.get()
    return current if current is not None and part in current.offloader.choice.parts else None


def offload(part: str, only: Sequence[Tensor] | None = None) -> contextlib.AbstractContextManager[None]:
    """Make what operations in this block keep wait on the host, where the stage offloads this part of its layers.

    only: of it the memory of these tensors alone. What another block computes again is not kept at all.
    """
    current = _find_pass(part)
    if current is None:
        return contextlib.nullcontext()
    storages = None if only is None else frozenset(value.untyped_storage()._cdata for value in only)
    return keep_all_as(_OnHost(current, storages))


def hold(part: str, value: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the value in backward, from the host where the stage offloads this part: for
    functions that compute something again from it, and would otherwise hold its memory."""
    current = _find_pass(part)
    if current is None or not torch.is_grad_enabled():
        return lambda: value
    way = _OnHost(current)
    waiting, shape = way.pack(value), value.shape
    return (lambda: value) if waiting is None else (lambda: way.unpack(waiting, shape))


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """In this block nothing is offloaded: it is computed again in backward, and keeps nothing."""
    token = _PASS.set(None)
    try:
        yield
    finally:
        _PASS.reset(token)
