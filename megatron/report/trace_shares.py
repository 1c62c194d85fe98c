# SPDX-License-Identifier: Apache-2.0
"""Shares of a step, from a trace of torch.profiler: rank-N.json.gz of --profile --use-pytorch-profiler.

Every moment of the profiled time counts once, for the first of these that holds:

    a kernel computes (without a GPU: an operation runs)    products, attention or elementwise
    the program fetches its next batch                      data
    a transfer between neighbours is under way              bubble, in a pipeline
    a collective is under way                               that kind of collective: it is exposed, nothing hides it
    nothing                                                 host: the program itself, launching
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.errors import DataError
from megatron.core.timers import FETCHING

_MOST_BYTES = 1 << 30
_COMPUTING = (
    ("attention", re.compile(r"flash|fmha|attention|attn|sdpa|sdp_", re.I)),
    ("products", re.compile(
        r"gemm|cutlass|cublas|nvjet|xmma|matmul|einsum|::(add|b|badd)?mm_?$|grouped_mm|scaled_mm|linear|::addmv|dot_"
        r"product|_Multiply|Matmul|convolution", re.I)),
)  # fmt: skip
_COLLECTIVES = (
    ("send and receive", re.compile(r"send|recv|p2p|coalesced", re.I)),
    ("all-to-all", re.compile(r"all_?to_?all", re.I)),
    ("reduce-scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all-gather", re.compile(r"all_?gather", re.I)),
    ("all-reduce", re.compile(r"all_?reduce", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
)
_COMMUNICATION = re.compile(r"^(gloo:|nccl|c10d::|ncclDev)", re.I)
_OPERATION = re.compile(r"^(?!autograd::|torch::autograd|c10d::)\w+::")
_FETCHING = re.compile(rf"^{FETCHING}$|DataLoader.*__next__")
_Stretch = tuple[float, float, str]


@dataclass
class Profile:
    """Times of one rank in the profiled steps, by kind of work."""

    rank: int
    seconds: float
    parts: Mapping[str, float]
    """Part -> seconds, in sum `seconds`."""
    products: int
    """Number of matrix products."""
    usual_product_seconds: float
    """The median, which other programs on the machine do not move."""
    has_device: bool = False
    """The steps ran on a device apart from the host."""

    @property
    def shares(self) -> dict[str, float]:
        """Part -> share of the profiled time, the largest first."""
        return {name: value / self.seconds for name, value in sorted(self.parts.items(), key=lambda item: -item[1])}

    @property
    def working_seconds(self) -> float:
        """Time in which this rank did not wait: kernels and the program around them."""
        return sum(self.parts.get(name, 0.0) for name in ("products", "attention", "elementwise", "host"))


def read_profile(path: Path) -> Profile:
    """Read a trace. Raises OSError, EOFError, ValueError, and DataError for one without steps, or too large to read."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise DataError(f"it has more than {_MOST_BYTES >> 30} GiB; profile fewer iterations")
    content = json.loads(text)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise DataError("it has no traceEvents")
    number = re.search(r"\d+", path.name)
    return measure(events, int(number[0]) if number else 0)


