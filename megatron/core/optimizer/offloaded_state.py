# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in the memory of the host, or in files, updated by the host's processors.

    device     gradients of chunk 2 | of chunk 3         ->  to the host, in a separate queue
    host                    update of chunk 1 | of chunk 2
    device                             parameters of chunk 1 |    ->  back, in another queue

The values that are updated are a copy of the parameters on the host, in float32 where the network computes in 16 bits.
A chunk is updated by the same kernels as the whole would be on a CPU, and gives the same numbers. The host waits for a
chunk's gradients, as it must.

Files have no name while they are in use: they go with the process that has opened them, however it ends. Their memory
is mapped, the next chunk is read ahead while one is updated, and the system writes behind.

Sources: Ren et al., ZeRO-Offload, 2021; Rajbhandari et al., ZeRO-Infinity, 2021.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.device import CopyQueue, allocate_host_memory, hold_computation_until, is_cuda, wait_for
from megatron.core.distributed.model_chunk import FlatBuffer
from megatron.core.errors import MemoryShortageError, StorageError, format_bytes
from megatron.core.flat_ranges import Range
from megatron.core.host_memory import count_pinned_bytes, require_host_memory
from megatron.core.optimizer.group_state import CHUNK, FlatShard, GroupState, Member
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class StateHome(ABC):
    """Memory that holds offloaded state, and the queues between it and the device. overlaps: chunks travel while others
    are updated. pins_grads, pins_params: whether what travels is in memory that a GPU copies by itself."""

    def __init__(self, device: torch.device, *, overlaps: bool, pins_grads: bool, pins_params: bool) -> None:
        self.overlaps, self.pins_grads, self.pins_params = overlaps, pins_grads, pins_params
        self.to_host, self.to_device = CopyQueue(device), CopyQueue(device)
        self._staging: dict[tuple[int, torch.dtype], Tensor] = {}

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, *, travels: bool = False) -> Tensor:
        """Zeros [numel] for as long as the process lives. travels: they go to the device after each update."""

    def read_ahead(self, part: Tensor) -> None:  # noqa: B027
        """Begin to bring a part of what was allocated into memory, where it is not there already."""

    def stage(self, turn: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory [numel] for gradients on their way: two buffers that alternate from turn to turn."""
        key = (turn % 2, dtype)
        if key not in self._staging or self._staging[key].numel() < numel:
            self._staging[key] = allocate_host_memory(numel, dtype, pinned=self.pins_grads)
        return self._staging[key][:numel]


class HostHome(StateHome):
    """The host's memory."""

    def __init__(self, device: torch.device, **options: bool) -> None:
        super().__init__(device, **options)
        # Beside a CPU nothing is pinned.
        self._pins_params = self.pins_params and is_cuda(device)
        self._bytes = 0

    def allocate(self, numel: int, dtype: torch.dtype, *, travels: bool = False) -> Tensor:
        """See StateHome. Raises MemoryShortageError where the host has not so much."""
        number = numel * dtype.itemsize
        self._bytes += count_pinned_bytes(number) if travels and self._pins_params else number
        remedy = "give a smaller --optimizer-offload-fraction, or --optimizer-offload-directory on a local disk"
        if self._pins_params:
            remedy += ", or --no-pin-cpu-params, since pinned memory comes in powers of two"
        require_host_memory(self._bytes, "optimizer states on the host (--optimizer-cpu-offload)", remedy)
        try:
            return allocate_host_memory(numel, dtype, pinned=travels and self._pins_params).zero_()
        except RuntimeError as error:
            raise MemoryShortageError(
                f"the host has no {format_bytes(self._bytes)} for optimizer states (--optimizer-cpu-offload); {remedy}"
            ) from error


class FileHome(StateHome):
    """Files without a name in a directory."""

    def __init__(self, device: torch.device, directory: Path, **options: bool) -> None:
        super().__init__(device, **options)
        self.directory = directory
        self._maps: list[tuple[int, int, mmap.mmap]] = []
        """First address, the one after the last, memory."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"--optimizer-offload-directory {directory} cannot be made ({error.strerror}); name a directory on a "
                "local disk"
            ) from error

    def allocate(self, numel: int, dtype: torch.dtype, *, travels: bool = False) -> Tensor:
        """See StateHome. Raises StorageError where the disk has not so much room."""
        num_bytes = numel * dtype.itemsize
        if num_bytes == 0:
            return torch.zeros(0, dtype=dtype)
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                # Written to a file without room, mapped memory would end the process by a signal.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                mapped = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise StorageError(
                f"--optimizer-offload-directory {self.directory} cannot take {format_bytes(num_bytes)} of optimizer "
                f"state ({error.strerror}); free space, name a directory on another disk, or give a smaller "
                "--optimizer-offload-fraction"
            ) from error
        tensor = torch.frombuffer(mapped, dtype=dtype)
        self._maps.append((tensor.data_ptr(), tensor.data_ptr() + num_bytes, mapped))
        return tensor

    def read_ahead(self, part: Tensor) -> None:
        """See StateHome."""
        first = part.data_ptr()
        for start, stop, mapped in self._maps:
            if start <= first < stop:
                begin = (first - start) // mmap.PAGESIZE * mmap.PAGESIZE
                mapped.madvise(mmap.MADV_WILLNEED, begin, first - start + part.nbytes - begin)


def build_home(config: OptimizerConfig, device: torch.device) -> StateHome | None:
    """Build the home of state that the config wants outside the device; None for nowhere."""
    if not config.optimizer_cpu_offload or config.optimizer_offload_fraction == 0:
        return None
    options = {
        "overlaps": config.overlap_cpu_optimizer_d2h_h2d,
        "pins_grads": config.pin_cpu_grads,
        "pins_params": config.pin_cpu_params,
    }
    if config.optimizer_offload_directory is None:
        return HostHome(device, **options)
    return FileHome(device, Path(config.optimizer_offload_directory), **options)


class OffloadedState(GroupState):
    """State of one group in one buffer that lies in a StateHome."""

    def __init__(
        self,
        buffer: FlatBuffer,
        members: Sequence[Member],
        ranges: Sequence[Range],
        kinds: Mapping[str, torch.dtype],
        main_dtype: torch.dtype,
        home: StateHome,
    ) -> None:
        self.home = home
        self._unsent = True
        """True if main parameters have changed that the network has not got."""
        self._last_sent: Any = None
        super().__init__(buffer, members, ranges, kinds, main_dtype)
        # Handed out chunk by chunk, never as the memory itself.
        self.is_float32 = False

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See GroupState."""
        return self.home.allocate(numel, dtype)

    def allocate_main(self, numel: int, main_dtype: torch.dtype) -> Tensor:
        """See GroupState; parameters that are updated as they are have a copy here, in their dtype."""
        # What is on the device already must not be kept twice in a checkpoint, too.
        self.mirrors_model = not self.needs_main(main_dtype)
        dtype = self.buffer.dtype if self.mirrors_model else main_dtype
        return self.home.allocate(numel, dtype, travels=True)

    def shards(self, ranges: Sequence[Range] | None = None, longest: int | None = None) -> Iterator[FlatShard]:
        """See GroupState; at most CHUNK elements at a time, in the host's memory."""
        assert ranges is None, "a rule that asks for single parameters has its state on the device"
        assert self.main is not None
        chunks = list(self._chunks(longest or CHUNK))
        arriving: list[tuple[Tensor, Any]] = []
        ahead = 2 if self.home.overlaps else 1
        for turn, (_, place) in enumerate(chunks):
            for piece, next_place in chunks[len(arriving) : turn + ahead]:
                arriving.append(self._fetch_grad(len(arriving), piece))
                for tensor in (self.main, *self.tensors.values()):
                    self.home.read_ahead(tensor[next_place])
            grad, moment = arriving[turn]
            wait_for(moment)
            kept = [self.main[place], *(tensor[place] for tensor in self.tensors.values())]
            wide = [part.float() for part in kept]
            yield FlatShard(wide[0], grad.float(), dict(zip(self.tensors, wide[1:], strict=True)))
            for part, result in zip(kept, wide, strict=True):
                if result is not part:
                    part.copy_(result)
            if self.home.overlaps:
                self._send(*chunks[turn])
        self._unsent = not self.home.overlaps

    def _chunks(self, longest: int) -> Iterator[tuple[Range, slice]]:
        for (start, _), place in self._own_pieces():
            for first in range(place.start, place.stop, longest):
                last = min(first + longest, place.stop)
                yield (start + first - place.start, start + last - place.start), slice(first, last)

    def _fetch_grad(self, turn: int, piece: Range) -> tuple[Tensor, Any]:
        source = self.buffer.grad_data[slice(*piece)]
        target = self.home.stage(turn, source.numel(), source.dtype)
        return target, self.home.to_host.copy(target, source)

    def _send(self, piece: Range, place: slice) -> None:
        assert self.main is not None
        self._last_sent = self.home.to_device.copy(self.buffer.values(*piece), self.main[place])

    def note_change(self) -> None:
        """See GroupState."""
        self._unsent = True

    def copy_main_to_model(self) -> None:
        """See GroupState; what has been sent already is waited for."""
        if self._unsent:
            for piece, place in self._chunks(CHUNK):
                self._send(piece, place)
        hold_computation_until(self._last_sent)
        self._unsent, self._last_sent = True, None

    def take_loaded(self) -> None:
        """See GroupState."""
        # A loader has written into the parameters themselves, of which this is the copy.
        if self.mirrors_model:
            self.copy_model_to_main()
        else:
            self.copy_main_to_model()


def divide_members(
    members: Sequence[Member], ranges: Sequence[Range], fraction: float, count_owned: Callable[[Range], int]
) -> list[tuple[list[Member], list[Range]]]:
    """Return what of a group in a buffer is offloaded, and what stays: members and ranges of each, either may be empty.

    Whole parameters, from the beginning of the memory, to which the share of the elements is nearest. count_owned:
    elements of a range that this process updates.
    """
    in_place = sorted(members, key=lambda member: member.slot.start)
    sizes = [count_owned((member.slot.start, member.slot.start + member.slot.numel)) for member in in_place]
    wanted, before, number = fraction * sum(sizes), 0, 0
    while number < len(sizes) and before + sizes[number] / 2 <= wanted:
        before += sizes[number]
        number += 1
    cut = in_place[number].slot.start if number < len(in_place) else max((stop for _, stop in ranges), default=0)
    parts = []
    for chosen, first, last in ((in_place[:number], 0, cut), (in_place[number:], cut, None)):
        inside = [(max(start, first), stop if last is None else min(stop, last)) for start, stop in ranges]
        names = {member.name for member in chosen}
        ordered = [member for member in members if member.name in names]
        parts.append((ordered, [(start, stop) for start, stop in inside if start < stop]))
    return parts
