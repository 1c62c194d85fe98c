# SPDX-License-Identifier: Apache-2.0
"""A process's progress, as another one reads it from the same file."""

from __future__ import annotations

from pathlib import Path

from megatron.core.progress_record import OUTSIDE, STEP, VERDICT, ProgressRecord
from megatron.core.traffic import Traffic


def test_a_reader_sees_steps_microbatches_and_the_last_collective_of_each_group(tmp_path: Path) -> None:
    record = ProgressRecord.make(tmp_path / "rank_3.progress", 3)
    traffic = Traffic()
    dp, tp = record.build_meter("dp", [1, 3, 5, 7], traffic), record.build_meter("tp", [2, 3], None)
    reader = ProgressRecord(tmp_path / "rank_3.progress", writes=False)
    assert (reader.read().phase, reader.read().calls, reader.read().limit_seconds) == (OUTSIDE, (), 0.0)

    record.set_limit(2.5)
    record.begin_step(12)
    record.take_microbatch()
    tp.add("tp", "all_gather", 64, 2)
    dp.add("dp", "all_reduce", 4096, 4)
    dp.add("dp", "reduce_scatter", 10**13, 4)

    seen = reader.read()
    assert (seen.rank, seen.phase, seen.iteration, seen.microbatch, seen.limit_seconds) == (3, STEP, 12, 1, 2.5)
    assert [(c.axis, c.ranks, c.kind, c.number, c.tensor_bytes) for c in seen.calls] == [
        ("dp", (1, 3, 5, 7), "reduce_scatter", 2, 10**13),
        ("tp", (2, 3), "all_gather", 1, 64),
    ]
    assert seen.changes == 5
    assert traffic.sent_bytes["dp", "all_reduce"] == 6144, "what it notes is handed on"


def test_groups_of_any_ranks_and_number_are_written_down(tmp_path: Path) -> None:
    record = ProgressRecord.make(tmp_path / "rank_0.progress", 0)
    groups = [[0], list(range(0, 4096, 8)), [0, 1, 5, 7], [7, 3, 0], list({0, *range(1, 900, 7), 2})]
    for ranks in groups + [[0, 1]] * 60:
        record.build_meter("cp", ranks, None).add("cp", "all_to_all", 1, len(ranks))
    found = {call.ranks for call in record.read().calls}
    # The last of them is too long for its place: its members are then not known, which is no error.
    assert found == {(0,), tuple(range(0, 4096, 8)), (0, 1, 5, 7), (7, 3, 0), (), (0, 1)}


def test_groups_of_one_axis_with_the_same_members_are_told_apart(tmp_path: Path) -> None:
    record = ProgressRecord.make(tmp_path / "rank_0.progress", 0)
    for ranks in ([0, 1], [0, 1], [0, 2], [0, 1]):
        record.build_meter("pp", ranks, None).add("pp", "all_reduce", 1, 2)
    assert sorted(call.group for call in record.read().calls) == [
        ("pp", (0, 1)), ("pp", (0, 2)), ("pp 2", (0, 1)), ("pp 3", (0, 1)),
    ]  # fmt: skip


def test_the_verdict_reaches_the_process(tmp_path: Path) -> None:
    record = ProgressRecord.make(tmp_path / "rank_0.progress", 0)
    assert record.told == 0
    ProgressRecord(tmp_path / "rank_0.progress", writes=False).tell(VERDICT)
    assert record.told == VERDICT
