# SPDX-License-Identifier: Apache-2.0
"""Model families: the flags that make it, and which tensors of a Hugging Face checkpoint are which of ours.

`families.py` has the table. A `Family` says, for the models of one class of Hugging Face transformers,

    flags      what all of them have in common
    sizes      fields of their config.json that are our flags: the shape
    settings   fields that are our flags: everything else
    defaults   what a field means that a config.json leaves out; one that is no flag must mean just this
    rows       a `Row` for every parameter of ours: the tensors in their files that hold its values

`family_flags.py` reads a config.json by these tables. Every `Row` and every `Setting` can be read in both directions: a
converter goes through our parameters, finds each one's row by its name (`find_row`) and joins or splits tensors as the
row's form says. Names are as in the files on disk; transformers may use others in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# ---- what a row and a setting may say


@dataclass(frozen=True)
class Row:
    """Place of one parameter of ours in their files.

    whole       one tensor, the same values
    stacked     theirs one below the other: the gate's rows, then the other half's of a gated MLP
    qkv         theirs are queries, keys, values [heads * width, h], or these three in one tensor; ours have one
                group of query heads after the other: [groups * (queries of the group, key, value) * width, h].
                Of four tensors the second is the gate of attention's output
    interleaved one tensor, whose rows are by turns the gate's and the other half's of a gated MLP
    gated_qkv   the same as qkv, each of their query heads being followed by the gate of its output
    sections    theirs one below the other, each being one or more neighbouring sections of a state mixer's projection
    grouped_sections    the same, their rows being grouped by key head: each head's part of every section of the tensor
    reshaped    one number for each head or expert; theirs are of the row's `shape`, which has -1 for their number
    turned_qkv  the same as qkv, the halves of their query and key heads being exchanged, which turns rotations round
    """

    ours: str
    """Name in the whole model; {layer} stands for its number, from 0, and {pair} in their names for half of it, where
    two letters of a hybrid are one layer of theirs. MTP layers (`mtp.layers`) are numbered after the decoder's in their
    files, and found by the decoder's rows as far as they are alike."""
    theirs: tuple[str, ...]
    """Names in their files; {expert}, from 0, where every expert has separate tensors. Ours are [experts, ...], as
    are theirs without {expert}. `scale[2]` is one number of the tensor `scale`, whose others are other parameters."""
    form: Literal[
        "whole", "stacked", "interleaved", "qkv", "gated_qkv", "turned_qkv", "sections", "grouped_sections",
        "reshaped",
    ] = "whole"  # fmt: skip
    transposed: bool = False
    """Their matrices are [inputs, outputs]; ours, as in torch.nn.Linear, [outputs, inputs]."""
    copies: tuple[str, ...] = ()
    """Names of tensors with the same values that each layer of multi-token prediction has in their files."""

    shape: tuple[int, ...] = ()
    if_apart: tuple[str, ...] = ()
    """Their names where two branches side by side have a norm each, and not one for both."""
    sections: tuple[tuple[str, ...], ...] = ()
    """Of each of theirs, the names of its sections, in the order of ours (core/plan/state_kinds.py)."""
    kind: str = ""
    """Of those sections: the name of a kind of branches."""


@dataclass(frozen=True)
class LayerLetters:
    """Fields in which a config.json states the kind of each layer of a hybrid, and the letters of
    --hybrid-layer-pattern."""

    mixers: Mapping[str, str]
    """A word for a kind of layers -> its letter."""
    field: str = "layer_types"
    """Field with a word for each layer, or with the indices of those that are of the last kind; "": all layers are of
    the only kind."""
    mlps: str = ""
    """Each layer also has an MLP: `dense`, or `experts` where the model has some; or the field that says it, with the
    words dense and sparse for each layer, or with the indices of layers with a dense one, or (`num_...`) how many come
    first that have a dense one. "": none has."""


SettingForm = Literal[
    "number", "switch", "inverted switch", "query groups", "window", "window layers", "layers without positions",
    "dense layers first", "layers with experts", "groups", "group score", "two best", "factors", "root", "inverse root",
    "inverse", "bounds", "expansion", "full layers", "multipliers", "gate norm",
    "one norm", "word", "average", "expert span", "rotated share", "compressed layers", "hashed layers",
]  # fmt: skip


GROUP_LIMITED = "group_limited_greedy"
"""`topk_method` of a model whose tokens are limited to a few groups of experts."""


