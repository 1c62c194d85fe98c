"""Families of models, each a tiny random Hugging Face model whose logits ours must give (huggingface_models.py)."""

from __future__ import annotations

import pytest

from tests.unit.huggingface_models import (
    LLAMA,
    LLAMA_FLAGS,
    SIZES,
    Source,
    assert_same_logits,
    packed_qkv_of_one,
    randomised,
    without,
)

transformers = pytest.importorskip("transformers")


def test_llama() -> None:
    hf = randomised(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))
    assert_same_logits(hf, LLAMA_FLAGS, LLAMA)


def test_llama_with_tied_embeddings() -> None:
    hf = randomised(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"tie_word_embeddings": True})))
    flags = LLAMA_FLAGS.replace("--untie-embeddings-and-output-weights", "")
    assert_same_logits(hf, flags, without(LLAMA, "output_layer"))


def test_qwen3() -> None:
    """Norms of queries and keys, and heads wider than hidden size / heads."""
    hf = randomised(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=12)))
    names = LLAMA | {
        f"decoder.layers.{{}}.self_attention.{x}_layernorm.weight": f"model.layers.{{}}.self_attn.{x}_norm.weight"
        for x in "qk"
    }
    assert_same_logits(hf, f"{LLAMA_FLAGS} --qk-layernorm --kv-channels 12", names)


def test_phi3() -> None:
    """Part of each head rotated; packed projections."""
    hf = randomised(transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, partial_rotary_factor=0.5)))
    names = LLAMA | {
        "decoder.layers.{}.self_attention.linear_qkv.weight": Source(
            packed_qkv_of_one, ("model.layers.{}.self_attn.qkv_proj.weight",)
        ),
        "decoder.layers.{}.mlp.linear_fc1.weight": "model.layers.{}.mlp.gate_up_proj.weight",
    }
    assert_same_logits(hf, f"{LLAMA_FLAGS} --norm-epsilon 1e-5 --rotary-percent 0.5", names)


def test_a_tensor_left_over_is_found() -> None:
    sizes = SIZES | {"attention_bias": True}
    hf = randomised(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
    with pytest.raises(AssertionError, match=r"no row .*k_proj\.bias"):
        assert_same_logits(hf, LLAMA_FLAGS, LLAMA)


def test_other_angles_are_found() -> None:
    """The comparison can fail: a model with another rotary base is another model."""
    hf = randomised(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_logits(hf, f"{LLAMA_FLAGS} --rotary-base 500", LLAMA)
