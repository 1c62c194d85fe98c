# SPDX-License-Identifier: Apache-2.0
"""Layers of a hybrid: their config.json says of what kind each is, our flag is a pattern of letters; both directions.

layer_types ["linear_attention", "full_attention"], an MLP in each layer      <->    --hybrid-layer-pattern G-*-
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.errors import ConfigError
from megatron.training.recipes.family import LayerLetters

_MLPS = {"dense": "-", "sparse": "E"}


def list_layer_fields(letters: LayerLetters) -> list[str]:
    """The fields of a config.json that say of what kind its layers are."""
    named = [letters.mlps] if letters.mlps not in ("", "dense", "experts") else []
    return [field for field in (letters.field, *named) if field]


def build_pattern(letters: LayerLetters, fields: Mapping[str, Any], *, has_experts: bool) -> str:
    """The letters of the layers that these fields, all completed, describe. Raises ConfigError for others."""
    layers = int(fields["num_hidden_layers"])
    first, last = next(iter(letters.mixers)), list(letters.mixers)[-1]
    words = [last] * layers if not letters.field else _read(fields, letters.field, layers, last, first)
    if unknown := [word for word in words if word not in letters.mixers]:
        raise ConfigError(
            f"{letters.field} in config.json has {unknown[0]!r}; only {', '.join(map(repr, letters.mixers))} are known"
        )
    mixers = [letters.mixers[word] for word in words]
    if not letters.mlps:
        return "".join(mixers)
    mlps = [{"dense": "dense"}.get(letters.mlps, "sparse" if has_experts else "dense")] * layers
    if letters.mlps.startswith("num_"):
        dense = fields[letters.mlps]
        mlps = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    elif letters.mlps not in ("dense", "experts"):
        mlps = _read(fields, letters.mlps, layers, "dense", "sparse")
    if unknown := [word for word in mlps if word not in _MLPS]:
        raise ConfigError(f"{letters.mlps} in config.json has {unknown[0]!r}; only 'dense' and 'sparse' are known")
    return "".join(mixer + _MLPS[mlp] for mixer, mlp in zip(mixers, mlps, strict=True))


def _read(fields: Mapping[str, Any], name: str, layers: int, listed: str, other: str) -> list[str]:
    """A word for each layer. listed, other: the words for layers whose indices the field has, and for the others."""
    value: Sequence[Any] = fields[name] or []
    if not any(isinstance(each, str) for each in value):
        if any(index not in range(layers) for index in value):
            raise ConfigError(
                f"{name} is {value} in config.json; it must have numbers of layers, from 0 to {layers - 1}"
            )
        return [listed if index in value else other for index in range(layers)]
    if len(value) != layers:
        raise ConfigError(
            f"{name} in config.json has {len(value)} entries; it must have one for each of the {layers} layers"
        )
    return list(value)


def read_pattern(letters: LayerLetters, pattern: str | None) -> dict[str, Any] | None:
    """The fields that describe the layers of a pattern; None where none of this family's models has such layers."""
    size = 2 if letters.mlps else 1
    pattern = (pattern or "").replace("|", "")
    mixers, mlps = pattern[::size], pattern[1::size] if letters.mlps else ""
    words = {letter: word for word, letter in letters.mixers.items()}
    kinds = {letter: word for word, letter in _MLPS.items()}
    known = set(mixers) <= set(words) and set(mlps) <= set(kinds)
    if not pattern or len(pattern) % size or not known or (letters.mlps == "dense" and "E" in mlps):
        return None
    if letters.mlps == "experts" and len(set(mlps)) > 1:
        return None
    found: dict[str, Any] = {"num_hidden_layers": len(mixers)}
    if letters.field:
        found[letters.field] = [words[letter] for letter in mixers]
        if letters.field.endswith("_indices"):
            last = list(letters.mixers)[-1]
            found[letters.field] = [index for index, word in enumerate(found[letters.field]) if word == last]
    elif len(set(mixers)) > 1:
        return None
    if letters.mlps.endswith("_types"):
        found[letters.mlps] = [kinds[letter] for letter in mlps]
    elif letters.mlps.startswith("num_"):
        dense = mlps.count("-")
        if "-" in mlps[dense:]:
            return None
        found[letters.mlps] = dense
    elif letters.mlps.endswith("_layers"):
        found[letters.mlps] = [index for index, letter in enumerate(mlps) if letter == "-"]
    return found
