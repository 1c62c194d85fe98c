# SPDX-License-Identifier: Apache-2.0
"""Measure this machine's products, memory, attention and links: the row of a device for `plan --gpu-file`.

    python -m megatron probe --output machine.json
    python -m megatron probe --world-size 8 --output node.json        in 8 processes at once, one a GPU

All processes measure the same at the same time, each over a stretch of time, so that cores or a bus that they share
count as shared. Of several rounds the fastest counts, once a second one comes near it: whatever else the machine does
makes a round longer, never shorter. Where none does, everything is measured again, and in the end a warning says what
is not steady. What is not measured (a network between nodes, with one process a link at all) is written as it is for an
H100, and `measured` in the file says what was.
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

from megatron.core.errors import ConfigError, command_line, format_bytes, say
from megatron.core.paths import write_atomically
from megatron.planner.devices import Device, find_device
from megatron.training.flags.argument import ProgramParser, path

_ROUNDS, _ATTEMPTS = 5, 3
_ROUND_SECONDS = 0.12
"""Of one round: many slices of a scheduler that shares a core among processes."""
_STEADY = 1.1
"""The second fastest round over the fastest."""
_CALLS = 8
"""Of a collective, in a round."""
_SMALL = 1 << 10
"""Bytes of the tensor that shows the time of a link's step."""
_COPIED_BYTES = 1 << 28
_MOST_PROCESSES = 64
_THIN = 128
"""Rows, or columns, of products by which the rate of narrow ones is found."""
Runs = dict[str, Callable[[], object]]
Rounds = dict[str, list[float]]
"""Name -> the seconds of one run, in each round."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tensors that are large for a device, and small enough to be used many times."""

    side: int
    """Of square matrices."""
    copied_bytes: int
    gathered_bytes: int
    attention: tuple[int, int, int]
    """Heads, length, width."""

    @property
    def attention_flops(self) -> float:
        """Causal products forward, and two and a half times as many backward."""
        heads, length, width = self.attention
        return 3.5 * 2 * heads * length * length * width


