# SPDX-License-Identifier: Apache-2.0
"""Families of mixtures of experts, each a tiny random Hugging Face model whose logits ours must give."""

from __future__ import annotations

import pytest
import torch

from tests.support.huggingface_models import assert_each_flag_counts, assert_same_logits, list_flags
from tests.unit.training.recipes.test_model_families import make

transformers = pytest.importorskip("transformers")


def test_mixtral() -> None:
    hf = make("Mixtral", num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-6)
    flags = list_flags(hf)
    assert_same_logits(hf, flags)
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_logits(hf, [*flags, "--moe-router-pre-softmax"])


def test_qwen2_moe() -> None:
    """Weights that do not add up to one, and a gated shared expert."""
    hf = make("Qwen2Moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
              shared_expert_intermediate_size=40)  # fmt: skip
    assert_each_flag_counts(hf, list_flags(hf), "--moe-router-pre-softmax")


@pytest.mark.parametrize("sums_to_one", [True, False])
def test_qwen3_moe(sums_to_one: bool) -> None:
    hf = make("Qwen3Moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=12,
              norm_topk_prob=sums_to_one)  # fmt: skip
    assert_same_logits(hf, list_flags(hf))


def test_llama4() -> None:
    """Chunks and norms of queries and keys in layers with positions, sharper queries in the others, experts in every
    second layer, whose inputs are weighted, beside a shared one."""
    hf = make("Llama4Text", intermediate_size_mlp=80, num_local_experts=4, head_dim=12, interleave_moe_layer_step=2,
              attention_chunk_size=6, floor_scale=3, attn_scale=0.5, num_experts_per_tok=1,
              attn_implementation="eager")  # fmt: skip
    flags = list_flags(hf)
    assert_each_flag_counts(
        hf, flags, "--attention-chunk-size", "--window-attn-skip-freq", "--no-rope-freq", "--attn-temperature-scale",
        "--attn-temperature-floor", "--qk-l2-norm", "--qk-l2-norm-layers", "--rotary-interleaved",
        "--moe-apply-probs-on-input",
    )  # fmt: skip


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_glm4_moe(dense_layers: int) -> None:
    """DeepSeek-V3's routing: sigmoid scores with a bias for the choice, the best groups, scaled weights."""
    hf = make("Glm4Moe", n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=24, n_shared_experts=1,
              n_group=4, topk_group=2, first_k_dense_replace=dense_layers, head_dim=8, routed_scaling_factor=1.5,
              rms_norm_eps=1e-6, attention_bias=bool(dense_layers), use_qk_norm=bool(dense_layers))  # fmt: skip
    for layer in hf.model.layers[dense_layers:]:
        bias = layer.mlp.gate.e_score_correction_bias
        bias.data.copy_(0.2 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(3)))
    flags = list_flags(hf)
    assert_each_flag_counts(hf, flags, "--moe-router-topk-scaling-factor")
    groups = [flag for flag in flags if "--moe-router-num-groups" in flag or "--moe-router-group-topk" in flag]
    assert len(groups) == 2
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_logits(hf, [flag for flag in flags if flag not in groups])
