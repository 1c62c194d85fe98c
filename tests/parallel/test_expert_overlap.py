# SPDX-License-Identifier: Apache-2.0
"""What a rank computes while tokens travel to experts on other ranks and back: the same numbers, bit for bit, and an
exchange really begins before what it hides behind. Seen in the order of events, not in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.errors import ConfigError
from megatron.core.exchange_gap import ExchangeGap
from megatron.core.fp8 import pack_rows, unpack_rows
from megatron.core.pipeline_parallel.weight_grad_queue import WeightGradQueue
from megatron.core.tensor_parallel.products import _Multiply
from megatron.core.transformer.moe import row_exchange
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, own_rank, training

ALLTOALL = "--moe-token-dispatcher-type=alltoall"


class _Watched:
    """The handle of an exchange, which notes when it is waited for."""

    def __init__(self, work: Any, note: Callable[[str], None]) -> None:
        self.work, self.note = work, note

    def wait(self) -> None:
        self.note("end")
        self.work.wait()


def watch_exchanges(monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]) -> None:
    begin = row_exchange.all_to_all_single

    def watched(*args: Any, **kwargs: Any) -> Any:
        work = begin(*args, **kwargs)
        assert work is not None, "an exchange that is over when the call returns hides behind nothing"
        note("begin")
        return _Watched(work, note)

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
        watch_exchanges(patch, events.append)
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


# ---- another micro-batch, and weight gradients

OVERLAP = "--overlap-moe-expert-parallel-comm"
DELAY = "--delay-wgrad-compute"
EXPERTS_ONLY = "--overlap-dispatch-backward-with-experts-wgrad"
BESIDE = [
    (f"dp2,ep2,{ALLTOALL}", OVERLAP),
    (f"dp2,ep2,{ALLTOALL}", f"{OVERLAP},{DELAY}"),
    (f"dp2,ep2,{ALLTOALL},--moe-shared-expert-overlap", EXPERTS_ONLY),
    (f"dp2,ep2,{ALLTOALL},dist-opt,--overlap-grad-reduce,--moe-permute-fusion,--recompute-granularity=selective,"
     "--recompute-modules moe,--attention-dropout=0.1,--hidden-dropout=0.1", f"{OVERLAP},{DELAY}"),
    (f"tp2,sp,ep2,etp1,{ALLTOALL},--no-gradient-accumulation-fusion", f"{OVERLAP},{DELAY}"),
]  # fmt: skip
IN_PIPELINE = [
    (f"pp2,dp2,ep2,{ALLTOALL},--defer-embedding-wgrad-compute,--wgrad-deferral-limit=1", f"{OVERLAP},{DELAY}"),
    (f"pp2,vpp2,dp2,ep2,{ALLTOALL},--defer-embedding-wgrad-compute,--micro-batch-size=1", OVERLAP),
    (f"pp2,vpp2,dp2,ep2,{ALLTOALL},--micro-batch-size=1,--hidden-dropout=0.1", f"{OVERLAP},{DELAY}"),
]


def trains_alike(cases: list[tuple[str, str]]) -> None:
    for layout, flags in cases:
        assert_same_bits(train(f"{layout},{flags}"), train(layout))


@pytest.mark.flags(OVERLAP, DELAY, EXPERTS_ONLY)
def test_hidden_exchanges_change_no_bit() -> None:
    run_distributed(trains_alike, 2, BESIDE, timeout=400.0)


def test_hidden_exchanges_change_no_bit_in_a_pipeline() -> None:
    run_distributed(trains_alike, 4, IN_PIPELINE, timeout=400.0)


def order_of_events(flags: str) -> list[str]:
    """Of a step with two micro-batches and one layer of experts: exchanges and products of experts in their order. What
    runs in the thread beside the main one, the backward of a pair, is marked as such."""
    events: list[str] = []
    forward, backward, late = _Multiply.forward, _Multiply.backward, WeightGradQueue.run_waiting

    def note(event: str) -> None:
        events.append(event if threading.current_thread() is threading.main_thread() else f"beside: {event}")

    def watched_forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        if weight.dim() == 3:
            note("product")
        return forward(ctx, x, weight, *rest)

    def watched_backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.weight.dim() == 3:
            note("product")
        return backward(ctx, grad)

    def watched_late(queue: WeightGradQueue, key: Any) -> None:
        if queue._work[key]:
            note("weights")
        late(queue, key)

    with pytest.MonkeyPatch.context() as patch:
        watch_exchanges(patch, note)
        patch.setattr(_Multiply, "forward", staticmethod(watched_forward))
        patch.setattr(_Multiply, "backward", staticmethod(watched_backward))
        patch.setattr(WeightGradQueue, "run_waiting", watched_late)
        train(f"dp2,ep2,{ALLTOALL},{flags},--moe-layer-freq=4,--micro-batch-size=3", steps=1)
    return events


@pytest.mark.parametrize("flags", [OVERLAP, f"{OVERLAP},{DELAY}"])
def test_an_exchange_begins_before_what_it_hides_behind(flags: str) -> None:
    """Products of experts, two forward and two backward, stand between the beginning and the end of an exchange of the
    other micro-batch; delayed weight gradients between those of their own."""
    weights = ["weights"] if DELAY in flags else []
    dispatch, products, ends = ["begin", "begin"], ["product", "product"], ["end", "end"]
    alone = [*dispatch, *ends, *products, "begin", "end"]
    forward = [dispatch, [*ends, *products, "begin"], ["end"]]
    backward = [["begin", *weights], ["end", *products, *dispatch, *weights], ends]
    pair = [
        event
        for turn, other in zip(forward, backward, strict=True)
        for event in (*turn, *(f"beside: {event}" for event in other))
    ]
    last = ["begin", *weights, "end", *products, *dispatch, *weights, *ends]
    for events in run_distributed(order_of_events, 2, flags, timeout=240.0):
        assert events == alone + pair + last


@pytest.mark.flags(EXPERTS_ONLY)
def test_weight_gradients_of_experts_are_computed_while_gradients_travel() -> None:
    forward = ["begin", "begin", "end", "end", "product", "product", "begin", "end"]
    backward = ["begin", "end", "product", "product", "begin", "begin", "weights", "end", "end"]
    for events in run_distributed(order_of_events, 2, EXPERTS_ONLY, timeout=240.0):
        assert events == 2 * (forward + backward)


# ---- rows in 8 bits


def exchange_rows(packs: dict[str, bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrives of the other rank's rows, and the gradient of the own ones; values that 8 bits do not hold."""
    rank = dist.get_rank()
    rows = draw_rows(rank).requires_grad_()
    exchange = row_exchange.RowExchange(dist.group.WORLD, [0, 4] if rank == 0 else [4, 0],  # type: ignore[arg-type]
                                        [0, 4] if rank == 0 else [4, 0], ExchangeGap(), **packs)  # fmt: skip
    arrived, weights = exchange.finish(exchange.start(rows, rows[:, 0]))
    assert torch.equal(weights, draw_rows(1 - rank)[:, 0]), "a weight of each row travels as it is"
    arrived.backward(draw_rows(2 + rank))
    assert rows.grad is not None
    return arrived.detach(), rows.grad