ON_HOST = Sizes(1024, _COPIED_BYTES // 8, 1 << 22, (4, 512, 64))
ON_GPU = Sizes(8192, _COPIED_BYTES, 1 << 28, (32, 4096, 128))


def choose_sizes() -> Sizes:
    """The sizes for this process's device."""
    from megatron.core import device as device_module

    return ON_HOST if device_module.is_cpu(device_module.current_device()) else ON_GPU


def list_runs(sizes: Sizes) -> Runs:
    """The measurements of one process, by name."""
    import torch
    import torch.nn.functional as F

    from megatron.core import device as device_module
    from megatron.core.tensor_parallel.products import multiply_by_onednn, takes_onednn

    device = device_module.current_device()
    dtype = torch.float32 if device_module.is_cpu(device) else torch.bfloat16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    source = random(sizes.copied_bytes // dtype.itemsize)
    target = torch.empty_like(source)
    heads, length, width = sizes.attention
    query = random(1, heads, length, width).requires_grad_()
    square, thin = random(sizes.side, sizes.side), random(sizes.side, _THIN)
    flat = random(sizes.side, 2 * sizes.side)
    few = torch.ones(8, device=device)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # By the kernel that a layer would take.
        return multiply_by_onednn(a, b) if takes_onednn(a, b) else a @ b

    return {
        "square": lambda: multiply(square, square),
        "rows": lambda: multiply(thin.mT, square),
        "columns": lambda: multiply(square, thin),
        "copy": lambda: target.copy_(source),
        "elementwise": lambda: F.gelu(F.layer_norm(flat, flat.shape[1:])),
        "attention": lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward(),
        "launch": lambda: few.add_(1.0),
    }


def list_collectives(sizes: Sizes, world_size: int) -> Runs:
    """The measurements that all processes make together, by name."""
    import torch
    import torch.distributed as dist

    from megatron.core import collectives
    from megatron.core import device as device_module

    device, group = device_module.current_device(), dist.group.WORLD
    assert group is not None, "the processes have met"
    whole, small = (
        torch.ones(size // world_size * world_size, dtype=torch.float32, device=device)
        for size in (sizes.gathered_bytes // 4, max(_SMALL // 4, world_size))
    )
    own, small_own = (torch.ones(tensor.numel() // world_size, device=device) for tensor in (whole, small))
    return {
        "step": lambda: collectives.all_gather_into_tensor(small, small_own, group),
        "gather": lambda: collectives.all_gather_into_tensor(whole, own, group),
        "scatter": lambda: collectives.reduce_scatter_tensor(own, whole, group),
        "reduce": lambda: collectives.all_reduce(whole, group),
    }


def measure_rounds(runs: Runs, meet: Callable[[], object], calls: int | None = None) -> Rounds:
    """Run each in turns, several rounds. meet: waits for the other processes. calls: of a round; None for as many as
    its time allows."""
    from megatron.core import device

    found: Rounds = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            device.synchronize()
            meet()
            done, began_at = 0, time.perf_counter()
            while done < calls if calls else time.perf_counter() - began_at < _ROUND_SECONDS:
                # A GPU is waited for after several, as in training.
                for _ in range(1 if calls else 4):
                    run()
                    done += 1
                device.synchronize()
            found[name].append((time.perf_counter() - began_at) / done)
    return found


def measure_alone(meet: Callable[[], object] = lambda: None) -> tuple[float, Rounds]:
    """FLOP/s of the yardstick of MFU, and the rounds of this process."""
    import torch

    from megatron.core import device as device_module
    from megatron.planner.throughput import measure_peak_flops

    device = device_module.current_device()
    on_host = device_module.is_cpu(device)
    peak = measure_peak_flops(device, torch.float32 if on_host else torch.bfloat16, seconds=1.0 if on_host else 5.0)
    return peak, measure_rounds(list_runs(choose_sizes()), meet)


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
    peak, rounds = measure_alone(dist.barrier)
    rounds |= measure_rounds(list_collectives(choose_sizes(), world_size), dist.barrier, _CALLS)
    write_atomically(Path(directory, f"{rank}.json"), json.dumps([peak, rounds]))
    dist.barrier()
    dist.destroy_process_group()


def measure_once(world_size: int) -> tuple[float, Rounds]:
    """The means over all processes."""
    if world_size == 1:
        return measure_alone()
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(prefix="probe-") as directory:
        torch.multiprocessing.spawn(measure_as_rank, (world_size, directory), nprocs=world_size)
        found = [json.loads(Path(directory, f"{rank}.json").read_bytes()) for rank in range(world_size)]
    means = {
        name: [statistics.fmean(times) for times in zip(*(rounds[name] for _, rounds in found), strict=True)]
        for name in found[0][1]
    }
    return statistics.median(peak for peak, _ in found), means


def measure(world_size: int, measure_again: Callable[[int], tuple[float, Rounds]] = measure_once) -> dict[str, Any]:
    """Fields of a row; `unsteady` names the runs whose rounds do not agree after several attempts."""
    peak, pooled, unsteady = 0.0, Rounds(), list[str]()
    for attempt in range(_ATTEMPTS):
        if attempt:
            say(f"rounds differ ({', '.join(unsteady)}): other programs run; measuring again", sys.stderr)
        once, rounds = measure_again(world_size)
        peak = max(peak, once)
        for name, seconds in rounds.items():
            pooled[name] = sorted([*pooled.get(name, []), *seconds])
        unsteady = [name for name, seconds in pooled.items() if seconds[1] > _STEADY * seconds[0]]
        if not unsteady:
            break
    best = {name: seconds[0] for name, seconds in pooled.items()}
    return derive(peak, best, choose_sizes(), world_size) | {"unsteady": unsteady}


def derive(peak: float, best: dict[str, float], sizes: Sizes, world_size: int) -> dict[str, float]:
    """Fields of a row from the seconds of each run."""
    side = sizes.side
    half_rows, half_width = (
        find_half(best["square"] / best[name] * _THIN / side, _THIN, side) for name in ("rows", "columns")
    )
    # The rate that products would have with more rows and columns still.
    rate = 2 * side**3 / best["square"] * (side + half_rows) / side * (side + half_width) / side
    bandwidth = 2 * sizes.copied_bytes / best["copy"]
    itemsize = 4 if sizes is ON_HOST else 2
    found = {
        "peak_flops": peak, "product_share": rate / peak, "half_rows": half_rows, "half_width": half_width,
        "attention_share": sizes.attention_flops / best["attention"] / peak,
        "memory_bandwidth": bandwidth,
        # Two kernels, each of which reads and writes.
        "memory_share": 4 * 2 * side * side * itemsize / best["elementwise"] / bandwidth,
        "launch_seconds": best["launch"],
    }  # fmt: skip
    if world_size > 1:
        moved = sizes.gathered_bytes * (world_size - 1) / world_size
        beyond = max(best["gather"] - best["step"], 1e-3 * best["gather"])
        found |= {
            "link_seconds": best["step"] / (world_size - 1), "link_bandwidth": moved / beyond,
            "reduce_scatter_ratio": best["scatter"] / best["gather"],
            "all_reduce_ratio": best["reduce"] / best["gather"],
        }  # fmt: skip
    return found


def find_half(ratio: float, thin: int, side: int) -> float:
    """The n at which n / (n + half) is half of the best rate, from the rate at `thin` over that at `side`."""
    # ratio = thin / (thin + half) / (side / (side + half)); at worst the rate is as small as n itself.
    return thin * side * max(0.0, 1 - ratio) / max(side * ratio - thin, 1e-3 * side)


def build_row(world_size: int, measured: dict[str, Any]) -> dict[str, Any]:
    """The row as the file has it, with what a data sheet or the system says."""
    from megatron.core import device as device_module
    from megatron.core.host_memory import read_host_memory

    unsteady = measured.pop("unsteady")
    on_host = device_module.is_cpu(device_module.current_device())
    memory = read_host_memory().total_bytes / world_size if on_host else device_module.read_total_memory_bytes()
    row = dataclasses.asdict(find_device("h100")) | {
        "name": "cpu" if on_host else device_module.device_name(), "memory_bytes": float(memory),
        "fp8_peak_flops": None, "devices_per_node": world_size,
    }  # fmt: skip
    if on_host:
        row |= {"reserved_bytes": 0.4 * (1 << 30), "communicator_bytes": 0.0, "hidden_share": 0.0}
    row |= measured
    # Checked here, so that plan takes it.
    Device(**row)
    return row | {"measured": sorted(measured), "unsteady": unsteady}


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
    if row["unsteady"]:
        say(
            f"warning: rounds of {', '.join(row['unsteady'])} differ by more than {_STEADY - 1:.0%}: other programs "
            "run here, and the row may be slower than the machine; measure again when it is idle",
            sys.stderr,
        )
    print(
        f"{row['name']}: products {row['peak_flops'] / 1e12:.3g} TFLOP/s, memory "
        f"{format_bytes(row['memory_bandwidth'])}/s, links {format_bytes(row['link_bandwidth'])}/s after "
        f"{1e6 * row['link_seconds']:.3g} us; {arguments.output}"
    )
    return 0
