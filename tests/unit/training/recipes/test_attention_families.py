# SPDX-License-Identifier: Apache-2.0
"""Families of models that differ in attention and positions, against tiny random Hugging Face models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.core.transformer.attention import SelfAttention
from megatron.hf.rows import join, list_names
from megatron.training.recipes.families import OURS, ROTARY_SHARE, find_family
from megatron.training.recipes.family import Row, find_row
from megatron.training.recipes.family_flags import build_flags
from tests.support.gpt_models import build_model
from tests.support.huggingface_models import (
    SIZES,
    assert_each_flag_counts,
    assert_same_logits,
    list_flags,
    randomised,
    replace_rows,
    without,
)
from tests.unit.training.recipes.test_model_families import make

transformers = pytest.importorskip("transformers")


def rope(kind: str, base: float = 10000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **options}}


def test_llama_3_1() -> None:
    """Slow frequencies stretched."""
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    hf = make("Llama", **rope("llama3", 500000.0, factor=32.0, **bands))
    flags = list_flags(hf)
    assert_same_logits(hf, flags)
    for other in (["--use-rope-scaling", "--rope-scaling-factor"], ["--rope-scaling-factor"]):
        with pytest.raises(AssertionError, match="differ by"):
            assert_same_logits(hf, without(flags, *other))


def test_linear_interpolation() -> None:
    hf = make("Llama", **rope("linear", factor=4.0))
    assert_each_flag_counts(hf, list_flags(hf), "--rotary-seq-len-interpolation-factor")


@pytest.mark.parametrize("is_rounded", [True, False])
def test_yarn(is_rounded: bool) -> None:
    options = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 0.5}
    hf = make("Llama", **rope("yarn", 100.0, truncate=is_rounded, **options))
    if is_rounded:
        assert_same_logits(hf, list_flags(hf))
    else:
        needed = ("--rotary-scaling-factor", "--yarn-beta-fast", "--yarn-beta-slow")
        assert_each_flag_counts(hf, list_flags(hf), *needed, "--no-yarn-correction-range-round-to-int")


def test_smollm3() -> None:
    """Every fourth layer without positions."""
    hf = make("SmolLM3", bos_token_id=1, eos_token_id=2)
    assert_each_flag_counts(hf, list_flags(hf), "--no-rope-freq")


def test_mistral() -> None:
    """A window of 6 tokens: itself and 5 before it."""
    hf = make("Mistral", sliding_window=6, attn_implementation="eager")
    flags = list_flags(hf)
    assert "--window-size 5,0" in flags
    assert_each_flag_counts(hf, flags, "--window-size")
    assert_same_logits(hf, [*flags, "--attention-backend local"])


def test_qwen3_with_windows() -> None:
    """QK norms; the first layers see everything, the others a window."""
    hf = make("Qwen3", head_dim=12, use_sliding_window=True, sliding_window=4, max_window_layers=1,
              attn_implementation="eager")  # fmt: skip
    assert_each_flag_counts(hf, list_flags(hf), "--window-attn-skip-freq")


def test_phi3_with_a_window() -> None:
    hf = make("Phi3", sliding_window=5, attn_implementation="eager")
    assert_each_flag_counts(hf, list_flags(hf), "--window-size")


def test_qwen3_next_attention() -> None:
    """Output gates, norms with weights around zero, a quarter of each head rotated; without its linear attention."""
    config = transformers.Qwen3NextConfig(
        **SIZES, head_dim=16, layer_types=["full_attention"] * 4, mlp_only_layers=[0, 1, 2, 3],
        attn_implementation="eager", **rope("default", partial_rotary_factor=0.25),
    )  # fmt: skip
    hf = randomised(transformers.Qwen3NextForCausalLM(config))
    qwen3 = find_family("qwen3")
    # Its share of a head that is turned is a setting, which no model of Qwen 3 has.
    expects = {name: value for name, value in qwen3.expects.items() if name != ROTARY_SHARE.theirs}
    qwen3 = dataclasses.replace(qwen3, settings=(*qwen3.settings, ROTARY_SHARE), expects=expects)
    row = find_row(qwen3, "decoder.layers.0.self_attention.linear_qkv.weight")
    assert row is not None
    gated = replace_rows(qwen3, Row(f"{OURS}self_attention.linear_qkv.weight", row.theirs, "gated_qkv"))
    flags = [*build_flags(qwen3, config.to_dict()), "--apply-layernorm-1p", "--attention-output-gate"]
    assert_same_logits(hf, flags, gated)


@pytest.mark.parametrize("layer", [0, 1])
def test_gpt_oss_attention(layer: int) -> None:
    """Sinks, a window in every other layer, YaRN, biases: the attention alone, for its MLP is one of experts."""
    config = transformers.GptOssConfig(
        **SIZES, head_dim=8, sliding_window=6, attn_implementation="eager", num_local_experts=4,
        **rope("yarn", 150000.0, factor=4.0, beta_fast=8.0, beta_slow=0.5, original_max_position_embeddings=16,
               truncate=False),
    )  # fmt: skip
    hf = randomised(transformers.GptOssForCausalLM(config))
    theirs = hf.model.layers[layer].self_attn
    family, config = find_family("gpt_oss"), config.to_dict()
    model = build_model(" ".join(build_flags(family, config)))
    ours: SelfAttention = model.decoder.layers[layer].self_attention
    weights, tensors = {}, hf.state_dict()
    for name in ours.state_dict():
        row = find_row(family, f"decoder.layers.{layer}.self_attention.{name}")
        assert row is not None
        (names,) = list_names(row, f"decoder.layers.{layer}.self_attention.{name}", ours.config)
        weights[name] = join(row, ours.config, [tensors[each] for each in names])
    ours.load_state_dict(weights)
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(4))
    positions = torch.arange(24)[None]
    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
    if layer == 0:
        hidden |= torch.ones(24, 24, dtype=torch.bool).tril(-6)
    mask = torch.zeros(1, 1, 24, 24).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = theirs(x, position_embeddings=hf.model.rotary_emb(x, positions), attention_mask=mask)[0]
        output, bias = ours(x.transpose(0, 1), None, model.rotary_pos_emb.build_rotation(24))
    torch.testing.assert_close((output + bias).transpose(0, 1), expected, rtol=1e-5, atol=1e-5)
