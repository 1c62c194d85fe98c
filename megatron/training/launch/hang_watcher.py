# SPDX-License-Identifier: Apache-2.0
"""The process that watches the ranks of one host; the first of them starts it, with the arguments

    RECORDS HOST PORT PREFIX POLL REJOIN TERMINATION [REPORTS]

It reads their progress records (megatron/core/progress_record.py), and so needs neither their interpreter lock nor
their consent. When a step is silent for longer than its limit, the watchers of all hosts put what they see into the
job's store at HOST and PORT, one of them judges, and each lets its ranks end with exit code 75; a rank that cannot is
killed. POLL are the seconds between two looks; REJOIN, where the job begins again inside its processes, those in which
ranks must have come out of the step; TERMINATION those between SIGTERM and SIGKILL for ranks that have not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.errors import say
from megatron.core.progress_record import ALARM, ENDED, STEP, VERDICT, ProgressRecord
from megatron.training.launch.hang_verdict import RankState, Verdict, judge

if TYPE_CHECKING:
    from torch.distributed import Store

RECORD = "rank_*.progress"
STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank write its Python stack, whatever it is doing; no launcher sends it."""
VERDICT_FILE = "verdict.txt"
RECORDER = ".recorder"
"""Suffix of the file in which a rank writes what torch's flight recorder knows."""
POLL_SECONDS = 0.25
_SHORT_LIMIT_SECONDS = 20.0
_ANSWER_SECONDS = 10.0
"""Seconds that the judge waits for the other hosts, which answer within one unless they are busy, or gone."""
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

    def look(self, now: float) -> bool:
        """Read the record; True where the rank is in a step and has been silent for longer than its limit, or is
        stopped for as long anywhere, as no slow disk does."""
        seen = self.record.read()
        if seen.changes != self.changes:
            self.changes, self.moved_at = seen.changes, now
        is_stopped = read_process_state(seen.process) in ("T", "t")
        self.stopped_since = (self.stopped_since or now) if is_stopped else None
        since = self.moved_at if seen.phase == STEP else self.stopped_since
        return since is not None and seen.phase != ENDED and 0 < seen.limit_seconds <= now - since

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


