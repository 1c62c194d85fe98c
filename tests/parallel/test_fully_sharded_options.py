# SPDX-License-Identifier: Apache-2.0
"""FSDP2's number formats, units and copies: what is kept, what is sent, and that the run stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron.core.distributed.torch_fully_sharded_data_parallel import replace_returned_parameters
from megatron.training.hooks.measures import TrafficHook
from megatron.training.loop import train
from megatron.training.step import train_step
from megatron.training.verify.comparison import compare, find_largest_differences
from megatron.training.verify.parity import RankTrace, join, open_local_run, trace_rank
from tests.parallel.checkpoint_contents import assert_bit_equal, saved
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import STYLES, own_rank, training
from tests.parallel.test_layout_checkpoints import run_on

PARAMS, GRADS, SENT = (
    f"--megatron-fsdp-{what}-dtype" for what in ("main-params", "main-grads", "grad-comm")
)  # fmt: skip
SHORT = f"{STYLES['llama']} --train-iters 2 --lr-warmup-iters 1"
FORMATS = {
    # flags: (divided parameters, gradients, bytes of a gradient on its way)
    "--bf16": (torch.float32, torch.float32, 4),
    f"--bf16 {SENT} bf16": (torch.float32, torch.float32, 2),
    f"--bf16 {GRADS} bf16": (torch.float32, torch.bfloat16, 2),
    f"--bf16 {GRADS} bf16 {SENT} fp32": (torch.float32, torch.bfloat16, 4),
    f"--bf16 {PARAMS} bf16": (torch.bfloat16, torch.bfloat16, 4),
    f"--bf16 --grad-reduce-in-bf16 {PARAMS} auto": (torch.bfloat16, torch.bfloat16, 2),
    f"--fp16 --loss-scale 1 {SENT} fp16": (torch.float32, torch.float32, 2),
}


class Kept(NamedTuple):
    """What a process has after a step."""

    params: set[torch.dtype]
    grads: set[torch.dtype]
    state: int
    """Elements of the optimizer's tensors."""
    sent_bytes: int
    """Of gradients in a step."""
    elements: int
    """Of the whole model."""


def kept_in(formats: list[str]) -> list[tuple[Kept, RankTrace]]:
    found = []
    for flags in formats:
        config, recipe = training(f"{SHORT} {flags} --log-comm-volume", "dp2,fsdp2")
        with open_local_run(config, recipe, own_rank(config)) as run:
            train(run)
            (hook,) = (hook for hook in run.hooks.hooks if isinstance(hook, TrafficHook))  # type: ignore[attr-defined]
            params = list(run.model[0].module.parameters())
            state = [tensor for kinds in run.optimizer.named_state().values() for tensor in kinds.values()]
            kept = Kept(
                {param.to_local().dtype for param in params if isinstance(param, DTensor)},
                {param.main_grad.dtype for param in params},  # type: ignore[attr-defined]
                sum(tensor.numel() for tensor in state),
                hook.step["dp", "reduce_scatter"],
                sum(param.numel() for param in params),
            )
        found.append((kept, trace_rank(config, recipe, rank=own_rank(config), iterations=2)))
    return found


@pytest.mark.flags(
    "--megatron-fsdp-main-params-dtype", "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype"
)
def test_number_formats() -> None:
    """The band is that of test_bf16_band.py."""
    config, recipe = training(SHORT, "1")
    reference = join([trace_rank(config, recipe, rank=0, iterations=2)])
    ranks = run_distributed(kept_in, 2, list(FORMATS), timeout=240.0)
    for flags, results in zip(FORMATS, zip(*ranks, strict=True), strict=True):
        params, grads, sent = FORMATS[flags]
        for kept, _ in results:
            assert (kept.params, kept.grads) == ({params}, {grads}), flags
            assert kept.sent_bytes == 3 * kept.elements * sent // 2, f"{flags}: three microbatches, half leaves"
        # Two moments, and main parameters where the network computes with copies of them.
        whole = results[0][0].elements
        assert sum(kept.state for kept, _ in results) == whole * (2 if params == torch.bfloat16 else 3), flags
        trace = join([share for _, share in results])
        sizes = find_largest_differences(reference, trace)
        assert trace.disagreements == []
        assert sizes["loss"] < 5e-4 and sizes["gradient norm"] < 1e-2 and sizes["gradient"] < 5e-2, (flags, sizes)


