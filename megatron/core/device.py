# SPDX-License-Identifier: Apache-2.0
"""The device this process computes on: a CUDA GPU, or the CPU. The only file that says so.

`MEGATRON_DEVICE=cpu` keeps a process on the CPU of a machine that has GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.dense_peaks import DENSE_PEAKS, Peaks
from megatron.core.errors import ConfigError
from megatron.core.optional_deps import available

# A GPU of another size or power sold under such a name: "RTX 4090 Laptop GPU", "RTX 5090 D", a slice "H100 ... MIG 1g".
_ANOTHER_CHIP = re.compile(r"\b(Laptop|Max-Q|D|D v2|MIG)\b")


def cuda_is_usable() -> bool:
    """Return whether this process may use a CUDA device."""
    return os.environ.get("MEGATRON_DEVICE", "") != "cpu" and torch.cuda.is_available()


def current_device() -> torch.device:
    """The device of this process: cuda:LOCAL_RANK where there is one, else cpu.

    Raises ConfigError where the machine has several GPUs, and more processes.
    """
    if not cuda_is_usable():
        return torch.device("cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if 1 < count <= local_rank:
        raise ConfigError(
            f"LOCAL_RANK={local_rank} has no GPU of its own: this process sees {count} of them; start {count} "
            f"processes on each machine (torchrun --nproc-per-node {count})"
        )
    # Launchers that show each process one GPU only number the processes all the same.
    return torch.device("cuda", local_rank % count)


def identify_gpu(device: torch.device) -> str | None:
    """A name that no other GPU anywhere has; None on the CPU, and where torch does not tell it."""
    if not is_cuda(device):
        return None
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if found is None else str(found)


def device_count() -> int:
    """GPUs that this process can see; 0 on the CPU."""
    return torch.cuda.device_count() if cuda_is_usable() else 0


def activate(device: torch.device) -> None:
    """Make it the device that new tensors and kernels of this process use when they name none."""
    if is_cuda(device):
        torch.cuda.set_device(device)


def is_cpu(where: torch.Tensor | torch.device) -> bool:
    """Return whether a tensor or a device is on the host: read without waiting, computed by the CPU's kernels.

    Every branch between CPU and GPU kernels asks this function, so that support for another kind of device starts here.
    """
    return (where.device if isinstance(where, torch.Tensor) else where).type == "cpu"


def is_cuda(device: torch.device) -> bool:
    """Return whether it is a CUDA device."""
    return device.type == "cuda"


def has_several_queues() -> bool:
    """Return whether kernels of several streams can start in another order than they were launched in: not with the
    single hardware queue that is set at start for tensor and context parallelism."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"


def find_own_gpus(ranks: Sequence[int], own_rank: int) -> list[int] | None:
    """The GPUs of these ranks, `own_rank` among them, as this process numbers them; None where one of them belongs to
    another machine or is not shown to this process."""
    local_rank = os.environ.get("LOCAL_RANK")
    if not cuda_is_usable() or local_rank is None:
        return None
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count())
    # Launchers number the processes of one machine after another.
    first = own_rank - int(local_rank)
    if first < 0 or first % processes:
        return None
    own = range(first, first + min(processes, torch.cuda.device_count()))
    return [rank - first for rank in ranks] if all(rank in own for rank in ranks) else None


def are_linked(gpus: Sequence[int]) -> bool:
    """Return whether each of these GPUs reaches every other one over NVLink."""
    try:
        # torch has it in a private function only, which reads NVIDIA's management library.
        found: Any = torch._C._distributed_c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink")  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # a build without it, a machine without that library
        return False
    return len(gpus) > 1 and all(found.matrix[a][b] > 0 for a, b in itertools.permutations(gpus, 2))


