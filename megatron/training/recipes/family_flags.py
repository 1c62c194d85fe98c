# SPDX-License-Identifier: Apache-2.0
"""From a config.json to flags, as the table of families says.

fields -> every known one is judged: a number, a truth value, a list
       -> completed: what the file leaves out means what the class in transformers takes for it
       -> flags; a field that is no flag and changes the model must have the class's default
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.errors import ConfigError
from megatron.training.recipes.compressed_layers import LAYER_WORDS, build_layer_flag
from megatron.training.recipes.family import GROUP_LIMITED, ROPE_TYPES, ConfigKey, Family
from megatron.training.recipes.family_letters import build_pattern, list_layer_fields
from megatron.training.recipes.flag_values import describe_number, describe_pattern, describe_period

ROPE = "rope_parameters"
ENDLESS = {"__float__": "Infinity"}
MAMBA_HEADS = ("mamba_n_heads|mamba_num_heads|num_heads", "mamba_d_head|mamba_head_dim|head_dim")
"""Fields with the number of Mamba-2 heads and the channels of one."""
FULL = "full_attention"
IDLE = frozenset(
    """model_type architectures auto_map transformers_version torch_dtype dtype _name_or_path is_encoder_decoder
    id2label label2id num_labels problem_type return_dict output_hidden_states output_attentions chunk_size_feed_forward
    use_cache attn_implementation _attn_implementation initializer_range attention_dropout vocab_size bos_token_id
    eos_token_id pad_token_id quantization_config output_router_logits router_aux_loss_coef pretraining_tp
    resid_pdrop embd_pdrop attn_pdrop hidden_dropout classifier_dropout router_jitter_noise reorder_and_upcast_attn
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout""".split()
)
"""Fields that change nothing in what a model computes, in any family, or are read elsewhere."""
_ROPE_NUMBERS = frozenset(
    """rope_theta partial_rotary_factor factor original_max_position_embeddings attention_factor beta_fast beta_slow
    low_freq_factor high_freq_factor mscale mscale_all_dim llama_4_scaling_beta alpha""".split()
)
_ROPE_FIELDS = _ROPE_NUMBERS | set("max_position_embeddings rope_type type truncate short_factor long_factor".split())
_LARGEST, _SMALLEST = 2**53, 2.0**-126
# Larger than any model's, so that a list with an entry for each stays small.
_MOST = 10_000
_Judge = Callable[[Any], bool]


def build_flags(family: Family, config: Mapping[str, Any], *, with_sizes: bool = True) -> list[str]:
    """The flags of a model whose config.json is `config`, each with its values: ["--swiglu", "--kv-channels 128", ...].

    with_sizes: also the shape's flags. The tokenizer's are not among them. Raises ConfigError where the model does
    something that no flag of its family says.
    """
    config = complete_fields(family, config)
    # A field that nothing here can follow is an error, never ignored: the converted model would compute something else.
    _check(family, config, family.expects)
    _check(family, config, {name: family.defaults[name] for name in list_pinned(family)})
    # A flag, with its value if one follows.
    flags = re.findall(r"--\S+(?: [^-\s]\S*)?", family.flags)
    if is_rotary(family, config):
        flags = [*_build_rope_flags(family, config), *flags]
    elif family.is_rotary:
        flags = ["--position-embedding-type none", *flags]
    settings = (*(family.sizes if with_sizes else ()), *family.settings)
    if family.letters is not None:
        # The number of layers follows from their letters.
        settings = tuple(setting for setting in settings if setting.flag != "--num-layers")
        pattern = build_pattern(family.letters, config, has_experts=uses_experts(config))
        # After an equals sign, a word that begins like a flag is none.
        flags += [f"--hybrid-layer-pattern{'=' if pattern.startswith('-') else ' '}{pattern}"] if with_sizes else []
    # Two fields may say the same.
    flags = list(
        dict.fromkeys([*flags, *(flag for setting in settings for flag in _build_flag(family, config, setting))])
    )
    shares = ("sigmoid", "softmax-share", "sqrtsoftplus")
    is_share = any(f"--moe-router-score-function {word}" in flags for word in shares)
    if is_share and "--moe-router-topk 1" in flags and "--moe-apply-probs-on-input" not in flags:
        # Theirs divides by the sum of one; here a single expert's weight is its score.
        name = next(setting.theirs for setting in settings if setting.flag == "--moe-router-topk")
        raise _refuse(family, name, 1, "with such scores only 2 and more are known")
    return flags


def is_rotary(family: Family, config: Mapping[str, Any]) -> bool:
    """Return whether positions are rotations in the model of a completed config.json. Raises ConfigError for other
    words."""
    if not family.is_rotary or not family.rotary_field:
        return family.is_rotary
    if family.rotary_field == ROPE:
        return config[ROPE].get("rope_theta", 0) is not None
    word = config[family.rotary_field]
    if word not in ("rope", None):
        raise _refuse(family, family.rotary_field, word, "only 'rope' and null are known")
    return word == "rope"


def uses_experts(config: Mapping[str, Any]) -> bool:
    """Return whether the model of a completed config.json has experts."""
    return any(config.get(name) for name in _COUNTS)


def list_pinned(family: Family) -> list[str]:
    """Fields of the family's class that change the model and are no flag: they must have the class's default."""
    read = _list_read(family) | family.expects.keys()
    return [name for name in family.defaults if name not in read]


def list_unknown(family: Family, config: Mapping[str, Any]) -> list[str]:
    """Fields of a config.json that neither the family's class nor this program knows."""
    known = _list_read(family) | {*IDLE, *family.defaults, *family.idle, *family.other_names, *family.expects}
    if family.is_rotary:
        known |= {ROPE, "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings"}
    ropes = [rope for name in (ROPE, "rope_scaling") for rope in _list_ropes(family, config.get(name))]
    return sorted(set(config) - known) + sorted({f"{ROPE}.{name}" for rope in ropes for name in rope} - _ROPE_NAMES)


