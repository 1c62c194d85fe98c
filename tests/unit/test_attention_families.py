"""Families of models that differ in attention and positions, against tiny random Hugging Face models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.transformer.attention import SelfAttention
from tests.unit.gpt_models import build_model
from tests.unit.huggingface_models import (
    LLAMA,
    LLAMA_FLAGS,
    SIZES,
    NameMap,
    Source,
    assert_same_logits,
    packed_qkv,
    packed_qkv_of_one,
    randomised,
)

transformers = pytest.importorskip("transformers")

QK_NORM = {
    f"decoder.layers.{{}}.self_attention.{x}_layernorm.weight": f"model.layers.{{}}.self_attn.{x}_norm.weight"
    for x in "qk"
}


def assert_same_only_with(hf: nn.Module, flags: str, names: NameMap, *needed: str) -> None:
    """Same logits with these flags, and other logits when any of the needed ones is left out."""
    assert_same_logits(hf, " ".join([flags, *needed]), names)
    for flag in needed:
        with pytest.raises(AssertionError, match="differ by"):
            assert_same_logits(hf, " ".join([flags, *(other for other in needed if other != flag)]), names)


def rope(kind: str, base: float = 10000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **options}}


def test_llama_3_1() -> None:
    """Slow frequencies stretched."""
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(**SIZES, **rope("llama3", 500000.0, factor=32.0, **bands))
    hf = randomised(transformers.LlamaForCausalLM(config))
    base = f"{LLAMA_FLAGS} --rotary-base 500000"
    assert_same_logits(hf, f"{base} --use-rope-scaling --rope-scaling-factor 32", LLAMA)
    for other in ("", "--use-rope-scaling"):
        with pytest.raises(AssertionError, match="differ by"):
            assert_same_logits(hf, f"{base} {other}", LLAMA)


def test_linear_interpolation() -> None:
    hf = randomised(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **rope("linear", factor=4.0))))
    assert_same_only_with(hf, LLAMA_FLAGS, LLAMA, "--rotary-seq-len-interpolation-factor 4")


@pytest.mark.parametrize("is_rounded", [True, False])
def test_yarn(is_rounded: bool) -> None:
    options = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 0.5}
    config = transformers.LlamaConfig(**SIZES, **rope("yarn", 100.0, truncate=is_rounded, **options))
    hf = randomised(transformers.LlamaForCausalLM(config))
    flags = LLAMA_FLAGS.replace("--position-embedding-type rope", "--position-embedding-type yarn")
    flags += " --rotary-base 100 --yarn-original-max-position-embeddings 64"
    needed = ["--rotary-scaling-factor 4", "--yarn-beta-fast 4", "--yarn-beta-slow 0.5"]
    if is_rounded:
        assert_same_logits(hf, " ".join([flags, *needed]), LLAMA)
    else:
        assert_same_only_with(hf, flags, LLAMA, *needed, "--no-yarn-correction-range-round-to-int")


def test_smollm3() -> None:
    """Every fourth layer without positions."""
    hf = randomised(
        transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**SIZES, bos_token_id=1, eos_token_id=2))
    )
    assert_same_only_with(hf, f"{LLAMA_FLAGS} --rotary-base 2000000", LLAMA, "--no-rope-freq 4")


def test_mistral() -> None:
    """A window of 6 tokens: itself and 5 before it."""
    config = transformers.MistralConfig(**SIZES, sliding_window=6, attn_implementation="eager")
    hf = randomised(transformers.MistralForCausalLM(config))
    assert_same_only_with(hf, LLAMA_FLAGS, LLAMA, "--window-size 5,0")
    assert_same_logits(hf, f"{LLAMA_FLAGS} --window-size 5,0 --attention-backend local", LLAMA)


def test_qwen3_with_windows() -> None:
    """QK norms; the first layers see everything, the others a window."""
    config = transformers.Qwen3Config(
        **SIZES,
        head_dim=12,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        attn_implementation="eager",
    )
    hf = randomised(transformers.Qwen3ForCausalLM(config))
    flags = f"{LLAMA_FLAGS} --qk-layernorm --kv-channels 12 --window-size 3,0"
    assert_same_only_with(hf, flags, LLAMA | QK_NORM, "--window-attn-skip-freq [0]+[1]*3")


def test_phi3_with_a_window() -> None:
    config = transformers.Phi3Config(**SIZES, sliding_window=5, attn_implementation="eager")
    hf = randomised(transformers.Phi3ForCausalLM(config))
    names = LLAMA | {
        "decoder.layers.{}.self_attention.linear_qkv.weight": Source(
            packed_qkv_of_one, ("model.layers.{}.self_attn.qkv_proj.weight",)
        ),
        "decoder.layers.{}.mlp.linear_fc1.weight": "model.layers.{}.mlp.gate_up_proj.weight",
    }
    assert_same_only_with(hf, f"{LLAMA_FLAGS} --norm-epsilon 1e-5", names, "--window-size 4,0")


def query_and_gate(config: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Each head's query rows followed by its gate rows -> group by group: queries, gates, key, value."""
    groups, width = config.num_query_groups, config.kv_channels
    both = query.unflatten(0, (groups, -1, 2, width)).transpose(1, 2)  # [g, 2, n / g, d, h]
    return packed_qkv(config, both.flatten(0, 3), key, value)