@functools.cache
def has_wide_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a product of operands in `dtype` can be added to a float32 matrix in one kernel. CUDA builds of
    torch can from release 2.10 on, and the CPU's kernels cannot."""
    if is_cpu(device):
        return False
    operand, into = torch.ones(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(into, operand, operand, out_dtype=torch.float32, out=into)
    # Earlier releases do not know out_dtype, or want the same dtype for all three.
    except (RuntimeError, TypeError):
        return False
    return True


def find_kernel_obstacle(device: torch.device) -> str | None:
    """Return why Triton does not compile kernels for the device, in words for the log; None where it should."""
    if not is_cuda(device):
        return "no GPU"
    if not available("triton"):
        return "the Python package triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def count_processors(device: torch.device) -> int:
    """The processors of a GPU, which run programs of a kernel side by side."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def find_widest_flash_heads(device: torch.device) -> int:
    """Channels of the widest heads that torch's flash kernel for GPUs trains on the device; 0 where it does not run,
    below compute capability 8.0."""
    if not is_cuda(device):
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return 0
    # Graphics cards have less shared memory than its backward needs for wider heads.
    return 256 if (major, minor) == (8, 0) or major in (9, 10) else 192


def choose_backend(device: torch.device) -> str:
    """The torch.distributed backend that moves this device's tensors."""
    return "nccl" if is_cuda(device) else "gloo"


def make_communication_options(high_priority: bool) -> object | None:
    """NCCL's options for a group whose communication may overtake other kernels; None where the defaults will do."""
    if not high_priority or not cuda_is_usable():
        return None
    return torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def synchronize() -> None:
    """Wait until the device has done what it was given; at once on the CPU."""
    if _cuda_in_use():
        torch.cuda.synchronize()


def _cuda_in_use() -> bool:
    """Return whether this process computes on a GPU and has touched it; asking does not touch one."""
    # A process that did so before may be kept on the CPU now: its GPU knows nothing of how far the CPU is.
    return bool(torch.cuda.is_initialized()) and os.environ.get("MEGATRON_DEVICE", "") != "cpu"  # type: ignore[no-untyped-call]


def device_name() -> str:
    """The product name of the GPU or of the processor."""
    device = current_device()
    if is_cuda(device):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def get_dense_peak_flops(dtype: torch.dtype, name: str | None = None) -> float | None:
    """Dense matrix peak of this GPU (or of the named one) in FLOP/s; None where no data sheet is known, as on CPUs.

    For float32 it is the TF32 peak when torch.set_float32_matmul_precision allows that.
    """
    if name is None:
        device = current_device()
        if not is_cuda(device):
            return None
        name = torch.cuda.get_device_name(device)
    if _ANOTHER_CHIP.search(name):
        return None
    # In the order of the table: "H100 PCIe" has to come before "H100", which is in its name.
    for product, peaks in DENSE_PEAKS.items():
        if re.search(rf"\b{product}\b", name):
            teraflops = _choose_peak(peaks, dtype)
            return None if teraflops is None else teraflops * 1e12
    return None


def _choose_peak(peaks: Peaks, dtype: torch.dtype) -> float | None:
    if dtype == torch.float32:
        # The yardstick must be what the products of this run can reach.
        tf32_allowed = torch.get_float32_matmul_precision() != "highest"
        return peaks.tf32 if tf32_allowed and peaks.tf32 else peaks.float32
    if dtype == torch.float16 or (dtype == torch.bfloat16 and peaks.has_bfloat16):
        return peaks.half
    return peaks.fp8 if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else None


def use_deterministic_algorithms() -> None:
    """From now on torch takes only algorithms that give the same result each time, and refuses what has none."""
    torch.use_deterministic_algorithms(True)
    # The filling is a further pass over every new tensor, and nothing of ours reads before it writes.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


# ---- time and profiles

Mark = float | torch.cuda.Event
"""A moment on the device."""


def mark() -> Mark:
    """The moment at which the device has done all that it was given so far. Does not wait for it."""
    if not _cuda_in_use():
        return time.perf_counter()
    # Recorded in the stream, because the host is ahead of the device by many kernels.
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def measure_seconds_between(earlier: Mark, later: Mark) -> float:
    """The time between two marks; the device must have reached both."""
    if isinstance(earlier, float) or isinstance(later, float):
        assert isinstance(earlier, float) and isinstance(later, float), "one mark on the CPU, one on the device"
        return later - earlier
    # torch counts milliseconds.
    return float(earlier.elapsed_time(later)) / 1000


def list_profiler_activities() -> list[torch.profiler.ProfilerActivity]:
    """Return what torch.profiler can see here: the CPU, and the GPU where this process computes on one."""
    activity = torch.profiler.ProfilerActivity
    return [activity.CPU, *([activity.CUDA] if is_cuda(current_device()) else [])]


def start_cuda_profiler() -> None:
    """Tell an attached profiler such as Nsight Systems to begin."""
    torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]


def stop_cuda_profiler() -> None:
    """Tell the attached profiler to stop."""
    torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]


class NamedRange:
    """A stretch of the program with a name in profiles: of torch.profiler, and where this process computes on a GPU of
    Nsight Systems."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._record: Any = None

    def __enter__(self) -> None:
        # Made on entry: the same range may be entered many times.
        self._record = torch.profiler.record_function(self.name)
        self._record.__enter__()
        if is_cuda(current_device()):
            torch.cuda.nvtx.range_push(self.name)  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        if is_cuda(current_device()):
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        self._record.__exit__(None, None, None)


def record_memory_history() -> None:
    """From now on the allocator of the GPU keeps a record of what it does."""
    torch.cuda.memory._record_memory_history()


def dump_memory_snapshot(path: Path) -> None:
    """Write the allocator's record to a file that pytorch.org/memory_viz shows."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


