# SPDX-License-Identifier: Apache-2.0
"""From our settings to the fields of a config.json: each `Setting` of the table of families read backwards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron.core.plan.model_plan import BranchOptions, LayerPlan
from megatron.core.plan.read import read_plan
from megatron.training.config.container import RunConfig
from megatron.training.flags.declarations import flags_by_spelling
from megatron.training.recipes.compressed_layers import describe_ropes, invert_layer_flag
from megatron.training.recipes.family import GROUP_LIMITED, ROPE_TYPES, ConfigKey, Family
from megatron.training.recipes.family_flags import ENDLESS, FULL, list_pinned
from megatron.training.recipes.family_letters import read_pattern


def invert_flags(family: Family, config: RunConfig) -> dict[str, Any] | None:
    """The fields of the config.json of a family's model with these settings; None where they fit no such model.

    What a family's flags say of all its models is not looked at: whether the fields mean these settings is for the
    caller to find out, by reading them again.
    """
    fields: dict[str, Any] = {}
    for name, expected in (*family.expects.items(), *((name, family.defaults[name]) for name in list_pinned(family))):
        if expected is not None:
            _put(fields, name, expected)
    for setting in (*family.sizes, *family.settings):
        if not _invert(setting, config, fields):
            return None
    if family.letters is not None:
        layers = read_pattern(family.letters, config.model.hybrid_layer_pattern)
        if layers is None:
            return None
        fields |= layers
    if family.rotary_field == "rope_parameters":
        if config.model.position_embedding_type == "none":
            fields["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
            del fields["rope_theta"]
    elif family.rotary_field:
        fields[family.rotary_field] = None if config.model.position_embedding_type == "none" else "rope"
    if family.is_rotary and config.model.position_embedding_type != "none":
        _add_rope(fields, config)
    return fields


def has_fixed_flags(family: Family, config: RunConfig) -> bool:
    """Return False where these settings contradict a flag that all models of a family have."""
    for text in re.findall(r"--\S+(?: [^-\s]\S*)?", family.flags):
        spelling, _, word = text.partition(" ")
        declared = _find_flag(spelling)
        if declared.kind not in ("shape", "function"):
            continue
        value = config.read(declared.dest)
        if isinstance(value, bool) and value != (spelling in declared.names):
            return False
        if isinstance(value, str) and value != word:
            return False
    return True


def _put(fields: dict[str, Any], names: str, value: Any) -> None:
    """Store a value under the first of the names `a|b`; under the second one, too, where the first lies deeper: earlier
    releases of transformers look there."""
    first, *others = names.split("|")
    if others and "." in first:
        fields[others[0]] = value
    *path, last = first.split(".")
    for part in path:
        fields = fields.setdefault(part, {})
    fields[last] = value


def _invert(setting: ConfigKey, config: RunConfig, fields: dict[str, Any]) -> bool:
    """Add the field of one setting; False where the family has no model with its value."""
    if setting.form in ("root", "two best", "full layers"):
        # Of a field that something else writes; whether it counts is said here.
        if setting.form == "root" and setting.only_if is not None:
            fields[setting.only_if] = _read(setting.flag, config) not in (None, 1.0)
        return True
    model = config.model
    if setting.with_experts and model.num_moe_experts is None:
        if setting.flag == "--num-experts":
            _put(fields, setting.theirs, 0)
        return True
    value = _read(setting.flag, config)
    layers = read_plan(model).decoder
    if setting.form == "expert span":
        return _invert_span(setting, [layer.has("experts") for layer in layers], fields)
    if setting.form == "gate norm":
        is_normed, is_first = setting.theirs.split("|")
        fields |= {is_normed: value != "none", is_first: value == "ungated"}
        return True
    if setting.form in ("compressed layers", "hashed layers"):
        return invert_layer_flag(setting.flag, model, fields)
    value = _convert(setting, value, config, layers)
    if setting.form == "expansion":
        if value != int(value):
            return False
        value = int(value)
    if setting.only_if is not None:
        fields[setting.only_if] = value is not None if setting.form == "number" else model.window_size is not None
        if not fields[setting.only_if]:
            if setting.form == "number":
                return True
            value = None
    if value is None and setting.form in ("number", "groups"):
        value = setting.default
    if "*" in setting.theirs:
        first, second = setting.theirs.split("*")
        # Their product is ours; the second factor has a separate setting.
        width = fields.get(second)
        if value is not None and (not width or value % width):
            return False
        fields[first] = 0 if value is None else value // width
        return True
    if value is None and ("." in setting.theirs.split("|")[0] or setting.flag == "--num-experts"):
        return False
    _put(fields, setting.theirs, value)
    return True


def _convert(setting: ConfigKey, value: Any, config: RunConfig, layers: Sequence[LayerPlan]) -> Any:
    """Return the value of their field for ours, where it is one separate field; ours as it is for other forms."""
    model = config.model
    match setting.form:
        case "switch" | "inverted switch":
            value = _is_given(setting, config) == (setting.form == "switch")
        case "rotated share":
            value = model.qk_pos_emb_head_dim / (model.qk_pos_emb_head_dim + model.qk_head_dim)
        case "average":
            value = {0.5: "average", 1.0: "sum"}.get(value)
        case "one norm":
            value = 1 if value else 2
        case "query groups":
            value = model.num_query_groups
        case "window":
            value = None if value is None or value[0] < 0 else value[0] + 1
        case "window layers":
            value = [_describe_sight(layer.options) for layer in layers]
        case "layers without positions":
            base = 1 if setting.word is None else _read("--rotary-base", config)
            value = [base if layer.options.rotary != "none" else 0 for layer in layers]
        case "dense layers first":
            value = next((index for index, layer in enumerate(layers) if layer.has("experts")), len(layers))
        case "layers with experts":
            value = [index for index, layer in enumerate(layers) if layer.has("experts")]
            if setting.word is not None:
                value = [setting.word if layer.has("experts") else "dense" for layer in layers]
        case "inverse root" | "inverse":
            value = None if value is None else _invert_power(value, -2 if setting.form == "inverse root" else -1)
        case "bounds":
            highest = _read(setting.word or "", config)
            value = [value, ENDLESS if highest is None else highest]
        case "multipliers" if setting.word is None:
            value = [1.0] * 5 if value is None else value
        case "multipliers":
            value = [value, _read(setting.word or "", config)]
        case "expansion":
            assert model.hidden_size is not None
            value = model.mamba_inner_width / (1 if setting.word == "channels" else model.hidden_size)
        case "group score":
            value = GROUP_LIMITED if model.moe_router_num_groups and value == "best" else setting.default
    return value


def _invert_span(setting: ConfigKey, has_experts: list[bool], fields: dict[str, Any]) -> bool:
    """Add the first and last layer with experts, and every which in between has some; False where no three numbers say
    it."""
    first, last = has_experts.index(True), len(has_experts) - 1 - has_experts[::-1].index(True)
    for every in range(1, len(has_experts) + 1):
        if has_experts == [first <= n <= last and (n + 1) % every == 0 for n in range(len(has_experts))]:
            fields |= dict(zip(setting.theirs.split("|"), (first, last, every), strict=True))
            return True
    return False


def _describe_sight(options: BranchOptions) -> str:
    """Their word for what a token sees in a layer."""
    if options.window is not None:
        return "sliding_attention"
    return "full_attention" if options.chunk is None else "chunked_attention"


def _find_flag(flag: str) -> Any:
    return flags_by_spelling()[flag]


def _read(flag: str, config: RunConfig) -> Any:
    return config.read(_find_flag(flag).dest)


def _is_given(setting: ConfigKey, config: RunConfig) -> bool:
    """Return whether a switch, in this spelling, would have to stand on the command line."""
    value = _read(setting.flag, config)
    if setting.word is not None:
        return bool(value == setting.word)
    return bool(value) == (setting.flag in _find_flag(setting.flag).names)


def _invert_power(value: float, exponent: int) -> float | int:
    """The number of which value is the power -1/2 (exponent -2), or 1 / value (exponent -1)."""
    # 144 ** -0.5 is rounded; so its inverse is not exactly 144.
    nearest = round(value**exponent)
    return nearest if nearest and nearest ** (1 / exponent) == value else value**exponent


def _add_rope(fields: dict[str, Any], config: RunConfig) -> None:
    """Add the kind of rotary positions: as `rope_parameters`, and as `rope_scaling` for earlier transformers."""
    if config.model.uses_yarn():
        kind = "yarn"
    elif config.gpt.use_rope_scaling:
        kind = "llama3"
    elif config.model.longrope_short_factors is not None:
        kind = "longrope"
    else:
        kind = "default" if config.gpt.rotary_seq_len_interpolation_factor is None else "linear"
    _, settings, expects = ROPE_TYPES[kind]
    rope: dict[str, Any] = {"rope_type": kind, **{name: value for name, value in expects.items() if value is not None}}
    for setting in settings:
        _invert(setting, config, rope)
    if "compress_rope_theta" in fields:
        # For layers with entries; the others are never stretched.
        fields["rope_parameters"] = describe_ropes(fields, rope)
        return
    parameters = fields.setdefault("rope_parameters", {})
    if FULL in parameters:
        # The layers with a window are never stretched.
        parameters["sliding_attention"]["rope_type"] = "default"
        parameters = parameters[FULL]
    parameters |= rope
    rope |= {name: parameters[name] for name in ("llama_4_scaling_beta", "partial_rotary_factor") if name in parameters}
    fields["rope_scaling"] = None if kind == "default" else rope
    if kind == "longrope":
        # Where the field is outside of them, it is the one that counts.
        fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
