# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's model divided over processes, for programs that use it: the texts of one process, for every kind of
layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.core.errors import ConfigError
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.checkpoint.trained_model import load_trained_model, read_trained_config
from megatron.training.launch.initialize import build_rank_grid
from tests.parallel.harness import run_distributed
from tests.support.tiny_training import train_tiny

TP, PP, EP = ({f"{name}_model_parallel_size": 2} for name in ("tensor", "pipeline", "expert"))
ROPE = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 24"
STYLES = {
    "dense": "--untie-embeddings-and-output-weights",
    "windows": f"{ROPE} --window-size 3,0 --window-attn-skip-freq 2",
    "latent": f"{ROPE} --multi-latent-attention --kv-lora-rank 6 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 5",
    "experts": f"{ROPE} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24",
    "streams": f"{ROPE} --enable-hyper-connections --num-residual-streams 2",
    "hybrid": f"{ROPE} --num-layers 4 --hybrid-layer-pattern M-K* --mamba-num-heads 4 --mamba-head-dim 4 "
    "--mamba-num-groups 2 --mamba-state-dim 5 --linear-num-key-heads 2 --linear-num-value-heads 2 "
    "--linear-key-head-dim 4 --linear-value-head-dim 4",
}  # fmt: skip
LAYOUTS = {"experts": [EP, PP, {}], "hybrid": [TP, PP], "windows": [PP]}
PROMPTS = [[3, 4, 5], [7], [11, 2, 9, 9, 1, 30, 4]]


def train(root: Path, style: str) -> None:
    flags = [flag for flag in STYLES[style].split() if flag != "--num-layers" or style == "hybrid"]
    train_tiny("--save", root, "--save-interval", "2", "--train-iters", "2", "--lr-warmup-iters", "1", *flags)


def write(root: Path, layouts: list[dict[str, int]]) -> list[list[list[int]]]:
    """Texts in each layout."""
    found = []
    for layout in layouts:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        groups = None
        if ranks > 1:
            config = read_trained_config(root, layout=layout, ranks=ranks)
            groups = ProcessGroupCollection.build(build_rank_grid(config, ranks), dist.get_rank())
        trained = load_trained_model(root, layout=layout, groups=groups)
        done = generate(
            trained.model, PROMPTS, max_new_tokens=6, sampling=Sampling(greedy=True), vocab_size=trained.vocab_size
        )
        found.append([completion.tokens for completion in done])
    return found


@pytest.mark.parametrize("style", STYLES)
def test_texts_are_those_of_one_process(style: str, tmp_path: Path) -> None:
    train(tmp_path, style)
    layouts = LAYOUTS.get(style, [TP, PP])
    expected = write(tmp_path, [{}]) * len(layouts)
    assert run_distributed(write, 2, tmp_path, layouts) == [expected] * 2


def test_layouts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    train(tmp_path, "dense")
    for layout, ranks, words in (
        (TP, 1, "start it with torchrun --nproc_per_node 2"),
        (TP, 4, "use 2 of 4 processes"),
        ({}, 3, "--num-attention-heads 2 cannot be split over --tensor-model-parallel-size 3"),
        (EP, 2, "--expert-model-parallel-size 2"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_trained_config(tmp_path, layout=layout, ranks=ranks)
        assert words in str(caught.value), caught.value
