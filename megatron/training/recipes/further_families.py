# SPDX-License-Identifier: Apache-2.0
"""Families whose layers other families have, too: a name, the fields of their config.json and their defaults."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.errors import ConfigError
from megatron.training.recipes.family import ConfigKey, Family, Row
from megatron.training.recipes.family_defaults import Fields, fill_layers, list_layers, size, without
from megatron.training.recipes.family_rows import (
    BIASED_ATTENTION,
    BIASED_ROWS,
    MLP_BIASES,
    OURS,
    OUTPUT_NORM_ROWS,
    PACKED_MLP,
    QK_NORMS,
    QKV_BIAS,
    SINKS,
    STARCODER2_ROWS,
    THEIRS,
    UNGATED_MLP,
    build_rows,
    list_projections,
    rename_rows,
    without_rows,
)
from megatron.training.recipes.family_settings import (
    ALL_BIASES,
    ATTENTION_BIAS,
    GRANITE_MULTIPLIERS,
    HALF_ROTATED,
    HEAD_WIDTH,
    LLAMA_FLAGS,
    MLP_BIAS,
    ROTARY_BASE,
    ROTARY_SHARE,
    SOFT_CAPS,
    TEMPERATURE,
    UNTIED,
    USUAL,
    WINDOW,
    WINDOW_LAYERS,
    build_family,
    build_llama,
    build_olmo,
    build_sizes,
)

_LIKE_LLAMA = {"rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False}
_DEFAULTS: Mapping[str, Fields] = {
    "granite": size(32, 4096, 11008, 32, None, 2048)
    | {
        "attention_bias": False, "mlp_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    },
    "seed_oss": size(64, 4096, 27648, 80, 8, 524288)
    | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 128},
    "ministral": size(32, 4096, 14336, 32, 8, 131072)
    | {"head_dim": None, "sliding_window": 4096, "layer_types": None},
    "ministral3": size(34, 4096, 14336, 32, 8, 262144)
    | {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": None},
    "starcoder2": without(size(30, 3072, 12288, 24, 2, 4096), "rms_norm_eps")
    | {
        "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "sliding_window": None, "use_bias": True,
        "tie_word_embeddings": True,
    },
    **dict.fromkeys(
        ("glm", "glm4"),
        size(40, 4096, 13696, 32, 2, 131072) | {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True},
    ),
    "ernie4_5": size(18, 1024, 3072, 16, 2, 131072)
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_bias": False, "head_dim": 128},
    "internlm3": size(48, 4096, 10240, 32, 2, 32768) | _LIKE_LLAMA | {"head_dim": 128},
    "iquestcoder": size(80, 5120, 27648, 40, 8, 131072) | _LIKE_LLAMA | {"head_dim": 128},
    "arcee": size(32, 2560, 18432, 32, None, 4096) | _LIKE_LLAMA | {"hidden_act": "relu2", "head_dim": None},
    "helium": size(24, 2560, 7040, 20, 20, 4096) | _LIKE_LLAMA | {"rms_norm_eps": 1e-8, "head_dim": 128},
    "exaone4": size(32, 4096, 16384, 32, 32, 2048)
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": None},
    "olmo3": size(32, 4096, 11008, 32, None, 2048)
    | {"rms_norm_eps": 1e-5, "attention_bias": False, "sliding_window": 4096, "layer_types": None},
    "hunyuan_v1_dense": size(32, 4096, 11008, 32, None, 2048)
    | {"rms_norm_eps": 1e-5, "attention_bias": False, "head_dim": None},
    "opt": {
        "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072, "max_position_embeddings": 2048,
        "do_layer_norm_before": True, "_remove_final_layer_norm": False, "word_embed_proj_dim": None,
        "num_attention_heads": 12, "activation_function": "relu", "enable_bias": True,
        "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
    },
    "olmo": without(size(32, 4096, 11008, 32, None, 2048), "rms_norm_eps")
    | {"attention_bias": False, "clip_qkv": None},
    "nanochat": size(12, 768, 8192, 6, None, 2048)
    | {"hidden_act": "relu2", "final_logit_softcapping": 15.0, "attention_bias": False},
    "granite_swa": size(24, 2560, 8192, 20, 4, 8192) | _LIKE_LLAMA
    | {
        "tie_word_embeddings": True, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "attention_multiplier": 1.0, "sliding_window": 128, "layer_types": None, "layer_rope_theta": None,
    },
}  # fmt: skip


def _complete_ministral(fields: Fields) -> Fields:
    """Fill in the layers: all have the window, where there is one."""
    if fields["layer_types"] is None:
        kind = "full_attention" if fields["sliding_window"] is None else "sliding_attention"
        fields["layer_types"] = [kind for _ in list_layers(fields)]
    if fields["sliding_window"] is None:
        fields["layer_types"] = ["full_attention" for _ in fields["layer_types"]]
    return fields


def complete_exaone(fields: Fields) -> Fields:
    """Fill in the layers: the window leaves out every so many. Without one, there are no layers that it concerns."""
    every = fields.pop("window_pattern", None)
    if fields["layer_types"] is None and isinstance(every, str):
        raise ConfigError(f"sliding_window_pattern is {every!r} in config.json, which needs layer_types beside it")
    if fields["sliding_window"] is None:
        fields["layer_types"] = ["full_attention" for _ in list_layers(fields)]
    fill_layers(fields, {layer: layer % (every or 4) != 0 for layer in list_layers(fields)})
    return fields


def _complete_olmo3(fields: Fields) -> Fields:
    fill_layers(fields, {layer: layer % 4 != 0 for layer in list_layers(fields)})
    return fields


def _complete_granite_swa(fields: Fields) -> Fields:
    """Fill in the layers: every fourth, from the first on, sees everything; all rotate by the same base, or not."""
    fill_layers(fields, {layer: layer % 4 != 1 for layer in list_layers(fields)})
    rope = fields.get("rope_scaling") or fields["rope_parameters"] or {}
    base = rope.get("rope_theta") or fields.get("rope_theta") or 10000.0
    bases = fields["layer_rope_theta"]
    if bases is None:
        fields["layer_rope_theta"] = [base for _ in list_layers(fields)]
    elif not set(bases) <= {0, base}:
        raise ConfigError(f"layer_rope_theta is {bases} in config.json; only 0 and rope_theta, {base}, are known in it")
    return fields


_GLM = (HEAD_WIDTH, ROTARY_SHARE, ATTENTION_BIAS[0])
_GLM_ROWS = {**QKV_BIAS, **PACKED_MLP}
EXAONE_PATTERN = frozenset(("sliding_window_pattern",))
EXAONE_WINDOWS = (
    WINDOW, WINDOW_LAYERS, ConfigKey("layer_types", "--no-rope-freq", "full layers", only_if="sliding_window"),
)  # fmt: skip


def complete_hunyuan(fields: Fields) -> Fields:
    """Positions of the type `dynamic` with `alpha` are rotations from a larger base (NTK-aware)."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.get(name) or {}
    if (rope.get("rope_type") or rope.get("type")) == "dynamic" and rope.get("alpha"):
        width = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
        base = rope.get("rope_theta") or fields.get("rope_theta") or 10000.0
        # Bases are whole numbers here; of large ones the rest is less than float32 tells apart.
        base = round(base * rope["alpha"] ** (width / (width - 2)))
        if base < 10**6:
            raise ConfigError(f"alpha is {rope['alpha']} in config.json; only a base above 10**6 is known with it")
        fields = fields | {name: {"rope_type": "default", "rope_theta": base}}
    return fields


