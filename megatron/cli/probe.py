# SPDX-License-Identifier: Apache-2.0
"""Measure this machine's products, memory, attention and links: the row of a device for `plan --gpu-file`.

    python -m megatron probe --output machine.json
    python -m megatron probe --world-size 8 --output node.json        in 8 processes at once, one a GPU

All processes measure at the same time, so that cores or a bus that they share count as shared. Best of several tries:
whatever else the machine does makes them longer, never shorter. What is not measured (a network between nodes, with one
process a link at all) is written as it is for an H100, and `measured` in the file says what was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigError, command_line, format_bytes
from megatron.core.paths import write_atomically
from megatron.planner.devices import Device, find_device
from megatron.training.flags.argument import ProgramParser, path

_TRIES = 5
_SMALL, _LARGE = 1 << 10, 1 << 24
"""Bytes of the tensors by which a link's step time and bandwidth are told apart."""
_COPIED_BYTES = 1 << 28
_MOST_PROCESSES = 64
_THIN = 128
"""Rows, or columns, of products by which the rate of narrow ones is found."""


def measure_seconds(run: Callable[[], object]) -> float:
    """The shortest of several runs, each until the device is done."""
    from megatron.core import device

    run()
    device.synchronize()
    found = []
    for _ in range(_TRIES):
        began_at = time.perf_counter()
        run()
        device.synchronize()
        found.append(time.perf_counter() - began_at)
    return min(found)


def measure_device() -> dict[str, float]:
    """FLOP/s, bytes/s and seconds of this process's device alone."""
    import torch
    import torch.nn.functional as F

    from megatron.core import device as device_module
    from megatron.planner.throughput import measure_peak_flops

    device = device_module.current_device()
    on_host = device_module.is_cpu(device)
    dtype = torch.float32 if on_host else torch.bfloat16
    peak = measure_peak_flops(device, dtype, seconds=1.0 if on_host else 5.0)
    source = torch.ones(
        (_COPIED_BYTES // 8 if on_host else _COPIED_BYTES) // dtype.itemsize, dtype=dtype, device=device
    )
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / measure_seconds(lambda: target.copy_(source))
    heads, length, width = (4, 512, 64) if on_host else (32, 4096, 128)
    query = torch.randn(1, heads, length, width, dtype=dtype, device=device, requires_grad=True)

    def attend() -> None:
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    # Causal products forward, and two and a half times as many backward.
    flops = 3.5 * 2 * heads * length * length * width
    side = 1024 if on_host else 8192
    square, thin = (torch.randn(side, n, dtype=dtype, device=device) for n in (side, _THIN))

    def rate(a: torch.Tensor, b: torch.Tensor) -> float:
        return 2 * a.shape[0] * a.shape[1] * b.shape[1] / measure_seconds(lambda: a @ b)

    best = rate(square, square)
    few = torch.ones(8, device=device)

    def launch() -> None:
        for _ in range(100):
            few.add_(1.0)

    return {
        "peak_flops": peak, "memory_bandwidth": bandwidth,
        "attention_share": min(1.0, flops / measure_seconds(attend) / peak),
        "launch_seconds": measure_seconds(launch) / 100,
        # At n rows the rate is n / (n + half_rows) of the best one; by columns likewise.
        "half_rows": max(0.0, _THIN * (best / rate(thin.mT, square) - 1)),
        "half_width": max(0.0, _THIN * (best / rate(square, thin) - 1)),
    }  # fmt: skip


def measure_link(world_size: int) -> dict[str, float]:
    """Bytes a second, and seconds of a step, of an all-gather over all processes."""
    import torch
    import torch.distributed as dist

    from megatron.core import device as device_module
    from megatron.core.collectives import all_gather_into_tensor

    device, group = device_module.current_device(), dist.group.WORLD
    assert group is not None, "the processes have met"

    def gather(size: int) -> Callable[[], object]:
        own = torch.ones(size // world_size, dtype=torch.uint8, device=device)
        whole = torch.empty(own.numel() * world_size, dtype=torch.uint8, device=device)
        return lambda: all_gather_into_tensor(whole, own, group)

    small, large = measure_seconds(gather(_SMALL)), measure_seconds(gather(_LARGE))
    share = (world_size - 1) / world_size
    return {
        "link_seconds": small / (world_size - 1),
        "link_bandwidth": _LARGE * share / max(large - small, 1e-3 * large),
    }


def measure_as_rank(rank: int, world_size: int, directory: str) -> None:
    """Measure in one of several processes, and write what was found for the first one to read."""
    import torch
    import torch.distributed as dist

    from megatron.core import device as device_module

    os.environ["LOCAL_RANK"] = str(rank)
    device = device_module.current_device()
    backend = "gloo" if device_module.is_cpu(device) else "nccl"
    dist.init_process_group(backend, init_method=f"file://{directory}/meet", rank=rank, world_size=world_size)
    torch.set_num_threads(1 if device_module.is_cpu(device) else torch.get_num_threads())
    dist.barrier()
    found = measure_device() | measure_link(world_size)
    write_atomically(Path(directory, f"{rank}.json"), json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(world_size: int) -> dict[str, float]:
    """The medians over all processes."""
    if world_size == 1:
        return measure_device()
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(prefix="probe-") as directory:
        torch.multiprocessing.spawn(measure_as_rank, (world_size, directory), nprocs=world_size)
        found: list[dict[str, float]] = [
            json.loads(Path(directory, f"{rank}.json").read_bytes()) for rank in range(world_size)
        ]
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def build_row(world_size: int, measured: dict[str, float]) -> dict[str, Any]:
    """The row as the file has it, with what a data sheet or the system says."""
    from megatron.core import device as device_module
    from megatron.core.host_memory import read_host_memory

    on_host = device_module.is_cpu(device_module.current_device())
    memory = read_host_memory().total_bytes / world_size if on_host else device_module.read_total_memory_bytes()
    row = dataclasses.asdict(find_device("h100")) | {
        "name": "cpu" if on_host else device_module.device_name(), "memory_bytes": float(memory),
        "fp8_peak_flops": None,
        "product_share": 0.9, "devices_per_node": world_size,
    }  # fmt: skip
    if on_host:
        row |= {"reserved_bytes": 0.4 * (1 << 30), "communicator_bytes": 0.0}
    row |= measured
    # Checked here, so that plan takes it.
    Device(**row)
    return row | {"measured": sorted(measured)}


@command_line
def main() -> int:
    """Measure, and write the row."""
    parser = ProgramParser(__doc__)
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="processes at once (default: 1)")
    parser.add_argument("--output", type=path, required=True, metavar="FILE.json", help="where the row goes")
    arguments = parser.parse_args(sys.argv[1:])
    if not 1 <= arguments.world_size <= _MOST_PROCESSES:
        raise ConfigError(f"--world-size {arguments.world_size} cannot be measured here; give 1 to {_MOST_PROCESSES}")
    print(f"measuring in {arguments.world_size} process{'es' if arguments.world_size > 1 else ''}", flush=True)
    row = build_row(arguments.world_size, measure(arguments.world_size))
    write_atomically(arguments.output, json.dumps(row, indent=2) + "\n")
    print(
        f"{row['name']}: products {row['peak_flops'] / 1e12:.3g} TFLOP/s, memory "
        f"{format_bytes(row['memory_bandwidth'])}/s, links {format_bytes(row['link_bandwidth'])}/s after "
        f"{1e6 * row['link_seconds']:.3g} us; {arguments.output}"
    )
    return 0
