# SPDX-License-Identifier: Apache-2.0
"""The most bytes that live at one moment of a rank's program: its forwards, backwards and transfers in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.programs import SENDS_UNDER_WAY, Program, find_end_of_transfers
from megatron.core.pipeline_parallel.schedules import Action


class ChunkMemory(NamedTuple):
    """Memory that the microbatches of a virtual stage need."""

    kept: float
    """From forward to backward, in addition to what another virtual stage has passed on."""
    waiting: float
    """From backward to the deferred gradients of weights."""
    forward: float
    """In addition to it at the end of forward."""
    backward: float
    """In addition to it in backward, at most."""
    recorded: float
    """In CUDA graphs, which keep their memory: for each microbatch that is ever in flight."""
    entering: float
    """Hidden states that come from another virtual stage, and their gradient on its way back; 0 on the first."""
    leaving: float
    """The same of what goes to the next one; 0 on the last."""


def walk_program(program: Program, chunks: Sequence[ChunkMemory], *, overlaps: bool) -> float:
    """The most that lives at one moment of a rank's program. overlaps: a transfer is not waited for where it begins."""
    most = 0.0
    in_flight, recorded = [0] * len(chunks), [0] * len(chunks)
    for step in program:
        if isinstance(step, Action):
            in_flight[step.chunk] += {"F": 1, "B": -1}.get(step.kind, 0)
            recorded[step.chunk] = max(recorded[step.chunk], in_flight[step.chunk])
    now = sum(times * chunk.recorded for times, chunk in zip(recorded, chunks, strict=True))
    sent: deque[float] = deque()
    for position, step in enumerate(program):
        chunk = chunks[step.chunk]
        if isinstance(step, Action):
            if step.kind == "F":
                now += chunk.kept
                most = max(most, now + max(chunk.forward, chunk.leaving))
                now += chunk.leaving
            elif step.kind == "B":
                most = max(most, now + chunk.backward)
                # What came from both sides goes, and the gradient of the input is there to be sent.
                now += chunk.waiting - chunk.kept - chunk.leaving
            else:
                now -= chunk.waiting
            continue
        size = chunk.leaving if (step.what == "F") == (step.kind == "send") else chunk.entering
        if step.kind == "receive":
            now += size
        else:
            sent.append(size)
        most = max(most, now)
        if find_end_of_transfers(program, position) == position + 1:
            while len(sent) > (SENDS_UNDER_WAY if overlaps else 0):
                now -= sent.popleft()
    return most
