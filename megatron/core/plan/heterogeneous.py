# SPDX-License-Identifier: Apache-2.0
"""Layers of different shapes, as models found by architecture search have them (Llama-Nemotron): the JSON of
--heterogeneous-layers-config-path, read into what each layer's attention and MLP are. Arithmetic only.

    { "block_configs": [ { "attention": { "n_heads_in_group": 8 }, "ffn": { "ffn_mult": 2.625 } },
                         { "attention": { "no_op": true }, "ffn": { "replace_with_linear": true } }, ... ], ... }

Source: Bercovich et al., "Puzzle: Distillation-Based NAS for Inference-Optimized LLMs", 2024, section 2.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron.core.errors import ConfigError

FLAG = "--heterogeneous-layers-config-path"
_MULTIPLE = 256
_LARGEST = 2**26


class HeterogeneousLayer(NamedTuple):
    """A layer."""

    attention: Literal["own", "linear", "none"]
    mlp: Literal["own", "linear", "none"]
    query_groups: int | None = None
    """Of attention; the model's when None."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP; the model's when None."""


def read_encoded(path: str) -> str:
    """Read the file of --heterogeneous-layers-config-path. Raises ConfigError where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FLAG} {path} cannot be read: {error}; give a JSON file") from None


@functools.lru_cache(maxsize=16)
def parse_document(text: str) -> dict[str, Any]:
    """Read the whole document. Raises ConfigError where it is no JSON object with `block_configs`."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG}: this is not JSON ({error}); it begins with {text[:40]!r}") from None
    if not isinstance(document, dict) or not isinstance(document.get("block_configs"), list):
        raise ConfigError(f"{FLAG}: block_configs is missing; give an object with a list of one entry for each layer")
    return document


@functools.lru_cache(maxsize=16)
def parse_blocks(text: str, hidden_size: int, heads: int) -> tuple[HeterogeneousLayer, ...]:
    """Read the layers of a model of this width and with so many query heads. Raises ConfigError for what they cannot
    be."""
    return tuple(
        _parse_block(f"{FLAG}: block_configs[{index}]", entry, hidden_size, heads)
        for index, entry in enumerate(parse_document(text)["block_configs"])
    )


def _parse_block(where: str, entry: Any, hidden_size: int, heads: int) -> HeterogeneousLayer:
    parts = entry if isinstance(entry, dict) else {}
    attention, groups = _parse_part(where, parts, ("attention",), ("num_query_groups", "n_heads_in_group"))
    mlp, width = _parse_part(where, parts, ("ffn", "mlp"), ("ffn_hidden_size", "ffn_mult"))
    if groups is not None:
        name, value = groups
        if not _is_whole(value) or heads % value:
            raise ConfigError(
                f"{where}.attention.{name} is {value!r}, which does not divide the {heads} heads; use a divisor"
            )
        groups = value if name == "num_query_groups" else heads // value
    if width is not None:
        name, value = width
        if name == "ffn_mult" and isinstance(value, int | float) and not isinstance(value, bool):
            value = _round_up(value, hidden_size)
        if not _is_whole(value):
            raise ConfigError(f"{where}.ffn.{name} is {width[1]!r}; give a number above 0, or null for the model's own")
        width = value
    return HeterogeneousLayer(attention, mlp, groups, width)


def _round_up(multiple: float, hidden_size: int) -> int:
    """The inner width of an MLP that is so many times a gated one of 2/3 of the hidden size; 0 where there is none."""
    if not 0 < multiple < _LARGEST:
        return 0
    return -(-int(2 * multiple * hidden_size / 3) // _MULTIPLE) * _MULTIPLE


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _parse_part(where: str, entry: dict[str, Any], names: tuple[str, ...], sizes: tuple[str, str]) -> Any:
    """Return what a part is, and its size as (name, value), None for the model's.

    names: either may be the part's; sizes: the first counts where both are there.
    """
    name = next((name for name in names if isinstance(entry.get(name), dict)), None)
    if name is None:
        raise ConfigError(f"{where} has no {' or '.join(names)}; give an object, such as {{{sizes[1]!r}: null}}")
    part = entry[name]
    is_gone, is_linear = (part.get(word, False) for word in ("no_op", "replace_with_linear"))
    for word, value in (("no_op", is_gone), ("replace_with_linear", is_linear)):
        if not isinstance(value, bool):
            raise ConfigError(f"{where}.{name}.{word} is {value!r}; it must be true or false")
    if is_gone and is_linear:
        raise ConfigError(f"{where}.{name} says both no_op and replace_with_linear; keep one")
    size = next((size for size in sizes if size in part), None)
    if size is None and not (is_gone or is_linear):
        raise ConfigError(
            f"{where}.{name} has neither {sizes[0]} nor {sizes[1]}; give one, or null for the model's own"
        )
    value = None if size is None else part[size]
    if value is not None and (is_gone or is_linear):
        word = "no_op" if is_gone else "replace_with_linear"
        raise ConfigError(f"{where}.{name} has {size} {value!r} and says {word}; {size} must be null there")
    kind = "none" if is_gone else "linear" if is_linear else "own"
    return kind, None if value is None else (size, value)
