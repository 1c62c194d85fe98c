# SPDX-License-Identifier: Apache-2.0
"""FP8 in several processes: histories of the whole batch and the whole matrix, losses in the band of bfloat16, and
checkpoints that go from one layout to another with their scales.

    MEGATRON_ALL_LAYOUTS=1 bash tests/run.sh tests/parallel/test_fp8.py      every recipe in every layout, and 50 steps
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.fp8 import Operand
from megatron.core.mesh import RankGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.fp8_products import GRAD, WEIGHT, FP8Matmul, FP8Recipe
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.parameters import find_global_name, initialise_parameters, normal
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.loop import train
from megatron.training.run import Run
from megatron.training.verify.comparison import choose_tolerances, find_differences
from megatron.training.verify.parity import RankTrace, join, open_local_run, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import own_rank, training
from tests.support.run_flags import run_config
from tests.support.tiny_training import note_losses

STEPS = 5
FP8 = f"""
    --hidden-size 64 --num-layers 2 --fp8-amax-history-len {STEPS} --fp8-amax-compute-algo max
    --train-iters {STEPS} --micro-batch-size 1 --global-batch-size 4 --seq-length 32 --max-position-embeddings 32
    --swiglu --ffn-hidden-size 128 --disable-bias-linear --position-embedding-type rope
"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64 --moe-layer-freq 1"
State = dict[str, Tensor]
ALL_LAYOUTS = bool(os.environ.get("MEGATRON_ALL_LAYOUTS"))
PAIRS = [("tensorwise", "dp2,fsdp2"), ("blockwise", "tp2,sp"), ("mxfp8", "cp2"), ("nvfp4", "dp2,ep2")]
if ALL_LAYOUTS:
    PAIRS = [
        (recipe, layout)
        for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8", "rowwise", "nvfp4")
        for layout in ("tp2,sp", "pp2", "dp2,dist-opt", "cp2", "dp2,ep2", "dp2,fsdp2")
    ]


def read_state(run: Run) -> State:
    """Histories and scales by the layer's name in the whole model."""
    return {
        f"{find_global_name(chunk.module, name)}.{kind}": data.clone()
        for chunk in run.model
        for name, module in chunk.module.named_modules()
        if isinstance(module, FP8Matmul)
        for kind, data in module.named_buffers(recurse=False)
    }


def train_on(flags: str, layout: str) -> tuple[list[float], State]:
    """Losses of all steps, and the state at the end."""
    config, recipe = training(f"{FP8} {'' if 'fp4' in flags else '--fp8-format hybrid'} {flags}", layout)
    with open_local_run(config, recipe, own_rank(config)) as run:
        losses = note_losses(run)
        train(run)
        if not losses and config.checkpoint.save is not None:
            save_checkpoint(run)
        return losses, read_state(run)


def on_all_ranks(flags: str, layout: str) -> list[tuple[list[float], State]]:
    processes = parse_layout(layout).world_size
    return [train_on(flags, layout)] if processes == 1 else run_distributed(train_on, processes, flags, layout)