def draw_rows(seed: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) + 1


@pytest.mark.parametrize("packs", ["packs_forward", "packs_backward"])
def test_rows_travel_in_8_bits_one_way(packs: str) -> None:
    for rank, (arrived, grad) in enumerate(run_distributed(exchange_rows, 2, {packs: True})):
        sent, returned = draw_rows(1 - rank), draw_rows(2 + 1 - rank)
        rounded = [unpack_rows(pack_rows(rows), torch.float32) for rows in (sent, returned)]
        assert torch.equal(arrived, rounded[0] if packs == "packs_forward" else sent)
        assert torch.equal(grad, rounded[1] if packs == "packs_backward" else returned)
        assert not torch.equal(rounded[0], sent)


@pytest.mark.flags("--moe-dispatch-fwd-dtype", "--moe-combine-bwd-dtype")
def test_tokens_and_gradients_in_8_bits_are_about_the_same_run() -> None:
    layout = f"dp2,ep2,{ALLTOALL}"
    losses, weights = run_distributed(train, 2, layout)[0]
    for flag, concerns_forward in (("--moe-dispatch-fwd-dtype", True), ("--moe-combine-bwd-dtype", False)):
        found, changed = run_distributed(train, 2, f"{layout},{flag}=mxfp8")[0]
        assert (found[0] != losses[0]) == concerns_forward
        assert not all(torch.equal(ours, theirs) for ours, theirs in zip(weights, changed, strict=True))
        assert found == pytest.approx(losses, rel=2e-3)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "--moe-dispatch-fwd-dtype mxfp8 does not work with --moe-token-dispatcher-type allgather"),
        (
            f"{ALLTOALL} --hidden-size 72",
            "every 32 channels a scale, and --hidden-size 72 is no multiple of 32; use 64 or 96",
        ),
        (f"{ALLTOALL} --moe-latent-size 40", "--moe-latent-size 40 is no multiple of 32; use 32 or 64"),
    ],
)
def test_what_cannot_be_packed_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        training(f"{EXPERTS['moe']} --moe-dispatch-fwd-dtype mxfp8 {flags}", "dp2,ep2")