_ROPE_NAMES = {f"{ROPE}.{name}" for name in _ROPE_FIELDS}


def _list_read(family: Family) -> set[str]:
    settings = (*family.sizes, *family.settings)
    of_layers = [] if family.letters is None else list_layer_fields(family.letters)
    of_layers = [*of_layers, *([family.rotary_field] if family.rotary_field else [])]
    of_settings = [name for setting in settings for name in (*_list_fields(setting), setting.only_if)]
    return {name for name in (*of_settings, *of_layers) if name is not None}


def _list_fields(setting: ConfigKey) -> list[str]:
    """The names of the fields of a config.json that a setting reads."""
    return [name.partition(".")[0] for name in re.split(r"[|*]", setting.theirs)]


def _list_ropes(family: Family, rope: object) -> list[Mapping[str, Any]]:
    """List the `rope_parameters` of each kind of layer."""
    if not isinstance(rope, Mapping):
        return []
    kinds = [rope[kind] for kind in family.rope if kind in rope] if FULL in family.rope else []
    return [kind for kind in kinds if isinstance(kind, Mapping)] if kinds else [rope]


# ---- judging what a file says, before any rule reads it


def _is_number(value: Any, most: int = _LARGEST) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # NaN is neither below nor above anything; what float32 cannot hold would become nothing somewhere.
    return value == 0 or _SMALLEST <= value <= most


def _is_list(of: _Judge) -> _Judge:
    return lambda value: isinstance(value, list) and all(of(each) for each in value)


