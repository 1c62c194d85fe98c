# SPDX-License-Identifier: Apache-2.0
"""pretrain() as a user's script calls it, and what pretrain_gpt.py itself brings: batch to loss."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
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
from tests.support.tiny_training import FLAGS, RandomTokens


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
    assert run.config.model.seed == 77
    assert run.config.extra["my_flag"] == 5


def test_what_pretrain_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="get_embedding_ranks"):
        megatron.training.pretrain(
            datasets_provider,
            model_provider,
            ModelType.encoder_or_decoder,
            pretrain_gpt.forward_step,
            get_embedding_ranks=lambda _: [0],  # type: ignore[arg-type]
        )


def run_as_upstream(monkeypatch: pytest.MonkeyPatch, *flags: str | Path, **named: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["my_script.py", *FLAGS.split(), "--train-iters", "2", *map(str, flags)])
    functions = (datasets_provider, model_provider, ModelType.encoder_or_decoder)
    megatron.training.pretrain(*functions, named.pop("forward_step", pretrain_gpt.forward_step), **named)


def test_globals_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def forward_step(batches: Any, model: Any) -> Any:
        args = megatron.training.get_args()
        args.steps = getattr(args, "steps", 0) + 1
        seen.append((args.steps, args.train_iters, args.padded_vocab_size, args.rank, args.my_flag))
        with megatron.training.get_timers()("my-part", log_level=1):
            assert megatron.training.get_tokenizer().vocab_size == 50
        return pretrain_gpt.forward_step(batches, model)

    def extra(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-flag", type=int, default=3)
        return parser

    flags = ("--timing-log-level", "1", "--log-interval", "2")
    run_as_upstream(monkeypatch, *flags, forward_step=forward_step, extra_args_provider=extra)
    assert seen == [(step, 2, 64, 0, 3) for step in range(1, 5)], "two steps of two microbatches"
    assert "my-part" in capsys.readouterr().out
    for name in ("get_args", "get_timers", "get_tokenizer"):
        with pytest.raises(RuntimeError, match="outside of a run"):
            getattr(megatron.training, name)()


def test_data_that_are_no_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def forward_step(batches: Any, model: Any) -> Any:
        output, usual = pretrain_gpt.forward_step(batches, model)
        return output, lambda out, non_loss_data=False: out.shape if non_loss_data else usual(out)

    given: list[Any] = []

    def process(data: Any, iteration: int, writer: Any) -> None:
        writer.add_scalar("mine", len(data), iteration)
        given.append((data, iteration))

    flags = ("--eval-interval", "1", "--eval-iters", "1", "--train-iters", "1")
    run_as_upstream(monkeypatch, *flags, forward_step=forward_step, process_non_loss_data_func=process)
    assert given == [], "as upstream, nothing without --tensorboard-dir"
    flags += ("--tensorboard-dir", str(tmp_path))
    run_as_upstream(monkeypatch, *flags, forward_step=forward_step, process_non_loss_data_func=process)
    assert given == [([(2, 16), (2, 16)], 1)] * 3, "evaluation at the interval, at the end, and of the test data"
    given.clear()
    run_as_upstream(
        monkeypatch, *flags, process_non_loss_data_func=process, non_loss_data_func=lambda model: [len(model)]
    )
    assert given == [([1], 1)] * 3


def test_an_operation_that_is_not_deterministic_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_step(batches: Any, model: Any) -> Any:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        return pretrain_gpt.forward_step(batches, model)

    run_as_upstream(monkeypatch, forward_step=forward_step)
    try:
        with pytest.raises(ConfigError, match="--deterministic-mode: put_"):
            run_as_upstream(monkeypatch, "--deterministic-mode", forward_step=forward_step)
    finally:
        torch.use_deterministic_algorithms(False)


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
