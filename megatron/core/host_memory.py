# SPDX-License-Identifier: Apache-2.0
"""The memory of the host: how much this process may have, and keeping what it has freed.

Freed memory stays in the process, so that a training step on the CPU stops paying for fresh pages. glibc hands large
blocks back to the kernel as soon as they are freed, and every new one then costs a page fault for each 4 KiB. A step
frees and allocates the same sizes again and again: on the CPU these faults can cost more than the arithmetic (a softmax
over 32 MB of logits: 18 ms into fresh memory, 5 ms into memory touched before).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.errors import MemoryShortageError, format_bytes

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_INT_MAX = 2**31 - 1


def keep_freed_host_memory() -> bool:
    """Tell the C library to reuse freed blocks instead of returning them; True where it understood.

    Affects the whole process; the resident size then stays at its peak. Other C libraries than glibc: no effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _INT_MAX))


@dataclass(frozen=True)
class HostMemory:
    """The memory that a process of this machine can have at most."""

    total_bytes: int
    """Of the machine with its swap, or less where a container or the shell sets a limit."""
    source: str
    """Source of the limit: `this machine has`, `this container may have`, `ulimit -v allows`."""


def read_host_memory() -> HostMemory:
    """The smallest of the limits that hold for this process."""
    return min(_list_limits(), key=lambda limit: limit.total_bytes)


def name_machine() -> str | None:
    """Equal for two processes that see each other under the same numbers, different after a restart of the machine."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def require_host_memory(number: float, what: str, remedy: str) -> None:
    """Raise MemoryShortageError where so many bytes cannot be had, whatever else is freed: before they are asked for,
    because the system gives memory away before it has it, and later ends the process without a word.

    what: the subject of the sentence, in the plural. remedy: what to change, as an imperative.
    """
    host = read_host_memory()
    if number > host.total_bytes:
        raise MemoryShortageError(
            f"{what} take {format_bytes(number)}, and {host.source} {format_bytes(host.total_bytes)}; {remedy}"
        )


def count_pinned_bytes(number: int) -> int:
    """Return what so many bytes of pinned memory take: torch's allocator hands out powers of two."""
    return 1 << (number - 1).bit_length() if number else 0


def _list_limits() -> Iterator[HostMemory]:
    page = os.sysconf("SC_PAGE_SIZE")
    physical, swap = page * os.sysconf("SC_PHYS_PAGES"), 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("SwapTotal:"):
                swap = int(line.split()[1]) * 1024
    yield HostMemory(physical + swap, "this machine has")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield HostMemory(soft, "ulimit -v allows")
    for directory in list_control_groups():
        limit = _read_number(directory / "memory.max")
        # Without the file of the swap there is no saying how much more the group may have.
        group_swap = _read_number(directory / "memory.swap.max")
        if limit is not None:
            yield HostMemory(limit + (swap if group_swap is None else group_swap), "this container may have")
        limit = _read_number(directory / "memory.limit_in_bytes")
        if limit is not None:
            yield HostMemory(limit + swap, "this container may have")


def list_control_groups(controller: str = "memory") -> Iterator[Path]:
    """Directories of the control groups that this process is in, of version 2 and of version 1, up to the root."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            is_first_version = controller in controllers.split(",")
            root = Path("/sys/fs/cgroup") / (controllers if is_first_version else "")
            if controllers == "" or is_first_version:
                inside = root / path.lstrip("/")
                # In a container the path may be the host's, and the container's group the root.
                yield from (inside, *(above for above in inside.parents if above.is_relative_to(root)))


def _read_number(path: Path) -> int | None:
    """The number in a file; None where there is no such file, or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
