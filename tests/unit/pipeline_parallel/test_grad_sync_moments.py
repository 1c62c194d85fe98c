# SPDX-License-Identifier: Apache-2.0
"""When each chunk's gradients are summed: by schedule, alignment and stage."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.executor import plan_grad_sync
from megatron.core.pipeline_parallel.schedules import Action
from tests.support.run_flags import run_config


class Chunk:
    """Writes down what it is told."""

    def __init__(self, name: str, flags: str = "") -> None:
        self.name = name
        self.told: list[str] = []
        self.ddp_config = run_config(flags).ddp
        self.reduces_every_microbatch = False

    def enable_grad_sync(self) -> None:
        self.told.append("enable")

    def start_grad_sync(self) -> None:
        self.told.append("start")


def played(actions: list[Action], chunks: list[Chunk], stage: int) -> list[str]:
    """The actions, with what the chunks are told between them."""
    signals = plan_grad_sync(actions, chunks, stage)
    lines = []
    for position, action in enumerate(actions):
        for signal in signals.get(position, ()):
            signal()
            lines += [f"{chunk.name} {chunk.told.pop()}" for chunk in chunks if chunk.told]
        lines.append(f"{action.kind}{action.microbatch}")
    return lines


def test_buckets_may_go_from_the_last_backward_on() -> None:
    assert played(schedules.one_f_one_b(0, 1, 2), [Chunk("a")], 0) == ["F0", "B0", "F1", "a enable", "B1"]


@pytest.mark.flags("--align-grad-reduce", "--no-align-grad-reduce")
def test_alignment_makes_later_stages_wait_for_the_first() -> None:
    two_chunks = [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0, 0), Action("B", 1, 0),
                  Action("B", 2, 0)]  # fmt: skip
    chunks = [Chunk("a"), Chunk("b")]
    assert played(two_chunks, chunks, 0) == ["F0", "F0", "b enable", "B0", "B0", "B1", "a enable", "B2"]
    assert played(two_chunks, chunks, 1) == ["F0", "F0", "B0", "B0", "b start", "B1", "B2"]
    assert played(two_chunks, chunks, 2) == ["F0", "F0", "B0", "B0", "B1", "b start", "B2"]
    chunks = [Chunk("a", "--no-align-grad-reduce"), Chunk("b", "--no-align-grad-reduce")]
    assert played(two_chunks, chunks, 2) == ["F0", "F0", "b enable", "B0", "B0", "B1", "a enable", "B2"]


def test_who_sums_after_every_microbatch_is_told_of_the_last() -> None:
    chunk = Chunk("a")
    chunk.reduces_every_microbatch = True
    assert played(schedules.one_f_one_b(1, 2, 2), [chunk], 1) == ["F0", "B0", "F1", "a enable", "B1"]


def test_deferred_weight_gradients_are_waited_for() -> None:
    actions = [Action("F", 0), Action("B", 0), Action("W", 0), Action("F", 1, 1)]
    assert played(actions, [Chunk("a")], 0) == ["F0", "B0", "W0", "a start", "F1"]


def test_bare_modules_are_left_alone() -> None:
    assert not plan_grad_sync(schedules.one_f_one_b(0, 1, 2), [object()], 0)
