# SPDX-License-Identifier: Apache-2.0
"""From our format to one of upstream's under any layout and back again: the same weights and optimizer state, bit for
bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.upstream_checkpoints.names import FLAT_KEY, name_upstream
from tests.parallel.checkpoint_contents import assert_bit_equal, saved
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, OPTIONS, STYLES
from tests.parallel.test_layout_checkpoints import run_on
from tests.support.tiny_training import prepare, values
from tests.unit.upstream_checkpoints.test_upstream_formats import GATED, draw

STEPS = "--train-iters 2 --lr-warmup-iters 1 --save-interval 100"
# The letters that upstream knows, too, once with attention and an MLP behind them, and with further tokens; and layers
# of different shapes.
LETTERS = {"letters": OPTIONS["states"].replace("MGK*/M-/M-", "MG*-/M-/M-"), "shapes": OPTIONS["shapes"]}
ROUND_TRIPS = [
    ("upstream_torch_dist", "llama", "tp2,pp2", "1"),
    ("upstream_torch_dist", "moe", "tp2,sp,ep2,dp2", "1"),
    ("upstream_torch_dist", "moe", "tp2,sp,ep2,dp2,dist-opt", "1"),
    ("upstream_torch_dist", "gpt2", "pp2,vpp2,dp2,dist-opt,--bf16,--micro-batch-size=1", "dp3,dist-opt,--bf16"),
    ("upstream_torch_dist", "letters", "tp2,pp2,dp2,dist-opt", "1"),
    ("upstream_torch_dist", "shapes", "tp2,pp2", "1"),
    ("torch", "shapes", "tp2", "1"),
    ("torch", "letters", "tp2,pp2", "tp2,sp"),
    ("torch", "gpt2", "pp2,vpp2", "1"),
    ("torch", "moe", "tp2,sp,ep2,dp2", "1"),
    ("torch", "gpt2", "dp2,dist-opt,--bf16", "dp2,--bf16"),
    ("torch", "llama", "dp3,fsdp2", "1"),
]
if os.environ.get("MEGATRON_ALL_LAYOUTS"):
    ROUND_TRIPS += [
        ("upstream_torch_dist", "letters", "tp2,sp,dp2", "pp2"),
        ("upstream_torch_dist", "letters", "dp3,fsdp2", "tp2"),
        ("torch", "letters", "dp2,dist-opt,--bf16", "dp2,--bf16"),
        ("torch", "llama", "tp2,pp2", "1"),
        ("upstream_torch_dist", "gpt2", "pp2,vpp2", "1"),
        ("upstream_torch_dist", "gpt2", "dp2,dist-opt,--bf16,--dist-ckpt-optim-fully-reshardable", "dp2,--bf16"),
        ("upstream_torch_dist", "gpt2", "pp2,dp2,dist-opt,--pipeline-schedule=zb-v", "tp2"),
        ("upstream_torch_dist", "gpt2", "pp2,dp3,dist-opt", "1"),
        ("upstream_torch_dist", "llama", "dp3,dist-opt,--overlap-grad-reduce,--ddp-bucket-size=3000", "tp2"),
        ("upstream_torch_dist", "llama", "tp2,pp2,dp2,dist-opt,--transformer-impl=transformer_engine", "1"),
        ("upstream_torch_dist", "picky", "dp2,ep2,dist-opt,--fp16,--initial-loss-scale=256", "1,--fp16"),
        ("upstream_torch_dist", "gpt2", "pp2,--pipeline-schedule=zb-v", "tp2"),
        ("upstream_torch_dist", "moe", "pp2,ep2,dp2,dist-opt,--moe-layer-freq=[1]*2+[0]*2", "1"),
        ("upstream_torch_dist", "llama", "dp3,fsdp2", "1"),
        ("upstream_torch_dist", "picky", "dp2,ep2,--fp16,--initial-loss-scale=256", "1,--fp16"),
        ("upstream_torch_dist", "moe", "1,--transformer-impl=transformer_engine,--moe-grouped-gemm", "dp2,ep2"),
        ("upstream_torch_dist", "moe", "tp4,ep2,etp1,dp1,sp,--moe-layer-freq=1", "1,--moe-layer-freq=1"),
        ("torch", "picky", "dp2,ep2", "1"),
        ("torch", "picky", "dp2,ep2,--fp16,--initial-loss-scale=256", "1,--fp16"),
        ("torch", "moe", "1,--transformer-impl=transformer_engine,--moe-grouped-gemm", "dp2,ep2"),
        ("torch", "gpt2", "tp2,pp2,vpp2,--transformer-impl=transformer_engine", "1"),
        ("torch", "llama", "tp2", "pp2"),
        ("torch", "gpt2", "pp2", "tp2"),
        ("torch", "llama", "dp2,dist-opt,--fp16,--initial-loss-scale=256", "dp2,fsdp2,--fp16"),
        ("torch", "llama", "tp2,pp2,dp2,dist-opt", "tp4"),
    ]


@pytest.mark.flags("--ckpt-format")
@pytest.mark.parametrize(("file_format", "style", "layout", "back_on"), ROUND_TRIPS, ids=str)
def test_there_and_back(file_format: str, style: str, layout: str, back_on: str, tmp_path: Path) -> None:
    flags = f"{(STYLES | EXPERTS | LETTERS)[style]} {STEPS}"
    run_on(layout, f"{flags} --save {tmp_path}/first")
    there = f"--load {tmp_path}/first --save {tmp_path}/there --ckpt-format {file_format}"
    assert run_on(layout, f"{flags} {there}") == [], "nothing was left to train"
    if file_format == "upstream_torch_dist":
        table = read_metadata(tmp_path / "there" / "iter_0000002" / ".metadata").state_dict_metadata
        is_flat = "dist-opt" in layout and not any(part in layout for part in ("--dist-ckpt", "zb-v", "freq"))
        assert any(FLAT_KEY.fullmatch(key) for key in table) == is_flat
        assert any(key.startswith("optimizer.state.") for key in table) != is_flat
    assert run_on(back_on, f"{flags} --load {tmp_path}/there --save {tmp_path}/back") == []
    assert_bit_equal(saved(tmp_path / "first", 2), saved(tmp_path / "back", 2))


def save_sharded(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Weights under upstream's names, each in two parts, as modules that FSDP2 divides have them."""
    module = torch.nn.Module()
    module.weights = torch.nn.ParameterList(weights.values())
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    divided = dict(zip(map(name_upstream, weights), module.weights, strict=True))
    torch.distributed.checkpoint.save({"model": divided, "iteration": 2}, checkpoint_id=path)


def test_weights_that_fsdp2_divided(tmp_path: Path) -> None:
    """As upstream's torch_dcp has them; heights that two ranks do not divide evenly, too."""
    flags = (*GATED, "--bf16", "--make-vocab-size-divisible-by", "67")
    weights = draw(flags)[""]
    assert any(tensor.shape[0] % 2 for tensor in weights.values())
    run_distributed(save_sharded, 2, tmp_path / "iter_0000002", weights)
    found = dict(values(prepare(*flags, "--load", tmp_path, "--no-load-optim")))
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
