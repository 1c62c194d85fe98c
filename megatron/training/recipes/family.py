# SPDX-License-Identifier: Apache-2.0
"""What a model family is: the flags that make it, and which tensors of a Hugging Face checkpoint are which of ours.

`families.py` has the table. A `Family` says, for the models of one class of Hugging Face transformers,

    flags      what all of them have in common
    sizes      fields of their config.json that are our flags: the shape
    settings   fields that are our flags: everything else
    expects    fields that must have a certain value, because nothing here could follow another one
    rows       a `Row` for every parameter of ours: the tensors in their files that hold its values

`build_flags` reads a config.json by these tables. Every `Row` and every `Setting` can be read in both directions: a
converter goes through our parameters, finds each one's row by its name (`find_row`) and joins or splits tensors as the
row's form says. Names are those of the files on disk; transformers may use others in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core.errors import ConfigError

# ---- what a row and a setting may say


@dataclass(frozen=True)
class Row:
    """Where one parameter of ours lies in their files.

    whole       one tensor, the same values
    stacked     theirs one below the other: the gate's rows, then those of the other half of a gated MLP
    qkv         theirs are queries, keys, values [heads * width, h], or these three in one tensor; ours have one
                group of query heads after the other: [groups * (queries of the group, key, value) * width, h]
    interleaved one tensor, whose rows are by turns the gate's and the other half's of a gated MLP
    gated_qkv   the same as qkv, each of their query heads being followed by the gate of its output
    """

    ours: str
    """Name in the whole model; {layer} stands for its number, from 0. Layers of multi-token prediction (`mtp.layers`)
    are numbered after those of the decoder in their files, and found by the decoder's rows as far as they are alike."""
    theirs: tuple[str, ...]
    """Names in their files; {expert}, from 0, where every expert has tensors of its own. Ours are [experts, ...], as
    are theirs without {expert}."""
    form: Literal["whole", "stacked", "interleaved", "qkv", "gated_qkv"] = "whole"
    transposed: bool = False
    """Their matrices are [inputs, outputs]; ours, as those of torch.nn.Linear, [outputs, inputs]."""
    copies: tuple[str, ...] = ()
    """Names of tensors with the same values that each layer of multi-token prediction has in their files."""


SettingForm = Literal[
    "number", "switch", "inverted switch", "query groups", "window", "window layers", "layers without positions",
    "dense layers first", "layers with experts", "group score", "root", "inverse root",
]  # fmt: skip


GROUP_LIMITED = "group_limited_greedy"
"""`topk_method` of a model whose tokens are limited to a few groups of experts."""


