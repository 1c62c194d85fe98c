# SPDX-License-Identifier: Apache-2.0
"""Settings that follow from those that a program has changed after they were parsed."""

from __future__ import annotations

from collections.abc import Set
from types import SimpleNamespace
from typing import Any

from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import groups_of_fields
from megatron.training.flags.derive import expand_short_forms

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_BATCH = frozenset({"world_size", "micro_batch_size", *_SIZES})
_ACTIVATION = frozenset({"swiglu", "geglu", "quick_geglu", "squared_relu", "relu", "openai_gelu"})
_SHORT_FORMS = _ACTIVATION | {"use_rotary_position_embeddings", "add_position_embedding", "recompute_activations"}
_FOLLOWING = {
    "global_batch_size": _BATCH,
    "eval_global_batch_size": _BATCH,
    "eval_micro_batch_size": _BATCH,
    "ffn_hidden_size": {"hidden_size"} | _ACTIVATION,
    "moe_ffn_hidden_size": {"hidden_size", "ffn_hidden_size"} | _ACTIVATION,
    "kv_channels": {"hidden_size", "num_attention_heads"},
    "num_query_groups": {"num_attention_heads", "group_query_attention"},
    "expert_tensor_parallel_size": {"tensor_model_parallel_size"},
}
"""Settings that follow from others where they are not given -> those others."""


def follow_changes(config: RunConfig, changes: dict[str, Any], changed: Set[str]) -> dict[str, Any]:
    """Return settings that follow from those that a script has changed: None for them to be derived again where nobody
    gave them, and what a short form stands for."""
    is_free = {name: name not in changes and is_default(config, name) for name in groups_of_fields()}
    found: dict[str, Any] = {name: None for name, others in _FOLLOWING.items() if others & changed and is_free[name]}
    if changed & _SHORT_FORMS:
        draft: Any = SimpleNamespace(
            model=SimpleNamespace(**vars(config.model)),
            gpt=SimpleNamespace(**vars(config.gpt) | changes),
            training=SimpleNamespace(**vars(config.training) | changes),
        )
        expand_short_forms(draft)
        found |= {name: value for name, value in vars(draft.model).items() if value != getattr(config.model, name)}
    if "num_query_groups" in found and changes.get("group_query_attention", config.gpt.group_query_attention):
        found["num_query_groups"] = 1
    return {name: value for name, value in found.items() if name not in changes}


def is_default(config: RunConfig, name: str) -> bool:
    """Return True where nobody gave the setting."""
    return config.sources.get(config.flag(name), "default") == "default"
