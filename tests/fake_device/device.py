# SPDX-License-Identifier: Apache-2.0
"""A CUDA device that does nothing, in a process of its own: real training steps without numbers.

Tensors are torch's fake ones: they have shapes, dtypes and a device, and no values. `install` must come before torch is
imported, because torch asks once whether there is a GPU; so this file imports torch in functions only.

    library = build(directory)             # a second or two; None without a compiler
    install(library)                       # torch.cuda says that there are eight H200
    with record() as recorder: ...         # recorder.py: kernels, waits, memory and collectives of what runs inside
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
MEMORY_BYTES = 141 << 30


def build(directory: Path) -> Path | None:
    """Compile the device; None where no C++ compiler is installed."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    specification = importlib.util.find_spec("torch")
    assert specification is not None and specification.origin is not None, "torch is not installed"
    torch = Path(specification.origin).parent
    library = directory / "libfake_cuda.so"
    subprocess.run(
        [
            compiler, *"-O0 -std=c++20 -shared -fPIC".split(), SOURCE, "-o", library, f"-I{torch}/include",
            f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib",
        ],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return library


def install(library: Path) -> None:
    """From now on this process has eight GPUs."""
    fake = ctypes.CDLL(str(library))
    fake.register_fake_guard()
    import torch

    # It makes a table of torch's functions, in which each has to be there once.
    import torch._dynamo
    import torch._subclasses.fake_tensor

    # A CUDA build has set its own, and would take real memory for the first fake tensor.
    fake.register_fake_guard()
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
    for name, stand_in in _STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    host_generator = torch.Generator

    class Generator(host_generator):  # type: ignore[misc,valid-type]
        """The host's, which fake tensors take as well."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return host_generator("cpu")

    torch.Generator = Generator  # type: ignore[misc]
    torch.cuda.current_stream = torch.accelerator.current_stream = find_stream  # type: ignore[assignment]
    torch.cuda.default_stream = lambda device=None: COMPUTATION  # type: ignore[assignment]
    torch.cuda.get_rng_state = _get_rng_state  # type: ignore[assignment]
    # A CPU build of torch raises an error for these.
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _nothing  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign,assignment]
    torch.Tensor.pin_memory = lambda tensor, *device: tensor  # type: ignore[method-assign,assignment]


def _get_rng_state(device: Any = None) -> Any:
    import torch

    refuse_in_graph("get_rng_state")
    return torch.zeros(16, dtype=torch.uint8)


def leave(code: int = 0) -> NoReturn:
    """End this process at once, with this exit code, its output written.

    Autograd's threads, which every process with a GPU has, may still be releasing what the last backward used. One that
    asks for the interpreter's lock while the interpreter shuts down is ended by Python 3.11 and 3.12 from within C++,
    and takes the process with it: "terminate called without an active exception", exit code -6.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Properties:
    """Of an H200."""

    name = "NVIDIA H200"
    total_memory = MEMORY_BYTES
    major, minor = 9, 0
    multi_processor_count = 132
    uuid = "fake"


class Event:
    """A moment of a stream. seconds: when it comes."""

    def __init__(self, **options: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.seconds = (stream or find_stream()).seconds
        ORDER.append(("recorded", self))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or find_stream()).wait_event(self)

    def query(self) -> bool:
        return self.seconds <= HOST.seconds

    def synchronize(self) -> None:
        _note_wait("Event.synchronize", self.seconds)

    def elapsed_time(self, later: Event) -> float:
        return (later.seconds - self.seconds) * 1000 or 1.0


class Stream:
    """A queue of kernels or copies. seconds: when it has done all that it was given."""

    def __init__(self, *device: Any, **options: Any) -> None:
        self.seconds = 0.0

    def run(self, seconds: float, launch_seconds: float) -> None:
        """A kernel or copy takes so long, and the host as long to launch it."""
        self.seconds = max(self.seconds, HOST.seconds) + seconds
        HOST.seconds += launch_seconds

    def wait_stream(self, other: Stream) -> None:
        self.seconds = max(self.seconds, other.seconds)

    def wait_event(self, event: Event) -> None:
        self.seconds = max(self.seconds, event.seconds)
        if self is COMPUTATION:
            ORDER.append(("waited", event))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.seconds <= HOST.seconds

    def synchronize(self) -> None:
        _note_wait("Stream.synchronize", self.seconds)


class Pool:
    """Memory of graphs: what they free, only they take again, so that it keeps the most that was ever in use."""

    def __init__(self) -> None:
        self.live_bytes = self.most_bytes = 0


class CUDAGraph:
    """Counts what is launched while it captures, and each replay as one launch."""

    def __init__(self) -> None:
        self.kernels = 0
        self.pool = Pool()

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        assert not CAPTURING, "two graphs cannot capture at once"
        self.pool = pool or self.pool
        CAPTURING.append(self)

    def capture_end(self) -> None:
        CAPTURING.remove(self)

    def replay(self) -> None:
        assert not CAPTURING, "a graph is replayed, not captured"
        REPLAYS.append(self)


COMPUTATION, HOST = Stream(), Stream()
"""The stream of all kernels that name no other, and the thread that launches them."""

_STREAMS = [COMPUTATION]
"""The current one last."""


def find_stream(device: Any = None) -> Stream:
    """The stream that is current."""
    return _STREAMS[-1]


@contextlib.contextmanager
def _in_stream(stream: Stream | None) -> Iterator[None]:
    _STREAMS.append(stream or find_stream())
    try:
        yield
    finally:
        _STREAMS.pop()


CAPTURING: list[CUDAGraph] = []
"""The graph that captures, if one does."""

REPLAYS: list[CUDAGraph] = []
"""In order; recorder.py empties it."""

ORDER: list[tuple[str, Any]] = []
"""Kernels, copies between host and device, and what the computation's stream waits for, in order."""

WAITS: list[str] = []
"""Waits that no operation of a tensor makes, by name; recorder.py empties it."""


def refuse_in_graph(what: str) -> None:
    """What CUDA refuses while a graph captures: waits of the host, and states of generators."""
    assert not CAPTURING, f"{what}, while a graph captures"


def _note_wait(name: str, until: float) -> None:
    refuse_in_graph(name)
    WAITS.append(name)
    HOST.seconds = max(HOST.seconds, until)


def _nothing(*arguments: Any, **options: Any) -> None:
    pass


def _outside_of_graphs(name: str) -> Callable[..., None]:
    return lambda *arguments, **options: refuse_in_graph(name)


_STAND_INS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 8,
    "current_device": lambda: 0,
    "set_device": _nothing,
    "init": _nothing,
    "_lazy_init": _nothing,
    "_initialized": True,  # or torch's checkpoint would leave the device's generator alone
    "synchronize": lambda *device: _note_wait("cuda.synchronize", COMPUTATION.seconds),
    "set_rng_state": _outside_of_graphs("set_rng_state"),
    "manual_seed": _outside_of_graphs("manual_seed"),
    "manual_seed_all": _outside_of_graphs("manual_seed_all"),
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_stats": lambda device=None: {},
    "memory_snapshot": lambda: [{"is_expandable": "expandable_segments:True" in os.environ["PYTORCH_ALLOC_CONF"]}],
    "reset_peak_memory_stats": _nothing,
    "empty_cache": _outside_of_graphs("empty_cache"),
    "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
    "get_device_name": lambda device=None: Properties.name,
    "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
    "get_device_properties": lambda device=None: Properties,
    "device": lambda device: contextlib.nullcontext(),
    "stream": _in_stream,
    "CUDAGraph": CUDAGraph,
    "graph_pool_handle": Pool,
    "is_current_stream_capturing": lambda: bool(CAPTURING),
    "Event": Event,
    "Stream": Stream,
}
