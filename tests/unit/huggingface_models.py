"""Our model against a tiny random Hugging Face model: mapped weights, same logits (float32, 1e-5).

Another family is one test in `test_model_families.py`:

    hf = randomised(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)))
    names = LLAMA | {
        "decoder.layers.{}.self_attention.q_layernorm.weight": "model.layers.{}.self_attn.q_norm.weight",
        "decoder.layers.{}.self_attention.k_layernorm.weight": "model.layers.{}.self_attn.k_norm.weight",
    }
    assert_same_logits(hf, f"{LLAMA_FLAGS} --qk-layernorm --kv-channels 8", names)

A name map has a row for every parameter of ours: its name, `{}` for the layer, and where its values come from, which is
the other model's name or a `Source` that joins several of its tensors. `names | {...}` replaces or adds rows,
`without(names, "bias")` leaves rows out. Nothing may be left over on either side, so that a forgotten bias is found.
`SIZES` and `SIZE_FLAGS` say the same shape in both languages; keep what a family changes beside each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.recipes.gpt import build_gpt_model
from tests.unit.gpt_models import read_config

VOCABULARY, LENGTH = 96, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
"""Arguments of a Hugging Face config; SIZE_FLAGS are the same in flags."""
SIZE_FLAGS = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --max-position-embeddings 64 --seq-length 24 --untie-embeddings-and-output-weights"
)
LLAMA_FLAGS = (
    f"{SIZE_FLAGS} --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu "
    "--disable-bias-linear"
)


@dataclass(frozen=True)
class Source:
    """Several tensors of the other model, joined into one of ours."""

    join: Callable[..., Tensor]
    """(config, *tensors) -> tensor."""
    names: tuple[str, ...]


NameMap = Mapping[str, "str | Source"]


def packed_qkv(config: TransformerConfig, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Queries, keys and values one below the other -> group by group; weights [rows, h] or biases [rows]."""
    groups, width = config.num_query_groups, config.kv_channels
    parts = [x.reshape(groups, -1, width, *x.shape[1:]) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def packed_qkv_of_one(config: TransformerConfig, packed: Tensor) -> Tensor:
    """The same from one tensor [all queries | all keys | all values] (Phi-3)."""
    keys = config.num_query_groups * config.kv_channels
    return packed_qkv(config, *packed.split([packed.shape[0] - 2 * keys, keys, keys]))


def stacked(config: TransformerConfig, *tensors: Tensor) -> Tensor:
    """One below the other: gate and up."""
    return torch.cat(tensors)


def qkv_from(pattern: str) -> Source:
    """From three projections; `pattern` has `{}` for the layer and `*` for q, k, v."""
    return Source(packed_qkv, tuple(pattern.replace("*", letter) for letter in "qkv"))


LLAMA: dict[str, str | Source] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.layers.{}.input_layernorm.weight": "model.layers.{}.input_layernorm.weight",
    "decoder.layers.{}.self_attention.linear_qkv.weight": qkv_from("model.layers.{}.self_attn.*_proj.weight"),
    "decoder.layers.{}.self_attention.linear_proj.weight": "model.layers.{}.self_attn.o_proj.weight",
    "decoder.layers.{}.pre_mlp_layernorm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "decoder.layers.{}.mlp.linear_fc1.weight": Source(
        stacked, ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight")
    ),
    "decoder.layers.{}.mlp.linear_fc2.weight": "model.layers.{}.mlp.down_proj.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Llama, Mistral, and what others start from."""


def without(names: NameMap, *parts: str) -> dict[str, str | Source]:
    """The rows whose name of ours contains none of these parts."""
    return {ours: theirs for ours, theirs in names.items() if not any(part in ours for part in parts)}


def randomised(model: nn.Module, seed: int = 1) -> nn.Module:
    """Weights so large that every part matters: matrices keep their input's size, vectors lie around their first
    value (1 for a norm, 0 for a bias)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(noise * param.shape[-1] ** -0.5 if param.dim() > 1 else param + 0.2 * noise)
    return model.eval()


def mapped_weights(names: NameMap, theirs: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Our state dict from theirs. Fails when a tensor of theirs is not used."""
    found, used = {}, set()
    for name, source in names.items():
        join, sources = (source.join, source.names) if isinstance(source, Source) else (None, (source,))
        for layer in range(config.num_layers if "{}" in name else 1):
            tensors = [theirs[each.format(layer)] for each in sources]
            used |= {each.format(layer) for each in sources}
            found[name.format(layer)] = tensors[0] if join is None else join(config, *tensors)
    unused = {name for name in theirs if name not in used and not re.search(r"rotary_emb|lm_head", name)}
    assert not unused, f"tensors that no row of the name map reads: {sorted(unused)}"
    return found


def converted(hf_model: nn.Module, flags: str, names: NameMap) -> GPTModel:
    """Our model of these flags with the weights of `hf_model`."""
    config = read_config(flags)
    model = build_gpt_model(config, hf_model.config.vocab_size)
    model.load_state_dict(mapped_weights(names, hf_model.state_dict(), config.model))
    return model.eval()


def token_ids(length: int = LENGTH) -> Tensor:
    """int64 [2, length]."""
    return torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def logits_of(model: GPTModel, ids: Tensor) -> Tensor:
    """[b, s, v]."""
    logits: Tensor = model(ids, torch.arange(ids.shape[1]).expand_as(ids))
    return logits


@torch.no_grad()
def assert_same_logits(
    hf_model: nn.Module, flags: str, names: NameMap, *, tolerance: float = 1e-5, length: int = LENGTH
) -> GPTModel:
    """Logits of every position of two sequences; returns our model. tolerance: of the largest logit.

    hf_model: a ...ForCausalLM in float32. flags: of a command line, as SIZE_FLAGS and LLAMA_FLAGS.
    """
    model, ids = converted(hf_model, flags, names), token_ids(length)
    expected = hf_model(input_ids=ids, use_cache=False).logits
    largest = expected.abs().max().item()
    assert largest > 0.5, "logits so small that anything would be close"
    difference = (logits_of(model, ids) - expected).abs().max().item()
    assert difference <= tolerance * max(1.0, largest), f"logits up to {largest:.2f} differ by {difference:.2e}"
    return model
