# SPDX-License-Identifier: Apache-2.0
"""--inprocess-restart: after a failure the remaining processes begin again without being restarted.

All processes of the job, those that train and those that wait, keep the job's key-value store. A process whose training
has failed says so there; all then meet, give each rank of the layout to a process that is left, and train again from
the newest checkpoint, which the emergency save has just written where that was possible. Each beginning has new keys
and groups, and nothing of the one before: seat.py says what is given back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store

from megatron.core import device
from megatron.core.errors import MegatronError, StorageError, TemporaryError, explain_refused_memory, say
from megatron.core.parent_death import end_with_parent
from megatron.training.config.container import RunConfig
from megatron.training.config.in_process import InProcessConfig
from megatron.training.launch.crash_loop import MOST_FAILURES, describe_failure
from megatron.training.launch.initialize import find_launch
from megatron.training.launch.launch import Launch
from megatron.training.launch.presence import Presence
from megatron.training.launch.rendezvous import open_store
from megatron.training.launch.seat import Seat
from megatron.training.rerun.survivors import Patience, SurvivorState, meet
from megatron.training.run import Hook, Run, StepResult

_FAILED, _OVER = "failed", "over"
_PAUSE_SECONDS = 0.01
_SEARCH_SECONDS = 0.5

Node = tuple[str, str]
"""Name of a host, and the launcher's number of the node: two nodes of containers may have one name."""
Train = Callable[[Seat, Hook], Run]
"""Set up and train from a seat, with one hook more than the run has anyway."""


def train_again_and_again(config: RunConfig, train: Train) -> Run:
    """Train, and begin again after failures as --inprocess-restart and its kin say; returns the finished run.

    Raises the last failure where it is not to be begun again; SystemExit(0) in a process that has waited for the whole
    run and was not needed.
    """
    job = RestartableJob(find_launch(), config)
    try:
        while True:
            outcome = job.train_or_wait(train)
            if isinstance(outcome, Run):
                return outcome
            job.begin_again(outcome)
            # The former run, which nobody needs any more, holds the memory that the next one takes.
            del outcome
            gc.collect()
            if config.in_process.inprocess_empty_cuda_cache:
                device.release_cached_memory()
    finally:
        job.close()


@dataclass(frozen=True)
class RankFailure:
    """End of one beginning, in a process."""

    condition: SurvivorState
    """Message to the others."""
    error: Exception
    """Error to raise if it is the last."""