def measure(events: Sequence[Mapping[str, Any]], rank: int) -> Profile:
    """Sort the events of a trace into parts. Raises DataError where nothing was computed."""
    by_category: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if _is_stretch(event):
            by_category[str(event.get("cat"))].append(event)
    kernels, operations = by_category["kernel"], by_category["cpu_op"]
    annotations = by_category["user_annotation"] + by_category["gpu_user_annotation"]
    if kernels:
        moves = by_category["gpu_memcpy"] + by_category["gpu_memset"]
        computing = [_name_stretch(event, _name_computing) for event in kernels if not _is_communication(event)]
        computing += [_name_stretch(event, lambda name: "elementwise") for event in moves]
        # A device's collectives are its kernels; the ranges of the same names begin when they are launched.
        sending = [_name_stretch(event, _name_collective) for event in kernels if _is_communication(event)]
    else:
        computing = list(_list_operations(operations))
        sending = [_name_stretch(event, _name_collective) for event in annotations if _is_communication(event)]
    if not computing:
        raise DataError("nothing was computed in it")
    fetching = [_name_stretch(event, lambda name: "data") for event in annotations if _FETCHING.search(_name(event))]
    whole = by_category["Trace"]
    begin = min(stretch[0] for stretch in (*computing, *sending, *fetching))
    end = max(stretch[1] for stretch in computing)
    if whole:
        begin, end = (
            max(begin, float(whole[0]["ts"])),
            min(max(end, begin), float(whole[0]["ts"]) + float(whole[0]["dur"])),
        )
    # Without a GPU fetching with no loader processes is itself made of operations.
    layers = [computing, fetching, sending] if kernels else [fetching, computing, sending]
    parts = sweep(layers, begin, end)
    products = [stretch[1] - stretch[0] for stretch in computing if stretch[2] == "products"]
    seconds = max(end - begin, 1e-9) / 1e6
    return Profile(
        rank, seconds, {name: value / 1e6 for name, value in parts.items()}, len(products),
        statistics.median(products or [0.0]) / 1e6, bool(kernels),
    )  # fmt: skip


def sweep(layers: Sequence[Sequence[_Stretch]], begin: float, end: float) -> dict[str, float]:
    """Part -> time between two moments: each moment counts for the first layer that has an interval there; else for
    "host"."""
    changes: list[tuple[float, int, int, str]] = []
    for layer, stretches in enumerate(layers):
        for start, stop, part in stretches:
            start, stop = max(start, begin), min(stop, end)
            if stop > start:
                changes += [(start, 1, layer, part), (stop, -1, layer, part)]
    changes.sort(key=lambda change: (change[0], change[1]))
    open_parts: list[Counter[str]] = [Counter() for _ in layers]
    found: dict[str, float] = defaultdict(float)
    now = begin
    for moment, step, layer, part in [*changes, (end, 0, 0, "")]:
        if moment > now:
            current = next((next(iter(parts)) for parts in open_parts if parts), "host")
            found[current] += moment - now
            now = moment
        if step:
            open_parts[layer][part] += step
            if not open_parts[layer][part]:
                del open_parts[layer][part]
    return dict(found)


def _list_operations(operations: Sequence[Mapping[str, Any]]) -> Iterator[_Stretch]:
    """The outermost operations of the library on the busiest thread: what an operation calls is a part of it. Nodes of
    autograd and functions of the program only call others, and what they take themselves is the host's."""
    threads: dict[Any, float] = defaultdict(float)
    for event in operations:
        threads[event.get("tid")] += event["dur"]
    busiest = max(threads, key=lambda thread: threads[thread], default=None)
    own = sorted(
        (event for event in operations if event.get("tid") == busiest), key=lambda event: (event["ts"], -event["dur"])
    )
    done_until = -1.0
    for event in own:
        if event["ts"] >= done_until and _OPERATION.match(_name(event)):
            stretch = _name_stretch(event, _name_computing)
            done_until = stretch[1]
            yield stretch


def _is_stretch(event: Any) -> bool:
    if not isinstance(event, dict) or event.get("ph") != "X":
        return False
    times = event.get("ts"), event.get("dur")
    return all(isinstance(value, int | float) and abs(value) < 1e300 for value in times) and event["dur"] >= 0


def _name(event: Mapping[str, Any]) -> str:
    return str(event.get("name", ""))[:300]


def _is_communication(event: Mapping[str, Any]) -> bool:
    return bool(_COMMUNICATION.match(_name(event)))


def _name_stretch(event: Mapping[str, Any], name: Callable[[str], str]) -> _Stretch:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"]), name(_name(event))


def _name_computing(name: str) -> str:
    return next((part for part, pattern in _COMPUTING if pattern.search(name)), "elementwise")


def _name_collective(name: str) -> str:
    return next((kind for kind, pattern in _COLLECTIVES if pattern.search(name)), "other communication")
