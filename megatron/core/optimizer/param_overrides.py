# SPDX-License-Identifier: Apache-2.0
"""Rates of chosen parameters, as upstream's programs give them: config_overrides of get_megatron_optimizer."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import nn

from megatron.core.errors import ConfigError
from megatron.core.placement import get_placement


@dataclass(frozen=True)
class ParamPredicate:
    """A question about a parameter. name: what tells two of them apart."""

    name: str
    fn: Callable[[Any], bool]

    def __call__(self, param: Any) -> bool:
        return self.fn(param)


@dataclass(frozen=True)
class ParamKey:
    """Parameters that match any of these: patterns of names, attributes that they carry, questions about them."""

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()

    def matches(self, param: Any, param_name: str) -> bool:
        """Return whether a parameter, by its name in the whole model, is one of them."""
        names = (self.name,) if isinstance(self.name, str) else self.name
        marks = (self.attr,) if isinstance(self.attr, str) else self.attr
        asked = self.predicate if isinstance(self.predicate, tuple) else (self.predicate,)
        is_named = any(fnmatch.fnmatchcase(param_name, pattern) for pattern in names)
        return is_named or any(getattr(param, mark, False) for mark in marks) or any(ask(param) for ask in asked)


class ParamGroupOverride(TypedDict, total=False):
    """Options of a group in place of the config's: ends of its learning rate's schedule, factor of its weight decay."""

    max_lr: float
    min_lr: float
    wd_mult: float


def find_overrides(
    overrides: Mapping[ParamKey, ParamGroupOverride], chunks: Iterable[nn.Module]
) -> dict[int, tuple[tuple[str, float], ...]]:
    """id of a stored parameter -> the options of all keys that match it, by its name in the whole model or the one that
    its layer spec shows, or that match one of its parts.

    Raises ConfigError for options that do not exist, and for two keys that contradict each other.
    """
    found: dict[int, dict[str, Any]] = {}
    for shown, param in (named for chunk in chunks for named in (chunk.named_parameters() if overrides else ())):
        stored = getattr(param, "part_of", param)
        name = get_placement(stored, shown).name
        given = found.setdefault(id(stored), {})
        for key, options in overrides.items():
            if unknown := sorted(set(options) - set(ParamGroupOverride.__annotations__)):
                known = ", ".join(ParamGroupOverride.__annotations__)
                raise ConfigError(f"config_overrides has {unknown[0]!r}; a group's options are {known}")
            if not (key.matches(param, name) or key.matches(param, shown)):
                continue
            for option, value in options.items():
                if given.setdefault(option, value) != value:
                    raise ConfigError(f"config_overrides gives {name} two values of {option}: {given[option]}, {value}")
    return {number: tuple(sorted(given.items())) for number, given in found.items()}
