# SPDX-License-Identifier: Apache-2.0
"""FP8 in several processes: histories of the whole batch and the whole matrix, losses in the band of bfloat16, and
checkpoints that go from one layout to another with their scales."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.mesh import RankGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.fp8_products import INPUT, WEIGHT, FP8Matmul, FP8Recipe
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.parameters import find_global_name, initialise_parameters, normal
from megatron.training.checkpoint.save_and_load import save_checkpoint
from megatron.training.loop import train
from megatron.training.run import Run
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import own_rank, training
from tests.unit.run_flags import run_config

STEPS = 5
FP8 = f"""
    --hidden-size 64 --num-layers 2 --fp8-format hybrid --fp8-amax-history-len {STEPS} --fp8-amax-compute-algo max
    --train-iters {STEPS} --micro-batch-size 1 --global-batch-size 4 --seq-length 32 --max-position-embeddings 32
    --swiglu --ffn-hidden-size 128 --disable-bias-linear --position-embedding-type rope
"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64 --moe-layer-freq 1"
State = dict[str, Tensor]


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
    config, recipe = training(f"{FP8} {flags}", layout)
    losses: list[float] = []
    with open_local_run(config, recipe, own_rank(config)) as run:
        record = run.metrics.record_losses

        def note(found: dict[str, Tensor]) -> None:
            losses.append(found["lm loss"].item())
            record(found)

        run.metrics.record_losses = note  # type: ignore[assignment, method-assign]
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
        # What the first step has rounded by a rank's own scales differs, and with it all that follows.
        torch.testing.assert_close(found[name], data, rtol=0.15, atol=0.0)
        if name.endswith("amax_history"):
            torch.testing.assert_close(found[name][WEIGHT, -1], data[WEIGHT, -1], rtol=0, atol=0)
        if name == "decoder.layers.0.self_attention.linear_qkv.product.amax_history":
            torch.testing.assert_close(found[name][INPUT, -1], data[INPUT, -1], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(("recipe", "layout"), [("tensorwise", "dp2,fsdp2"), ("blockwise", "tp2,sp")])
def test_other_recipes_stay_in_the_band(recipe: str, layout: str) -> None:
    flags = f"--num-layers 1 --fp8-recipe {recipe} --hidden-size 256 --ffn-hidden-size 256 --bf16"
    losses, _ = reference(flags)
    for found, _ in on_all_ranks(flags, layout):
        assert found == pytest.approx(losses, rel=1e-3)


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
