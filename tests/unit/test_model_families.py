"""Families of models, each a tiny random Hugging Face model whose logits ours must give (huggingface_models.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.training.flags.read import examine
from tests.unit.huggingface_models import (
    LLAMA,
    LLAMA_FLAGS,
    SIZE_FLAGS,
    SIZES,
    Source,
    assert_same_logits,
    packed_qkv_of_one,
    qkv_from,
    randomised,
    without,
)
from tests.unit.run_flags import SMALLEST_RUN

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


QK_NORM = {
    f"decoder.layers.{{}}.self_attention.{x}_layernorm.weight": f"model.layers.{{}}.self_attn.{x}_norm.weight"
    for x in "qk"
}
BIASES = {
    f"decoder.layers.{{}}.self_attention.linear_{ours}.bias": theirs
    for ours, theirs in {
        "qkv": qkv_from("model.layers.{}.self_attn.*_proj.bias"),
        "proj": "model.layers.{}.self_attn.o_proj.bias",
    }.items()
}


def test_qwen2() -> None:
    """A bias in the query-key-value projection only; Qwen 2.5 is the same."""
    hf = randomised(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)))
    assert_same_logits(hf, f"{LLAMA_FLAGS} --add-qkv-bias", LLAMA | without(BIASES, "linear_proj"))


GEMMA_FLAGS = (
    LLAMA_FLAGS.replace("--untie-embeddings-and-output-weights", "").replace("--swiglu", "--geglu --openai-gelu")
    + f" --kv-channels 12 --apply-layernorm-1p --embedding-multiplier {32**0.5}"
)
GEMMA_SIZES = SIZES | {"tie_word_embeddings": True, "head_dim": 12, "attn_implementation": "eager"}
SANDWICH = {
    f"decoder.layers.{{}}.{ours}.weight": f"model.layers.{{}}.{theirs}.weight"
    for ours, theirs in {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }.items()
}


def test_gemma() -> None:
    """Weights of norms around zero, gates by the tanh form of GELU, a scaled embedding that is also the output."""
    hf = randomised(transformers.GemmaForCausalLM(transformers.GemmaConfig(**GEMMA_SIZES)))
    assert_same_logits(hf, GEMMA_FLAGS, without(LLAMA, "output_layer"))


def test_gemma2() -> None:
    """Norms on both sides of attention and MLP, bounded scores and logits, a window in every other layer."""
    config = transformers.Gemma2Config(
        **GEMMA_SIZES, query_pre_attn_scalar=16, sliding_window=6, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    )  # fmt: skip
    hf = randomised(transformers.Gemma2ForCausalLM(config))
    needed = ["--norm-placement both", "--attn-logit-softcapping 2", "--final-logit-softcapping 3"]
    needed += ["--softmax-scale 0.25", "--window-size 5,0", "--window-attn-skip-freq 2"]
    assert_same_logits(hf, " ".join([GEMMA_FLAGS, *needed]), without(LLAMA, "output_layer") | SANDWICH)
    for flag in needed[1:]:
        if flag != "--window-size 5,0":  # without it the frequency is refused
            others = " ".join(other for other in [GEMMA_FLAGS, *needed] if other != flag)
            with pytest.raises(AssertionError, match="differ by"):
                assert_same_logits(hf, others, without(LLAMA, "output_layer") | SANDWICH)


def test_gemma3() -> None:
    """Norms of queries and keys, three layers with a window for one without, each with a rotary base of its own."""
    bases = {"sliding_attention": 100.0, "full_attention": 1000.0}
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    config = transformers.Gemma3TextConfig(
        **GEMMA_SIZES, query_pre_attn_scalar=16, sliding_window=6, layer_types=layers,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
    )  # fmt: skip
    hf = randomised(transformers.Gemma3ForCausalLM(config))
    names = without(LLAMA, "output_layer") | SANDWICH | QK_NORM
    flags = f"{GEMMA_FLAGS} --norm-placement both --qk-layernorm --softmax-scale 0.25 --window-size 5,0"
    flags += " --window-attn-skip-freq 4 --rotary-base 1000"
    assert_same_logits(hf, f"{flags} --rotary-base-local 100", names)
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_logits(hf, flags, names)


def test_nemotron() -> None:
    """LayerNorm with weights around zero, squared ReLU without a gate, half of each head rotated."""
    hf = randomised(transformers.NemotronForCausalLM(transformers.NemotronConfig(**SIZES)))
    norms = {
        f"decoder.{ours}.bias": f"model.{theirs}.bias"
        for ours, theirs in {
            "layers.{}.input_layernorm": "layers.{}.input_layernorm",
            "layers.{}.pre_mlp_layernorm": "layers.{}.post_attention_layernorm",
            "final_layernorm": "norm",
        }.items()
    }
    mlp = {"decoder.layers.{}.mlp.linear_fc1.weight": "model.layers.{}.mlp.up_proj.weight"}
    flags = f"{SIZE_FLAGS} --position-embedding-type rope --rotary-percent 0.5 --squared-relu --apply-layernorm-1p"
    assert_same_logits(hf, f"{flags} --norm-epsilon 1e-5 --disable-bias-linear", LLAMA | norms | mlp)


@pytest.mark.flags("--qk-norm-scope")
def test_olmo2() -> None:
    """Norms on the outputs of attention and MLP, and over all query and key heads of a token."""
    hf = randomised(transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SIZES, rms_norm_eps=1e-6)))
    names = without(LLAMA, "input_layernorm", "pre_mlp_layernorm") | {
        f"decoder.layers.{{}}.{ours}.weight": f"model.layers.{{}}.{theirs}.weight"
        for ours, theirs in {
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
            "self_attention.q_layernorm": "self_attn.q_norm",
            "self_attention.k_layernorm": "self_attn.k_norm",
        }.items()
    }
    assert_same_logits(hf, f"{LLAMA_FLAGS} --norm-placement output --qk-layernorm --qk-norm-scope all", names)


def test_gpt2() -> None:
    """Learned positions, the tanh form of GELU, matrices that lie the other way round."""
    config = transformers.GPT2Config(
        vocab_size=SIZES["vocab_size"], n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=0
    )
    hf = randomised(transformers.GPT2LMHeadModel(config))
    layer = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}
    matrices = {
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    modules = {f"decoder.layers.{{}}.{ours}": f"transformer.h.{{}}.{theirs}" for ours, theirs in layer.items()}
    modules["decoder.final_layernorm"] = "transformer.ln_f"
    names: dict[str, str | Source] = {
        f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")
    }
    for ours, theirs in matrices.items():
        for kind in ("weight", "bias"):
            source = f"transformer.h.{{}}.{theirs}.{kind}"
            if "qkv" in ours:
                join = Source(lambda config, x: packed_qkv_of_one(config, x.t() if x.dim() > 1 else x), (source,))
            else:
                join = Source(lambda config, x: x.t() if x.dim() > 1 else x, (source,))
            names[f"decoder.layers.{{}}.{ours}.{kind}"] = join
    names["embedding.word_embeddings.weight"] = "transformer.wte.weight"
    names["embedding.position_embeddings.weight"] = "transformer.wpe.weight"
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 24"
    assert_same_logits(hf, f"{flags} --openai-gelu", names)


@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_neox(parallel: bool) -> None:
    """Attention and MLP side by side, a quarter of each head rotated, biases everywhere."""
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    config = transformers.GPTNeoXConfig(**sizes, rotary_pct=0.25, use_parallel_residual=parallel, hidden_act="gelu")
    hf = randomised(transformers.GPTNeoXForCausalLM(config))
    layer = {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }
    modules = {f"decoder.layers.{{}}.{ours}": f"gpt_neox.layers.{{}}.{theirs}" for ours, theirs in layer.items()}
    modules["decoder.final_layernorm"] = "gpt_neox.final_layer_norm"
    names = {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")}
    names |= {
        "embedding.word_embeddings.weight": "gpt_neox.embed_in.weight",
        "output_layer.weight": "lm_head.weight",
    }
    flags = SIZE_FLAGS.replace("--num-query-groups 2", "--num-query-groups 4") + " --position-embedding-type rope"
    assert_same_logits(hf, f"{flags} --rotary-percent 0.25{' --parallel-residual' if parallel else ''}", names)


def rows_of_the_documentation() -> list[tuple[str, str]]:
    """(family, flags) of docs/models.md, with what the words Llama and Gemma stand for."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    words = dict(re.findall(r"\*(\w+)\*\s(?:stands\s)?for\s+`(.*?)`", text, re.DOTALL))
    rows = re.findall(r"^\| ([^|]+) \| (?:\*(\w+)\*)? ?(?:`([^`]*)`)?[^|]*\|$", text, re.MULTILINE)
    return [(family, f"{words.get(word, '')} {flags}") for family, word, flags in rows if word or flags]


@pytest.mark.parametrize(("family", "flags"), rows_of_the_documentation(), ids=lambda text: text[:20].strip())
def test_documented_flags_are_accepted(family: str, flags: str) -> None:
    sizes = "--num-layers 12 --hidden-size 2304 --num-attention-heads 16 --group-query-attention --num-query-groups 4"
    argv = [*SMALLEST_RUN.split(), *sizes.split(), "--seq-length", "64", *flags.split()]
    assert [problem.text for problem in examine(argv, {}).problems] == []


def test_documentation_names_the_families() -> None:
    families = " ".join(family for family, _ in rows_of_the_documentation())
    for name in ("Llama 3.1", "Mistral", "Qwen 3", "Phi-3", "OLMo 2", "Gemma 3", "Nemotron", "GPT-NeoX", "gpt-oss"):
        assert name in families


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