def test_parameters_without_float32_ones_resume_and_move(tmp_path: Path) -> None:
    flags = f"{STYLES['llama']} --bf16 --lr-decay-iters 4 --lr-warmup-iters 1 --save-interval 100"
    own, moments = f"{flags} {PARAMS} bf16", [".exp_avg.", ".exp_avg_sq."]
    run_on("dp2,fsdp2", f"{own} --train-iters 4 --save {tmp_path}/whole")
    for iterations in (2, 4):
        parts = f"--save {tmp_path}/parts --load {tmp_path}/parts"
        run_on("dp2,fsdp2", f"{own} --train-iters {iterations} {parts}")
    whole = saved(tmp_path / "whole", 4)
    assert_bit_equal(whole, saved(tmp_path / "parts", 4))
    assert not any("fp32_param" in key for key in whole)
    # To a run with float32 main parameters, and back.
    run_on("1", f"{flags} --train-iters 4 --load {tmp_path}/whole --save {tmp_path}/alone")
    run_on("dp2,fsdp2", f"{own} --train-iters 4 --load {tmp_path}/alone --save {tmp_path}/back")
    alone, back = saved(tmp_path / "alone", 4), saved(tmp_path / "back", 4)
    assert any("fp32_param" in key for key in alone)
    assert_bit_equal(whole, back)
    for key, tensor in whole.items():
        if any(kind in key for kind in moments) or not key.startswith("optimizer."):
            assert torch.equal(tensor, alone[key]), key


UNITS = ["", "--suggested-communication-unit-size 1000000", "--megatron-fsdp-enable-fine-grained-param-gather"]


def gathered_with(flag_list: list[str]) -> list[tuple[bool, bool, float]]:
    """For each: is the last layer whole while the first one computes, is the first's attention still when its MLP
    begins, and the gradient norm."""
    found = []
    for flags in flag_list:
        config, recipe = training(f"{STYLES['llama']} {flags}", "dp2,fsdp2")
        with open_local_run(config, recipe, own_rank(config)) as run:
            layers: nn.ModuleList = run.model[0].module.decoder.layers  # type: ignore[assignment, union-attr]
            seen: list[tuple[bool, bool]] = []

            def look(*_: Any, seen: Any = seen, layers: Any = layers) -> None:
                last, attention = layers[-1].mlp.linear_fc1.weight, layers[0].self_attention.linear_qkv.weight
                seen.append((not isinstance(last, DTensor), not isinstance(attention, DTensor)))

            layers[0].mlp.register_forward_pre_hook(look)  # type: ignore[union-attr]
            norm = train_step(run, run.data.open("train", 0)).grad_norm
            assert norm is not None and len(set(seen)) == 1
            found.append((*seen[0], float(norm)))
    return found


@pytest.mark.flags("--suggested-communication-unit-size", "--megatron-fsdp-enable-fine-grained-param-gather")
def test_units_are_gathered_together() -> None:
    for layer_by_layer, together, finely in run_distributed(gathered_with, 2, UNITS):
        assert layer_by_layer[:2] == (False, True)
        assert together[:2] == (True, True)
        assert finely[:2] == (False, False)
        assert together[2] == pytest.approx(layer_by_layer[2], rel=1e-6)
        assert finely[2] == pytest.approx(layer_by_layer[2], rel=1e-6)


FINE = "--megatron-fsdp-enable-fine-grained-param-gather"
DIVIDED = [
    *UNITS,
    "--torch-fsdp2-no-reshard-after-forward",
    f"{FINE} --data-parallel-sharding-strategy optim_grads",
    f"{FINE} --init-model-with-meta-device --no-bias-dropout-fusion",
    f"{FINE} --recompute-granularity selective --recompute-modules core_attn layernorm mlp",
    f"{FINE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
]


def trained_with(style: str, flag_list: list[str]) -> list[RankTrace]:
    settings = [training(f"{STYLES[style]} {flags}", "dp2,fsdp2") for flags in flag_list]
    return [trace_rank(*each, rank=own_rank(each[0]), iterations=2) for each in settings]


