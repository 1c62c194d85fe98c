# SPDX-License-Identifier: Apache-2.0
"""A run saved under one layout goes on under another, with the same weights and optimizer state, bit for bit; under its
own layout it is the uninterrupted run, dropout included."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import shard_files
from megatron.core.placement import get_placement
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.checkpoint.trained_model import load_trained_model
from megatron.training.loop import train
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.checkpoint_contents import assert_bit_equal, saved
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, OPTIONS, STYLES, own_rank, training
from tests.support.tiny_training import values

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
TWO_COPIES = "--num-distributed-optimizer-instances=2,--micro-batch-size=1"
MOVES = [
    ("llama", "tp2", ["1", "dp2,dist-opt", "tp4"]),
    ("gpt2", "pp2", ["1", "tp2,sp", "pp2,vpp2"]),
    ("llama", "dp3,fsdp2", ["1", "tp2"]),
    ("gpt2", f"dp4,fsdp2,{TWO_COPIES}", ["dp3,fsdp2"]),
    ("gpt2", "pp2,dp2,fsdp2", ["1"]),
    ("latent", "tp2,sp", ["1", "dp2,dist-opt"]),
    ("deepseek", f"dp4,ep2,fsdp2,{TWO_COPIES}", ["1", f"tp2,sp,dp2,etp1,dist-opt,{TWO_COPIES}"]),
]
if os.environ.get("MEGATRON_ALL_LAYOUTS"):
    MOVES += [
        ("deepseek", "dp2,ep2,dist-opt", ["dp3,fsdp2", "tp2,dp2,ep4,etp1,fsdp2", "dp2,ep2,fsdp2"]),
        ("llama", "dp3,dist-opt", ["pp2,dp2,fsdp2", "pp2,vpp2,dp2,fsdp2,--micro-batch-size=1"]),
        ("gpt2", "1", ["tp2", "pp4", "dp3,dist-opt"]),
        ("gpt2", "dp2,dist-opt", ["dp3,fsdp2", "tp2,dp2,fsdp2"]),
        ("llama", "tp4", ["tp2,sp,dp2", "dp3"]),
        ("latent", "pp2,--pipeline-schedule=zb-v", ["tp4", "dp3,fsdp2", "tp2,pp2"]),
        ("llama", "tp2,pp2,dp2,dist-opt", ["1", "tp4", "pp2,vpp2"]),
        ("gpt2", "tp2,sp,pp2,vpp2,dp2,dist-opt,--micro-batch-size=1", ["dp2", "pp2,--pipeline-schedule=zb-v"]),
    ]


def train_on(flags: str, layout: str) -> list[float]:
    """Go on from where --load is, or start, to --train-iters, and save; the gradient norms on the way."""
    config, recipe = training(flags, layout)
    norms = []
    with open_local_run(config, recipe, own_rank(config)) as run:
        update = run.optimizer.step

        def recorded() -> Any:
            result = update()
            norms.append(float(result.grad_norm))
            return result

        run.optimizer.step = recorded  # type: ignore[method-assign]
        train(run)
        if not norms:  # what was loaded is not saved again by itself
            save_checkpoint(run)
        assert run.optimizer.step_count == config.training.train_iters
    return norms


def run_on(layout: str, flags: str) -> list[float]:
    """The same on all processes that the layout takes."""
    processes = parse_layout(layout).world_size
    return train_on(flags, layout) if processes == 1 else run_distributed(train_on, processes, flags, layout)[0]


@pytest.mark.parametrize(("style", "saved_on", "loaded_on"), MOVES, ids=str)
def test_L8_R24_from_one_layout_to_others(style: str, saved_on: str, loaded_on: list[str], tmp_path: Path) -> None:
    flags = f"{(STYLES | OPTIONS)[style]} --train-iters 2 --lr-warmup-iters 1 --save-interval 100"
    assert len(run_on(saved_on, f"{flags} --save {tmp_path}/first")) == 2
    for number, layout in enumerate(loaded_on):
        norms = run_on(layout, f"{flags} --load {tmp_path}/first --save {tmp_path}/{number}")
        assert norms == [], "nothing was left to train"
        assert_bit_equal(saved(tmp_path / "first", 2), saved(tmp_path / str(number), 2))


def load_on(flags: str, layout: str) -> list[tuple[dict[str, torch.Tensor], int]]:
    """All that this rank has after loading, and how many bytes of tensors it read: by itself, and by shares."""
    results = []
    counts: list[int] = []
    read = shard_files._read_exactly

    def counting(file: io.FileIO, position: int, memory: torch.Tensor) -> None:
        counts.append(len(memory))
        read(file, position, memory)

    shard_files._read_exactly = counting
    for more in ("", "--ckpt-fully-parallel-load"):
        counts.clear()
        config, recipe = training(f"{flags} {more}", layout)
        with open_local_run(config, recipe, own_rank(config)) as run:
            assert run.optimizer.step_count == 2
            results.append((dict(values(run)), sum(counts)))
    return results


@pytest.mark.flags("--ckpt-fully-parallel-load")
@pytest.mark.parametrize(
    ("style", "layout", "most"), [("moe", "tp2,ep2,dp2", 0.8), ("gpt2", "pp2,cp2,dist-opt", 0.95)], ids=str
)
def test_L8_replicas_that_share_the_reading_have_the_same(style: str, layout: str, most: float, tmp_path: Path) -> None:
    flags = f"{(STYLES | EXPERTS)[style]} --train-iters 2 --lr-warmup-iters 1 --save-interval 100"
    run_on("1", f"{flags} --save {tmp_path}")
    ranks = run_distributed(load_on, 4, f"{flags} --load {tmp_path}", layout)
    for (alone, _), (shared, _) in ranks:
        assert alone.keys() == shared.keys() and all(torch.equal(alone[name], shared[name]) for name in alone)
    alone_bytes, shared_bytes = (sum(rank[way][1] for rank in ranks) for way in (0, 1))
    assert shared_bytes < most * alone_bytes


TRAINED_ON = (
    "pp2,vpp2",
    "pp2,--pipeline-schedule=zb-v",
    "pp2,--pipeline-model-parallel-layout=Et|t|t|tL",
    "tp2,sp,--tp-comm-overlap",
)


@pytest.mark.parametrize("layout", TRAINED_ON)
def test_a_trained_model_has_no_layout(layout: str, tmp_path: Path) -> None:
    """Whatever pipeline or communication a checkpoint's run had, the model is loaded whole on one process."""
    flags = f"{STYLES['gpt2']} --num-layers 4 --train-iters 2 --lr-warmup-iters 1 --save-interval 100"
    run_on(layout, f"{flags} --save {tmp_path}")
    trained = load_trained_model(tmp_path)
    weights = saved(tmp_path, 2)
    found = {get_placement(p, name).name: p.detach() for name, p in trained.model.named_parameters()}
    assert len(found) > 4 * 8 and trained.config.model.num_layers == 4
    for name, weight in found.items():
        assert torch.equal(weight, weights[name]), name


RESUMED = ["tp2,sp,pp2", "dp2,fsdp2"] + (
    ["tp2,pp2", "tp2,sp,pp2,vpp2,dp2,dist-opt,--micro-batch-size=1"] if os.environ.get("MEGATRON_ALL_LAYOUTS") else []
)


@pytest.mark.parametrize("layout", RESUMED)
def test_resume_is_the_uninterrupted_run(layout: str, tmp_path: Path) -> None:
    flags = f"{STYLES['gpt2']} {DROPOUT} --lr-decay-iters 4 --lr-warmup-iters 1 --save-interval 100"
    norms = run_on(layout, f"{flags} --save {tmp_path}/whole --train-iters 4")
    checkpoints = f"--save {tmp_path}/parts --load {tmp_path}/parts"
    first = run_on(layout, f"{flags} {checkpoints} --train-iters 2")
    second = run_on(layout, f"{flags} {checkpoints} --train-iters 4")
    assert first + second == norms and len(norms) == 4
    assert_bit_equal(saved(tmp_path / "whole", 4), saved(tmp_path / "parts", 4))