@functools.cache
def reference(flags: str) -> tuple[list[float], State]:
    return train_on(flags, "1")


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ("", "tp2,sp"),
        ("", "dp2,dist-opt"),
        ("", "cp2"),
        ("", "pp2"),
        (EXPERTS, "dp2,ep2"),
        (EXPERTS, "tp2,sp,ep2,--expert-tensor-parallel-size=1"),
        (EXPERTS + " --calculate-per-token-loss", "dp2"),
    ],
    ids=str,
)
def test_histories_are_those_of_the_whole_run(flags: str, layout: str) -> None:
    losses, expected = reference(flags)
    found: State = {}
    for of_rank, state in on_all_ranks(flags, layout):
        assert of_rank == pytest.approx(losses, rel=5e-4), "the band of bfloat16"
        for name, data in state.items():
            assert torch.equal(found.setdefault(name, data), data), f"{name} differs between ranks"
    assert found.keys() == expected.keys()
    for name, data in expected.items():
        if name.endswith("steps"):
            assert found[name] == data == STEPS
            continue
        # Replicas scale their own tokens in the first step, and values between two fall to either side; that goes on.
        torch.testing.assert_close(found[name], data, rtol=0.15, atol=0.0)
        if name.endswith("amax_history"):
            torch.testing.assert_close(found[name][WEIGHT, -1], data[WEIGHT, -1], rtol=0, atol=0)
            # The first step has the scales of whole matrices, unless replicas bring tokens of other microbatches.
            if "dp2" not in layout:
                torch.testing.assert_close(found[name][:, -1], data[:, -1], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_layout_in_few_bits_is_no_other_run(recipe: str) -> None:
    """As check_parity judges it; whose mistakes it still sees."""
    flags = f"{FP8} --fp8-format hybrid --fp8-recipe {recipe} --lr-warmup-iters 0"
    (right,), found = (run_distributed(trace, n, flags, layout) for n, layout in ((1, "1"), (2, "tp2")))
    limits = choose_tolerances(training(flags, "1")[0].model)
    assert find_differences(join([right]), join(found), limits) == []
    doubled = [share._replace(grad=2 * share.grad) for share in right.held]
    assert find_differences(join([right]), join([dataclasses.replace(right, held=doubled)]), limits)


def trace(flags: str, layout: str) -> RankTrace:
    config, recipe = training(flags, layout)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=2, in_detail=True)


@pytest.mark.parametrize(("recipe", "layout"), PAIRS, ids=str)
def test_every_recipe_stays_in_the_band_in_every_layout(recipe: str, layout: str) -> None:
    """Scales of a part of a matrix, or of blocks that begin elsewhere, are others: losses deviate as bfloat16's do."""
    asked = "--fp4-format e2m1" if recipe == "nvfp4" else f"--fp8-recipe {recipe}"
    layers = 2 if layout == "pp2" else 1
    flags = f"--num-layers {layers} {asked} --hidden-size 256 --ffn-hidden-size 256 --bf16"
    flags += f" {EXPERTS} --moe-ffn-hidden-size 256" if "ep2" in layout else ""
    losses, _ = reference(flags)
    for found, _ in on_all_ranks(flags, layout):
        # With two bits instead of three, or four, the errors of a sum of other parts are as much greater.
        assert found == pytest.approx(losses, rel=5e-3 if recipe == "nvfp4" else 1e-3)


CHOSEN = """--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16
    --v-head-dim 16 --qk-layernorm --normalization RMSNorm --experimental-attention-variant dsa --num-layers 1 --bf16
    --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8 --dsa-indexer-loss-coeff 0.1"""


@pytest.mark.parametrize(
    ("recipe", "layout"), [("tensorwise", "tp2,sp"), ("delayed", "cp2,--cp-comm-type=all_gather")], ids=str
)
def test_attention_to_chosen_keys_stays_in_the_band(recipe: str, layout: str) -> None:
    """What chooses them stays in 16 bits; whoever attends to them multiplies in 8."""
    flags = f"{CHOSEN} --fp8-recipe {recipe}"
    losses, state = reference(flags)
    for found, of_rank in on_all_ranks(flags, layout):
        assert found == pytest.approx(losses, rel=1e-3)
        assert not any("indexer" in name for name in of_rank)
    assert recipe == "tensorwise" or any("linear_q_up_proj" in name for name in state)


@pytest.mark.skipif(not ALL_LAYOUTS, reason="takes minutes; MEGATRON_ALL_LAYOUTS=1 runs it")
@pytest.mark.parametrize("layout", ["tp2,sp", "dp2,dist-opt", "cp2", "dp2,ep2"])
def test_fifty_steps_of_history_in_layouts(layout: str) -> None:
    """What a history says of its steps is what the products of all ranks were given, and scales follow from it."""
    flags = f"--num-layers 1 --fp8-amax-history-len 50 --train-iters 50 {EXPERTS if 'ep2' in layout else ''}"
    for history, expected in run_distributed(note_operands, 2, flags, layout):
        assert len(history) == len(expected) > 0
        for name, found in history.items():
            # Newest first; gradients as they would be in one process.
            torch.testing.assert_close(found, expected[name], rtol=1e-6, atol=0.0)