class _Witness(Hook):
    """Knows how far the run has come; says, once, how long a failure has taken."""

    def __init__(self, failed_at: float | None) -> None:
        self.run: Run | None = None
        self.failed_at = failed_at
        """By time.monotonic(): before this beginning, until its first step is done, or in it."""

    def on_train_start(self, run: Run) -> None:
        """Keep the run."""
        self.run = run

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Tell, after the first step."""
        if self.failed_at is not None and run.is_first_rank:
            seconds = time.monotonic() - self.failed_at
            say(f"note: iteration {run.progress.iteration} is done, {seconds:.2f} s after the failure", sys.stderr)
        self.failed_at = None

    def on_error(self, run: Run, error: Exception) -> None:
        """Note when; the state is saved afterwards."""
        self.failed_at = time.monotonic()


def assign(
    members: Sequence[int], present: Sequence[int], nodes: dict[int, Node], size: int, *, by_node: bool
) -> list[int] | None:
    """Return the process of each rank; None where too few are left.

    members: ranks before the failure; present: ranks that are left, of 0 to size - 1. A process keeps its rank, and
    others take the places of the lost in their order. by_node: a node that has lost a process is given up.
    """
    fit = set(present)
    if by_node:
        spoilt = {nodes[process] for process in range(size) if process in nodes and process not in fit}
        fit = {process for process in fit if nodes[process] not in spoilt}
    free = iter(sorted(fit.difference(members)))
    found = [member if member in fit else next(free, None) for member in members]
    chosen = [process for process in found if process is not None]
    return chosen if len(chosen) == len(members) else None


class RestartableJob:
    """The processes of a job over all beginnings, from one of them. A process is known by the RANK that its launcher
    gave it."""

    def __init__(self, launch: Launch, config: RunConfig) -> None:
        """Join. Raises TemporaryError where there is no store."""
        self._launch, self._settings = launch, config.in_process
        self._own, self._size = launch.rank, launch.world_size
        self._beginning = 0
        self._members: list[int] = list(range(config.world_size))
        self._present = list(range(self._size))
        self._highest_iteration, self._futile = -1, 0
        """Iterations done at most, and the failures in succession since without a further one."""
        self._failed_at: float | None = None
        """By time.monotonic(), when training in this process has failed last."""
        self._presence: Presence | None = None
        self._ended = threading.Event()
        self._seat: Seat | None = None
        self._store: Store = HashStore()
        if self._size == 1:
            return
        if launch.agent_store:
            # As without restarts: torchrun itself may be killed.
            end_with_parent(os.getppid())
        self._store = open_store(launch, 60.0 * config.distributed.distributed_timeout_minutes)
        self._presence = Presence(launch, PrefixStore("job", self._store))
        self._store.set(f"node/{self._own}", json.dumps([socket.gethostname(), launch.node]))
        self._await_all()
        # A separate connection: a call that waits keeps others from using the same one.
        monitor = (self._store.clone(), self._settings)  # type: ignore[attr-defined]
        threading.Thread(target=self._monitor, args=monitor, name="in-process restart", daemon=True).start()

    def _await_all(self) -> None:
        """Wait for those who wait, too: one that comes later than the first failure takes nobody's place."""
        deadline = time.monotonic() + self._settings.inprocess_barrier_timeout
        nodes = [f"node/{process}" for process in range(self._size)]
        while not self._store.check(nodes) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)

    # ---- one beginning

    def train_or_wait(self, train: Train) -> Run | RankFailure:
        """Train, in a process that has a rank, or wait until one is needed."""
        if self._own not in self._members:
            return self._wait()
        seat, witness = self._take_seat(), _Witness(self._failed_at)
        self._seat = seat
        try:
            run = train(seat, witness)
        except Exception as error:
            self._failed_at = witness.failed_at or time.monotonic()
            return self._note_failure(error, 0 if witness.run is None else witness.run.progress.iteration)
        except KeyboardInterrupt as interrupt:
            # With words, it has ended the run in order, on all ranks.
            if interrupt.args:
                self._complete()
            raise
        finally:
            self._seat = None
            witness.run = None
            seat.leave()
        return run if self._complete() else self._be_told(run.progress.iteration)

    def _take_seat(self) -> Seat:
        members, launch = self._members, self._launch
        nodes = self._read_nodes()
        here = [member for member in members if nodes.get(member) == nodes.get(self._own)]
        place = dataclasses.replace(
            launch,
            rank=members.index(self._own),
            world_size=len(members),
            beginning=self._beginning,
            leads_host=self._own == here[0],
            # The process that serves the store does so for all beginnings.
            agent_store=launch.agent_store or members[0] != 0,
        )
        store = PrefixStore(f"beginning{self._beginning}", self._store)
        return Seat(place, store, self._settings.inprocess_barrier_timeout)

    def _note_failure(self, error: Exception, iteration: int) -> RankFailure:
        """Tell the others, and say why it cannot be begun again where that is so."""
        problem = None
        is_ours = isinstance(error, MegatronError)
        if (is_ours and not isinstance(error, TemporaryError | StorageError)) or explain_refused_memory(error):
            problem = " ".join(str(error).split())[:200]
        elif describe_failure(error) is not None:
            # What is no error of ours has its traceback in every case; a peer's end is told once, by all together.
            shown = str(error) if is_ours else "".join(traceback.format_exception(error)).strip()
            say(f"warning: process {self._own}: {shown}", sys.stderr)
        with contextlib.suppress(RuntimeError):  # the store has gone: the meeting says so
            if self._announce(_FAILED) == _OVER:
                problem = "the others are through"
        return RankFailure(SurvivorState(iteration, problem), error)

    def _be_told(self, iteration: int) -> RankFailure:
        return RankFailure(
            SurvivorState(iteration), TemporaryError("another process of the job has failed; look at its log")
        )

    def _wait(self) -> RankFailure:
        """Return when a failure may need this process. Raises SystemExit when the run is over."""
        patience = timedelta(seconds=self._settings.inprocess_monitor_thread_interval)
        while True:
            try:
                self._store.wait([self._event], patience)
            except RuntimeError as error:
                if not self._is_there():
                    raise TemporaryError(
                        "the process that serves the job's store has ended; look at its log"
                    ) from error
                continue
            if self._store.get(self._event) == _OVER.encode():
                self._store.set(f"left/{self._own}", "")
                raise SystemExit(0)
            return self._be_told(max(0, self._highest_iteration))

    def _complete(self) -> bool:
        """Wait for all others at the end; True when they are through, False where one has failed."""
        deadline = time.monotonic() + self._settings.inprocess_completion_timeout
        try:
            self._store.set(f"done/{self._beginning}/{self._own}", "")
            done = [f"done/{self._beginning}/{member}" for member in self._members]
            while not self._store.check(done) and time.monotonic() < deadline:
                if self._store.check([self._event]):
                    break
                time.sleep(_PAUSE_SECONDS)
            if self._announce(_OVER) == _FAILED:
                return False
            self._store.set(f"left/{self._own}", "")
            if self._own == 0 and not self._launch.agent_store:
                # The store ends with this process.
                self._wait_for_others_to_leave(deadline)
        # It has gone with the process that served it, which leaves last.
        except RuntimeError:
            pass
        return True

    def _wait_for_others_to_leave(self, deadline: float) -> None:
        search_at = time.monotonic() + _SEARCH_SECONDS
        left = [process for process in self._present if process != self._own]
        while left and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            left = [process for process in left if not self._store.check([f"left/{process}"])]
            if time.monotonic() > search_at:
                search_at = time.monotonic() + _SEARCH_SECONDS
                ended = self._list_ended(left)
                left = [process for process in left if process not in ended]

    # ---- the next one

    def begin_again(self, failure: RankFailure) -> None:
        """Meet the others and take places. Raises the failure's error where it was the last beginning."""
        settings = self._settings
        patience = Patience(settings.inprocess_barrier_timeout, settings.inprocess_last_call_wait)
        try:
            store = PrefixStore(f"meeting{self._beginning}", self._store)
            conditions = meet(store, self._own, self._size, failure.condition, self._list_ended, patience)
            nodes = self._read_nodes()
        # TimeoutError: the others have gone on without this process.
        except (RuntimeError, TimeoutError) as error:
            reason = " ".join(str(error).split())[:200]
            say(f"note: process {self._own} cannot meet the others to begin again ({reason})", sys.stderr)
            raise failure.error from None
        former, self._present = self._members, sorted(conditions)
        by_node = settings.inprocess_granularity == "node"
        chosen = assign(former, self._present, nodes, self._size, by_node=by_node)
        problem = self._find_problem(conditions, chosen)
        if problem is not None:
            if self._own == self._present[0]:
                say(f"note: the job does not begin again inside its processes: {problem}", sys.stderr)
            raise failure.error
        assert chosen is not None, "a problem otherwise"
        self._beginning += 1
        self._members = chosen
        if self._own == self._present[0]:
            self._tell(former)

    def _find_problem(self, conditions: dict[int, SurvivorState], chosen: list[int] | None) -> str | None:
        """Return why there is no next beginning; the same on all processes."""
        done = max(condition.iteration for condition in conditions.values())
        self._futile = 1 if done > self._highest_iteration else self._futile + 1
        self._highest_iteration = max(done, self._highest_iteration)
        for process, condition in conditions.items():
            if condition.problem is not None:
                return f"process {process}: {condition.problem}"
        most = self._settings.inprocess_max_iterations
        if most is not None and self._beginning + 1 >= most:
            return f"it has begun {most} times (--inprocess-max-iterations)"
        if self._futile >= MOST_FAILURES:
            return f"{MOST_FAILURES} failures in succession, and no iteration beyond {self._highest_iteration}"
        if chosen is None:
            lost = [process for process in range(self._size) if process not in conditions]
            of_node = (
                " of whole nodes (--inprocess-granularity)" if self._settings.inprocess_granularity == "node" else ""
            )
            return (
                f"{len(self._members)} processes{of_node} are needed, and {len(conditions)} are left without "
                f"{', '.join(map(str, lost)) or 'those of other nodes'}"
            )
        return None

    def _tell(self, former: Sequence[int]) -> None:
        changes = [
            f"process {process} is rank {rank} in the place of process {before}"
            for rank, (before, process) in enumerate(zip(former, self._members, strict=True))
            if before != process
        ]
        who = "; ".join(changes) or "all of them are left"
        say(f"note: the job begins again inside its processes, beginning {self._beginning + 1}: {who}", sys.stderr)

    # ---- background work

    def close(self) -> None:
        """Let go of the job."""
        self._ended.set()
        if self._presence is not None:
            self._presence.close()

    @property
    def _event(self) -> str:
        return f"event/{self._beginning}"

    def _announce(self, event: str) -> str:
        """Announce how this beginning ends, and return what was first."""
        return str(self._store.compare_set(self._event, "", event).decode())

    def _is_there(self) -> bool:
        try:
            self._store.check([self._event])
        except RuntimeError:
            return False
        return True

    def _read_nodes(self) -> dict[int, Node]:
        """Node of each process that has joined."""
        if self._presence is None:
            return {0: ("", "")}
        joined = [process for process in range(self._size) if self._store.check([f"node/{process}"])]
        return {process: tuple(json.loads(self._store.get(f"node/{process}"))) for process in joined}

    def _list_ended(self, processes: Sequence[int]) -> list[int]:
        """Return those that are lost: ended, never come, or silent for too long."""
        if self._presence is None:
            return []
        joined = [process for process in processes if self._store.check([f"node/{process}"])]
        ended = self._presence.list_ended(joined)
        return [p for p in processes if p not in joined or p in ended or self._store.check([f"silent/{p}"])]

    def _monitor(self, store: Store, settings: InProcessConfig) -> None:
        """Give signs of life, watch the next process's, and cut this one's connections when another has failed: it may
        wait for a rank that waits for that one."""
        beats, beat_at = 0, 0.0
        heard, heard_at = (-1, b""), time.monotonic()
        with contextlib.suppress(RuntimeError):  # the store has gone
            while not self._ended.wait(settings.inprocess_monitor_thread_interval):
                now, seat = time.monotonic(), self._seat
                if now >= beat_at:
                    beats, beat_at = beats + 1, now + settings.inprocess_heartbeat_interval
                    store.set(f"beat/{self._own}", str(beats))
                following = self._find_next()
                found = (following, store.get(f"beat/{following}") if store.check([f"beat/{following}"]) else b"")
                if found != heard:
                    heard, heard_at = found, now
                elif found[1] and now - heard_at > settings.inprocess_heartbeat_timeout:
                    heard_at = now
                    # Another thread's look at it is over when it sees the event.
                    store.set(f"silent/{following}", "")
                    store.compare_set(self._event, "", _FAILED)
                if seat is not None and store.check([self._event]) and store.get(self._event) == _FAILED.encode():
                    seat.cut()

    def _find_next(self) -> int:
        """The next process in the circle of those that were there last."""
        present = self._present
        return next((process for process in present if process > self._own), present[0])
