"""pretrain() as a user's script calls it, and what pretrain_gpt.py itself brings: batch to loss."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pytest
import torch

import megatron.training
import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit.tiny_training import FLAGS, RandomTokens


def model_provider(pre_process: bool = True, post_process: bool = True) -> GPTModel:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)


def datasets_provider(num_samples: tuple[int, int, int]) -> list[Any]:
    return [RandomTokens(count) if count else None for count in num_samples]


def test_pretrain_reads_the_command_line_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def extra(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-flag", type=int, default=3)
        return parser

    monkeypatch.setattr(sys, "argv", ["my_script.py", *FLAGS.split(), "--my-flag", "5", "--train-iters", "2"])
    run = megatron.training.pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        extra_args_provider=extra,
        args_defaults={"train_iters": 9, "seed": 77},
    )
    assert run.progress.iteration == 2, "the command line wins over args_defaults"
    assert run.config.rng.seed == 77
    assert run.config.extra["my_flag"] == 5


def test_what_pretrain_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="process_non_loss_data_func"):
        megatron.training.pretrain(
            datasets_provider, model_provider, ModelType.encoder_or_decoder, pretrain_gpt.forward_step, lambda *_: None
        )


def test_loss_is_summed_over_the_tokens_that_count() -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    output = torch.tensor([[1.0, 100.0], [2.0, 4.0]], requires_grad=True)
    loss, num_tokens, reported = pretrain_gpt.loss_func(mask, output)
    assert (loss.item(), num_tokens.item()) == (7.0, 3.0)
    assert reported["lm loss"].tolist() == [7.0, 3.0]
    assert not reported["lm loss"].requires_grad
    loss.backward()
    assert output.grad is not None and output.grad.tolist() == [[1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("with_mask", [True, False])
def test_the_model_gets_what_the_loader_made(with_mask: bool) -> None:
    given: list[Any] = []

    def model(*inputs: Any, **named: Any) -> torch.Tensor:
        given.append((inputs, named))
        return torch.zeros(1, 4)

    model.groups = ProcessGroupCollection.single()  # type: ignore[attr-defined]
    batch = {name: torch.full((1, 4), value) for value, name in enumerate(("tokens", "position_ids", "labels"))}
    batch["loss_mask"] = torch.ones(1, 4)
    if with_mask:
        batch["attention_mask"] = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    pretrain_gpt.forward_step(iter([batch]), model)  # type: ignore[arg-type]
    (tokens, position_ids, attention_mask), named = given[0]
    assert tokens is batch["tokens"]
    assert position_ids is batch["position_ids"]
    assert attention_mask is batch.get("attention_mask")
    assert named["labels"] is batch["labels"]
