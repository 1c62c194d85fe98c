# SPDX-License-Identifier: Apache-2.0
"""Named places in a save at which a process can be told to die, to show that no crash costs more than the last steps.

    MEGATRON_CRASH_POINT=manifest-flushed            every process that gets there kills itself (SIGKILL)
    MEGATRON_CRASH_POINT=shard-begun:1               rank 1, the first time
    MEGATRON_CRASH_POINT=renamed:0:2                 rank 0, the second time

`arm` reads that text, which megatron/training/launch/initialize.py hands over; `reach` is called at each place and
costs a look into an empty dictionary. `python -m tests.faults.crash_matrix` goes through all of them.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Final, NamedTuple

from megatron.core.errors import ConfigError


class CrashPoint(NamedTuple):
    """A place in the program."""

    when: str
    """Event that has just happened there, or comes next."""
    on_every_rank: bool = False
    """Otherwise only the first rank comes by."""
    beside_training_only: bool = False
    """Only with --async-save."""
    by_writer: bool = False
    """True if the writer process, where a rank has one, comes by instead of the rank."""


CRASH_POINTS: Final[dict[str, CrashPoint]] = {
    "leftovers-next": CrashPoint("--save is locked; what a crash has left is settled next"),
    "leftover-settled": CrashPoint("one leftover was finished or removed"),
    "save-begun": CrashPoint("a save has been asked for, nothing is on the disk", True),
    "weights-gathered": CrashPoint("the model is described, the optimizer is not", True),
    "state-gathered": CrashPoint("all that will be saved is known", True),
    "directory-next": CrashPoint("the temporary directory is made next"),
    "directory-made": CrashPoint("the temporary directory exists on the first rank"),
    "tensors-next": CrashPoint("every rank knows the directory and writes next", True),
    "snapshot-taken": CrashPoint("the rank's tensors are copied, and training may go on", True, True),
    "shard-created": CrashPoint("the rank's file of tensors exists and is empty", True, by_writer=True),
    "shard-begun": CrashPoint("a part of the first tensor has been written", True, by_writer=True),
    "shard-flushed": CrashPoint("the rank's file is whole and on the device", True, by_writer=True),
    "metadata-created": CrashPoint("the table of contents exists and is empty"),
    "metadata-begun": CrashPoint("it has been written and not flushed"),
    "metadata-flushed": CrashPoint("it is on the device under its temporary name"),
    "metadata-renamed": CrashPoint("it has its name"),
    "tensors-written": CrashPoint("all tensors of this rank are on the device", True),
    "shares-reported": CrashPoint("the first rank knows that all have written", False, True),
    "document-created": CrashPoint("the first JSON document exists and is empty"),
    "document-unflushed": CrashPoint("it has been written and not flushed to the device"),
    "document-flushed": CrashPoint("it is on the device"),
    "documents-written": CrashPoint("all JSON documents are"),
    "attachments-copied": CrashPoint("the tokenizer's files are"),
    "directories-flushed": CrashPoint("names inside the temporary directory are; the manifest is written next"),
    "manifest-created": CrashPoint("the manifest exists and is empty"),
    "manifest-unflushed": CrashPoint("it has been written and not flushed to the device"),
    "manifest-flushed": CrashPoint("it is on the device"),
    "checkpoint-complete": CrashPoint("and so is its name: the temporary directory is a complete checkpoint"),
    "tracker-created": CrashPoint("the file that becomes the tracker exists and is empty"),
    "tracker-unflushed": CrashPoint("it has been written and not flushed to the device"),
    "tracker-flushed": CrashPoint("it is on the device"),
    "earlier-moved-aside": CrashPoint(
        "a checkpoint of the same iteration was moved aside; the new one takes its place"
    ),
    "renamed": CrashPoint("the new checkpoint has its final name"),
    "rename-flushed": CrashPoint("and that is on the device"),
    "tracker-replaced": CrashPoint("the tracker names it"),
    "tracker-replace-flushed": CrashPoint("and that is on the device"),
    "earlier-removed": CrashPoint("what was moved aside is gone"),
    "save-done": CrashPoint("the save is complete on this rank", True),
    "old-unmarked": CrashPoint("an older checkpoint to be removed has lost its name"),
    "old-removed": CrashPoint("it is gone"),
}
"""Name -> where it is, in the order of a run that starts, saves and removes."""

_ARMED: dict[str, int] = {}
"""Point -> how many times it is still to be passed before the process dies; below 0, the system's number of the error
that is raised there, once."""


def arm(text: str, rank: int) -> None:
    """Have this process die at a point: `POINT`, `POINT:RANK` or `POINT:RANK:TIME`. Another rank's is ignored.

    Raises ConfigError for anything else.
    """
    point, *numbers = text.split(":")
    if point not in CRASH_POINTS:
        raise ConfigError(
            f"MEGATRON_CRASH_POINT {text!r}: there is no such point; choose from {', '.join(CRASH_POINTS)}"
        )
    if len(numbers) > 2 or not all(number.isascii() and number.isdecimal() for number in numbers):
        raise ConfigError(f"MEGATRON_CRASH_POINT {text!r} is not POINT, POINT:RANK or POINT:RANK:TIME")
    if not numbers or int(numbers[0]) == rank:
        _ARMED[point] = int(numbers[1]) if len(numbers) > 1 else 1


def fill_disk() -> None:
    """Have the next save of this process find no room for its tensors (ENOSPC), once."""
    _ARMED["shard-begun"] = -errno.ENOSPC


def hand_over() -> str:
    """Return what a process that writes for this one is armed for in its place, once; `take_over` there reads it."""
    points = [point for point in _ARMED if CRASH_POINTS[point].by_writer]
    return ",".join(f"{point}:{_ARMED.pop(point)}" for point in points)


def take_over(text: str) -> None:
    """Have this process die where the one that it writes for was to."""
    for entry in filter(None, text.split(",")):
        point, _, times = entry.partition(":")
        _ARMED[point] = int(times)


def reach(point: str) -> None:
    """This process is at a point of CRASH_POINTS: kill it where it was armed for that."""
    if not _ARMED or point not in _ARMED:
        return
    if _ARMED[point] < 0:
        number = -_ARMED.pop(point)
        raise OSError(number, os.strerror(number))
    _ARMED[point] -= 1
    if _ARMED[point] <= 0:
        # As `kill -9` and the kernel's out-of-memory killer do: nothing of the process runs any more.
        os.kill(os.getpid(), signal.SIGKILL)
