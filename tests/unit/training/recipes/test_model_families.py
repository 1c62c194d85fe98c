# SPDX-License-Identifier: Apache-2.0
"""Families of models, each a tiny random Hugging Face model whose logits ours must give (huggingface_models.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import ConfigError
from megatron.training.recipes.families import FAMILIES, find_family
from megatron.training.recipes.family_flags import build_flags
from megatron.training.recipes.presets import PRESETS
from tests.support.huggingface_models import (
    SIZES,
    assert_each_flag_counts,
    assert_same_logits,
    list_flags,
    randomised,
    without,
)

transformers = pytest.importorskip("transformers")


def make(name: str, **settings: Any) -> Any:
    """A tiny random model of a family, by the prefix of its classes in transformers."""
    config = getattr(transformers, f"{name}Config")(**SIZES | settings)
    return randomised(getattr(transformers, find_family(config.model_type).model_class)(config))


def test_llama() -> None:
    hf = make("Llama")
    assert_same_logits(hf, list_flags(hf))


def test_llama_with_tied_embeddings() -> None:
    hf = make("Llama", tie_word_embeddings=True)
    flags = list_flags(hf)
    assert "--untie-embeddings-and-output-weights" not in flags
    assert_same_logits(hf, flags)


def test_qwen3() -> None:
    """Norms of queries and keys, and heads wider than hidden size / heads."""
    hf = make("Qwen3", head_dim=12)
    assert_same_logits(hf, list_flags(hf))


def test_phi3() -> None:
    """Part of each head rotated; packed projections."""
    hf = make("Phi3", partial_rotary_factor=0.5)
    assert_each_flag_counts(hf, list_flags(hf), "--rotary-percent")


def test_qwen2() -> None:
    """A bias in the query-key-value projection only; Qwen 2.5 is the same."""
    hf = make("Qwen2")
    assert_same_logits(hf, list_flags(hf))


GEMMA = {"tie_word_embeddings": True, "head_dim": 12, "attn_implementation": "eager"}


def test_gemma() -> None:
    """Weights of norms around zero, gates by the tanh form of GELU, a scaled embedding that is also the output."""
    hf = make("Gemma", **GEMMA)
    assert_each_flag_counts(hf, list_flags(hf), "--apply-layernorm-1p", "--openai-gelu", "--embedding-multiplier")


def test_gemma2() -> None:
    """Norms on both sides of attention and MLP, bounded scores and logits, a window in every other layer."""
    hf = make("Gemma2", **GEMMA, query_pre_attn_scalar=16, sliding_window=6, attn_logit_softcapping=2.0,
              final_logit_softcapping=3.0)  # fmt: skip
    needed = ["--attn-logit-softcapping", "--final-logit-softcapping", "--softmax-scale", "--window-attn-skip-freq"]
    assert_each_flag_counts(hf, list_flags(hf), *needed)


def test_gemma3() -> None:
    """Norms of queries and keys, three layers with a window for one without, each with a rotary base of its own."""
    bases = {"sliding_attention": 100.0, "full_attention": 1000.0}
    hf = make("Gemma3Text", **GEMMA, query_pre_attn_scalar=16, sliding_window=6,
              layer_types=["sliding_attention"] * 3 + ["full_attention"],
              rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
              )  # fmt: skip
    assert_each_flag_counts(hf, list_flags(hf), "--rotary-base-local", "--rotary-base", "--window-attn-skip-freq")


def test_nemotron() -> None:
    """LayerNorm with weights around zero, squared ReLU without a gate, half of each head rotated."""
    hf = make("Nemotron")
    assert_each_flag_counts(hf, list_flags(hf), "--rotary-percent", "--squared-relu", "--apply-layernorm-1p")


@pytest.mark.flags("--qk-norm-scope")
def test_olmo2() -> None:
    """Norms on the outputs of attention and MLP, and over all query and key heads of a token."""
    hf = make("Olmo2", rms_norm_eps=1e-6)
    assert_same_logits(hf, list_flags(hf))


def test_gpt2() -> None:
    """Learned positions, the tanh form of GELU, matrices that lie the other way round."""
    config = transformers.GPT2Config(
        vocab_size=SIZES["vocab_size"], n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=0
    )
    hf = randomised(transformers.GPT2LMHeadModel(config))
    assert_each_flag_counts(hf, list_flags(hf), "--openai-gelu")


@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_neox(parallel: bool) -> None:
    """Attention and MLP side by side, a quarter of each head rotated, biases everywhere."""
    hf = make("GPTNeoX", use_parallel_residual=parallel)
    flags = list_flags(hf)
    assert ("--parallel-residual" in flags) is parallel
    assert_each_flag_counts(hf, flags, "--rotary-percent", *(["--parallel-residual"] if parallel else []))


# ---- docs/models.md

DOCUMENT = Path(__file__).parents[4] / "docs" / "models.md"


def table_of_families() -> str:
    """The table of docs/models.md: the first published model of each family, and a Llama that stretches positions."""
    first = {find_family(preset.model_type).name: preset for preset in reversed(PRESETS.values())}
    llama = [PRESETS["llama3.1-8b"]]
    lines = ["| family | in Hugging Face transformers | `--preset` | flags |", "|---|---|---|---|"]
    for family in FAMILIES:
        known = [first[family.name]] if family.name in first else []
        for preset in [*known, *(llama if family.name == "Llama" else [])] or [None]:
            # Of a family without a published model here: of its class as it is.
            fields = {} if preset is None else preset.fields
            flags = " ".join(build_flags(family, fields, with_sizes=False))
            name = "" if preset is None else f"`{preset.name}`"
            lines.append(f"| {family.name} | `{family.model_class}` | {name} | `{flags}` |")
    return "\n".join(lines)


def test_the_documentation_has_the_table_of_families() -> None:
    assert table_of_families() in DOCUMENT.read_text(encoding="utf-8"), f"docs/models.md needs:\n{table_of_families()}"


def test_families_and_their_rows_have_names_of_their_own() -> None:
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        ours = [row.ours for row in family.rows]
        assert len(set(ours)) == len(ours), family.name
        # A name of theirs may be the same module of another kind of layer: of Nemotron-H's norms, or an MLP beside
        # experts or alone.
        theirs = [(row.ours.split(".")[-2:], name) for row in family.rows for name in row.theirs]
        assert all(theirs.count(each) == 1 for each in theirs) or family.letters is not None, family.name


# ---- what is not known is refused


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("Llama", "attention_bias", True, "Llama: attention_bias is True in its config.json; only False is known"),
        ("Llama", "hidden_act", "relu", "Llama: hidden_act is 'relu' in its config.json; only 'silu' is known"),
        ("Llama", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "Llama: rotary positions of the type"),
        ("Gemma3Text", "rope_scaling", {"rope_type": "dynamic", "factor": 8.0}, "Gemma 3: rotary positions of"),
        ("Qwen3Moe", "mlp_only_layers", [0], "Qwen 3 MoE: mlp_only_layers is .0. in its config.json"),
    ],
)  # fmt: skip
def test_a_config_that_does_something_else_is_refused(name: str, field: str, value: Any, message: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SIZES).to_dict() | {field: value}
    with pytest.raises(ConfigError, match=message):
        build_flags(find_family(config["model_type"]), config)


def test_a_type_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="models of the type blom are not known; the nearest name is .*; known are"):
        find_family("blom")
    with pytest.raises(ConfigError, match="of the type bloom do not convert: they have positions as a bias on scores"):
        find_family("bloom")
    with pytest.raises(ConfigError, match=r"qwen3_nxt are not known; the nearest name is qwen3_next \(Qwen3-Next\)"):
        find_family("qwen3_nxt")


def test_fields_of_earlier_releases() -> None:
    """config.json of Llama 3.1 and of Pythia as published: no rope_parameters yet."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
               "original_max_position_embeddings": 8192}  # fmt: skip
    flags = build_flags(find_family("llama"), {"rope_theta": 500000.0, "rope_scaling": scaling})
    assert {"--use-rope-scaling", "--rope-scaling-factor 8", "--rotary-base 500000"} <= set(flags)
    flags = build_flags(find_family("gpt_neox"), {"rotary_pct": 0.5, "rotary_emb_base": 20000})
    assert {"--rotary-percent 0.5", "--rotary-base 20000", "--parallel-residual"} <= set(flags)


def test_a_tensor_left_over_is_found() -> None:
    hf = make("Llama", attention_bias=True)
    with pytest.raises(AssertionError, match=r"no row .*k_proj\.bias"):
        assert_same_logits(hf, list_flags(make("Llama")))


def test_other_angles_are_found() -> None:
    """The comparison can fail: a model with another rotary base is another model."""
    hf = make("Llama")
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_logits(hf, [*without(list_flags(hf)), "--rotary-base 500"])