@dataclass(frozen=True)
class ConfigKey:
    """A field of a config.json and the flag that it is.

    number                    the value itself
    switch                    the flag stands, with `word` behind it, where the value is true; "inverted switch":
                              where it is false
    query groups              heads of keys and values
    window                    w tokens are seen, the token itself among them: w - 1 before it
    window layers             `full_attention`, or `sliding_attention` or `chunked_attention`, of each layer
    full layers               the flag is for the layers that are `full_attention`
    layers without positions  of each layer, 0 where it has none; with the `word` base, else the base of rotation
    dense layers first        so many layers come before those with experts
    layers with experts       their indices, from 0; or of each layer a word, which is `word` where it has some
    groups                    of experts; 1 where there are none
    group score               `greedy`: experts are in no groups; `group_limited_greedy`: a group counts by its best one
    two best                  a group counts by its two best, of so many groups
    factors                   a number for each pair of channels
    multipliers               five numbers, or two, of which the second is the flag `word`
    gate norm                 whether there is one, and (behind `|`) whether the gate comes after it
    one norm                  the flag stands where there is 1; else there are 2
    word                      `word`, or the default; no others
    average                   half of the sum of experts and the shared one, or all of it: `average` and `sum`
    expert span               first and last layer with experts, from 0, and every which in between
    compressed layers         of each layer its kind of compressed attention, and (behind `|`) the tokens of a window by
                              kind
    hashed layers             `hash_moe` of the first layers with experts, then `moe`
    rotated share             of a head with latent attention: the widths of its parts say it, too
    root, inverse root        of the value
    inverse                   1 / value
    bounds                    smallest and largest step of a state; `word` is the flag of the largest
    expansion                 of the hidden size to the channels of all Mamba-2 heads, which other fields say; these
                              channels where `word` is so
    """

    theirs: str
    """Name of the field; `a|b`: the first that is there; `a*b`: the product of two."""
    flag: str
    form: SettingForm = "number"
    default: Any = None
    """Meaning of the flag's absence: it is left out for this value."""
    only_if: str | None = None
    """A field that must be true for this one to count."""
    word: str | None = None
    """Of a switch whose flag is no switch: the flag's value."""
    with_experts: bool = False
    """It counts in models with experts."""
    needed: bool = False
    """No model has null here; nor where the flag's absence means another value."""


Setting = ConfigKey
"""Its name in files of families that are older."""


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
    sizes: tuple[ConfigKey, ...]
    settings: tuple[ConfigKey, ...]
    rows: tuple[Row, ...]
    is_rotary: bool = True
    """Tokens know their position by rotation; `rope_parameters` says how."""
    rotary_field: str = ""
    """A field that is `rope` where they do so, and null where nothing says positions; or `rope_parameters`, where it is
    the base of rotation that is null then."""
    letters: LayerLetters | None = None
    """Of a hybrid, whose layers are of several kinds or have no MLP."""
    published: Mapping[str, str] = field(default_factory=dict)
    """Part of a name that transformers writes -> what published files have instead."""
    left_out: tuple[str, ...] = ()
    """Beginnings of the names of tensors in published files that neither the class nor this program reads."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the class in transformers, each with what a config.json means that leaves it out."""
    idle: frozenset[str] = frozenset()
    """Fields of the class that change nothing in what the model computes."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Other name of a field in some files -> its name in the class."""
    expects: Mapping[str, Any] = field(default_factory=dict)
    """The only value that is known of a field: of one that the class does not know, and that earlier programs for the
    same files read, or of one for which the class has another default."""
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0})
    """Contents of `rope_parameters` where a config.json leaves them out."""
    complete: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    """All fields with the values that follow from others where they are null; it removes those that say no more."""


ROPE_TYPES: Mapping[str, tuple[str, tuple[ConfigKey, ...], Mapping[str, Any]]] = {
    "default": ("--position-embedding-type rope", (), {}),
    "linear": (
        "--position-embedding-type rope",
        (ConfigKey("factor", "--rotary-seq-len-interpolation-factor", needed=True),),
        {},
    ),
    "llama3": (
        "--position-embedding-type rope --use-rope-scaling",
        (
            ConfigKey("factor", "--rope-scaling-factor", needed=True),
            ConfigKey("high_freq_factor", "--rope-scaling-high-freq-factor", default=4.0),
        ),
        {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    ),
    "yarn": (
        "--position-embedding-type yarn",
        (
            ConfigKey("factor", "--rotary-scaling-factor", needed=True),
            ConfigKey("original_max_position_embeddings", "--yarn-original-max-position-embeddings"),
            ConfigKey("beta_fast", "--yarn-beta-fast", default=32),
            ConfigKey("beta_slow", "--yarn-beta-slow", default=1),
            ConfigKey("truncate", "--no-yarn-correction-range-round-to-int", "inverted switch", default=True),
            ConfigKey("mscale", "--mscale", default=1.0),
            ConfigKey("mscale_all_dim", "--mscale-all-dim", default=0.0),
        ),
        {"attention_factor": None},
    ),
    "longrope": (
        "--position-embedding-type rope",
        (
            ConfigKey("short_factor", "--longrope-short-factors", "factors", needed=True),
            ConfigKey("long_factor", "--longrope-long-factors", "factors", needed=True),
            ConfigKey("original_max_position_embeddings", "--longrope-original-max-position-embeddings"),
            ConfigKey("attention_factor", "--longrope-magnitude", default=1.0),
        ),
        {},
    ),
}
"""`rope_type` of a config.json -> our kind of positions, and settings and expected values of its `rope_parameters` (in
files of earlier releases, `rope_scaling`)."""


class HasRows(Protocol):
    """A family, or another part of a model with such a table."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """A row for every parameter of ours."""


def find_row(family: HasRows, parameter: str) -> Row | None:
    """The row of a parameter of ours, by its name in the whole model; None where the family has none."""
    # Rows are written once for all layers.
    pattern = re.sub(r"^(decoder|mtp)\.layers\.\d+\.", r"\1.layers.{layer}.", parameter)
    if any(row.ours.startswith("mtp.") for row in family.rows):
        pattern = pattern.replace("mtp.layers.{layer}.mtp_model_layer.", "decoder.layers.{layer}.")
    return next((row for row in family.rows if row.ours == pattern), None)
