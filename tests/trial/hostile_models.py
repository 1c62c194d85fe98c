# SPDX-License-Identifier: Apache-2.0
"""Hostile Hugging Face models: a tiny directory of weights whose config.json says something that no one should say.

Conversion has to refuse it in a sentence, or to make a model of it, which it has compared with the source itself.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SIZES = {
    "vocab_size": 96, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 12},
    "phi3": {},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "deepseek_v3": {
        **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}  # fmt: skip
"""model_type -> fields of its config beside the sizes."""
# JSON as Python reads it: Infinity and NaN are what a careless program writes.
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, -0.0, 0.5, 1e-320, 1e308, float("inf"), float("-inf"),
    float("nan"), "", "x", "8", "1e4", "null", "../../x", "é 🙂", "\\ud800", [], [0], [-1], [[1]], ["x"], {}, {"x": 1},
    {"type": "linear", "factor": 0}, {"rope_type": "yarn", "factor": -1.0}, {"rope_type": "os.system"},
)  # fmt: skip
# Fields that some release of transformers knows and the written file may lack.
OTHER_FIELDS = (
    "rope_theta", "rope_scaling", "sliding_window", "layer_types", "quantization_config", "torch_dtype", "auto_map",
    "attention_bias", "mlp_bias", "head_dim", "partial_rotary_factor", "final_logit_softcapping", "max_window_layers",
    "tie_word_embeddings", "num_nextn_predict_layers", "norm_topk_prob", "routed_scaling_factor", "architectures",
)  # fmt: skip


def can_make_models() -> bool:
    """Tell whether transformers is there, which makes the models."""
    return importlib.util.find_spec("transformers") is not None


def make_hostile_model(directory: Path, name: str, rng: random.Random) -> None:
    """Copy the model there and change one or two places of its config.json, at random."""
    shutil.copytree(_tiny_model(name), directory)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for _ in range(rng.choice((1, 1, 2))):
        places = [*_list_places(config), *((config, field) for field in OTHER_FIELDS)]
        holder, key = rng.choice(places)
        if rng.random() < 0.1:
            holder.pop(key, None)
        else:
            holder[key] = rng.choice(VALUES)
    file.write_text(json.dumps(config))


def describe_change(directory: Path, name: str) -> str:
    """Return what the config.json of such a directory has otherwise than the model's own, as JSON."""
    before = json.loads((_tiny_model(name) / "config.json").read_text())
    after = json.loads((directory / "config.json").read_text())
    changed = {key: value for key, value in after.items() if json.dumps(before.get(key, "")) != json.dumps(value)}
    return json.dumps(changed | dict.fromkeys(before.keys() - after.keys(), "(removed)"))


def _list_places(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict):
            yield from _list_places(value)


@functools.cache
def _tiny_model(name: str) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(1)
    directory = Path(tempfile.mkdtemp(prefix="trial-")) / name
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(_SIZES | MODELS[name]))).save_pretrained(directory)
    return directory


def remove_models() -> None:
    """Remove what was made."""
    for name in MODELS if _tiny_model.cache_info().currsize else ():
        shutil.rmtree(_tiny_model(name).parent)
    _tiny_model.cache_clear()
