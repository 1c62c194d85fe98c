# SPDX-License-Identifier: Apache-2.0
"""Tiny training runs under a layout, for the tests of pipelines."""

from __future__ import annotations

import os

import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.initialize import Process, build_rank_grid
from megatron.training.launch.launch import Launch
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.recipes.recipe import Recipe
from megatron.training.run import Run
from megatron.training.setup import setup
from megatron.training.verify.parity import RankTrace, trace_rank
from megatron.training.verify.parity_layouts import parse_layout

ITERATIONS = 3
COMMON = """
    --num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 3 --clip-grad 1.0 --adam-eps 1e-6
    --hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 30
    --make-vocab-size-divisible-by 32 --eval-iters 0 --num-workers 0
"""
STYLES = {
    "tied": "",
    "untied": """--position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 24
        --disable-bias-linear --untie-embeddings-and-output-weights""",
}


def share(style: str, text: str) -> RankTrace:
    """This process's part of three iterations; all of them where the layout is one process."""
    config, recipe = _read(style, text)
    return trace_rank(config, recipe, rank=_rank(), iterations=ITERATIONS)


def prepared_run(style: str, text: str) -> Run:
    """A run before its first step."""
    config, recipe = _read(style, text)
    groups = ProcessGroupCollection.build(build_rank_grid(config, config.world_size), _rank())
    launch = Launch(rank=_rank(), world_size=config.world_size, local_rank=_rank())
    return setup(config, Process(launch, torch.device("cpu"), groups), recipe)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _read(style: str, text: str) -> tuple[RunConfig, Recipe]:
    layout = parse_layout(text)
    argv = [*COMMON.split(), *STYLES[style].split(), *layout.flags]
    config = read_run_config(argv, {"WORLD_SIZE": str(layout.world_size)})
    recipe = build_gpt_recipe(config)
    return config, recipe
