# SPDX-License-Identifier: Apache-2.0
"""What a rank computes while tokens travel to experts on other ranks and back: the same numbers, bit for bit, and an
exchange really begins before what it hides behind. Seen in the order of events, not in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.transformer.moe import row_exchange
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, own_rank, training

ALLTOALL = "--moe-token-dispatcher-type=alltoall"


class _Watched:
    """The handle of an exchange, which notes when it is waited for."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        self.events.append("end")
        self.work.wait()


def watch_exchanges(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    begin = row_exchange.all_to_all_single

    def watched(*args: Any, **kwargs: Any) -> Any:
        work = begin(*args, **kwargs)
        assert work is not None, "an exchange that is over when the call returns hides behind nothing"
        events.append("begin")
        return _Watched(work, events)

    monkeypatch.setattr(row_exchange, "all_to_all_single", watched)


def watch_shared_experts(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    compute = SharedExpertMLP.compute_output

    def watched(self: SharedExpertMLP, hidden_states: torch.Tensor) -> torch.Tensor:
        output = compute(self, hidden_states)
        events.append("shared expert")
        output.register_hook(lambda grad: events.append("its backward"))
        return output

    monkeypatch.setattr(SharedExpertMLP, "compute_output", watched)


def train(text: str, steps: int = 2) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of the first steps, and the weights after them."""
    config, recipe = training(EXPERTS["moe"], text)
    with open_local_run(config, recipe, own_rank(config)) as run:
        batches = run.data.open("train", 0)
        losses = [float(train_step(run, batches).losses["lm loss"]) for _ in range(steps)]
        return losses, [p.detach().clone() for chunk in run.model for p in chunk.parameters()]


def assert_same_bits(found: tuple[list[float], list[torch.Tensor]], expected: Any) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[1], expected[1], strict=True))


# ---- the shared expert

SHARED = [
    f"dp2,ep2,{ALLTOALL}",
    f"tp2,sp,ep2,etp1,{ALLTOALL}",
    f"tp2,ep2,etp1,{ALLTOALL},--recompute-granularity=selective,--recompute-modules shared_experts",
]


def shared_experts_beside_exchanges() -> list[str]:
    for layout in SHARED:
        assert_same_bits(train(f"{layout},--moe-shared-expert-overlap"), train(layout))
    events: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        watch_exchanges(patch, events)
        watch_shared_experts(patch, events)
        train(f"{SHARED[0]},--moe-shared-expert-overlap,--micro-batch-size=6", steps=1)
    return events


@pytest.mark.flags("--moe-shared-expert-overlap")
def test_the_shared_expert_is_computed_while_tokens_travel() -> None:
    """Of the layer's exchanges, dispatch carries two tensors, rows and their weights, and combine one."""
    combine = ["begin", "end"]
    forward = ["begin", "begin", "shared expert", "end", "end", *combine]
    backward = [*combine, "begin", "begin", "its backward", "end", "end"]
    for events in run_distributed(shared_experts_beside_exchanges, 2, timeout=240.0):
        assert events == 2 * forward + 2 * backward
