# SPDX-License-Identifier: Apache-2.0
"""The trainer knows no kind of model: what depends on it comes from the recipe."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.training.flags.read import read_run_config
from megatron.training.launch.initialize import initialize, shut_down
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.recipes.recipe import Recipe
from megatron.training.run import Hook, Run
from megatron.training.setup import setup
from tests.support.source_code import Source, parse, sources
from tests.support.tiny_training import FLAGS, RandomTokens, finish, prepare
from tests.unit.house.test_architecture import loaded_by

MAY_NAME_GPT = tuple(f"megatron/training/{room}/" for room in ("recipes", "config", "flags", "upstream"))
"""The recipes, where GPT's flags are declared, and upstream's names."""


def names_of_gpt(source: Source) -> list[str]:
    """Imports, variables and attributes of GPT in the code; words in documentation do not count."""
    found = [f"{source.relative}:{i.line}" for i in source.imports() if "gpt" in f"{i.target} {i.name}".lower()]
    for node in ast.walk(source.tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if "gpt" in name.lower():
            found.append(f"{source.relative}:{node.lineno}")
    return found


def test_the_trainer_does_not_know_gpt() -> None:
    files = [source for source in sources("megatron/training") if not source.relative.startswith(MAY_NAME_GPT)]
    assert [place for source in files for place in names_of_gpt(source)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from megatron.core.models.gpt.gpt_model import GPTModel",
        "x = config.gpt.spec",
        "def f():\n    import pretrain_gpt",
    ],
)
def test_gpt_in_the_trainer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr("tests.support.source_code.ROOT", tmp_path)
    file = tmp_path / "step.py"
    file.write_text(f'"""GPT is a word."""\n{line}\n')
    assert len(names_of_gpt(parse(file))) == 1


def test_flags_and_families_load_neither_torch_nor_numpy() -> None:
    modules = ["pretrain_gpt", "megatron.training.recipes.gpt", "megatron.training.recipes.families"]
    assert loaded_by(modules) == {module: [] for module in modules}


class Bigrams(torch.nn.Module):
    """The next token from the last one alone: a table of logits."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.logits = torch.nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: torch.Tensor, *_: Any, labels: torch.Tensor, **__: Any) -> torch.Tensor:
        """int64 [b, s] -> loss of each token [b, s]."""
        logits = self.logits(tokens).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)


def bigrams(gpt: Recipe) -> Recipe:
    return dataclasses.replace(gpt, build_model=lambda **_: Bigrams(gpt.padded_vocab_size), parallel_axes=())


def test_throughput_of_a_model_that_nobody_has_counted_is_not_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare("--train-iters", "1", "--log-interval", "1", build_model=lambda **_: Bigrams(64))
    assert run.flops_per_token is None
    finish(run)
    assert "throughput per GPU (TFLOP/s/GPU): n/a | MFU (%): n/a" in capsys.readouterr().out


def test_operations_of_gpt_are_counted_once_for_the_run() -> None:
    run = prepare()
    layers = 2 * (4 * 16 * 16 + 2 * 16 * 64) + 64 * 16
    assert run.flops_per_token == 6 * (layers + 2 * 2 * 16 * 16 // 2)
    run.data.close()


def test_an_axis_that_the_model_cannot_be_divided_over_is_refused() -> None:
    config = read_run_config(FLAGS.split(), {})
    model = dataclasses.replace(config.model, tensor_model_parallel_size=2)
    config = dataclasses.replace(config, model=model, world_size=2)
    gpt = build_gpt_recipe(config)
    gpt.check_layout(config.model)
    with pytest.raises(ConfigError, match="cannot be divided: --tensor-model-parallel-size is 2; leave it at 1"):
        bigrams(gpt).check_layout(config.model)


class Noting(Hook):
    def __init__(self) -> None:
        self.moments: list[str] = []

    def on_gradients(self, run: Run) -> None:
        self.moments.append(f"gradients of step {run.progress.iteration + 1}")


def test_hooks_of_ones_own_are_called_too() -> None:
    config = read_run_config([*FLAGS.split(), "--train-iters", "2"], {})
    noting = Noting()
    data = {"build_datasets": lambda counts: [RandomTokens(n) if n else None for n in counts]}
    recipe = dataclasses.replace(bigrams(build_gpt_recipe(config)), **data)
    try:
        finish(setup(config, initialize(config), recipe, [noting]))
    finally:
        shut_down()
    assert noting.moments == ["gradients of step 1", "gradients of step 2"]
