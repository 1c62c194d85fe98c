# SPDX-License-Identifier: Apache-2.0
"""Every field of every family's config.json, changed alone: does our model follow, or is the file refused?

A case is a tiny random model of Hugging Face transformers whose config.json has one field changed, left out, or set to
what no model has. The class of transformers reads the file, and so do our tables; the same weights must then give the
same logits. A file that we refuse is refused in a sentence; one that the class refuses may be.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from megatron.core.errors import MegatronError
from megatron.training.recipes.families import FAMILIES, find_family
from megatron.training.recipes.family import Family
from megatron.training.recipes.family_flags import IDLE, build_flags
from megatron.training.recipes.hf_config import keep_stored_prediction
from tests.support.huggingface_models import SIZES, assert_same_logits, randomised
from tests.trial.verdict import Verdict

ABSENT = "(left out)"
_LATENT = {
    "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14, "num_key_value_heads": 4,
    "n_routed_experts": 16, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "num_experts_per_tok": 4, "q_lora_rank": 20,
}  # fmt: skip
_LATENT_ONLY = {name: value for name, value in _LATENT.items() if name != "first_k_dense_replace"}
# So many heads that no key has a product below zero with all of them: of equal scores transformers takes any.
_INDEXER = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 5, "mlp_layer_types": ["dense"] + ["sparse"] * 3}
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 16, "sliding_window": 6, "tie_word_embeddings": True}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
# Norms of heads make much of what nearly cancelled, in transformers too; a larger epsilon keeps the last digits.
_DELTA = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 14,
    "head_dim": 16, "rms_norm_eps": 0.01,
}  # fmt: skip
_SHARED = {"shared_expert_intermediate_size": 40}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 4, "mamba_d_state": 6, "rms_norm_eps": 0.01}
BASES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {}, "mistral": {"sliding_window": 6}, "olmo2": {}, "smollm3": {"bos_token_id": 1, "eos_token_id": 2},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"head_dim": 12}, "phi3": {"partial_rotary_factor": 0.5}, "gemma": {"head_dim": 12}, "gemma2": _GEMMA,
    "gemma3_text": _GEMMA, "nemotron": {}, "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 6},
    "mixtral": {"num_local_experts": 4}, "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": _EXPERTS | {"head_dim": 12},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4},
    "deepseek_v2": _LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": _LATENT | {"n_group": 4, "topk_group": 2},
    "deepseek_v32": _LATENT_ONLY | _INDEXER | {"n_group": 4, "topk_group": 2},
    "glm_moe_dsa": _LATENT_ONLY | _INDEXER | {"indexer_types": ["full", "full", "shared", "shared"]},
    "deepseek_v4": {
        "head_dim": 16, "partial_rotary_factor": 0.25, "q_lora_rank": 20, "o_groups": 2, "o_lora_rank": 10,
        "sliding_window": 6, "index_n_heads": 16, "index_head_dim": 8, "index_topk": 3, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 24, "swiglu_limit": 1.0,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "heavily_compressed_attention"] + ["compressed_sparse_attention"] * 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        "mlp_layer_types": ["hash_moe"] + ["moe"] * 3,
    },
    "glm4_moe": {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "head_dim": 8,
    },
    "llama4_text": {
        "intermediate_size_mlp": 80, "num_local_experts": 4, "head_dim": 12, "attention_chunk_size": 6,
        "floor_scale": 3, "attn_scale": 0.5,
    },
    "qwen3_next": _DELTA | _EXPERTS | _SHARED | {"mlp_only_layers": [1]}, "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS | _SHARED,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 12,
        "mamba_num_heads": 6, "mamba_head_dim": 10, "n_groups": 3, "ssm_state_size": 8, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 20, "time_step_min": 0.5,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 4, "state_size": 6},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 8} | _MAMBA,
    "granitemoehybrid": _MAMBA
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4, "mamba_d_head": 8,
        "shared_intermediate_size": 40, "attention_multiplier": 0.4,
    },
    "falcon_h1": {
        "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 3, "mamba_d_state": 7,
        "rms_norm_eps": 0.01, "mlp_multipliers": [0.9, 0.7], "ssm_multipliers": [0.6, 1.2, 0.8, 1.5, 0.5],
        "key_multiplier": 0.7, "attention_in_multiplier": 1.4, "attention_out_multiplier": 0.6,
        "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.3, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.5,
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 3,
        "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 14, "rms_norm_eps": 0.01,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"], "linear_num_heads": 3,
        "linear_head_dim": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14,
        "num_key_value_heads": 4, "num_local_experts": 16, "moe_intermediate_size": 24, "n_shared_experts": 2,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "rms_norm_eps": 0.01,
    },
    "granite": {"attention_multiplier": 0.4}, "seed_oss": {"head_dim": 12}, 
    "ministral": {"head_dim": 12, "sliding_window": 6}, "starcoder2": {"sliding_window": 6},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12},
    "glm": {"head_dim": 12}, "glm4": {"head_dim": 12}, "ernie4_5": {"head_dim": 12}, "internlm3": {"head_dim": 12},
    "iquestcoder": {"head_dim": 12}, "arcee": {}, "helium": {"head_dim": 8}, "exaone4": {"sliding_window": 6},
    "olmo3": {"sliding_window": 6}, "granite_swa": {"sliding_window": 6, "attention_multiplier": 0.4},
    "glm4_moe_lite": _LATENT_ONLY | {"n_group": 4, "topk_group": 2},
    "dots1": {
        "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "sliding_window": 6,
        "max_window_layers": 2,
    },
    "ministral3": {
        "head_dim": 12, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 7,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    },
    "hunyuan_v1_dense": {"head_dim": 12}, "hunyuan_v1_moe": {"head_dim": 12, "num_experts": 6, "moe_topk": 3},
    "granitemoe": {"num_local_experts": 4, "attention_multiplier": 0.4},
    "granitemoeshared": {"num_local_experts": 4, "attention_multiplier": 0.4, "shared_intermediate_size": 40},
    "solar_open": {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "head_dim": 12,
    },
    "hy_v3": _EXPERTS | {"head_dim": 12},
    "exaone_moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "sliding_window": 6,
    },
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4},
    "phi": {}, "stablelm": {}, "cohere": {"logit_scale": 0.7},
    "cohere2": {"logit_scale": 0.7, "sliding_window": 6},
    "cohere2_moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 6, "num_shared_experts": 2,
        "prefix_dense_intermediate_size": 40, "shared_expert_combination_strategy": "sum",
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "logit_scale": 0.7,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False, "norm_eps": 0.01,
    },
    "lfm2_moe": _EXPERTS
    | {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1, "norm_eps": 0.01},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "olmo": {}, "nanochat": {},
    "ernie4_5_moe": {
        "head_dim": 12, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
    },
    "mistral4": _LATENT
    | {
        "n_group": 4, "topk_group": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 7,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2},
    "afmoe": _EXPERTS | {"head_dim": 12, "sliding_window": 6, "mup_enabled": True},
}  # fmt: skip
"""Settings of a tiny model of each type, beside `SIZES`."""
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 4.0, "alpha": 1000.0},
}  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    math.nan, math.inf, -1, -0.5, "six", "", [], {}, [1], {"a": 1}, True, None, 0, 10**30, 1e300, 1e-300,
)  # fmt: skip


@dataclass(frozen=True)
class FieldCase:
    """One config.json."""

    model_type: str
    changes: tuple[tuple[str, Any], ...]
    """Field and value; a dot leads into `rope_parameters`."""

    def text(self) -> str:
        """As a person would say it."""
        return f"{self.model_type}: " + ", ".join(f"{name} {value!r}" for name, value in self.changes)


def read_config(model_type: str, fields: dict[str, Any]) -> Any:
    """What the class of transformers makes of the fields of a config.json."""
    from transformers import AutoConfig

    return type(AutoConfig.for_model(model_type)).from_dict(copy.deepcopy(fields))


def write_fields(model_type: str) -> dict[str, Any]:
    """The config.json of the tiny model, as transformers writes it."""
    sizes = {"vocab_size": 96, "pad_token_id": 0} if model_type == "gpt2" else SIZES
    if model_type == "mamba2":
        sizes = {name: SIZES[name] for name in ("vocab_size", "num_hidden_layers", "hidden_size", "pad_token_id")}
    # In the files, and not in what the class keeps: a window that is switched off, how often layers come.
    given = sizes | BASES[model_type]
    return json.loads(json.dumps(read_config(model_type, given).to_dict() | given, default=str))


def list_values(model_type: str, name: str, value: Any) -> list[Any]:
    """Values of a field that a model may have."""
    layers = SIZES["num_hidden_layers"]
    if name == "layer_types":
        local = "chunked_attention" if model_type == "llama4_text" else "sliding_attention"
        return [["full_attention"] * layers, [local] * layers, [local, "full_attention"] * (layers // 2),
                ["full_attention", local, local, local], ["full_attention"], ["linear_attention"] * layers]  # fmt: skip
    if name == "no_rope_layers":
        return [[1] * layers, [0, 1, 1, 1], [1, 0] * (layers // 2), [0] * layers, [1]]
    if name in ("layers_block_type", "hybrid_override_pattern"):
        return [["mlp", "full_attention", "moe", "linear_attention"], ["linear_attention"] * layers, ["mamba"] * 3,
                ["full_attention", "mlp"] * 2, "ME*-", "-ME*", "MX*-"]  # fmt: skip
    if name == "time_step_limit":
        return [[0.5, math.inf], [0.0, 0.7], [0.5, 0.9], [0.9, 0.5], [1.0]]
    if name == "position_embedding_type":
        return ["rope", "alibi"]
    if name in ("moe_layers", "mlp_only_layers", "attn_layer_indices"):
        return [[0], [1, 3], [0, 1, 2, 3], []]
    if name == "rope_parameters":
        return []
    if name == "topk_method":
        return ["greedy", "group_limited_greedy", "noaux_tc"]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return ["gelu", "relu2", "silu", "gelu_pytorch_tanh"]
    if isinstance(value, float):
        return [value * 0.5, value * 3]
    # In narrower layers rounding alone makes a difference.
    return [8, 12, 16, 64] if "size" in name or "embd" in name else [1, 2, 3, 4, 8, 12]


@functools.cache
def list_every_field() -> tuple[FieldCase, ...]:
    """Each field of each family: other values, left out, and what no model has."""
    return tuple(_list_every_field())


def _list_every_field() -> Iterator[FieldCase]:
    for family in FAMILIES:
        fields = write_fields(family.model_type)
        names = dict.fromkeys([*family.defaults, *fields, "rope_theta", "partial_rotary_factor", "rope_scaling"])
        for name in names:
            if name in ("model_type", "vocab_size", "dtype", "architectures", "transformers_version"):
                continue
            values = list_values(family.model_type, name, fields.get(name))
            if name not in IDLE:
                values += HOSTILE
            if name not in _SIZES:
                values.append(ABSENT)
            yield from (FieldCase(family.model_type, ((name, value),)) for value in values)
        if family.is_rotary:
            yield from _list_ropes(family)


_SIZES = {*SIZES, "n_positions", "n_embd", "n_layer", "n_head", "n_routed_experts", "moe_intermediate_size",
          "intermediate_size_mlp", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"}  # fmt: skip


def _list_ropes(family: Family) -> Iterator[FieldCase]:
    """Each kind of rotary positions, in both forms, and each of its fields."""
    config = read_config(family.model_type, write_fields(family.model_type))
    for kind, rope in ROPES.items():
        full = {"rope_type": kind, "rope_theta": 1000.0, **rope}
        if kind == "longrope":
            pairs = _count_pairs(family, config)
            full |= {
                "short_factor": [1.0 + n / 8 for n in range(pairs)],
                "long_factor": [2.0 + n for n in range(pairs)],
            }
        by_layer = "full_attention" in family.rope
        for changed in ({}, {"mscale": 0.7}, {"mscale_all_dim": 0.9}, {"mscale": 0.7, "mscale_all_dim": 0.9},
                        {"attention_factor": 1.5}, {"truncate": False}, {"beta_fast": 4.0, "beta_slow": 0.5},
                        {"factor": None}, {"factor": math.inf}, {"factor": "2"}, {"rope_theta": math.nan},
                        {"original_max_position_embeddings": None}, {"partial_rotary_factor": 0.5},
                        {"short_factor": None}, {"rope_theta": -1.0}, {"what": 1}):  # fmt: skip
            fields = {name: value for name, value in (full | changed).items() if value is not None}
            nested = {"full_attention": fields, "sliding_attention": {"rope_type": "default"}} if by_layer else fields
            yield FieldCase(family.model_type, (("rope_parameters", nested),))
        yield FieldCase(family.model_type, (("rope_parameters", ABSENT), ("rope_scaling", {**full, "type": kind})))


def _count_pairs(family: Family, config: Any) -> int:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    return int(width * rope.get("partial_rotary_factor", 1.0)) // 2


def draw_fields(seed: int) -> FieldCase:
    """Two or three fields changed together."""
    rng = random.Random(f"fields {seed}")
    chosen = rng.choice(FAMILIES).model_type
    usual = (case for case in list_every_field() if not any(case.changes[0][1] is value for value in HOSTILE))
    cases = [case for case in usual if case.model_type == chosen]
    picked = {case.changes[0][0]: case.changes[0][1] for case in rng.sample(cases, rng.randint(2, 3))}
    return FieldCase(chosen, tuple(picked.items()))


def judge_fields(case: FieldCase) -> Verdict:
    """Build both models and compare. A case of which a part takes no sense is "refused"."""
    # Of equal scores, which an indexer of few heads has many of, transformers' topk takes any and ours the first.
    with mock.patch.object(torch, "topk", _take_first), mock.patch.object(torch.Tensor, "topk", _take_first):
        return _judge(case)


def _take_first(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """torch.topk, of equal numbers the first."""
    values, places = x.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))


def _judge(case: FieldCase) -> Verdict:
    fields = write_fields(case.model_type)
    for name, value in case.changes:
        fields.pop(name, None)
        if value is not ABSENT:
            fields[name] = value
    command = f"config.json: {case.text()}"
    family = find_family(case.model_type)
    try:
        # transformers' models have no layers of multi-token prediction, whatever their config says.
        flags = build_flags(family, keep_stored_prediction(fields, ()))
    except MegatronError as error:
        return Verdict("refused", str(error), command)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # What hf_config.py makes a sentence of.
        return Verdict("refused", f"{type(error).__name__}: {error}", command)
    try:
        with warnings.catch_warnings(action="ignore"):
            hf = _build_theirs(family, fields)
    except Exception as error:  # of transformers, which raises almost anything
        return Verdict("refused", f"transformers: {type(error).__name__}: {error}".splitlines()[0], command)
    try:
        assert_same_logits(hf, flags, family, allows_rounding=True)
    except MegatronError as error:
        return Verdict("refused", str(error), command)
    except AssertionError as error:
        if "logits so small" in str(error):
            return Verdict("refused", str(error), command)
        # transformers' float32 may be the less exact one of the two.
        if not _is_near_float64(hf, flags, family):
            return Verdict("fault", f"{error} with {' '.join(flags)}", command)
    return Verdict("ran", "same logits", command)


def _is_near_float64(hf: Any, flags: list[str], family: Family) -> bool:
    """Tell whether our logits in float32 are those of transformers' model in float64."""
    try:
        assert_same_logits(hf.double(), flags, family)
    except AssertionError:
        return False
    return True


def _build_theirs(family: Family, fields: dict[str, Any]) -> Any:
    """A tiny random model of transformers, which has run once."""
    import transformers

    config = read_config(family.model_type, fields)
    config._attn_implementation = config._experts_implementation = "eager"  # others take no float64
    hf = randomised(getattr(transformers, family.model_class)(config))
    for name, buffer in hf.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(3)))
    with torch.no_grad():
        logits = hf(input_ids=torch.arange(1, 25)[None], use_cache=False).logits
    if not logits.isfinite().all():
        raise ValueError("logits are not finite")
    return hf
