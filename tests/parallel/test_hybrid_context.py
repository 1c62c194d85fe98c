# SPDX-License-Identifier: Apache-2.0
"""Dynamic context parallelism: conversations on as many ranks as they need are the run of one process, which packs them
into sequences of one length; and what the flags choose."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.training.flags.read import read_run_config
from megatron.training.loop import train
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.verify.comparison import compare, find_largest_differences
from megatron.training.verify.parity import RankTrace, Trace, join, open_local_run, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.checkpoint_contents import assert_bit_equal, saved
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import COMMON, OPTIONS, STYLES, own_rank
from tests.unit.datasets.test_sft_dataset import Letters, conversation, write

ITERATIONS = 3
BASE = COMMON.replace("--mock-data", "").replace("--vocab-size 125", "--vocab-size 128") + (
    " --seq-length 48 --max-position-embeddings 48 --global-batch-size 4 --micro-batch-size 1 --num-layers 2 --sft"
    " --split 1,0,0 --calculate-per-token-loss --log-interval 1"
)
HYBRID = "--hybrid-context-parallel,--max-seqlen-per-dp-cp-rank="
ALLTOALL = "--moe-token-dispatcher-type=alltoall"
MODELS = STYLES | {
    "latent": OPTIONS["latent"],
    "experts": """--swiglu --disable-bias-linear --ffn-hidden-size 48 --num-experts 4 --moe-ffn-hidden-size 24
        --moe-router-load-balancing-type none --moe-shared-expert-intermediate-size 24""",
}
# (style, layout, the numbers of ranks that its microbatches have)
LAYOUTS = [
    ("gpt2", f"dp4,{HYBRID}12", {1, 2, 4}),
    ("gpt2", f"tp2,sp,dp2,{HYBRID}24,dist-opt,overlap-all", {1, 2}),
    ("llama", f"cp2,dp2,{HYBRID}12,dist-opt,--cp-comm-type a2a all_gather", {1, 2, 4}),
]
LAYOUTS += [("experts", f"dp4,ep2,{HYBRID}12,dist-opt,{ALLTOALL}", {1, 2, 4})]
if os.environ.get("MEGATRON_ALL_LAYOUTS"):
    LAYOUTS += [
        ("llama", f"dp4,fsdp2,{HYBRID}12", {1, 2, 4}),
        ("experts", f"dp4,ep4,fsdp2,{HYBRID}12,{ALLTOALL}", {1, 2, 4}),
        ("experts", f"tp2,sp,cp2,ep2,etp1,{HYBRID}24", {1, 2}),
        ("experts", f"tp2,cp2,ep4,etp1,{HYBRID}24,{ALLTOALL}", {1, 2}),
        ("experts", f"dp4,{HYBRID}12,overlap", {1, 2, 4}),
        ("latent", f"tp2,sp,dp2,{HYBRID}24,dist-opt", {1, 2}),
        ("llama", f"dp4,{HYBRID}24,overlap", {1, 2}),
        ("llama", f"tp2,sp,cp2,{HYBRID}24,--tp-comm-overlap", {1, 2}),
        ("gpt2", f"tp2,dp4,{HYBRID}12,dist-opt", {1, 2, 4}),
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of conversations with 9 to 48 tokens, many of them short."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    conversations = [
        conversation("q" * (i % 4), letters[: 26 if i % 7 == 0 else 1 + i % 11], *["m", letters[:3]] * (i % 7 == 0))
        for i in range(60)
    ]
    return f"--data-path {write(tmp_path_factory.mktemp('sft') / 'chat.jsonl', conversations)}"


def training(flags: str, layout_text: str) -> Any:
    """Settings and recipe of the run under a layout; flags given later win."""
    layout = parse_layout(layout_text)
    padding = f"--make-vocab-size-divisible-by {128 // layout.sizes['tp']}"
    argv = [*f"{BASE} {padding} {flags}".split(), *layout.flags]
    config = read_run_config(argv, {"WORLD_SIZE": str(layout.world_size)})
    return config, build_gpt_recipe(config, Letters())


def share_and_microbatches(flags: str, layout: str) -> tuple[RankTrace, list[tuple[int, int]]]:
    """One rank's part of the run, and (tokens on this rank, ranks that share them) of its microbatches."""
    config, recipe = training(flags, layout)
    microbatches = []

    def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> Any:
        batch = next(batches)
        ranks = int(batch.get("local_cp_size", 1))
        microbatches.append((batch["tokens"].shape[1] // ranks, ranks))
        return recipe.forward_step(iter([batch]), model)

    recording = dataclasses.replace(recipe, forward_step=forward_step)
    return trace_rank(config, recording, rank=own_rank(config), iterations=ITERATIONS), microbatches


@functools.cache
def reference(flags: str) -> Trace:
    share, microbatches = share_and_microbatches(flags, "1")
    assert microbatches == [(48, 1)] * 4 * ITERATIONS
    return join([share])


@pytest.mark.flags("--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank")
@pytest.mark.parametrize(("style", "layout", "sizes"), LAYOUTS)
def test_it_is_the_run_of_one_process(style: str, layout: str, sizes: set[int], data: str) -> None:
    """Which packs the same conversations into sequences of one length."""
    flags = f"{MODELS[style]} {data}"
    world = parse_layout(layout).world_size
    shares, microbatches = zip(*run_distributed(share_and_microbatches, world, flags, layout, timeout=240), strict=True)
    trace = join(shares)
    print(f"{style} {layout}:", {k: f"{v:.1e}" for k, v in find_largest_differences(reference(flags), trace).items()})
    assert compare(reference(flags), trace) == []
    assert {ranks for own in microbatches for _, ranks in own} == sizes
    assert max(tokens for own in microbatches for tokens, _ in own) <= 48 // max(sizes)


# ---- from start to end


def train_on(flags: str, layout: str) -> None:
    config, recipe = training(flags, layout)
    with open_local_run(config, recipe, own_rank(config)) as run:
        train(run)


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_resume_and_balance(data: str, tmp_path: Path) -> None:
    """With dropout, interrupted after two of four iterations and evaluated there."""
    flags = f"{data} --split 3,1,0 --lr-decay-iters 4 --lr-warmup-iters 1 --save-interval 100"
    evaluated = f"{flags} --eval-interval 2 --eval-iters 1"
    dropping, layout = f"{evaluated} --hidden-dropout 0.1 --attention-dropout 0.1", f"dp2,{HYBRID}24,dist-opt"
    run_distributed(train_on, 2, f"{dropping} --save {tmp_path}/whole --train-iters 4 --metrics-dir {tmp_path}", layout)
    for iterations in (2, 4):
        parts = f"--save {tmp_path}/parts --load {tmp_path}/parts --train-iters {iterations}"
        run_distributed(train_on, 2, f"{dropping} {parts} --metrics-dir {tmp_path}/parts", layout)
    assert_bit_equal(saved(tmp_path / "whole", 4), saved(tmp_path / "parts", 4))
    steps = [row for row in rows(tmp_path) if "lm loss" in row]
    assert [row["lm loss"] for row in rows(tmp_path / "parts") if "lm loss" in row] == [s["lm loss"] for s in steps]
    assert len(steps) == 4 and len(rows(tmp_path)) > 4
    for step in steps:
        assert 0.9 < step["work-balance"] <= 1 and 0.5 < step["work-balance static"] <= 1