def test_qwen3_next_attention() -> None:
    """Output gates, norms with weights around zero, a quarter of each head rotated; without its linear attention."""
    config = transformers.Qwen3NextConfig(
        **SIZES, head_dim=16, layer_types=["full_attention"] * 4, mlp_only_layers=[0, 1, 2, 3],
        attn_implementation="eager", **rope("default", partial_rotary_factor=0.25),
    )  # fmt: skip
    hf = randomised(transformers.Qwen3NextForCausalLM(config))
    letters = (f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkv")
    names = LLAMA | QK_NORM
    names["decoder.layers.{}.self_attention.linear_qkv.weight"] = Source(query_and_gate, tuple(letters))
    flags = f"{LLAMA_FLAGS} --qk-layernorm --kv-channels 16 --apply-layernorm-1p --rotary-percent 0.25"
    assert_same_logits(hf, f"{flags} --attention-output-gate", names)


@pytest.mark.parametrize("layer", [0, 1])
def test_gpt_oss_attention(layer: int) -> None:
    """Sinks, a window in every other layer, YaRN, biases: the attention alone, for its MLP is one of experts."""
    config = transformers.GptOssConfig(
        **SIZES, head_dim=8, sliding_window=6, attn_implementation="eager", num_local_experts=2,
        **rope("yarn", 150000.0, factor=4.0, beta_fast=8.0, beta_slow=0.5, original_max_position_embeddings=16,
               truncate=False),
    )  # fmt: skip
    hf = randomised(transformers.GptOssForCausalLM(config))
    theirs = hf.model.layers[layer].self_attn
    model = build_model(
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
        "--softmax-type learnable --window-size 5,0 --window-attn-skip-freq 2 --position-embedding-type yarn "
        "--rotary-base 150000 --rotary-scaling-factor 4 --yarn-beta-fast 8 --yarn-beta-slow 0.5 "
        "--yarn-original-max-position-embeddings 16 --no-yarn-correction-range-round-to-int"
    )
    ours: SelfAttention = model.decoder.layers[layer].self_attention
    weights = {"core_attention.softmax_offset": theirs.sinks}
    for part in ("weight", "bias"):
        rows = [getattr(getattr(theirs, f"{x}_proj"), part) for x in "qkv"]
        weights[f"linear_qkv.{part}"] = packed_qkv(ours.config, *rows)
        weights[f"linear_proj.{part}"] = getattr(theirs.o_proj, part)
    ours.load_state_dict(weights)
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(4))
    positions = torch.arange(24)[None]
    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
    if layer == 0:
        hidden |= torch.ones(24, 24, dtype=torch.bool).tril(-6)
    mask = torch.zeros(1, 1, 24, 24).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = theirs(x, position_embeddings=hf.model.rotary_emb(x, positions), attention_mask=mask)[0]
        output, bias = ours(x.transpose(0, 1), None, model.rotary_pos_emb.rotation(24))
    torch.testing.assert_close((output + bias).transpose(0, 1), expected, rtol=1e-5, atol=1e-5)
