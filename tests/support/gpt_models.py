# SPDX-License-Identifier: Apache-2.0
"""Tiny GPT models built from command lines, so that a test fails wherever on its way a flag is dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_model

VOCAB_SIZE = 64
SEQUENCE_LENGTH = 16
_SIZES = {
    "--num-layers": "2",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": str(SEQUENCE_LENGTH),
    "--max-position-embeddings": str(SEQUENCE_LENGTH),
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
}
_RUN = "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 63"


def read_config(flags: str = "") -> RunConfig:
    """The settings of a tiny run with these flags; a size given in `flags` replaces the usual one."""
    given = flags.split()
    sized = {word.partition("=")[0] for word in given}
    # The letters of a hybrid say how many layers it has.
    sized |= {"--num-layers"} if "--hybrid-layer-pattern" in sized else set()
    sizes = [word for flag, value in _SIZES.items() if flag not in sized for word in (flag, value)]
    return read_run_config([*sizes, *_RUN.split(), *given], {})


def build_model(flags: str = "") -> GPTModel:
    """The tiny model of `read_config`, with its initial weights."""
    return build_gpt_model(read_config(flags), VOCAB_SIZE)


def first_layer(model: GPTModel) -> TransformerLayer:
    """The model's first layer."""
    layer = model.decoder.layers[0]
    assert isinstance(layer, TransformerLayer)
    return layer


def first_attention(model: GPTModel) -> SelfAttention:
    """The first layer's attention."""
    return first_layer(model).self_attention


def first_mlp(model: GPTModel) -> MLP:
    """The first layer's MLP."""
    return first_layer(model).mlp


def token_batch(batch: int = 2, length: int = SEQUENCE_LENGTH, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(input_ids, position_ids, labels), each [b, s]."""
    ids = torch.randint(VOCAB_SIZE, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], torch.arange(length).expand(batch, -1), ids[:, 1:]


def losses_and_grads(model: GPTModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of every token of the batch [b, s], and the gradient of their mean for every parameter."""
    ids, positions, labels = token_batch()
    losses = model(ids, positions, labels=labels)
    model.zero_grad()
    losses.mean().backward()
    return losses.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


def assert_same_function(model: GPTModel, other: GPTModel, tolerance: float = 1e-5) -> None:
    """Same losses and same gradients on the batch, from the weights of `model`."""
    other.load_state_dict(model.state_dict())
    losses, grads = losses_and_grads(model)
    other_losses, other_grads = losses_and_grads(other)
    torch.testing.assert_close(other_losses, losses, rtol=tolerance, atol=tolerance)
    assert other_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(
            other_grads[name], grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