@dataclass(frozen=True)
class Setting:
    """A field of a config.json and the flag that it is.

    number                    the value itself
    switch                    the flag stands, with `word` behind it, where the value is true; "inverted switch":
                              where it is false
    query groups              heads of keys and values
    window                    w tokens are seen, the token itself among them: w - 1 before it
    window layers             `full_attention`, or `sliding_attention` or `chunked_attention`, of each layer
    layers without positions  of each layer, 0 where it has none
    dense layers first        so many layers come before those with experts
    layers with experts       their indices, from 0
    group score               `greedy`: experts are in no groups; `group_limited_greedy`: a group counts by its best one
    root, inverse root        of the value
    """

    theirs: str
    """Name of the field; `a|b`: the first that is there; `a*b`: the product of two."""
    flag: str
    form: SettingForm = "number"
    default: Any = None
    """What the flag's absence means: it is left out for this value."""
    only_if: str | None = None
    """A field that must be true for this one to count."""
    word: str | None = None
    """Of a switch whose flag is no switch: the flag's value."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The models of one class of Hugging Face transformers; see the head of this file."""

    name: str
    """As in docs/models.md. Published models of it are in presets.py."""
    model_type: str
    """`model_type` of the config.json."""
    model_class: str
    """Class of transformers."""
    aliases: tuple[str, ...] = ()
    """Other words for `model_type`, in files of the same model."""
    flags: str
    sizes: tuple[Setting, ...]
    settings: tuple[Setting, ...]
    rows: tuple[Row, ...]
    is_rotary: bool = True
    """Tokens know their position by rotation; `rope_parameters` says how."""
    expects: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What a field means that a config.json leaves out."""
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """The fields of a config.json with those that it leaves out and that follow from others."""


ROPE_TYPES: Mapping[str, tuple[str, tuple[Setting, ...], Mapping[str, Any]]] = {
    "default": ("--position-embedding-type rope", (), {}),
    "linear": ("--position-embedding-type rope", (Setting("factor", "--rotary-seq-len-interpolation-factor"),), {}),
    "llama3": (
        "--position-embedding-type rope --use-rope-scaling",
        (
            Setting("factor", "--rope-scaling-factor"),
            Setting("high_freq_factor", "--rope-scaling-high-freq-factor", default=4.0),
        ),
        {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    ),
    "yarn": (
        "--position-embedding-type yarn",
        (
            Setting("factor", "--rotary-scaling-factor"),
            Setting("original_max_position_embeddings", "--yarn-original-max-position-embeddings"),
            Setting("beta_fast", "--yarn-beta-fast", default=32),
            Setting("beta_slow", "--yarn-beta-slow", default=1),
            Setting("truncate", "--no-yarn-correction-range-round-to-int", "inverted switch", default=True),
            Setting("mscale", "--mscale", default=1.0),
            Setting("mscale_all_dim", "--mscale-all-dim", default=0.0),
        ),
        {"attention_factor": None},
    ),
}
"""`rope_type` of a config.json -> our kind of positions, and settings and expected values of its `rope_parameters` (in
files of earlier releases, `rope_scaling`)."""


def find_row(family: Family, parameter: str) -> Row | None:
    """The row of a parameter of ours, by its name in the whole model; None where the family has none."""
    # Rows are written once for all layers.
    pattern = re.sub(r"^(decoder|mtp)\.layers\.\d+\.", r"\1.layers.{layer}.", parameter)
    if any(row.ours.startswith("mtp.") for row in family.rows):
        pattern = pattern.replace("mtp.layers.{layer}.mtp_model_layer.", "decoder.layers.{layer}.")
    return next((row for row in family.rows if row.ours == pattern), None)


# ---- from a config.json to flags


def build_flags(family: Family, config: Mapping[str, Any], *, with_sizes: bool = True) -> list[str]:
    """The flags of a model whose config.json is `config`, each with its values: ["--swiglu", "--kv-channels 128", ...].

    with_sizes: also those of the shape. The tokenizer's are not among them. Raises ConfigError where the model does
    something that no flag of its family says.
    """
    config = config if family.complete is None else family.complete(config)
    # A field that nothing here can follow is an error, never ignored: the converted model would compute something else.
    _check(family, config, family.expects)
    # A flag, with its value if one follows.
    flags = re.findall(r"--\S+(?: [^-\s]\S*)?", family.flags)
    if family.is_rotary:
        flags = [*_build_rope_flags(family, config), *flags]
    settings = (*(family.sizes if with_sizes else ()), *family.settings)
    # Two fields may say the same.
    return list(
        dict.fromkeys([*flags, *(flag for setting in settings for flag in _build_flag(family, config, setting))])
    )


def _check(family: Family, fields: Mapping[str, Any], expects: Mapping[str, Any]) -> None:
    """Raises ConfigError for a field with another value than the only one that is known."""
    for name, expected in expects.items():
        found = _find(family, fields, name)
        if found is not None and found != expected:
            raise ConfigError(f"{family.name}: {name} is {found!r} in its config.json; only {expected!r} is known")


def _build_rope_flags(family: Family, config: Mapping[str, Any]) -> list[str]:
    # transformers 5 writes rope_parameters, earlier releases rope_scaling; a file may have both.
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{family.name}: rotary positions of the type {kind} are not known; known are {', '.join(ROPE_TYPES)}"
        )
    flags, settings, expects = ROPE_TYPES[kind]
    _check(family, rope, expects)
    # Theirs takes no account of one without the other.
    if rope.get("mscale", 1.0) != 1.0 and not rope.get("mscale_all_dim"):
        raise ConfigError(f"{family.name}: mscale {rope['mscale']} without mscale_all_dim has no meaning; give both")
    # With latent attention rope alone means YaRN.
    if kind != "yarn" and "--multi-latent-attention" in family.flags:
        flags += " --rope-type rope"
    given = re.findall(r"--\S+(?: [^-\s]\S*)?", flags)
    return [*given, *(flag for setting in settings for flag in _build_flag(family, rope, setting))]


def _find(family: Family, config: Mapping[str, Any], names: str) -> Any:
    """The first of the fields `a|b|c` that is there; None where none is. A dot leads into a field that has fields."""
    # What transformers assumes for a field that the file leaves out differs between families.
    for fields in (config, family.absent):
        for name in names.split("|"):
            value: Any = fields
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
    return None


def _build_flag(family: Family, config: Mapping[str, Any], setting: Setting) -> list[str]:
    """The flag of one setting; nothing where its absence means the same."""
    if setting.only_if is not None and not _find(family, config, setting.only_if):
        return []
    factors = [_find(family, config, name) for name in setting.theirs.split("*")]
    if any(factor is None for factor in factors):
        return []
    value = factors[0] * factors[1] if len(factors) == 2 else factors[0]
    # The default of an inverted switch is a value of theirs; what it means for the flag is decided below.
    if value == setting.default and setting.form != "inverted switch":
        return []
    match setting.form:
        case "switch":
            return [" ".join(filter(None, [setting.flag, setting.word]))] if value else []
        case "inverted switch":
            return [] if value else [setting.flag]
        case "query groups":
            return [f"--group-query-attention {setting.flag} {value}"]
        case "window":
            # Theirs counts the token itself, ours the tokens before and behind it.
            return [f"{setting.flag} {value - 1},0"]
        case "window layers":
            sees_all = [kind == "full_attention" for kind in value]
            return [f"{setting.flag} {_describe_pattern(sees_all, '0', '1')}"] if any(sees_all) else []
        case "layers without positions":
            has_none = [not has_positions for has_positions in value]
            pattern = _describe_pattern(has_none, "1", "0", divides=True) if any(has_none) else None
            return [] if pattern is None else [f"{setting.flag} {pattern}"]
        case "dense layers first":
            return [f"{setting.flag} [0]*{value}+[1]*{config['num_hidden_layers'] - value}"]
        case "layers with experts":
            has_experts = [index in value for index in range(config["num_hidden_layers"])]
            return [] if all(has_experts) else [f"{setting.flag} {_describe_period(has_experts)}"]
        case "group score":
            if value != GROUP_LIMITED:
                raise ConfigError(
                    f"{family.name}: {setting.theirs} is {value!r} in its config.json; only {setting.default!r} and "
                    f"{GROUP_LIMITED!r} are known"
                )
            return [f"{setting.flag} best"]
        # The last two forms only change the value; it is written below, like a number.
        case "root":
            value = value**0.5
        case "inverse root":
            value = value**-0.5
    return [f"{setting.flag} {int(value) if value == int(value) else value}"]


def _describe_pattern(is_other: Sequence[bool], other: str, usual: str, *, divides: bool = False) -> str:
    """Which layers are not like the others: n for every n-th, or an entry for each layer.

    divides: n must divide the number of layers.
    """
    # A single number where possible: it also fits a model with more layers.
    period = is_other.index(True) + 1
    may_repeat = not divides or len(is_other) % period == 0
    if may_repeat and list(is_other) == [(index + 1) % period == 0 for index in range(len(is_other))]:
        return str(period)
    return f"[{','.join(other if entry else usual for entry in is_other)}]"


def _describe_period(holds: Sequence[bool]) -> str:
    """An entry for each layer, 1 where it holds, written as a period and how often it comes."""
    size = len(holds)
    period = next(n for n in range(1, size + 1) if size % n == 0 and list(holds) == list(holds[:n]) * (size // n))
    return f"[{','.join(str(int(entry)) for entry in holds[:period])}]*{size // period}"
