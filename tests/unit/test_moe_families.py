"""Families of mixtures of experts, each a tiny random Hugging Face model whose logits ours must give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit.huggingface_models import (
    LLAMA,
    LLAMA_FLAGS,
    SIZES,
    Source,
    assert_same_logits,
    qkv_from,
    randomised,
    without,
)

transformers = pytest.importorskip("transformers")

MOE = without(LLAMA, ".mlp.") | {
    "decoder.layers.{}.mlp.router.weight": "model.layers.{}.mlp.gate.weight",
    "decoder.layers.{}.mlp.experts.linear_fc1.weight": "model.layers.{}.mlp.experts.gate_up_proj",
    "decoder.layers.{}.mlp.experts.linear_fc2.weight": "model.layers.{}.mlp.experts.down_proj",
}


def shared_expert(name: str) -> dict[str, str | Source]:
    """Rows of the name map for a shared expert of this name."""

    def stacked(config: TransformerConfig, *tensors: Tensor) -> Tensor:
        return torch.cat(tensors)

    ours, theirs = "decoder.layers.{}.mlp.shared_experts.", f"model.layers.{{}}.mlp.{name}."
    return {
        f"{ours}linear_fc1.weight": Source(stacked, (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")),
        f"{ours}linear_fc2.weight": f"{theirs}down_proj.weight",
    }


def test_mixtral() -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-6)
    hf = randomised(transformers.MixtralForCausalLM(config))
    flags = f"{LLAMA_FLAGS} --rotary-base 1000000 --num-experts 4 --moe-router-topk 2"
    assert_same_logits(hf, flags, MOE)
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_logits(hf, f"{flags} --moe-router-pre-softmax", MOE)


def test_qwen2_moe() -> None:
    """Weights that do not add up to one, and a gated shared expert."""
    config = transformers.Qwen2MoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40
    )
    hf = randomised(transformers.Qwen2MoeForCausalLM(config))
    names = MOE | shared_expert("shared_expert") | {
        "decoder.layers.{}.self_attention.linear_qkv.bias": qkv_from("model.layers.{}.self_attn.*_proj.bias"),
        "decoder.layers.{}.mlp.shared_experts.gate_weight": "model.layers.{}.mlp.shared_expert_gate.weight",
    }  # fmt: skip
    flags = f"{LLAMA_FLAGS} --add-qkv-bias --num-experts 6 --moe-router-topk 3 --moe-ffn-hidden-size 24"
    flags += " --moe-router-pre-softmax --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate"
    assert_same_logits(hf, flags, names)


def test_glm4_moe() -> None:
    """DeepSeek-V3's routing: sigmoid scores with a bias for the choice, the best groups, scaled weights."""
    config = transformers.Glm4MoeConfig(
        **SIZES, n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=24, n_shared_experts=1, n_group=4,
        topk_group=2, first_k_dense_replace=0, head_dim=8, routed_scaling_factor=1.5, rms_norm_eps=1e-6,
    )  # fmt: skip
    hf = randomised(transformers.Glm4MoeForCausalLM(config))
    for layer in hf.model.layers:
        bias = layer.mlp.gate.e_score_correction_bias
        bias.data.copy_(0.2 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(3)))
    names = MOE | shared_expert("shared_experts") | {
        "decoder.layers.{}.mlp.router.expert_bias": "model.layers.{}.mlp.gate.e_score_correction_bias"
    }  # fmt: skip
    needed = ["--moe-router-score-function sigmoid --moe-router-enable-expert-bias"]
    needed += ["--moe-router-num-groups 4 --moe-router-group-topk 2", "--moe-router-topk-scaling-factor 1.5"]
    flags = f"{LLAMA_FLAGS} --rotary-percent 0.5 --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 24"
    flags += " --moe-shared-expert-intermediate-size 24 "
    assert_same_logits(hf, flags + " ".join(needed), names)
    for left_out in needed[1:]:
        with pytest.raises(AssertionError, match="differ by"):
            assert_same_logits(hf, flags + " ".join(flag for flag in needed if flag != left_out), names)