@pytest.mark.parametrize("style", STYLES)
def test_no_option_changes_the_run(style: str) -> None:
    """With biases, which attention and MLP return for the layer to add, and without."""
    reference = join([trace_rank(*training(STYLES[style], "1"), rank=0, iterations=2)])
    ranks = run_distributed(trained_with, 2, style, DIVIDED, timeout=240.0)
    for flags, shares in zip(DIVIDED, zip(*ranks, strict=True), strict=True):
        assert compare(reference, join(list(shares))) == [], flags


def test_a_part_that_returns_its_parameters_hands_out_copies() -> None:
    part, foreign = nn.Linear(3, 2), torch.zeros(2)
    assert part.bias is not None
    returned = {"bias": part.bias, "rows": (part.weight[1:],), "other": foreign, "none": None}
    copies = replace_returned_parameters(part, (), returned)
    assert copies["other"] is foreign and copies["none"] is None
    for copy, original in ((copies["bias"], part.bias), (copies["rows"][0], part.weight[1:])):
        assert torch.equal(copy, original)
        assert copy.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()
    (copies["bias"].sum() + copies["rows"][0].sum()).backward()
    assert torch.equal(part.bias.grad, torch.ones(2)), "a copy hands its gradient back"
    assert torch.equal(part.weight.grad, torch.tensor([[0.0] * 3, [1.0] * 3]))


def memory_asked_for(flags: str) -> int:
    """How many of the model's parts ask the process group for memory; the step is made."""
    asked: list[FSDPModule] = []
    switch = FSDPModule.set_allocate_memory_from_process_group_for_comm

    def recorded(part: FSDPModule, enable: bool) -> None:
        asked.extend([part] if enable else [])
        switch(part, enable)

    FSDPModule.set_allocate_memory_from_process_group_for_comm = recorded  # type: ignore[method-assign]
    try:
        config, recipe = training(f"{STYLES['llama']} {flags}", "dp2,fsdp2")
        with open_local_run(config, recipe, own_rank(config)) as run:
            train_step(run, run.data.open("train", 0))
            assert len(asked) in (0, sum(isinstance(part, FSDPModule) for part in run.model[0].modules()))
        return len(asked)
    finally:
        FSDPModule.set_allocate_memory_from_process_group_for_comm = switch  # type: ignore[method-assign]


def memory_asked_for_both_ways() -> list[int]:
    return [memory_asked_for(""), memory_asked_for("--use-nccl-ub")]


@pytest.mark.flags("--use-nccl-ub")
def test_registered_memory() -> None:
    """Four layers, two ends and the rest; gloo, which has no such memory, uses ordinary."""
    assert run_distributed(memory_asked_for_both_ways, 2) == [[0, 7], [0, 7]]


def divided(flags: str) -> tuple[int, int, int]:
    """Elements of parameters, gradients and moments that this process keeps."""
    config, recipe = training(STYLES["llama"], f"dp4,--use-megatron-fsdp,--micro-batch-size=1,{flags}")
    with open_local_run(config, recipe, own_rank(config)) as run:
        train_step(run, run.data.open("train", 0))
        run.model[0].finish_param_sync()
        params = list(run.model[0].module.parameters())
        kept = [param.to_local() for param in params if isinstance(param, DTensor)]
        moments = [tensors["exp_avg"] for tensors in run.optimizer.named_state().values()]
        grads = [param.main_grad for param in params]  # type: ignore[attr-defined]
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in (kept, grads, moments)]
        return sizes[0], sizes[1], sizes[2]


@pytest.mark.flags("--num-distributed-optimizer-instances", "--use-megatron-fsdp")
def test_each_instance_divides_a_copy() -> None:
    """That they train alike is said by test_layouts.py, and what they send by test_traffic.py."""
    ranks = run_distributed(divided, 4, "--num-distributed-optimizer-instances=2")
    assert len({ranks[0], ranks[2]}) == len({ranks[1], ranks[3]}) == 1
    config, recipe = training(STYLES["llama"], "1")
    with open_local_run(config, recipe, 0) as run:
        whole = sum(param.numel() for param in run.model[0].parameters())
    assert [a + b for a, b in zip(ranks[0], ranks[1], strict=True)] == [whole] * 3
