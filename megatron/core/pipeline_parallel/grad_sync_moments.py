"""When, in a schedule, the gradients of each chunk may start to be summed over the replicas.

| the chunk's last gradients come from | without alignment                    | --align-grad-reduce, stage r > 0       |
|--------------------------------------|--------------------------------------|----------------------------------------|
| a whole backward (B)                 | bucket by bucket, during it          | r actions after it, all buckets        |
| a deferred weight backward (W)       | after it, all buckets                | r actions after it, all buckets        |

Stage r ends its last backward r actions before the first stage does, so that aligned stages start together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.pipeline_parallel.communication import Transfer
from megatron.core.pipeline_parallel.schedules import Action

Signals = Mapping[int, Sequence[Callable[[], None]]]
"""Position in a program -> what to call before the action there."""


def grad_sync_moments(program: Sequence[Action | Transfer], chunks: Sequence[Any], stage: int) -> Signals:
    """Who is told what before which action of this rank's program.

    chunks: those wrapped in DistributedDataParallel are told; others, which have nothing to sum, are left alone. What
    would come after the last action is left to `finish_grad_sync`.
    """
    signals: dict[int, list[Callable[[], None]]] = defaultdict(list)
    positions = [p for p, step in enumerate(program) if isinstance(step, Action)]
    actions = [step for step in program if isinstance(step, Action)]
    for index, chunk in enumerate(chunks):
        gradients = [turn for turn, action in enumerate(actions) if action.chunk == index and action.kind != "F"]
        if not gradients or not hasattr(chunk, "enable_grad_sync"):
            continue
        is_aligned = chunk.ddp_config.align_grad_reduce and stage > 0
        if not is_aligned and all(actions[turn].kind == "B" for turn in gradients):
            signals[positions[gradients[-1]]].append(chunk.enable_grad_sync)
            continue
        turn = gradients[-1] + 1 + (stage if is_aligned else 0)
        if turn < len(actions):
            signals[positions[turn]].append(chunk.start_grad_sync)
    return signals
