# SPDX-License-Identifier: Apache-2.0
"""Rates of chosen parameters, as upstream's programs give them: config_overrides of get_megatron_optimizer."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from megatron.core.errors import ConfigError


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
    overrides: Sequence[tuple[ParamKey, ParamGroupOverride]], param: Any, name: str
) -> tuple[tuple[str, float], ...]:
    """The options of all keys that match a parameter, by name. Raises ConfigError for options that do not exist, and
    for two keys that contradict each other."""
    found: dict[str, float] = {}
    for key, options in overrides:
        if unknown := sorted(set(options) - set(ParamGroupOverride.__annotations__)):
            known = ", ".join(ParamGroupOverride.__annotations__)
            raise ConfigError(f"config_overrides has {unknown[0]!r}; a group's options are {known}")
        if key.matches(param, name):
            for option, value in options.items():
                if found.setdefault(option, value) != value:  # type: ignore[arg-type]
                    raise ConfigError(f"config_overrides gives {name} two values of {option}: {found[option]}, {value}")
    return tuple(sorted(found.items()))
