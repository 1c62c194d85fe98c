# SPDX-License-Identifier: Apache-2.0
"""Recording what a function launches on a GPU, to launch it again as one: CUDA graphs behind a small protocol.

While a function is recorded nothing runs on the device: its kernels, with the addresses that they read and write, are
noted, and everything it does on the host happens once and never again. `Recording.replay` launches them in their order,
in one call.

Memory that a recorded function allocates belongs to a pool. What it has freed by its end, later recordings of the same
pool may use, so that recordings of one pool must be replayed in the order in which they were made, and not at the same
time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from megatron.core.device import current_device, is_cuda, release_cached_memory, synchronize

Result = TypeVar("Result")


@dataclass
class Recording(Generic[Result]):
    """Record of what a function launched."""

    replay: Callable[[], None]
    """Launch it again; does not wait."""
    result: Result
    """Return value of the function: tensors, if any, at addresses to which every replay writes."""


class Recorder(Protocol):
    """Makes recordings."""

    def open_pool(self) -> Any:
        """Return a new pool of memory."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """A block in which recordings are made, while nothing travels between ranks: it may wait for the device."""

    def record(self, function: Callable[[], Result], pool: Any) -> Recording[Result]:
        """Call the function without running what it launches. What it needs for the first time (libraries, compiled
        kernels, communicators) must be there already."""


class GraphRecorder:
    """A Recorder of the CUDA device that this process computes on."""

    def __init__(self) -> None:
        # One stream for all recordings: backward runs on the stream that forward ran on.
        self._stream: Any = torch.cuda.Stream(current_device())  # type: ignore[no-untyped-call]

    def open_pool(self) -> Any:
        """Return a new pool of memory."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """A block in which recordings are made; waits for the device once."""
        synchronize()
        gc.collect()
        # Pools allocate separate memory; what is cached in the common pool would be idle.
        release_cached_memory()
        collects = gc.isenabled()
        # A tensor or graph that is freed by chance in the middle of a recording would be recorded, or break it.
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()

    def record(self, function: Callable[[], Result], pool: Any) -> Recording[Result]:
        """Call the function on a stream of ours; backward passes inside of it included."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads may go on querying the device: NCCL's watchdog polls its collectives.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                # The error that matters is the function's; that the recording is broken follows from it.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return Recording(graph.replay, result)


def are_same(one: Tensor, other: Tensor) -> bool:
    """Return whether they are the same numbers at the same place, both being alive."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or one.dtype != other.dtype:
        return False
    return one.storage_offset() == other.storage_offset() and (one.shape, one.stride()) == (other.shape, other.stride())


def load(fixed: Tensor, tensor: Tensor) -> None:
    """Bring values to a fixed address, where they are not there already."""
    if not are_same(tensor, fixed):
        fixed.copy_(tensor)


def list_tensors(value: Any) -> list[Tensor]:
    """List the tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in list_tensors(item)] if isinstance(value, list | tuple) else []


def copy_structure(value: Any) -> Any:
    """The same structure with new tensors; what is no tuple or tensor is itself."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        items = [copy_structure(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def renew_gradient_nodes(parameters: Iterable[nn.Parameter]) -> None:
    """Let autograd make new nodes for the gradients of these parameters; their values stay where they are.

    A node runs on the stream of the forward pass that first used the parameter, and lives as long as any graph that
    leads to it, such as the graph of a loss that a caller keeps. In a recording that stream would have to wait for
    ours, which CUDA refuses.
    """
    for parameter in parameters:
        values = parameter.data
        # Autograd drops the node of a parameter that changes its dtype.
        other = torch.float32 if values.dtype == torch.float64 else torch.float64
        parameter.data = values.new_empty(0, dtype=other)
        parameter.data = values


def is_recording() -> bool:
    """Return whether what is launched now is recorded instead of run."""
    return is_cuda(current_device()) and torch.cuda.is_current_stream_capturing()
