# SPDX-License-Identifier: Apache-2.0
"""Would these ranks wait for each other for ever? Their collectives compared, group by group, before a job starts.

Members of a group must make the same calls over it, of the same sizes and in the same order; and the calls over several
groups must be in an order in which all can be made. Transfers are compared by pair: what one sends the other receives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.training.launch.dry_recorder import RecordedCall


@dataclass(frozen=True)
class CollectiveDeadlock:
    """Ranks that would hang, or exchange the wrong sizes."""

    ranks: tuple[int, ...]
    """Ranks that differ from the others: the culprits, where they can be told."""
    group: tuple[int, ...]
    sentence: str


def find_deadlock(calls: Mapping[int, Sequence[RecordedCall]]) -> CollectiveDeadlock | None:
    """The first disagreement among ranks. calls: rank -> what it calls, in order; ranks may be left out, as long as
    those that are there stand for them."""
    found = [*_compare_groups(calls), *_compare_transfers(calls)]
    if found:
        return _choose(found)
    return _play(calls)


def _compare_groups(calls: Mapping[int, Sequence[RecordedCall]]) -> list[tuple[int, CollectiveDeadlock]]:
    """For each group whose members differ: the position of the first difference, and who differs."""
    by_group: dict[tuple[int, ...], dict[int, list[tuple[int, RecordedCall]]]] = defaultdict(dict)
    for rank, sequence in calls.items():
        for position, call in enumerate(sequence):
            if not call.is_transfer:
                by_group[call.ranks].setdefault(rank, []).append((position, call))
    found = []
    for group, members in by_group.items():
        present = [rank for rank in group if rank in calls]
        longest = max(map(len, members.values()))
        for number in range(longest):
            at = {rank: dict(enumerate(members.get(rank, []))).get(number) for rank in present}
            kinds = {rank: None if call is None else (call[1].op, call[1].bytes) for rank, call in at.items()}
            if len(set(kinds.values())) == 1:
                continue
            votes = Counter(kinds.values()).most_common()
            # Of two that differ, the one that does not come is late for ever.
            tied = len(votes) > 1 and votes[0][1] == votes[1][1]
            usual = next((kind for kind, _ in votes if kind is not None), None) if tied else votes[0][0]
            odd = tuple(rank for rank in present if kinds[rank] != usual)
            if tied and None not in kinds.values():
                odd = tuple(present)
            found.append((min(call[0] for call in at.values() if call), _tell(group, number, at, odd)))
            break
    return found


def _tell(
    group: tuple[int, ...], number: int, at: Mapping[int, tuple[int, RecordedCall] | None], odd: tuple[int, ...]
) -> CollectiveDeadlock:
    said = []
    for rank, entry in at.items():
        call = None if entry is None else entry[1]
        text = "does not come" if call is None else f"calls {call.op} of {call.bytes} bytes ({call.place})"
        said.append(f"rank {rank} {text}")
    # A few tell the story: those that differ, and one that does not.
    told = {*odd[:3], *[rank for rank in at if rank not in odd][:1]}
    shown = [text for rank, text in zip(at, said, strict=True) if rank in told]
    whom = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    sentence = f"{whom}: the group of ranks {format_ranks(group)} hangs in its call {number + 1}: {'; '.join(shown)}"
    return CollectiveDeadlock(odd, group, sentence)


def _compare_transfers(calls: Mapping[int, Sequence[RecordedCall]]) -> list[tuple[int, CollectiveDeadlock]]:
    """For each pair whose sends and receives differ, the same."""
    sides: dict[tuple[int, ...], dict[str, list[tuple[int, RecordedCall]]]] = defaultdict(
        lambda: {"send": [], "recv": []}
    )
    for sequence in calls.values():
        for position, call in enumerate(sequence):
            if call.is_transfer:
                sides[call.ranks][call.op].append((position, call))
    found = []
    for pair, both in sides.items():
        if not all(rank in calls for rank in pair):
            continue
        sizes = {side: [call.bytes for _, call in entries] for side, entries in both.items()}
        if sizes["send"] == sizes["recv"]:
            continue
        number = next(
            (n for n, (a, b) in enumerate(zip(sizes["send"], sizes["recv"], strict=False)) if a != b),
            min(map(len, sizes.values())),
        )
        side = {rank: dict(enumerate(both[op])).get(number) for rank, op in zip(pair, ("send", "recv"), strict=True)}
        odd = tuple(rank for rank, entry in side.items() if entry is None) or pair
        found.append((min(entry[0] for entry in side.values() if entry), _tell(pair, number, side, odd)))
    return found


def _choose(found: Sequence[tuple[int, CollectiveDeadlock]]) -> CollectiveDeadlock:
    """The disagreement that a reader should see. A rank that is part of all of them is who caused them: one that calls
    over the wrong group makes two groups hang."""
    common = set.intersection(*({*one.ranks, *one.group} for _, one in found))
    named = [(position, one) for position, one in found if common & set(one.ranks)]
    _, first = min(named or found, key=lambda entry: (len(entry[1].ranks), entry[0]))
    return first


def _play(calls: Mapping[int, Sequence[RecordedCall]]) -> CollectiveDeadlock | None:
    """Make all calls, each when all its members are there; what is left when nobody gets further hangs."""
    collectives = {rank: [call for call in sequence if not call.is_transfer] for rank, sequence in calls.items()}
    at = dict.fromkeys(calls, 0)
    moved = True
    while moved:
        moved = False
        for rank, sequence in collectives.items():
            while at[rank] < len(sequence):
                group = sequence[at[rank]].ranks
                members = [member for member in group if member in calls]
                here = all(
                    at[member] < len(collectives[member]) and collectives[member][at[member]].ranks == group
                    for member in members
                )
                if not here:
                    break
                for member in members:
                    at[member] += 1
                moved = True
    waiting = {rank: sequence[at[rank]] for rank, sequence in collectives.items() if at[rank] < len(sequence)}
    if not waiting:
        return None
    # Who waits in the group that fewest have come to.
    counts = Counter(call.ranks for call in waiting.values())
    rank = min(waiting, key=lambda one: (counts[waiting[one].ranks], one))
    said = "; ".join(
        f"rank {one} waits in {call.op} over ranks {format_ranks(call.ranks)} ({call.place})"
        for one, call in list(waiting.items())[:4]
    )
    return CollectiveDeadlock(
        (rank,), waiting[rank].ranks, f"rank {rank} calls over its groups in another order: {said}"
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """`0, 8, 16`, or for many ranks `0, 8, ..., 1016`."""
    shown = [*map(str, ranks[:2]), "...", str(ranks[-1])] if len(ranks) > 8 else map(str, ranks)
    return ", ".join(shown)