# ---- memory


def read_memory_stats() -> dict[str, int]:
    """allocated_bytes and peak_bytes of this process: on the device, or resident memory on the CPU."""
    device = current_device()
    if is_cuda(device):
        return {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "peak_bytes": torch.cuda.max_memory_allocated(device),
        }
    resident = _read_resident_bytes()
    # The kernel keeps the two counts separately and lets the peak lag a little behind.
    return {"allocated_bytes": resident, "peak_bytes": max(resident, _read_peak_resident_bytes())}


def reset_peak_memory() -> None:
    """Start counting peak_bytes again; the CPU's peak counts from the start of the process."""
    if _cuda_in_use():
        torch.cuda.reset_peak_memory_stats()


def release_cached_memory() -> None:
    """Give the allocator's unused device memory back to the driver."""
    if _cuda_in_use():
        torch.cuda.empty_cache()


def pin_memory(memory: torch.Tensor) -> Callable[[], None]:
    """Let the GPU copy into this host memory by itself, at the full speed of its bus; returns what ends that.

    The memory must stay mapped until then. Does nothing in a process that does not compute on a GPU.
    """
    if not _cuda_in_use():
        return lambda: None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    # Refused where the system limits locked memory: copies are then slower, and as exact.
    if int(runtime.cudaHostRegister(address, memory.numel(), 0)) != 0:
        # CUDA reports the refusal to the next call that checks for errors, which would be the next kernel: clear it
        # here.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=current_device())
        return lambda: None
    return lambda: runtime.cudaHostUnregister(address)


def allow_bf16_reduced_precision_sums(allowed: bool) -> None:
    """Set whether a GPU's matrix products may sum their parts in bfloat16; process-wide, torch's default is True."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed


def read_total_memory_bytes() -> int:
    """Memory of the GPU, or of the machine."""
    device = current_device()
    if is_cuda(device):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_used_memory_bytes() -> int:
    """Bytes of the device's memory, or of the machine's, that all processes together use."""
    device = current_device()
    if is_cuda(device):
        # The driver's figures, not the allocator's: other processes and the CUDA context take memory, too.
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return os.sysconf("SC_PAGE_SIZE") * (os.sysconf("SC_PHYS_PAGES") - os.sysconf("SC_AVPHYS_PAGES"))


def _read_resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        # In pages: the size of the program, then what of it is resident.
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return _read_peak_resident_bytes()


def _read_peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss is bytes on macOS and KiB on Linux.
    return peak if sys.platform == "darwin" else peak * 1024


# ---- copies during the computation


class CopyQueue:
    """Copies between host and device that run one after the other, concurrently with the computation: on a GPU in a
    separate stream, on the CPU at once.

    A moment is what other queues and the computation wait for without the host; None on the CPU, where all is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if is_cuda(device) else None  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor, *after: Any) -> Any:
        """Copy when the computation has done what it was given so far, and these moments have come; returns the moment
        at which it is done.

        The caller keeps both tensors until then.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        for moment in after:
            if moment is not None:
                self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done


def hold_computation_until(moment: Any) -> None:
    """Let what the computation is given from now on begin after this moment of a CopyQueue. The host does not wait."""
    if moment is not None:
        torch.cuda.current_stream().wait_event(moment)


def wait_for(moment: Any) -> None:
    """Let the host wait for a moment of a CopyQueue."""
    if moment is not None:
        moment.synchronize()


def allocate_host_memory(numel: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Memory of the host, [numel]. pinned: the GPU copies to and from it by itself; no difference on the CPU."""
    return torch.empty(numel, dtype=dtype, pin_memory=pinned and _cuda_in_use())


# ---- random numbers


def get_rng_state() -> dict[str, torch.Tensor]:
    """torch's generator states: "cpu" always, "cuda" when this process computes on a GPU."""
    # The CPU's as well: data and initialisation draw from it on a GPU, too.
    states = {"cpu": torch.get_rng_state()}
    device = current_device()
    if is_cuda(device):
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: dict[str, torch.Tensor]) -> None:
    """Restore what get_rng_state returned; a state for a device that is not there is left out."""
    # A loader may have put the states on the GPU; generators take them from the host only.
    torch.set_rng_state(states["cpu"].cpu())
    device = current_device()
    if is_cuda(device) and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


def get_device_rng_state() -> torch.Tensor:
    """State of the generator that draws dropout masks on this process's device."""
    device = current_device()
    return torch.cuda.get_rng_state(device) if is_cuda(device) else torch.get_rng_state()


def set_device_rng_state(state: torch.Tensor) -> None:
    """Set the state of the generator that draws dropout masks on this process's device."""
    device = current_device()
    if is_cuda(device):
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
