# SPDX-License-Identifier: Apache-2.0
"""The process that watches the ranks of one host; the first of them starts it, with the arguments

    RECORDS HOST PORT PREFIX WORLD POLL REJOIN TERMINATION [REPORTS]

It reads their progress records (megatron/core/progress_record.py), and so needs neither their interpreter lock nor
their consent. When a step is silent for longer than its limit, the watchers of all hosts meet at the job's store at
HOST and PORT (hang_meeting.py), one of them judges, and each lets its ranks end with exit code 75; a rank that cannot
is killed. WORLD is the number of ranks of the job. POLL are the seconds between two looks; REJOIN, where the job begins
again inside its processes, those in which ranks must have come out of the step; TERMINATION those between SIGTERM and
SIGKILL for ranks that have not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.errors import say
from megatron.core.progress_record import ALARM, ENDED, SAVE, STEP, VERDICT, ProgressRecord
from megatron.training.launch.hang_meeting import Judgement, Meeting
from megatron.training.launch.hang_verdict import HangVerdict, RankState, judge

RECORD = "rank_*.progress"
STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank write its Python stack, whatever it is doing; no launcher sends it."""
VERDICT_FILE = "verdict.txt"
RECORDER = ".recorder"
"""Suffix of the file in which a rank writes what torch's flight recorder knows."""
POLL_SECONDS = 0.25
_SHORT_LIMIT_SECONDS = 20.0
_STACK_SECONDS = 0.4
_END_SECONDS = 1.5
"""Ranks end by themselves in this time, or are killed."""
_MOST_STACK_BYTES = 60_000


@dataclass
class Watched:
    """One rank of this host."""

    path: Path
    record: ProgressRecord
    changes: int = -1
    moved_at: float = 0.0
    """By time.monotonic(), the last time that the record was seen to have changed."""

    stopped_since: float | None = None
    """By time.monotonic(), since when the process has been seen stopped."""
    written_bytes: int | None = 0
    """Of its process, as it was seen last in a save."""

    def look(self, now: float) -> bool:
        """Read the record; True where the rank has been silent in a step or a save for longer than the limit of that,
        or is stopped for as long as a step's limit anywhere, as no slow disk does."""
        seen = self.record.read()
        state = read_process_state(seen.process)
        if seen.changes != self.changes or (seen.phase == SAVE and self._writes(seen.process, state)):
            self.changes, self.moved_at = seen.changes, now
        self.stopped_since = (self.stopped_since or now) if state in ("T", "t") else None
        silent = {STEP: seen.limit_seconds, SAVE: seen.save_limit_seconds}.get(seen.phase, 0.0)
        if 0 < silent <= now - self.moved_at:
            return True
        since = None if seen.phase in (STEP, ENDED) else self.stopped_since
        return since is not None and 0 < seen.limit_seconds <= now - since

    def _writes(self, process: int, state: str | None) -> bool:
        """Return whether the process has written since the last look, or waits for a disk."""
        before, self.written_bytes = self.written_bytes, read_written_bytes(process)
        # Where it cannot be known, no rank is named.
        return state == "D" or self.written_bytes is None or self.written_bytes != before

    @property
    def is_half_way(self) -> bool:
        """True where half of the limit has passed, or where half of it may be too short for what is to be done then."""
        seen = self.record.read()
        if 0 < seen.limit_seconds < _SHORT_LIMIT_SECONDS:
            return True
        return seen.phase == STEP and 0 < seen.limit_seconds <= 2 * (time.monotonic() - self.moved_at)

    def describe(self) -> RankState:
        """Return what is seen of the rank now."""
        seen = self.record.read()
        state = read_process_state(seen.process)
        silent = time.monotonic() - self.moved_at
        return RankState(socket.gethostname(), state in ("T", "t"), state is None, round(silent, 1), seen)

    def read_note(self, suffix: str) -> str:
        """Return what the rank has written, at STACK_SIGNAL or ALARM, into its file with this suffix."""
        with contextlib.suppress(OSError):
            return self.path.with_suffix(suffix).read_text(errors="replace")[-_MOST_STACK_BYTES:].strip()
        return ""


