# SPDX-License-Identifier: Apache-2.0
"""From our format to one of upstream's under any layout and back again: the same weights and optimizer state, bit for
bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.upstream_dist import FLAT_KEY
from tests.parallel.checkpoint_contents import assert_bit_equal, saved
from tests.parallel.small_training import EXPERTS, STYLES
from tests.parallel.test_layout_checkpoints import run_on

STEPS = "--train-iters 2 --lr-warmup-iters 1 --save-interval 100"
ROUND_TRIPS = [
    ("upstream_torch_dist", "llama", "tp2,pp2", "1"),
    ("upstream_torch_dist", "moe", "tp2,sp,ep2,dp2", "1"),
    ("upstream_torch_dist", "moe", "tp2,sp,ep2,dp2,dist-opt", "1"),
    ("upstream_torch_dist", "gpt2", "pp2,vpp2,dp2,dist-opt,--bf16,--micro-batch-size=1", "dp3,dist-opt,--bf16"),
    ("torch", "gpt2", "pp2,vpp2", "1"),
    ("torch", "moe", "tp2,sp,ep2,dp2", "1"),
    ("torch", "gpt2", "dp2,dist-opt,--bf16", "dp2,--bf16"),
    ("torch", "llama", "dp3,fsdp2", "1"),
]
if os.environ.get("MEGATRON_ALL_LAYOUTS"):
    ROUND_TRIPS += [
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
    flags = f"{(STYLES | EXPERTS)[style]} {STEPS}"
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
