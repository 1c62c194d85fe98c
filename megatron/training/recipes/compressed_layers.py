# SPDX-License-Identifier: Apache-2.0
"""Fields of DeepSeek-V4's config.json that say something of each layer or of each kind of layers, and the flags that
they are, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.plan.read import SPARSE_RATIO, read_plan

_SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_HASHED, _ROUTED = "hash_moe", "moe"
COMPRESSED_BASE = 40000
"""--csa-compress-rotary-base where nobody says it."""
VOCABULARY = 129280
"""Rows of the embedding where a config.json does not say it."""
USUAL_RATES = {SPARSE: SPARSE_RATIO, HEAVY: 128}
LAYER_WORDS = (
    lambda value: (
        (isinstance(value, list) and all(isinstance(word, str) for word in value))
        or (isinstance(value, Mapping) and all(type(rate) is int and 0 < rate <= 10_000 for rate in value.values()))
    ),
    "a word for each layer, or by such words whole numbers from 1 to 10000",
)
"""Values that the fields of --csa-compress-ratios may have, and what is said of others."""
_BY_RATIO = {0: _SLIDING, SPARSE_RATIO: SPARSE, 128: HEAVY}


def complete_compressed(fields: dict[str, Any]) -> dict[str, Any]:
    """All fields by their names in the class, given the fields of published files; `rope_parameters` belong to layers
    with entries, and the two bases stand beside them."""
    ratios, hashed = fields.pop("compress_ratios", None), fields.pop("num_hash_layers", None)
    rotated, count = fields.pop("qk_rope_head_dim", None), fields["num_hidden_layers"]
    rates = {**USUAL_RATES, **(fields["compress_rates"] or {})}
    for kind, name in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        given = fields.pop(name, None)
        rates[kind] = rates[kind] if given is None else given
    kinds = fields["layer_types"]
    if kinds is None and ratios is not None:
        kinds = [_BY_RATIO.get(ratio, f"ratio {ratio}") for ratio in ratios]
    if kinds is None:
        # What the class takes for granted, which no published model has.
        kinds = [HEAVY] * min(count, 2) + [SPARSE if index % 2 else HEAVY for index in range(max(0, count - 2))]
    mlps = fields["mlp_layer_types"]
    if mlps is None:
        first = 3 if hashed is None else hashed
        mlps = [_HASHED] * min(count, first) + [_ROUTED] * max(0, count - first)
    share = fields.pop("partial_rotary_factor")
    if share is None:
        share = 64 / 512 if rotated is None else rotated / fields["head_dim"]
    fields |= {"compress_rates": rates, "layer_types": list(kinds[:count]), "mlp_layer_types": list(mlps[:count])}
    return _complete_ropes(fields, share)


def _complete_ropes(fields: dict[str, Any], share: float) -> dict[str, Any]:
    given = fields.pop("rope_scaling", None) or fields["rope_parameters"] or {}
    main, stretched = given.get("main"), given.get("compress")
    if isinstance(main, Mapping) and isinstance(stretched, Mapping):
        if (main.get("rope_type") or main.get("type") or "default") != "default":
            raise ConfigError(f"rope_parameters.main is {dict(main)} in config.json; only the type default is known")
        shares = main.get("partial_rotary_factor", 1.0), stretched.get("partial_rotary_factor", 1.0)
        if shares[0] != shares[1]:
            raise ConfigError(f"rope_parameters of config.json rotate {shares[0]} and {shares[1]} of a head; give one")
        share, rope = shares[0], dict(stretched)
        bases = main.get("rope_theta"), rope.pop("rope_theta", None)
        usual_magnitude = None
    else:
        rope = {name: value for name, value in given.items() if name not in ("main", "compress")}
        bases, usual_magnitude = (fields["rope_theta"], fields["compress_rope_theta"]), 1.0
        if rope.pop("rope_theta", bases[0]) != bases[0]:
            raise ConfigError("rope_parameters.rope_theta and rope_theta of config.json differ; give one")
    if None in bases:
        raise ConfigError("rope_parameters of config.json have no rope_theta; give one for main and for compress")
    is_stretched = (rope.get("rope_type") or rope.get("type")) == "yarn"
    if is_stretched and rope.pop("attention_factor", usual_magnitude) != 1.0:
        raise ConfigError("attention_factor of config.json must be 1.0: rotated channels have no factor here")
    rope = {name: value for name, value in rope.items() if name not in ("mscale", "mscale_all_dim")}
    rope.pop("partial_rotary_factor", None)
    rotated = int(fields["head_dim"] * share)
    named = dict(zip(("rope_theta", "compress_rope_theta"), bases, strict=True))
    return {**fields, **named, "rope_parameters": rope, "qk_rope_head_dim": rotated}


def describe_ropes(fields: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of both kinds of layers; rope: the parameters of layers with entries, without a base."""
    share = fields["qk_rope_head_dim"] / fields["head_dim"]
    magnitude = {"attention_factor": 1.0} if rope["rope_type"] == "yarn" else {}
    of_sliding = {"rope_type": "default", "rope_theta": fields["rope_theta"], "partial_rotary_factor": share}
    of_entries = {**rope, "rope_theta": fields["compress_rope_theta"], "partial_rotary_factor": share, **magnitude}
    return {"main": of_sliding, "compress": of_entries}