_NUMBER = (_is_number, f"a number from 0 to {_LARGEST}")
_COUNT = (lambda value: isinstance(value, int) and _is_number(value, _MOST), f"a whole number from 0 to {_MOST}")
_STEP = (lambda value: value != 0 and _COUNT[0](value), f"a whole number from 1 to {_MOST}")
_SWITCH = (lambda value: isinstance(value, bool | int), "true or false")
_WORD = (lambda value: isinstance(value, str), "a word")
_WORDS = (_is_list(_WORD[0]), "a list of words")
_NUMBERS = (_is_list(_is_number), "a list of numbers")
_LAYERS = (lambda value: _WORDS[0](value) or _is_list(_COUNT[0])(value), "a list of words or of layers' numbers")
_BOUNDS = (
    lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(
        each == math.inf or _is_number(each) for each in value
    ),
    "two numbers, the smallest and the largest step",
)  # fmt: skip
_BY_FORM: Mapping[str, tuple[_Judge, str]] = {
    "switch": _SWITCH, "inverted switch": _SWITCH, "window layers": _WORDS, "full layers": _LAYERS,
    "multipliers": _NUMBERS, "gate norm": _SWITCH, "layers without positions": _NUMBERS,
    "layers with experts": _NUMBERS, "group score": _WORD, "word": _WORD, "average": _WORD,
    "expert span": (lambda value: value == -1 or _COUNT[0](value), "a layer's number, from 0, or -1 for the last"),
    "bounds": _BOUNDS, "hashed layers": _WORDS, "compressed layers": LAYER_WORDS,
}  # fmt: skip
_BY_TYPE: Mapping[type, tuple[_Judge, str]] = {bool: _SWITCH, int: _NUMBER, float: _NUMBER, str: _WORD}
# No flags: flags follow from them.
_BY_NAME: Mapping[str, tuple[_Judge, str]] = {
    "original_max_position_embeddings": _NUMBER, "layer_types": _WORDS,
    **dict.fromkeys(("no_rope_layer_interval", "interleave_moe_layer_step", "sliding_window_pattern"), _STEP),
}  # fmt: skip
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_COUNTED = ("--num-layers", "--num-experts", "--mtp-num-layers")


