"""How a config field says what its command-line flag looks like.

A config is a keyword-only dataclass. A field's type, default and docstring (the string literal below it) are
enough for most flags; `flag(...)` adds what they cannot say. `megatron/training/flags` turns this into `--flags`.
This module and every config module import neither torch nor numpy, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

_FLAG = "flag"


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """What a field's flag needs beyond type, default and docstring."""

    names: tuple[str, ...] = ()
    """Spellings that replace the derived one, such as ("--norm-epsilon",). The first is the one we print."""
    off_names: tuple[str, ...] = ()
    """Spellings that store False, such as ("--disable-bias-linear",). A bool that is on by default gets `--no-x` and
    `--disable-x` when this is empty."""
    aliases: tuple[str, ...] = ()
    """Further accepted spellings, noted as aliases in the documentation."""
    choices: tuple[Any, ...] | None = None
    parse: Callable[[str], Any] | None = None
    """Text to value; raises ValueError with a sentence."""
    nargs: str | int | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive lower bound."""
    unit: str | None = None
    """tokens, samples, iterations, seconds, bytes, ..."""
    planned: str | None = None
    """The coming capability this field belongs to: until then only its default is accepted."""
    planned_choices: tuple[Any, ...] = ()
    """Values among the choices that belong to a coming capability and are refused until then."""
    unsupported_choices: tuple[Any, ...] = ()
    """Values among the choices that upstream knows and this system does not plan to have."""
    coming: str | None = None
    """The coming capability that planned_choices belong to."""
    metavar: str | tuple[str, ...] | None = None
    """What stands for the value in the help."""
    hidden: bool = False
    """True for a field without a flag: derived, or set by code."""


def flag(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Callable[[], Any] | Any = dataclasses.MISSING,
    choices: Sequence[Any] | None = None,
    names: Sequence[str] = (),
    off_names: Sequence[str] = (),
    aliases: Sequence[str] = (),
    planned_choices: Sequence[Any] = (),
    unsupported_choices: Sequence[Any] = (),
    **spec: Any,
) -> Any:
    """A dataclass field with a FlagSpec (see there for the keywords)."""
    flag_spec = FlagSpec(
        names=tuple(names),
        off_names=tuple(off_names),
        aliases=tuple(aliases),
        choices=None if choices is None else tuple(choices),
        planned_choices=tuple(planned_choices),
        unsupported_choices=tuple(unsupported_choices),
        **spec,
    )
    metadata = {_FLAG: flag_spec}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def derived(default: Any = None) -> Any:
    """A field without a flag: set by code or computed from other fields."""
    return flag(default, hidden=True)


def flag_spec(field: dataclasses.Field[Any]) -> FlagSpec:
    """The FlagSpec of a dataclass field; an empty one where the field is plain."""
    spec: FlagSpec = field.metadata.get(_FLAG, FlagSpec())
    return spec


def multiples_near(value: int, unit: int) -> str:
    """The multiples of `unit` around a value that is none, for a sentence: `8 or 16`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else str(unit)


def divisors_near(number: int, value: int) -> str:
    """The divisors of `number` around a value that is none, for a sentence: `4 or 8`. Looks 4096 steps either way."""
    below = next((n for n in range(value - 1, max(0, value - 4096), -1) if number % n == 0), 1)
    above = next((n for n in range(value + 1, min(number, value + 4096) + 1) if number % n == 0), None)
    return str(below) if above is None else f"{below} or {above}"