def note_operands(flags: str, layout: str) -> tuple[State, State]:
    """The amax histories of a run at its end, and what they are by definition: the greatest absolute value in a step of
    what is rounded on any rank, newest step first."""
    config, recipe = training(f"{FP8} --fp8-format hybrid {flags}", layout)
    seen: dict[FP8Matmul, list[Tensor]] = {}
    now: dict[FP8Matmul, Tensor] = {}
    original, end = FP8Matmul._round_along_columns, FP8Matmul.forget_operands

    def note(self: FP8Matmul, operand: int, matrix: Tensor, **options: bool) -> Operand:
        step = now.setdefault(self, torch.zeros(3))
        step[operand] = max(step[operand], matrix.detach().float().abs().max() if matrix.numel() else 0.0)
        return original(self, operand, matrix, **options)

    def count(self: FP8Matmul) -> None:
        step = now.pop(self, torch.zeros(3))
        dist.all_reduce(step, op=dist.ReduceOp.MAX)
        step[GRAD] /= self.recipe.replicas
        seen.setdefault(self, []).insert(0, step)
        end(self)

    with (
        mock.patch.object(FP8Matmul, "_round_along_columns", note),
        mock.patch.object(FP8Matmul, "forget_operands", count),
        open_local_run(config, recipe, own_rank(config)) as run,
    ):
        train(run)
        products = {name: module for name, module in run.model[0].module.named_modules() if module in seen}
        return (
            {name: product.amax_history.clone() for name, product in products.items()},
            {name: torch.stack(seen[product], dim=1) for name, product in products.items()},
        )


def test_scales_go_from_layout_to_layout(tmp_path: Path) -> None:
    flags = "--train-iters 3 --lr-decay-iters 5 --save-interval 100"
    (_, saved), *_ = on_all_ranks(f"{flags} --save {tmp_path}", "tp2,sp")
    for layout in ("1", "pp2"):
        loaded: State = {}
        for losses, state in on_all_ranks(f"{flags} --load {tmp_path}", layout):
            assert losses == [], "nothing was left to train"
            loaded |= state
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(data, loaded[name]) for name, data in saved.items())


# ---- what waits for backward


def kept_and_whole(recipe: str, flags: str) -> list[tuple[int, list[Tensor]]]:
    """Of a column and a row layer under sequence parallelism, with inputs that wait in 8 bits and without: the bytes
    that wait, and the output with all gradients."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = ProcessGroupCollection.build(RankGrid(size, tp=size), rank).tp
    base = f"--tensor-model-parallel-size {size} --sequence-parallel --num-attention-heads 4"
    config = run_config(f"{base} {flags}", world_size=size).model
    options: Any = {"config": config, "init_method": normal(0.5), "tp_group": group, "bias": False}
    model = nn.Sequential(
        ColumnParallelLinear(32, 64, gather_output=False, **options),
        RowParallelLinear(64, 32, input_is_parallel=True, skip_bias_add=True, **options),
    )
    initialise_parameters(model, seed=1)
    # [s / tp, b, h]: 128 tokens in all.
    tokens = torch.randn(size, 32, 2, 32, generator=torch.Generator().manual_seed(2))[rank]
    found = []
    for keeps in (True, False):
        kept = 0

        def note(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.untyped_storage().nbytes()
            return tensor

        for layer in model:
            layer.product = FP8Matmul(FP8Recipe(name=recipe, hybrid=True), keeps_rounded_input=keeps)
        x = tokens.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output, _ = model[1](model[0](x)[0])
        grads = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
        found.append((kept, [output.detach(), *grads]))
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_divided_tokens_wait_in_eight_bits(recipe: str) -> None:
    scales = 32 if recipe == "mxfp8" else None
    for flags, spares in (("", True), ("--tp-comm-overlap", False)):
        for (few, found), (all_bytes, expected) in run_distributed(kept_and_whole, 2, recipe, flags):
            assert all(map(torch.equal, found, expected))
            if not spares:  # the scales of a chunk of tokens are not those that the weight gradient has
                assert few == all_bytes
                continue
            # Of the column layer this rank's tokens, of the row layer its channels.
            values = 64 * 32 + 128 * 32
            assert all_bytes - few >= values * 3 - (2 * 4 if scales is None else values / scales)