def _judge(family: Family, config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field whose value is of another kind than any model's."""
    kinds = {name: _BY_TYPE[type(value)] for name, value in family.defaults.items() if type(value) in _BY_TYPE}
    kinds |= _BY_NAME
    if family.letters is not None:
        fields = list_layer_fields(family.letters)
        kinds |= {name: _COUNT if name.startswith("num_") else _LAYERS for name in fields}
    needed = {name for name, kind in _BY_NAME.items() if kind is _STEP and name in family.defaults}
    for setting in (*family.sizes, *family.settings):
        of_setting = _COUNT if setting.flag in _COUNTED else _BY_FORM.get(setting.form, _NUMBER)
        for name in _list_fields(setting):
            kinds[name] = _WORDS if setting.form == "layers with experts" and setting.word else of_setting
            # null would become the flag's absence, which means another value.
            if setting.form == "switch" and of_setting is _SWITCH and name in _COUNTS:
                kinds[name] = _COUNT
            if setting.needed or (
                (setting in family.sizes or setting.default is not None) and family.defaults.get(name) is not None
            ):
                needed.add(name)
        if setting.only_if is not None:
            kinds.setdefault(setting.only_if, _SWITCH)
    kinds.pop(ROPE, None)
    for name, (judge, expected) in kinds.items():
        value = config.get(name, family.defaults.get(name))
        is_derived = value == "auto" == family.defaults.get(name)
        if is_derived or (value is None and name not in needed):
            continue
        if not judge(value):
            raise _refuse(family, name, value, f"it must be {expected}")
    for name in (ROPE, "rope_scaling") if family.is_rotary else ():
        if not isinstance(config.get(name) or {}, Mapping):
            raise _refuse(family, name, config[name], "it must be an object with fields")
        for part in family.rope if FULL in family.rope else ():
            if not isinstance((config.get(name) or {}).get(part) or {}, Mapping):
                raise _refuse(family, f"{name}.{part}", config[name][part], "it must be an object with fields")
        for rope in _list_ropes(family, config.get(name)):
            for field, (judge, expected) in _ROPE_KINDS.items():
                if rope.get(field) is not None and not judge(rope[field]):
                    raise _refuse(family, f"{name}.{field}", rope[field], f"it must be {expected}")


_ROPE_KINDS = {
    **dict.fromkeys(sorted(_ROPE_NUMBERS), _NUMBER), "short_factor": _NUMBERS, "long_factor": _NUMBERS,
    "truncate": _SWITCH, "rope_type": _WORD, "type": _WORD,
}  # fmt: skip


def _refuse(family: Family, name: str, value: object, expected: str) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ConfigError(f"{family.name}: {name} is {shown} in its config.json; {expected}")


def _check(family: Family, fields: Mapping[str, Any], expects: Mapping[str, Any]) -> None:
    """Raises ConfigError for a field with another value than the only one that is known."""
    for name, expected in expects.items():
        found = fields.get(name, expected)
        # null, false and an empty list say the same.
        if found != expected and not (_says_nothing(found) and _says_nothing(expected)):
            raise _refuse(family, name, found, f"only {expected!r} is known")


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value == []


# ---- what a file leaves out


def complete_fields(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields that the family's class in transformers has for a config.json, by their names there; rotary positions
    in `rope_parameters`. Raises ConfigError for a value that no model has, and for two that contradict."""
    fields = {name: _read_endless(value) for name, value in config.items()}
    for other, name in family.other_names.items():
        if other in fields:
            value = fields.pop(other)
            if fields.setdefault(name, value) != value:
                raise _refuse(family, name, fields[name], f"and {other}, another name of it, is {value!r}; keep one")
    _judge(family, fields)
    fields = {**family.defaults, **fields}
    if family.complete is not None:
        fields = dict(family.complete(fields))
    if family.is_rotary:
        _complete_rope(family, fields)
    return fields


def _read_endless(value: Any) -> Any:
    """Read what transformers writes for infinity in a list: JSON has no word for it."""
    return [math.inf if each == ENDLESS else each for each in value] if isinstance(value, list) else value


def _complete_rope(family: Family, fields: dict[str, Any]) -> None:
    """Make `rope_parameters` of what transformers 5 and earlier releases write."""
    by_kind, scaling, given = FULL in family.rope, fields.pop("rope_scaling", None), fields.get(ROPE) or {}
    # The layers with a window are never stretched.
    rope = {**(given.get(FULL) or {}), **(scaling or {})} if by_kind else dict(scaling or given)
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    original = fields.pop("original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    longest = fields.get("max_position_embeddings") or 0
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = original or longest
        if rope["original_max_position_embeddings"] <= 1:
            stretched = "positions are stretched from a length of 2 tokens or more"
            raise _refuse(family, "original_max_position_embeddings", original or longest, stretched)
    if rope["rope_type"] in ("yarn", "longrope"):
        rope["factor"] = rope.get("factor") or longest / rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        rope["attention_factor"] = rope.get("attention_factor") or _compute_longrope_magnitude(rope)
    fields[ROPE] = {**given, FULL: rope} if by_kind else rope
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    reads_share = any("partial_rotary_factor" in setting.theirs for setting in family.settings)
    if share not in (None, 1.0) and not reads_share:
        raise _refuse(family, "partial_rotary_factor", share, "only 1.0 is known")


def _compute_longrope_magnitude(rope: Mapping[str, Any]) -> float:
    """The factor on rotated channels (Ding et al., "LongRoPE", 2024): sqrt(1 + ln(factor) / ln(original length))."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


# ---- flags


def _build_rope_flags(family: Family, config: Mapping[str, Any]) -> list[str]:
    rope, local = config[ROPE], None
    if FULL in family.rope:
        rope, local = rope[FULL], rope.get("sliding_attention") or {}
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{family.name}: rotary positions of the type {kind} are not known; known are {', '.join(ROPE_TYPES)}"
        )
    if local is not None and (local.get("rope_type") or "default") != "default":
        raise _refuse(family, f"{ROPE}.sliding_attention.rope_type", local["rope_type"], "only 'default' is known")
    flags, settings, expects = ROPE_TYPES[kind]
    _check(family, rope, expects)
    if local is not None:
        # transformers does not look for it in the fields of one kind of layer.
        _check(family, rope, {"truncate": True})
    for setting in settings:
        if setting.needed and rope.get(setting.theirs) is None:
            raise _refuse(family, f"{ROPE}.{setting.theirs}", None, f"positions of the type {kind} need it")
    # Theirs takes no account of one without the other.
    mscale, everywhere = rope.get("mscale"), rope.get("mscale_all_dim")
    if (everywhere and not mscale) or (mscale not in (None, 1.0) and not everywhere):
        given, missing = ("mscale_all_dim", "mscale") if everywhere else ("mscale", "mscale_all_dim")
        raise ConfigError(f"{family.name}: {given} {rope[given]} without {missing} has no meaning; give both")
    if kind in ("yarn", "longrope") and any(setting.flag == "--qk-l2-norm" for setting in family.settings):
        # Theirs normalises queries and keys after the rotation, and so removes the factor on them.
        raise _refuse(family, f"{ROPE}.rope_type", kind, "only 'default', 'linear' and 'llama3' are known")
    if everywhere and kind != "yarn" and "--multi-latent-attention" in family.flags:
        raise _refuse(
            family, f"{ROPE}.mscale_all_dim", everywhere, f"with positions of the type {kind} only 0 is known"
        )
    # With latent attention rope alone means YaRN.
    if kind != "yarn" and "--multi-latent-attention" in family.flags:
        flags += " --rope-type rope"
    spelled = re.findall(r"--\S+(?: [^-\s]\S*)?", flags)
    return [*spelled, *(flag for setting in settings for flag in _build_flag(family, rope, setting))]


def _find(family: Family, config: Mapping[str, Any], names: str) -> Any:
    """The first of the fields `a|b|c` that is there; None where none is. A dot leads into a field that has fields."""
    for fields in (config, {ROPE: family.rope}):
        for name in names.split("|"):
            value: Any = fields
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
    return None


def _build_flag(family: Family, config: Mapping[str, Any], setting: ConfigKey) -> list[str]:
    """The flag of one setting; nothing where its absence means the same."""
    if setting.only_if is not None and not _find(family, config, setting.only_if):
        return []
    if setting.with_experts and not uses_experts(config):
        return []
    factors = [_find(family, config, name) for name in setting.theirs.split("*")]
    if any(factor is None for factor in factors):
        return []
    value = factors[0] * factors[1] if len(factors) == 2 else factors[0]
    # The default of an inverted switch is a value of theirs; what it means for the flag is decided below.
    if value == setting.default and setting.form not in ("inverted switch", "groups"):
        return []
    match setting.form:
        case "switch":
            return [" ".join(filter(None, [setting.flag, setting.word]))] if value else []
        case "inverted switch":
            return [] if value else [" ".join(filter(None, [setting.flag, setting.word]))]
        case "query groups":
            return [f"--group-query-attention {setting.flag} {value}"]
        case "window":
            if value < 1:
                raise _refuse(family, setting.theirs, value, "a window has 1 token or more")
            # Theirs counts the token itself, ours the tokens before and after it.
            return [f"{setting.flag} {int(value) - 1},0"]
        case "window layers":
            sees_all = [kind == FULL for kind in _judge_layers(family, config, setting, value)]
            return [f"{setting.flag} {describe_pattern(sees_all, '0', '1')}"] if any(sees_all) else []
        case "full layers":
            # Where a layer of theirs is two letters, both are alike.
            letters = 2 if family.letters and family.letters.mlps else 1
            of_layers = [kind == FULL for kind in value for _ in range(letters)]
            return [f"{setting.flag} {describe_pattern(of_layers, '1', '0', divides=True)}"] if any(of_layers) else []
        case "layers without positions":
            has_none = [not has_positions for has_positions in _judge_layers(family, config, setting, value)]
            pattern = describe_pattern(has_none, "1", "0", divides=True) if any(has_none) else None
            return [] if pattern is None else [f"{setting.flag} {pattern}"]
        case "dense layers first":
            return [f"{setting.flag} [0]*{value}+[1]*{config['num_hidden_layers'] - value}"]
        case "layers with experts":
            has_experts = [index in value for index in range(config["num_hidden_layers"])]
            if setting.word is not None:
                has_experts = [kind == setting.word for kind in _judge_layers(family, config, setting, value)]
            return [] if all(has_experts) else [f"{setting.flag} {describe_period(has_experts)}"]
        case "groups" | "two best" if (config["n_group"], config["topk_group"]) == (1, 1):
            return []
        case "group score":
            if value != GROUP_LIMITED:
                known = f"only {setting.default!r} and {GROUP_LIMITED!r} are known"
                raise _refuse(family, setting.theirs, value, known)
            return [f"{setting.flag} best"]
        case "two best" if value == 0:
            raise _refuse(family, setting.theirs, value, "tokens need 1 group of experts or more")
        case "two best":
            # The result of our rule: as many of the best as a token uses of a group.
            return [] if config["num_experts_per_tok"] // value == 2 else [f"{setting.flag} two-best"]
        case "factors":
            return [" ".join([setting.flag, *map(describe_number, value)])]
        case "bounds":
            low, high = value
            lowest = [f"{setting.flag} {describe_number(low)}"] if low > 0 else []
            return lowest + ([] if high == math.inf else [f"{setting.word} {describe_number(high)}"])
        case "multipliers":
            return _build_multipliers(family, setting, value)
        case "gate norm":
            is_normed, is_first = (config[name] for name in setting.theirs.split("|"))
            form = "none" if not is_normed else "ungated" if is_first else "gated"
            return [] if form == "gated" else [f"{setting.flag} {form}"]
        case "word":
            if value != setting.word:
                raise _refuse(family, setting.theirs, value, f"only {setting.default!r} and {setting.word!r} are known")
            return [f"{setting.flag} {value}"]
        case form if form in _RARE:
            return _build_rare_flag(family, config, setting, value)
        # The last forms only change the value; it is written below, like a number.
        case "inverse" | "inverse root" if value == 0:
            raise _refuse(family, setting.theirs, value, "it must be a number above 0")
        case "inverse" | "root" | "inverse root":
            value **= {"inverse": -1, "root": 0.5, "inverse root": -0.5}[setting.form]
    return [f"{setting.flag} {describe_number(value)}"]


_RARE = {"rotated share", "average", "expert span", "one norm", "expansion", "compressed layers", "hashed layers"}


def _build_rare_flag(family: Family, config: Mapping[str, Any], setting: ConfigKey, value: Any) -> list[str]:
    """The flag of a form that few families have."""
    match setting.form:
        case "compressed layers" | "hashed layers":
            return build_layer_flag(setting.flag, config)
        case "rotated share":
            turned, plain = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
            if value != turned / (turned + plain):
                raise _refuse(family, setting.theirs, value, f"{turned} of {turned + plain} channels are rotated")
            return []
        case "average":
            has_dense = "dense" in config["mlp_layer_types"]
            if value not in ("sum", "average") or (value == "average" and has_dense):
                raise _refuse(family, setting.theirs, value, "only 'sum', or 'average' if no layer is dense, is known")
            return [f"{setting.flag} 0.5"] if value == "average" else []
        case "expert span":
            first, last, every = (config[name] for name in setting.theirs.split("|"))
            if every < 1:
                raise _refuse(family, setting.theirs.split("|")[2], every, "it must be 1 or more")
            layers = range(config["num_hidden_layers"])
            chosen = [first <= index <= last and (index + 1) % every == 0 for index in layers]
            return [] if all(chosen) else [f"{setting.flag} {describe_period(chosen)}"]
        case "one norm":
            if value not in (1, 2):
                raise _refuse(family, setting.theirs, value, "only 1 and 2 are known")
            return [setting.flag] if value == 1 else []
        case "expansion":
            heads, width = (_find(family, config, name) for name in MAMBA_HEADS)
            if value * (1 if setting.word == "channels" else config["hidden_size"]) != heads * width:
                raise _refuse(family, setting.theirs, value, f"{heads} heads of {width} channels are no such multiple")
            return []
    raise AssertionError(f"{setting.form} is no rare form")


def _build_multipliers(family: Family, setting: ConfigKey, value: Sequence[float]) -> list[str]:
    """The flag with five numbers, or two flags with one each; nothing for what is 1."""
    flags = [setting.flag] if setting.word is None else [setting.flag, setting.word]
    if len(value) != (5 if setting.word is None else 2):
        raise _refuse(family, setting.theirs, value, "it must have 5 numbers, or 2 for mlp_multipliers")
    pairs = zip(flags, [value] if setting.word is None else [[each] for each in value], strict=True)
    return [" ".join([flag, *map(describe_number, each)]) for flag, each in pairs if set(each) != {1}]


def _judge_layers(family: Family, config: Mapping[str, Any], setting: ConfigKey, value: Sequence[Any]) -> Sequence[Any]:
    """An entry for each layer. Raises ConfigError for other lists, and for kinds of layers that the family has not."""
    layers = config.get("num_hidden_layers")
    if len(value) != layers:
        raise _refuse(family, setting.theirs, value, f"it must have an entry for each of the {layers} layers")
    chunked = any(other.flag == "--attention-chunk-size" for other in family.settings)
    known = (FULL, "chunked_attention" if chunked else "sliding_attention")
    if setting.form == "layers with experts":
        known = ("dense", str(setting.word))
    if setting.form in ("window layers", "layers with experts") and not set(value) <= set(known):
        raise _refuse(family, setting.theirs, value, f"only {known[0]!r} and {known[1]!r} are known")
    return value
