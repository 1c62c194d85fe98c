# SPDX-License-Identifier: Apache-2.0
"""A training run small enough for a unit test: the real setup, loop and hooks, random tokens instead of a dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.training.flags.read import read_run_config
from megatron.training.launch.initialize import initialize, shut_down
from megatron.training.loop import train
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.run import Run
from megatron.training.setup import setup

SEQUENCE, VOCABULARY = 16, 50

FLAGS = f"""
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length {SEQUENCE}
    --max-position-embeddings {SEQUENCE} --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 6
    --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 16
    --eval-iters 0 --log-interval 100 --num-workers 0 --hidden-dropout 0.1 --attention-dropout 0.1
"""


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sample i is a function of i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(index))
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(SEQUENCE),
            "position_ids": torch.arange(SEQUENCE),
        }


def prepare(*flags: str | Path, **recipe_parts: Any) -> Run:
    """Everything up to the first step, loading included; recipe_parts replace those of the GPT recipe."""
    config = read_run_config([*FLAGS.split(), *map(str, flags)], {})
    parts = {"build_datasets": lambda counts: [RandomTokens(n) if n else None for n in counts]} | recipe_parts
    return setup(config, initialize(config), dataclasses.replace(build_gpt_recipe(config), **parts))


def replace_forward_step(run: Run, forward_step: Any) -> None:
    """Let the run call this one from now on."""
    run.recipe = dataclasses.replace(run.recipe, forward_step=forward_step)


def note_losses(run: Run) -> list[float]:
    """The language model's loss of each step that the run takes from now on."""
    losses: list[float] = []
    record = run.metrics.record_losses

    def note(found: dict[str, torch.Tensor]) -> None:
        losses.append(found["lm loss"].item())
        record(found)

    run.metrics.record_losses = note  # type: ignore[assignment, method-assign]
    return losses


def finish(run: Run) -> Run:
    """Train to the end."""
    try:
        train(run)
    finally:
        run.hooks.on_close(run)
        run.data.close()
        shut_down()
    return run


def train_tiny(*flags: str | Path) -> Run:
    """The whole run."""
    return finish(prepare(*flags))


def values(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that must come back on resume, by name: weights, optimizer state."""
    for chunk in run.model:
        for name, parameter in chunk.module.named_parameters():
            yield name, parameter.detach().clone()
    for name, tensors in run.optimizer.named_state().items():
        for kind, tensor in tensors.items():
            yield f"{kind} of {name}", tensor.clone()
    for name, tensors in run.optimizer.whole_state().items():
        for kind, tensor in tensors.items():
            yield f"{kind} of {name}", tensor.clone()


def differing(first: Run, second: Run) -> list[str]:
    """Names of tensors that are not bit-identical."""
    theirs = dict(values(second))
    return [name for name, tensor in values(first) if not torch.equal(tensor, theirs[name])]
