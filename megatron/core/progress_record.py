# SPDX-License-Identifier: Apache-2.0
"""The progress of one process, in memory that another process can read without its help: iteration, micro-batch, and
for each group the collective that was called last.

The file is mapped by both sides, so that a note costs a microsecond and stays readable when the process is stopped or
holds the interpreter lock. A reader may see half of a note; it looks again when the count of changes has moved.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.traffic import Kind, Meter

# Rank, process, phase, what the watcher has to say; iteration, micro-batch, count of changes, limits of silence.
_HEADER = struct.Struct("<IIIIQQQdd")
_NUMBERS = struct.Struct("<QQQ")
_NUMBERS_AT = 16
_LIMIT_AT = 40
# Order among all calls, calls so far, bytes; kind; axis and members of the group.
_CALL = struct.Struct("<QQQ16s")
_GROUP = struct.Struct("<16s160s")
_SLOT_BYTES = _CALL.size + _GROUP.size
_SLOTS = 48
_LENGTH = _HEADER.size + _SLOTS * _SLOT_BYTES

OUTSIDE, STEP, ENDED, SAVE = range(4)
"""Phases: between steps (set-up, evaluation), inside of a step, after the last one, and inside of a save."""
ALARM, VERDICT = 1, 2
"""Words of the watcher to a process: say what you know; the job is hung."""


@dataclass(frozen=True)
class LastCollective:
    """The last collective that a process has entered in one group."""

    axis: str
    ranks: tuple[int, ...]
    """Members of the group, global ranks in order; empty where there are too many to be written down."""
    kind: str
    number: int
    """Number of collectives that this process has entered in the group, this one included."""
    tensor_bytes: int
    order: int
    """Larger for later calls, over all groups of the process."""

    @property
    def group(self) -> tuple[str, tuple[int, ...]]:
        """Key that two processes in the same group agree on."""
        return self.axis, self.ranks


@dataclass(frozen=True)
class ProgressSnapshot:
    """A record as it was read."""

    rank: int
    process: int
    phase: int
    iteration: int
    microbatch: int
    """Micro-batches that the step has taken, from 1; 0 before the first."""
    changes: int
    """Moves with every note."""
    limit_seconds: float
    """A step without a note for so long is taken for hung; 0 as long as no limit is known."""
    calls: tuple[LastCollective, ...]
    """Of each group, the latest first."""
    save_limit_seconds: float = 0.0
    """The same of a save, in which a process that writes is not silent."""


class ProgressRecord:
    """The record of this process, which writes it, or of another one, which is only read."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        """Raises OSError for a file that cannot be mapped."""
        file = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(file, _LENGTH, access=mmap.ACCESS_WRITE)
        finally:
            os.close(file)
        self._writes = writes
        self._iteration = self._microbatch = self._changes = 0
        self._groups = 0
        self._alike: Counter[tuple[str, str]] = Counter()

    @classmethod
    def make(cls, path: Path, rank: int) -> ProgressRecord:
        """Make the file of this process. Raises OSError."""
        with path.open("xb") as file:
            # Not a hole: where memory for the file is missing, the process would be ended later, by SIGBUS.
            os.posix_fallocate(file.fileno(), 0, _LENGTH)
        record = cls(path, writes=True)
        _HEADER.pack_into(record._map, 0, rank, os.getpid(), OUTSIDE, 0, 0, 0, 0, 0.0, 0.0)
        return record

    # ---- the process itself

    def begin_step(self, iteration: int) -> None:
        """Note that an iteration, counted from 1, begins."""
        self._iteration, self._microbatch = iteration, 0
        self._note()
        self._set_phase(STEP)

    def take_microbatch(self) -> None:
        """Note that the step goes on with its next micro-batch."""
        self._microbatch += 1
        self._note()

    def leave_step(self, phase: int = OUTSIDE) -> None:
        """Note that the step has ended: what follows is not watched."""
        self._set_phase(phase)
        self._note()

    def begin_save(self) -> None:
        """Note that a save begins, which `leave_step` ends."""
        self._set_phase(SAVE)
        self._note()

    def set_limit(self, seconds: float) -> None:
        """Say after a silence of how many seconds the step is taken for hung."""
        struct.pack_into("<d", self._map, _LIMIT_AT, seconds)

    def set_save_limit(self, seconds: float) -> None:
        """Say the same of a save."""
        struct.pack_into("<d", self._map, _LIMIT_AT + 8, seconds)

    def build_meter(self, axis: str, ranks: Sequence[int], inner: Meter | None) -> Meter:
        """Return what notes the calls of a group, and hands them on to `inner`."""
        slot, self._groups = self._groups, self._groups + 1
        if slot >= _SLOTS:  # more groups than any layout has
            return _Fanout(None, 0, self, inner)
        at = _HEADER.size + slot * _SLOT_BYTES
        written = _write_ranks(ranks)
        # Several groups of one axis may have the same members, which make them in the same order.
        self._alike[axis, written] += 1
        name = axis if self._alike[axis, written] == 1 else f"{axis[:13]} {self._alike[axis, written]}"
        _GROUP.pack_into(self._map, at + _CALL.size, name.encode()[:16], written.encode())
        return _Fanout(self._map, at, self, inner)

    def _set_phase(self, phase: int) -> None:
        struct.pack_into("<I", self._map, 8, phase)

    def _note(self) -> int:
        self._changes += 1
        _NUMBERS.pack_into(self._map, _NUMBERS_AT, self._iteration, self._microbatch, self._changes)
        return self._changes

    # ---- who watches

    def read(self) -> ProgressSnapshot:
        """Return what the record says now."""
        rank, process, phase, _, iteration, microbatch, changes, *limits = _HEADER.unpack_from(self._map, 0)
        calls = []
        for slot in range(_SLOTS):
            at = _HEADER.size + slot * _SLOT_BYTES
            order, number, tensor_bytes, kind = _CALL.unpack_from(self._map, at)
            if number:
                axis, ranks = _GROUP.unpack_from(self._map, at + _CALL.size)
                calls.append(
                    LastCollective(_text(axis), _read_ranks(_text(ranks)), _text(kind), number, tensor_bytes, order)
                )
        calls.sort(key=lambda call: -call.order)
        return ProgressSnapshot(
            rank, process, phase, iteration, microbatch, changes, limits[0], tuple(calls), limits[1]
        )

    def tell(self, what: int) -> None:
        """Tell the process that its job seems hung (ALARM), or is (VERDICT)."""
        struct.pack_into("<I", self._map, 12, what)

    @property
    def told(self) -> int:
        """Number that the process was told last; 0: nothing."""
        return int(struct.unpack_from("<I", self._map, 12)[0])


class _Fanout:
    """Notes the calls of one group in a record, and hands them on."""

    def __init__(self, memory: mmap.mmap | None, at: int, record: ProgressRecord, inner: Meter | None) -> None:
        self._map, self._at, self._record, self._inner = memory, at, record, inner
        self._calls = 0
        self._kinds: dict[str, bytes] = {}

    def add(self, axis: str, kind: Kind, tensor_bytes: int, members: int) -> None:
        """Note one call."""
        if self._map is not None:
            self._calls += 1
            name = self._kinds.setdefault(kind, kind.encode()[:16])
            order = self._record._note()
            _CALL.pack_into(self._map, self._at, order, self._calls, tensor_bytes, name)
        if self._inner is not None:
            self._inner.add(axis, kind, tensor_bytes, members)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _write_ranks(ranks: Sequence[int]) -> str:
    """`0:8:2` for 0, 2, 4, 6; else the ranks one by one; nothing where that is too long."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    evenly = range(ranks[0], ranks[0] + step * len(ranks), step) if step > 0 else range(0)
    if list(evenly) == list(ranks):
        return f"{evenly.start}:{evenly.stop}:{step}"
    written = ",".join(map(str, ranks))
    return written if len(written) <= 160 else ""


def _read_ranks(text: str) -> tuple[int, ...]:
    try:
        if ":" in text:
            return tuple(range(*map(int, text.split(":"))))
        return tuple(map(int, text.split(","))) if text else ()
    except ValueError:  # half of a note
        return ()
