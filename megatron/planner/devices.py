# SPDX-License-Identifier: Apache-2.0
"""Devices and the links between them, as rows of data: what the planner knows of a cluster.

    peaks              of matrix products: core/dense_peaks.py, from data sheets
    memory             what nvidia-smi reports of each product; bandwidth from its data sheet
    shares             what large products and flash attention reach of the peak: for bf16 A100 250-275 of 312 TFLOP/s,
                       H100 620-750 of 989, B200 1500-1700 of 2250, as published measurements of cuBLAS and
                       FlashAttention-2 and -3 (Dao, 2023; Shah et al., 2024) give them
    links              achieved by NCCL in one direction for each GPU, and the time of a step of a ring: NVLink 2, 3, 4,
                       5 of 150, 300, 450, 900 GB/s; in a network HDR, NDR or XDR InfiniBand of 25, 50, 100 GB/s a GPU;
                       to the host PCIe 3, 4, 5 of 16, 32, 64 GB/s, or NVLink-C2C of 450 GB/s

`python -m megatron probe` measures such a row on the machine at hand.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dense_peaks import DENSE_PEAKS
from megatron.core.errors import ConfigError

_GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process of a CPU, with its links. Bandwidths in bytes a second, times in seconds."""

    name: str
    memory_bytes: float
    peak_flops: float
    """Of dense products in the format of training, a second: what MFU goes by."""
    memory_bandwidth: float
    link_bandwidth: float
    """To the other devices of a node, one direction, achieved."""
    network_bandwidth: float
    """To devices of other nodes, one direction, achieved, for each device."""
    fp8_peak_flops: float | None = None
    product_share: float = 0.75
    """Of the peak that a large product reaches."""
    attention_share: float = 0.45
    """Of the peak that attention reaches in forward and backward together."""
    memory_share: float = 0.8
    """Of the memory's bandwidth that elementwise kernels reach."""
    half_rows: float = 200.0
    """Rows of a product at which its rate is half of the best one."""
    half_width: float = 150.0
    """Its shortest other side, likewise."""
    link_seconds: float = 8e-6
    """Of a step of a ring within a node, however little it carries."""
    network_seconds: float = 15e-6
    reduce_scatter_ratio: float = 1.0
    """Time of a reduce-scatter over an all-gather's: 1 for rings."""
    all_reduce_ratio: float = 2.0
    """Of an all-reduce, likewise."""
    hidden_share: float = 1.0
    """Fraction of communication during computing that costs no time: 0 where one processor does both."""
    launch_seconds: float = 4e-6
    """The host's time for one kernel."""
    devices_per_node: int = 8
    """Devices that the fast links join."""
    reserved_bytes: float = 0.75 * _GIB
    """Context and libraries, which no tensor can have."""
    communicator_bytes: float = 0.25 * _GIB
    """Buffers of the collective library for each group of several devices."""
    host_bandwidth: float = 50e9
    """To pinned memory of the host, one direction, achieved."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            least_is_zero = field.name.endswith("_seconds") or field.name in (
                "reserved_bytes", "communicator_bytes", "half_rows", "half_width", "hidden_share"
            )  # fmt: skip
            if not is_number or value < 0 or (value == 0 and not least_is_zero):
                raise ConfigError(f"device {self.name}: {field.name} is {value!r}; give a number above 0")
        if self.devices_per_node != int(self.devices_per_node):
            raise ConfigError(f"device {self.name}: devices_per_node is {self.devices_per_node!r}; give a whole number")


def _row(
    product: str,
    gib: float,
    bandwidth: float,
    link: float,
    network: float,
    host: float,
    shares: tuple[float, float],
    node: int = 8,
) -> Device:
    """A device of DENSE_PEAKS: GiB of memory, then TB/s of memory, GB/s of the link, of the network and of the host."""
    peaks = DENSE_PEAKS[product]
    fp8 = None if peaks.fp8 is None else peaks.fp8 * 1e12
    return Device(
        product.lower(), gib * _GIB, peaks.half * 1e12, bandwidth * 1e12, link * 1e9, network * 1e9, fp8, *shares,
        devices_per_node=node, host_bandwidth=host * 1e9,
    )  # fmt: skip


DEVICES: Mapping[str, Device] = {
    row.name: row
    for row in (
        _row("V100", 31.7, 0.9, 120, 10, 12, (0.72, 0.35)),
        _row("A100", 79.3, 2.04, 235, 21, 24, (0.83, 0.55)),
        _row("H100", 79.6, 3.35, 360, 42, 50, (0.68, 0.50)),
        _row("H800", 79.6, 3.35, 160, 42, 50, (0.68, 0.50)),
        _row("H200", 140.4, 4.8, 360, 42, 50, (0.70, 0.50)),
        _row("GH200", 94.5, 4.0, 360, 42, 350, (0.70, 0.50), 1),
        _row("B200", 179.1, 8.0, 680, 42, 50, (0.70, 0.45)),
        _row("GB200", 185.0, 8.0, 680, 42, 350, (0.70, 0.45), 72),
    )
}


def find_device(name: str) -> Device:
    """The row of a device. Raises ConfigError where there is none."""
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    close = difflib.get_close_matches(name.lower(), DEVICES, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"--gpu {name} is not known; {hint}there are {', '.join(DEVICES)}, and --gpu-file FILE.json takes the row of "
        "any other (python -m megatron probe --output FILE.json measures one)"
    )


def read_device(path: Path) -> Device:
    """The row in a JSON file, an object with the fields of Device; `like` names the row whose values it takes for what
    it leaves out. Raises ConfigError."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--gpu-file {path} cannot be read: {error}; give a row that probe has written") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--gpu-file {path} holds a {type(found).__name__}; it must hold an object with fields")
    known = {field.name: field for field in dataclasses.fields(Device)}
    given = {name: value for name, value in found.items() if name not in ("like", "measured", "unsteady")}
    like = str(found.get("like", "")).lower()
    if "like" in found and like not in DEVICES:
        raise ConfigError(f"--gpu-file {path}: like is {found['like']!r}; it must be one of {', '.join(DEVICES)}")
    base = dataclasses.asdict(DEVICES[like]) if like else {}
    base |= given
    strange = sorted(base.keys() - known.keys())
    missing = sorted(name for name, field in known.items() if field.default is dataclasses.MISSING and name not in base)
    if strange or missing:
        wrong = [*(f"{name} is no field" for name in strange), *(f"{name} is missing" for name in missing)]
        raise ConfigError(f"--gpu-file {path}: {', '.join(wrong)}; the fields are {', '.join(known)}")
    return Device(**base)