def read_process_state(process: int) -> str | None:
    """Return the system's letter for what a process does (R, S, D, T stopped, ...); None for one that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[0]


def read_written_bytes(process: int) -> int | None:
    """Return how many bytes a process has written since it began; None where that cannot be read."""
    try:
        return int(Path(f"/proc/{process}/io").read_text().partition("wchar:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return None


class Watcher:
    """Watches the ranks whose records are in one directory."""

    def __init__(
        self,
        directory: Path,
        store: tuple[str, int, str],
        world_size: int,
        times: tuple[float, float, float],
        reports: Path,
    ) -> None:
        """store: host, port, prefix of keys. times: POLL, REJOIN, TERMINATION."""
        self._directory, self._store, self._world_size, self._reports = directory, store, world_size, reports
        self._poll_seconds, self._rejoin_seconds, self._termination_seconds = times
        self._ranks: dict[Path, Watched] = {}
        self._meeting: Meeting | None = None
        """With the watchers of other hosts, where steps are under way, or hurry is needed."""

    def run(self) -> None:
        """Watch until the last rank of this host has ended, or the job was found to be hung."""
        while True:
            time.sleep(self._poll_seconds)
            self._find_ranks()
            now = time.monotonic()
            is_hung = [watched for watched in list(self._ranks.values()) if watched.look(now)]
            if is_hung or (self._meeting is not None and self._meeting.is_alarmed.is_set()):
                self._raise_alarm()
                return
            if all(self._has_left(watched) for watched in self._ranks.values()):
                return
            # Not during set-up, when its ranks are not there yet, and everybody is busy.
            if self._is_half_way() or any(w.record.read().phase == STEP for w in self._ranks.values()):
                self._meet_others()

    def _find_ranks(self) -> None:
        for path in self._directory.glob(RECORD):
            if path not in self._ranks:
                with contextlib.suppress(OSError, ValueError):  # ValueError: not yet of its full length
                    self._ranks[path] = Watched(path, ProgressRecord(path, writes=False), moved_at=time.monotonic())

    @staticmethod
    def _has_left(watched: Watched) -> bool:
        seen = watched.record.read()
        return seen.phase == ENDED or read_process_state(seen.process) is None

    def _meet_others(self) -> None:
        """Begin to meet the watchers of other hosts, where there are any."""
        if self._meeting is None and len(self._ranks) < self._world_size:
            host, port, prefix = self._store
            self._meeting = Meeting((host, port), prefix, self._list_ranks, self._world_size, self._is_half_way)
            self._meeting.start()

    def _list_ranks(self) -> list[int]:
        return [watched.record.read().rank for watched in list(self._ranks.values())]

    def _is_half_way(self) -> bool:
        return any(watched.is_half_way for watched in list(self._ranks.values()))

    # ---- the job is hung

    def _raise_alarm(self) -> None:
        own = [watched.describe() for watched in self._ranks.values()]
        verdict, states, stacks = self._judge_together(own)
        self._end_ranks(verdict, self._write_report(verdict, states, stacks))

    def _judge_together(self, own: list[RankState]) -> Judgement:
        self._meet_others()
        stacks = self._collect_stacks()
        outcome = None if self._meeting is None else self._meeting.judge_together(own, stacks)
        # Without a meeting all ranks are here, or only those that are can be seen.
        return outcome or Judgement(judge(own, self._world_size), own, stacks)

    def _collect_stacks(self) -> str:
        for watched in self._ranks.values():
            watched.record.tell(ALARM)
            with contextlib.suppress(OSError):
                os.kill(watched.record.read().process, STACK_SIGNAL)
        time.sleep(_STACK_SECONDS)
        texts = []
        for watched in self._ranks.values():
            rank = watched.record.read().rank
            stack = watched.read_note(".stack") or "no stack: the process is stopped, or has ended"
            texts.append(f"Python stack of rank {rank}\n{stack}")
            if calls := watched.read_note(RECORDER):
                texts.append(f"Flight recorder of rank {rank}\n{calls}")
        return "\n\n".join(texts)

    def _write_report(self, verdict: HangVerdict | None, states: Iterable[RankState], stacks: str) -> str:
        """Write the report where there is a verdict; return the sentence for the ranks of this host."""
        if verdict is None:
            return "the job makes no progress; another host's log names the rank that it waits for"
        lines = [state.describe() for state in sorted(states, key=lambda state: state.rank)]
        path = self._reports / time.strftime("hang_%Y%m%d_%H%M%S.txt")
        with contextlib.suppress(OSError):
            path.write_text("\n".join([verdict.sentence, "", *lines, "", stacks, ""]))
        silent = max((state.silent_seconds for state in states), default=0.0)
        return (
            f"the job has made no progress for {silent:.0f} s (--hang-timeout): {verdict.sentence}; "
            f"{path} has the progress and the stacks of all ranks; "
            + ("it begins again without those that cannot" if self._rejoin_seconds else "start again")
        )

    def _end_ranks(self, verdict: HangVerdict | None, sentence: str) -> None:
        with contextlib.suppress(OSError):
            (self._directory / VERDICT_FILE).write_text(sentence)
        if verdict is not None:
            say(f"error: {sentence}", sys.stderr)
        for watched in self._ranks.values():
            watched.record.tell(VERDICT)
        if verdict is not None and self._meeting is not None:
            self._meeting.close()
        if self._rejoin_seconds:
            # Now: the others meet as soon as it is gone, and it could wake up among them.
            self._signal(signal.SIGKILL, only_stopped=True)
        self._wait_for_ranks(self._rejoin_seconds + _END_SECONDS)
        if self._termination_seconds and self._signal(signal.SIGTERM):
            self._wait_for_ranks(self._termination_seconds)
        # Stopped, or in a call that does not let go of the interpreter lock.
        self._signal(signal.SIGKILL)

    def _wait_for_ranks(self, seconds: float) -> None:
        """Wait for those that still can leave."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            left = self._list_hung()
            if all(read_process_state(process) in (None, "T", "t") for process in left):
                return
            time.sleep(0.05)

    def _signal(self, number: signal.Signals, *, only_stopped: bool = False) -> bool:
        """Send it to the ranks that have not left; True where there is one."""
        found = [p for p in self._list_hung() if not only_stopped or read_process_state(p) in ("T", "t")]
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, number)
        return bool(found)

    def _list_hung(self) -> list[int]:
        """Return the processes of ranks that are not through with the step that hangs."""
        left = [w.record.read() for w in self._ranks.values() if not self._has_left(w)]
        if self._rejoin_seconds:
            left = [r for r in left if r.phase in (STEP, SAVE) or read_process_state(r.process) in ("T", "t")]
        return [record.process for record in left]


def main(arguments: Sequence[str]) -> None:
    """Watch; the ranks' Ctrl-C and SIGTERM are not this process's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    directory, host, port, prefix, world_size, poll, rejoin, termination, *reports = arguments
    place = Path(reports[0] if reports else tempfile.gettempdir())
    times = float(poll), float(rejoin), float(termination)
    Watcher(Path(directory), (host, int(port), prefix), int(world_size), times, place).run()
    # What killed ranks have left.
    shutil.rmtree(directory, ignore_errors=True)