def build_layer_flag(flag: str, config: Mapping[str, Any]) -> list[str]:
    """--csa-compress-ratios or --moe-n-hash-layers, from completed fields."""
    kinds, rates, mlps = config["layer_types"], config["compress_rates"], config["mlp_layer_types"]
    count = config["num_hidden_layers"]
    for name, found in (("layer_types", kinds), ("mlp_layer_types", mlps)):
        if len(found) != count:
            raise ConfigError(f"{name} of config.json has {len(found)} entries; it must have {count}, one per layer")
    if flag == "--moe-n-hash-layers":
        first = next((index for index, kind in enumerate(mlps) if kind != _HASHED), count)
        if mlps[first:] != [_ROUTED] * (count - first):
            raise ConfigError(f"mlp_layer_types is {mlps} in config.json; only {_HASHED} and then {_ROUTED} is known")
        return [f"{flag} {first}", f"--actual-vocab-size {config.get('vocab_size', VOCABULARY)}"] if first else []
    if rates[SPARSE] != SPARSE_RATIO or rates[HEAVY] <= SPARSE_RATIO:
        raise ConfigError(
            f"compress_rates is {rates} in config.json; known are {SPARSE_RATIO} for {SPARSE}, and more for {HEAVY}"
        )
    ratios = {_SLIDING: 0, **rates}
    if unknown := next((kind for kind in kinds if kind not in ratios), None):
        raise ConfigError(f"layer_types of config.json has {unknown!r}; known are {', '.join(ratios)}")
    return [f"{flag} [{','.join(str(ratios[kind]) for kind in kinds)}]"]


def invert_layer_flag(flag: str, model: Any, fields: dict[str, Any]) -> bool:
    """Add the fields of one of these flags; False where no model of theirs has its value. model: a
    TransformerConfig."""
    layers = read_plan(model).decoder
    if flag == "--moe-n-hash-layers":
        count = model.moe_n_hash_layers
        fields["mlp_layer_types"] = [_HASHED] * count + [_ROUTED] * (len(layers) - count)
        return True
    names = {"sliding_attention": _SLIDING, "compressed_sparse": SPARSE, "compressed_heavy": HEAVY}
    heavy = {layer.options.compress_ratio for layer in layers if layer.has("compressed_heavy")}
    if len(heavy) > 1 or any(layer.kinds[0] not in names for layer in layers):
        return False
    fields["layer_types"] = [names[layer.kinds[0]] for layer in layers]
    fields["compress_rates"] = {**USUAL_RATES, **({HEAVY: heavy.pop()} if heavy else {})}
    return True
