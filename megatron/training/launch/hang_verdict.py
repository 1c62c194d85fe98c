# SPDX-License-Identifier: Apache-2.0
"""Search for the rank that a hung job waits for, from the progress records of all ranks: a pure function of what was
read.

A rank that is stopped or has ended is the culprit. Otherwise a rank waits for those members of the group of its last
collective that have entered fewer collectives there; the culprits are waited for, directly or through others, and wait
for nobody. Where all wait for each other in a circle, groups come in another order on those that most wait for. Where
all members have entered as many, those are named whose collective is another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.errors import format_bytes
from megatron.core.progress_record import OUTSIDE, SAVE, STEP, LastCollective, ProgressSnapshot

_SEND = "send"
"""Counted only by the sender, so that the number says nothing about the receiver."""


@dataclass(frozen=True)
class RankState:
    """A rank as its host's watcher saw it."""

    host: str
    is_stopped: bool
    """By SIGSTOP, a debugger, or a frozen container."""
    has_ended: bool
    silent_seconds: float
    """Since its last note."""
    record: ProgressSnapshot

    @property
    def rank(self) -> int:
        """Rank in the whole job."""
        return self.record.rank

    @property
    def last_call(self) -> LastCollective | None:
        """The collective that it entered last; None before the first."""
        return self.record.calls[0] if self.record.calls else None

    def describe(self) -> str:
        """Return the state in words, for the report."""
        record = self.record
        calls = "; ".join(
            f"{call.axis} {list(call.ranks)}: {call.kind} number {call.number}, {call.tensor_bytes} bytes"
            for call in record.calls
        )
        state = ", stopped" if self.is_stopped else ", ended" if self.has_ended else ""
        return (
            f"rank {self.rank}, {self.host}, process {record.process}: iteration {record.iteration}, micro-batch "
            f"{record.microbatch}, silent for {self.silent_seconds} s{state}; {calls or 'no collective yet'}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**vars(self), "record": {**vars(self.record), "calls": [vars(call) for call in self.record.calls]}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankState:
        """The inverse of `to_json`."""
        record = values["record"]
        calls = tuple(LastCollective(**{**call, "ranks": tuple(call["ranks"])}) for call in record["calls"])
        return cls(**{**values, "record": ProgressSnapshot(**{**record, "calls": calls})})


@dataclass(frozen=True)
class HangVerdict:
    """Findings on what a hung job waits for."""

    culprits: tuple[int, ...]
    """Ranks; empty where none can be told from the others."""
    sentence: str


def judge(states: Sequence[RankState], world_size: int) -> HangVerdict:
    """Name the culprits. states: of the ranks whose watchers answered, in any order; at least one."""
    states = sorted(states, key=lambda state: state.rank)
    for found, what in (
        ([s for s in states if s.is_stopped], "stopped (by SIGSTOP, a debugger or a frozen container)"),
        ([s for s in states if s.has_ended], "gone"),
    ):
        if found:
            return _accuse(found, f"{'is' if len(found) == 1 else 'are'} {what} {_place(found[0])}", states)
    missing = [rank for rank in range(world_size) if rank not in {state.rank for state in states}]
    if missing:
        be, them = ("is", "its") if len(missing) == 1 else ("are", "their")
        return HangVerdict(
            tuple(missing), f"{_name_ranks(missing)} {be} not heard of: {them} host, or the network to it, is gone"
        )
    return _find_absent(states) or _find_other_collective(states) or _find_first_silent(states)


def _find_absent(states: Sequence[RankState]) -> HangVerdict | None:
    by_rank = {state.rank: state for state in states}
    waits_for: dict[int, list[int]] = {}
    for state in states:
        call = state.last_call
        if call is not None and call.kind != _SEND:
            behind = [r for r in call.ranks if r in by_rank and _count(by_rank[r], call) < call.number]
            waits_for[state.rank] = behind
    wanted = Counter(rank for ranks in waits_for.values() for rank in ranks)
    found = [by_rank[rank] for rank in sorted(wanted) if not waits_for.get(rank)]
    if not found:
        return _find_other_order(by_rank, wanted) if wanted else None
    waiting = [s for s in states if any(r == f.rank for f in found for r in waits_for.get(s.rank, ()))]
    call = waiting[0].last_call
    assert call is not None, "it waits in one"
    have = "has" if len(found) == 1 else "have"
    return _accuse(found, f"{have} not entered {_say_call(call)} {_place(found[0])}", waiting)


def _find_other_order(by_rank: Mapping[int, RankState], wanted: Counter[int]) -> HangVerdict:
    """Find the ranks that most others wait for, where all wait for each other in a circle."""
    most = max(wanted.values())
    found = [by_rank[rank] for rank in sorted(wanted) if wanted[rank] == most]
    call = found[0].last_call
    assert call is not None, "it waits in one"
    others = [by_rank[rank] for rank in sorted(wanted) if wanted[rank] < most]
    if not others:  # no majority
        text = f"wait for each other, rank {found[0].rank} in {_say_call(call)} {_place(found[0])}: their groups"
        return _accuse(found, f"{text} come in another order on each", others)
    be, whose = ("is", "its") if len(found) == 1 else ("are", "their")
    text = f"{be} in {_say_call(call)}, {_place(found[0])}, where ranks are missing that wait for it"
    return _accuse(found, f"{text}: {whose} groups come in another order", others)


def _find_other_collective(states: Sequence[RankState]) -> HangVerdict | None:
    """Find members of one group that have entered as many collectives there, the last of them another one."""
    by_group: dict[tuple[str, tuple[int, ...], int], list[tuple[RankState, LastCollective]]] = {}
    for state in states:
        for call in state.record.calls:
            if call.kind != _SEND and call.ranks:
                by_group.setdefault((*call.group, call.number), []).append((state, call))
    for members in by_group.values():
        kinds = Counter((call.kind, call.tensor_bytes) for _, call in members)
        if len(kinds) < 2:
            continue
        # The majority is right; of two equal halves, the one with the lowest rank.
        usual = max(kinds, key=lambda kind: (kinds[kind], kind == (members[0][1].kind, members[0][1].tensor_bytes)))
        others = [(s, call) for s, call in members if (call.kind, call.tensor_bytes) != usual]
        right = next(call for _, call in members if (call.kind, call.tensor_bytes) == usual)
        found = [state for state, _ in others]
        be = "is" if len(found) == 1 else "are"
        text = f"{be} in {_say_call(others[0][1])}, where the rest of the group is in {_say_call(right)},"
        return _accuse(found, f"{text} {_place(found[0])}", [s for s, _ in members if s not in found])
    return None


def _find_first_silent(states: Sequence[RankState]) -> HangVerdict:
    if all(state.record.phase == SAVE for state in states):
        place = f"in the save of iteration {states[0].record.iteration}"
        return HangVerdict((), f"all ranks are silent {place}: the network or the disk does not answer")
    inside = [state for state in states if state.record.phase in (STEP, SAVE)]
    if not inside or len(inside) < len(states):
        found = [state for state in states if state.record.phase == OUTSIDE] or list(states)
        return _accuse(found, f"{'is' if len(found) == 1 else 'are'} between two steps", inside)
    behind = min((s.record.iteration, s.record.microbatch) for s in states)
    found = [s for s in states if (s.record.iteration, s.record.microbatch) == behind]
    if len(found) < len(states):
        return _accuse(found, f"{'is' if len(found) == 1 else 'are'} behind all others: {_place(found[0])}", states)
    call = states[0].last_call
    where = "before the first collective" if call is None else f"after entering {_say_call(call)}"
    return HangVerdict((), f"all ranks are silent {where}, and none is behind: the network or a device does not answer")


def _accuse(found: Sequence[RankState], what: str, others: Sequence[RankState]) -> HangVerdict:
    names = ", ".join(f"rank {s.rank} ({s.host}, process {s.record.process})" for s in found[:8])
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    waiting = next((s for s in others if s not in found and s.last_call is not None), None)
    still = sorted(s.rank for s in others if s not in found)
    text = f"{names}{more} {what}"
    if waiting is not None and waiting.last_call is not None:
        wait = "waits" if len(still) == 1 else "wait"
        text += f"; {_name_ranks(still)} {wait}, rank {waiting.rank} in {_say_call(waiting.last_call)}"
    return HangVerdict(tuple(s.rank for s in found), text)


def _count(state: RankState, call: LastCollective) -> int:
    """Return how many collectives a rank has entered in the group of `call`."""
    return next((other.number for other in state.record.calls if other.group == call.group), 0)


def _place(state: RankState) -> str:
    microbatch = f", micro-batch {state.record.microbatch}" if state.record.microbatch else ""
    return f"in iteration {state.record.iteration}{microbatch}"


def _say_call(call: LastCollective) -> str:
    return f"{call.kind} number {call.number} of group {call.axis} ({format_bytes(call.tensor_bytes)})"


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