HUNYUAN_FLAGS = "--qk-layernorm --qk-norm-after-rotation"
HUNYUAN_ROWS = BIASED_ATTENTION | rename_rows(
    OURS, THEIRS,
    {"self_attention.q_layernorm": "self_attn.query_layernorm",
     "self_attention.k_layernorm": "self_attn.key_layernorm"},
)  # fmt: skip


def _complete_ministral3(fields: Fields) -> Fields:
    """Fill in the positions, which are stretched where nothing else is said."""
    if not fields.get("rope_scaling") and fields["rope_parameters"] is None:
        fields["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }  # fmt: skip
    return fields


def _complete_opt(fields: Fields) -> Fields:
    """Fill in the width of the embedding: the layers'."""
    width, hidden = fields["word_embed_proj_dim"], fields["hidden_size"]
    if width not in (None, hidden):
        raise ConfigError(f"word_embed_proj_dim is {width} in config.json; only hidden_size, {hidden}, is known")
    return fields | {"word_embed_proj_dim": hidden}


_OPT = "model.decoder.layers.{layer}."
_OPT_ROWS = {
    **rename_rows(
        "", "", {"embedding.word_embeddings": "model.decoder.embed_tokens", "embedding.position_embeddings":
                 "model.decoder.embed_positions", "output_layer": "lm_head"},
    ),
    **rename_rows("", "", {"decoder.final_layernorm": "model.decoder.final_layer_norm"}, "weight", "bias"),
    **rename_rows(
        OURS, _OPT,
        {"input_layernorm": "self_attn_layer_norm", "pre_mlp_layernorm": "final_layer_norm",
         "self_attention.linear_proj": "self_attn.out_proj", "mlp.linear_fc1": "fc1", "mlp.linear_fc2": "fc2"},
        "weight", "bias",
    ),
    **build_rows(
        *(
            Row(
                f"{OURS}self_attention.linear_qkv.{kind}",
                tuple(f"{_OPT}self_attn.{letter}_proj.{kind}" for letter in "qkv"), "qkv",
            )
            for kind in ("weight", "bias")
        )
    ),
}  # fmt: skip

FURTHER: tuple[Family, ...] = (
    build_family(
        # Norms have the default epsilon.
        "OPT", "opt", "OPTForCausalLM",
        flags="--relu --learned-position-offset 2",
        sizes=(*build_sizes(intermediate_size="ffn_dim"), ConfigKey("word_embed_proj_dim", "--hidden-size")),
        settings=(
            UNTIED, ConfigKey("enable_bias", "--disable-bias-linear", "inverted switch", default=True),
            ConfigKey(
                "layer_norm_elementwise_affine", "--norm-parameters", "inverted switch", default=True, word="none"
            ),
        ),
        rows=_OPT_ROWS, is_rotary=False, idle=frozenset(("dropout", "layerdrop", "init_std")),
        complete=_complete_opt, defaults=_DEFAULTS["opt"],
    ),
    build_llama(
        "Granite 3", "granite", "GraniteForCausalLM",
        settings=(HEAD_WIDTH, *ATTENTION_BIAS, MLP_BIAS, *GRANITE_MULTIPLIERS),
        rows={**BIASED_ROWS, **MLP_BIASES},
        defaults=_DEFAULTS["granite"],
    ),
    build_llama(
        "Seed-OSS", "seed_oss", "SeedOssForCausalLM",
        settings=(
            HEAD_WIDTH, MLP_BIAS, ATTENTION_BIAS[0],
            ConfigKey("attention_out_bias", "--add-attention-output-bias", "switch", default=False),
        ),
        rows={**BIASED_ROWS, **MLP_BIASES},
        defaults=_DEFAULTS["seed_oss"],
        idle=frozenset(("residual_dropout",)),
    ),
    build_llama(
        "Ministral", "ministral", "MinistralForCausalLM",
        settings=(HEAD_WIDTH, WINDOW, WINDOW_LAYERS),
        defaults=_DEFAULTS["ministral"],
        complete=_complete_ministral,
    ),
    build_llama(
        "Ministral 3", "ministral3", "Ministral3ForCausalLM",
        flags="--attn-temperature-layers all",
        settings=(
            HEAD_WIDTH, WINDOW, *TEMPERATURE,
        ),
        complete=_complete_ministral3, defaults=_DEFAULTS["ministral3"],
    ),
    build_family(
        "Starcoder 2", "starcoder2", "Starcoder2ForCausalLM",
        flags="--openai-gelu",
        settings=(
            UNTIED, ROTARY_BASE, ConfigKey("norm_epsilon", "--norm-epsilon", default=1e-5), HEAD_WIDTH, WINDOW,
            ConfigKey("use_bias", "--disable-bias-linear", "inverted switch", default=True),
        ),
        rows=STARCODER2_ROWS,
        defaults=_DEFAULTS["starcoder2"],
        idle=frozenset(("residual_dropout", "embedding_dropout")),
    ),
    build_llama(
        "GLM 4 0414", "glm4", "Glm4ForCausalLM",
        flags="--rotary-interleaved --norm-placement both",
        settings=_GLM,
        rows=_GLM_ROWS | rename_rows(
            OURS, THEIRS,
            {"post_self_attn_layernorm": "post_self_attn_layernorm", "post_mlp_layernorm": "post_mlp_layernorm"},
        ),
        rope=HALF_ROTATED, defaults=_DEFAULTS["glm4"],
    ),
    build_llama(
        "GLM 4", "glm", "GlmForCausalLM",
        flags="--rotary-interleaved", settings=_GLM, rows=_GLM_ROWS, rope=HALF_ROTATED, defaults=_DEFAULTS["glm"],
    ),
    build_llama(
        "ERNIE 4.5", "ernie4_5", "Ernie4_5ForCausalLM",
        flags="--rotary-interleaved",
        settings=(HEAD_WIDTH, *(ConfigKey("use_bias", flag, "switch", default=False) for flag in ALL_BIASES)),
        rows={**BIASED_ROWS, **MLP_BIASES},
        rope={"rope_theta": 500000.0}, defaults=_DEFAULTS["ernie4_5"],
    ),
    build_llama(
        "InternLM 3", "internlm3", "LlamaForCausalLM",
        settings=(HEAD_WIDTH, *ATTENTION_BIAS, MLP_BIAS), rows={**BIASED_ROWS, **MLP_BIASES},
        other_names={"qkv_bias": "attention_bias", "bias": "mlp_bias"}, defaults=_DEFAULTS["internlm3"],
    ),
    build_llama(
        "IQuest-Coder", "iquestcoder", "LlamaForCausalLM",
        settings=(HEAD_WIDTH, *ATTENTION_BIAS, MLP_BIAS), rows={**BIASED_ROWS, **MLP_BIASES},
        expects={"clip_qkv": None, "use_sliding_window": False}, defaults=_DEFAULTS["iquestcoder"],
    ),
    build_family(
        "Arcee", "arcee", "ArceeForCausalLM",
        flags="--normalization RMSNorm --squared-relu --disable-bias-linear",
        settings=(*USUAL, HEAD_WIDTH, *ATTENTION_BIAS, MLP_BIAS),
        rows={
            **BIASED_ROWS, **UNGATED_MLP,
            **rename_rows(OURS, THEIRS, {"mlp.linear_fc1": "mlp.up_proj", "mlp.linear_fc2": "mlp.down_proj"}, "bias"),
        },
        defaults=_DEFAULTS["arcee"],
    ),
    build_llama(
        "Helium", "helium", "HeliumForCausalLM",
        flags="--rotary-interleaved", settings=(HEAD_WIDTH, ATTENTION_BIAS[0], MLP_BIAS),
        rows={**QKV_BIAS, **MLP_BIASES}, rope={"rope_theta": 100000.0}, defaults=_DEFAULTS["helium"],
    ),
    build_family(
        "EXAONE 4", "exaone4", "Exaone4ForCausalLM",
        # Layers without a window have no positions.
        flags=f"{LLAMA_FLAGS} --norm-placement output --qk-layernorm",
        settings=(*USUAL, HEAD_WIDTH, *EXAONE_WINDOWS), rows=OUTPUT_NORM_ROWS | QK_NORMS,
        idle=EXAONE_PATTERN, other_names={"sliding_window_pattern": "window_pattern"}, complete=complete_exaone,
        defaults=_DEFAULTS["exaone4"],
    ),
    build_olmo(
        "OLMo 3", "olmo3", "Olmo3ForCausalLM",
        settings=(
            *ATTENTION_BIAS, WINDOW, WINDOW_LAYERS,
            ConfigKey("rope_parameters.full_attention.rope_theta|rope_theta", "--rotary-base", default=10000),
            # Theirs has no other name for it, so that the base of the whole model is not read here.
            ConfigKey("rope_parameters.sliding_attention.rope_theta", "--rotary-base-local"),
        ),
        rows=BIASED_ATTENTION,
        rope={"full_attention": {"rope_theta": 500000.0}, "sliding_attention": {"rope_theta": 500000.0}},
        complete=_complete_olmo3, defaults=_DEFAULTS["olmo3"],
    ),
    build_llama(
        "Hunyuan", "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM",
        flags=HUNYUAN_FLAGS, settings=(HEAD_WIDTH, *ATTENTION_BIAS), rows=HUNYUAN_ROWS,
        idle=frozenset(("eod_token_id",)), complete=complete_hunyuan, defaults=_DEFAULTS["hunyuan_v1_dense"],
    ),
    build_family(
        "OLMo 1", "olmo", "OlmoForCausalLM",
        flags="--swiglu --disable-bias-linear --norm-parameters none",
        settings=(UNTIED, ROTARY_BASE, HEAD_WIDTH, *ATTENTION_BIAS), rows=without_rows(BIASED_ROWS, "layernorm"),
        defaults=_DEFAULTS["olmo"],
    ),
    build_family(
        # It turns queries and keys the other way round, which is the same with their halves exchanged.
        "nanochat", "nanochat", "NanoChatForCausalLM",
        flags="--normalization RMSNorm --norm-parameters none --squared-relu --disable-bias-linear "
        "--add-embedding-norm --qk-l2-norm --qk-norm-after-rotation",
        settings=(*USUAL, HEAD_WIDTH, *ATTENTION_BIAS, SOFT_CAPS[1]),
        rows={
            **without_rows(BIASED_ROWS, "layernorm", ".mlp.", "linear_qkv"),
            **rename_rows(OURS, THEIRS, {"mlp.linear_fc1": "mlp.fc1", "mlp.linear_fc2": "mlp.fc2"}),
            **build_rows(
                *(
                    Row(f"{OURS}self_attention.linear_qkv.{kind}", list_projections(kind), "turned_qkv")
                    for kind in ("weight", "bias")
                )
            ),
        },
        defaults=_DEFAULTS["nanochat"],
    ),
    build_llama(
        "Granite SWA", "granite_swa", "GraniteSWAForCausalLM",
        flags="--softmax-type learnable",
        settings=(
            HEAD_WIDTH, *ATTENTION_BIAS, MLP_BIAS, *GRANITE_MULTIPLIERS, WINDOW, WINDOW_LAYERS,
            ConfigKey("layer_rope_theta", "--no-rope-freq", "layers without positions", word="base"),
        ),
        rows={**BIASED_ROWS, **MLP_BIASES, **SINKS},
        complete=_complete_granite_swa, defaults=_DEFAULTS["granite_swa"],
    ),
)  # fmt: skip