class Watcher:
    """Watches the ranks whose records are in one directory."""

    def __init__(
        self, directory: Path, address: tuple[str, int], prefix: str, times: tuple[float, float, float], reports: Path
    ) -> None:
        self._directory, self._address, self._prefix, self._reports = directory, address, prefix, reports
        self._poll_seconds, self._rejoin_seconds, self._termination_seconds = times
        self._ranks: dict[Path, Watched] = {}
        self._store: Store | None = None
        self._connects = False

    def run(self) -> None:
        """Watch until the last rank of this host has ended, or the job was found to be hung."""
        while True:
            time.sleep(self._poll_seconds)
            self._find_ranks()
            now = time.monotonic()
            is_hung = [watched for watched in list(self._ranks.values()) if watched.look(now)]
            if is_hung or self._hears_alarm():
                self._raise_alarm()
                return
            if all(self._has_left(watched) for watched in self._ranks.values()):
                return
            # Loading torch takes seconds, which are not to be lost when the limit is reached.
            if not self._connects and any(watched.is_half_way for watched in self._ranks.values()):
                self._connects = True
                threading.Thread(target=self._connect, daemon=True).start()

    def _find_ranks(self) -> None:
        for path in self._directory.glob(RECORD):
            if path not in self._ranks:
                with contextlib.suppress(OSError, ValueError):  # ValueError: not yet of its full length
                    self._ranks[path] = Watched(path, ProgressRecord(path, writes=False), moved_at=time.monotonic())

    @staticmethod
    def _has_left(watched: Watched) -> bool:
        seen = watched.record.read()
        return seen.phase == ENDED or read_process_state(seen.process) is None

    def _connect(self) -> None:
        with contextlib.suppress(Exception):  # the host of the store may be what hangs: then this host judges alone
            from datetime import timedelta

            from torch.distributed import PrefixStore, TCPStore

            host, port = self._address
            # A plain socket first: torch prints the frames of its stack where nobody answers.
            socket.create_connection(self._address, timeout=2.0).close()
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
            self._store = PrefixStore(self._prefix, store)

    def _hears_alarm(self) -> bool:
        if self._store is None:
            return False
        try:
            return self._store.check(["alarm"])
        except RuntimeError:
            self._store = None
            return False

    # ---- the job is hung

    def _raise_alarm(self) -> None:
        own = [watched.describe() for watched in self._ranks.values()]
        verdict, states, stacks = self._judge_together(own)
        self._end_ranks(verdict, self._write_report(verdict, states, stacks))

    def _judge_together(self, own: Sequence[RankState]) -> tuple[Verdict | None, list[RankState], str]:
        """Return the verdict, None where another host has it; the states that it rests on; the stacks."""
        stacks = self._collect_stacks()
        world = max([1, *(1 + rank for state in own for call in state.record.calls for rank in call.ranks)])
        if self._store is None and len(own) < world:
            self._connect()
        if self._store is None or len(own) == world:
            # All ranks are here, or only those that are can be seen.
            return judge(own, len(own)), list(own), stacks
        try:
            self._store.set("alarm", "1")
            content = {"states": [state.to_json() for state in own], "stacks": stacks}
            self._store.set(f"host/{own[0].rank}", json.dumps(content))
            self._store.set(f"names/{self._store.add('hosts', 1)}", str(own[0].rank))
            if self._store.add("judges", 1) > 1:
                self._wait_for_verdict(self._store)
                return None, list(own), stacks
            states, texts = self._wait_for_hosts(self._store, world)
            return judge(states, world), states, "\n\n".join(texts)
        except RuntimeError:
            return judge(own, len(own)), list(own), stacks

    def _wait_for_hosts(self, store: Store, world: int) -> tuple[list[RankState], list[str]]:
        found: dict[str, dict[str, object]] = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            for number in range(1, store.add("hosts", 0) + 1):
                name = store.get(f"names/{number}").decode()
                if name not in found:
                    found[name] = json.loads(store.get(f"host/{name}"))
            states = [RankState.from_json(s) for host in found.values() for s in _list(host["states"])]
            if len(states) >= world or time.monotonic() > deadline:
                return states, [str(host["stacks"]) for host in found.values() if host["stacks"]]
            time.sleep(POLL_SECONDS)

    @staticmethod
    def _wait_for_verdict(store: Store) -> None:
        """Keep this host's ranks until the verdict is out: the store may be in one of them, and the end of another
        would look like the cause."""
        deadline = time.monotonic() + 2 * _ANSWER_SECONDS
        while time.monotonic() < deadline and not store.check(["judged"]):
            time.sleep(POLL_SECONDS)

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

    def _write_report(self, verdict: Verdict | None, states: Iterable[RankState], stacks: str) -> str:
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

    def _end_ranks(self, verdict: Verdict | None, sentence: str) -> None:
        with contextlib.suppress(OSError):
            (self._directory / VERDICT_FILE).write_text(sentence)
        if verdict is not None:
            say(f"error: {sentence}", sys.stderr)
        for watched in self._ranks.values():
            watched.record.tell(VERDICT)
        if verdict is not None and self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set("judged", "1")
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
            left = [r for r in left if r.phase == STEP or read_process_state(r.process) in ("T", "t")]
        return [record.process for record in left]


def _list(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list), "written by another watcher of this job"
    return value


def main(arguments: Sequence[str]) -> None:
    """Watch; the ranks' Ctrl-C and SIGTERM are not this process's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    directory, host, port, prefix, poll, rejoin, termination, *reports = arguments
    place = Path(reports[0]) if reports else Path(tempfile.gettempdir())
    Watcher(Path(directory), (host, int(port)), prefix, (float(poll), float(rejoin), float(termination)), place).run()
    # What killed ranks have left.
    shutil.rmtree(directory, ignore_errors=True)
