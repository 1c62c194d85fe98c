# SPDX-License-Identifier: Apache-2.0
"""Facts that a config field states about itself, and configs that check themselves.

A config is a keyword-only dataclass that inherits `CheckedConfig`. A field's type, default and docstring (the string
literal below it) are enough for most flags; `flag(...)` adds what they cannot say: bounds, choices, spellings, what
kind of fact the field is, and what it needs to have an effect. `megatron/training/flags` turns this into `--flags`.

The command line, a YAML file and a Python caller all get the same sentences for the same mistake: `find_value_problem`
judges one value, `CheckedConfig.rules` the relations of a config's fields, and construction raises `ConfigError`
with all of them. This module and every config module import neither torch nor numpy, so that `--help` answers at once.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from megatron.core.errors import ConfigError, UnknownFieldError
from megatron.core.setting import (
    CHANGES_THE_RUN,
    FieldKind,
    Needs,
    NeedsGPU,
    Setting,
    describe_type_problem,
    find_field_problem,
    has_type,
    strip_path_mark,
)

_FLAG = "flag"


_SEVERAL = ("needs", "gpu", "choices", "names", "off_names", "planned_choices", "unsupported_choices")


def flag(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Callable[[], Any] | Any = dataclasses.MISSING,
    aliases: Sequence[str] = (),
    **says: Any,
) -> Any:
    """A dataclass field that says more than its type, default and docstring: attributes of its Setting.

    names: spellings that replace the derived one. aliases: further accepted ones, noted as such in the documentation.
    A single need, or a single wish for a GPU, may be given without a tuple.
    """
    for name in says.keys() & _SEVERAL:
        value = says[name]
        says[name] = (value,) if isinstance(value, Needs | NeedsGPU) else value and tuple(value)
    # Metadata, not a subclass of Field: dataclasses leave it alone.
    metadata = {_FLAG: says | {"aliases": tuple(aliases)}}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def derived(default: Any = None, *, kind: FieldKind | None = None) -> Any:
    """A field without a flag: set by code or computed from other fields."""
    return flag(default, hidden=True, kind=kind)


def get_settings(config_class: Any) -> dict[str, Setting]:
    """The Setting of every field of a config class, hidden ones too, by name and in the order of the dataclass."""
    return _read_settings(config_class)


# Evaluating annotations is slow, and every check and every flag asks.
@functools.cache
def _read_settings(config_class: type) -> dict[str, Setting]:
    hints = _annotations(config_class)
    # Bases first, so that the class that declares a field again decides.
    owners = {name: cls for cls in reversed(config_class.__mro__) for name in vars(cls).get("__annotations__", {})}
    return {f.name: _setting(f, hints.get(f.name, Any), owners[f.name]) for f in dataclasses.fields(config_class)}


def _annotations(config_class: type) -> dict[str, Any]:
    names = {"torch": types.SimpleNamespace(dtype=object)}  # imported for type checkers only
    try:
        return typing.get_type_hints(config_class, localns=names, include_extras=True)
    except NameError:  # a user's subclass with annotations that only its module or function knows
        return typing.get_type_hints(config_class.__mro__[1], localns=names, include_extras=True)


def _setting(field: dataclasses.Field[Any], hint: Any, owner: type) -> Setting:
    """Complete what a field says by its name, its type and the class that declares it."""
    says = dict(field.metadata.get(_FLAG, {}))
    hint, is_path = strip_path_mark(hint)
    value_type, nargs, choices = _value_type(hint)
    default = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    written, aliases = field.name.replace("_", "-"), says.pop("aliases", ())
    # Sentences about a field that no flag sets name the field.
    names = says.pop("names", ()) or ((field.name,) if says.get("hidden") else (f"--{written}",))
    # Every switch that is on by default can be switched off, and can also be spelled positively.
    if value_type is bool and default is True and not says.get("hidden"):
        says.setdefault("off_names", (f"--no-{written}", f"--disable-{written}"))
    says["kind"] = says.get("kind") or vars(owner).get("usual_kind")
    # Another run than the one that was asked for must not take place with a note.
    assert not says.get("gpu") or says["kind"] not in CHANGES_THE_RUN, f"{field.name} changes numbers"
    found = {"nargs": nargs, "choices": choices, **says}
    return Setting(
        dest=field.name, names=names + aliases, value_type=value_type, default=default, annotation=hint,
        is_path=is_path, owner=owner, group=(owner.__doc__ or owner.__name__).strip().splitlines()[0].rstrip("."),
        **found,
    )  # fmt: skip


def _value_type(hint: Any) -> tuple[type, str | None, tuple[Any, ...] | None]:
    """Type of one value, nargs and choices of a type annotation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in inner if part is not type(None)]
        return _value_type(parts[0]) if len(parts) == 1 else (str, None, None)  # several: `parse` tells them apart
    if origin is Literal:
        return type(inner[0]), None, inner
    if origin is list:
        return inner[0], "+", None
    # One word on the command line, which `parse` takes apart.
    if origin is tuple:
        return str, None, None
    return (hint if origin is None and isinstance(hint, type) else object), None, None


def _broken_fields(config: Any) -> dict[str, str]:
    found = {}
    for name, setting in get_settings(type(config)).items():
        value = getattr(config, name)
        # A default is right, unless it stands for what must be given: most fields of most configs have theirs.
        if value is not setting.default or setting.example is not None:
            found[name] = find_field_problem(setting, value)
    return {name: problem for name, problem in found.items() if problem is not None}


def _describe_unknown(cls: type, name: str) -> str:
    close = difflib.get_close_matches(name, get_settings(cls), n=1, cutoff=0.8)
    remedy = f"use {close[0]}" if close else "leave it out, or add it in a subclass"
    return f"{cls.__name__} has no field {name}; {remedy}"


class CheckedConfig:
    """A config that fills in what follows from its fields and checks itself when it is made.

    Raises ConfigError with everything that is wrong: values by themselves, then relations between fields. A subclass
    extends `derive`, calling its base's method first, as the groups of fields that form one config do, and has `rules`.
    """

    usual_kind: ClassVar[FieldKind | None] = None
    """Kind of the fields that a class declares, where a field says no other."""

    def __new__(cls, *_: Any, **named: Any) -> Any:
        """Refuse arguments that the class's constructor does not have."""
        taken = inspect.signature(cls.__init__).parameters
        if named.keys() - taken and not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
            raise UnknownFieldError([_describe_unknown(cls, name) for name in named if name not in taken])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        problems = check(self)
        if problems:
            raise ConfigError(problems)

    def normalize(self) -> None:
        """Accept other forms of values, such as one word for a list of one. Fields may hold anything here."""

    def derive(self) -> None:
        """Fill in the fields that follow from others. Required fields may be None here: they are complained about."""

    def rules(self) -> Iterator[str]:
        """A sentence for every relation between fields that does not hold, of those that one class knows: each class of
        a config has its own, and calls no other's. Required fields may be None here."""
        yield from ()

    def problems(self) -> Iterator[str]:
        """The rules of all classes of the config, bases first."""
        for cls in reversed(type(self).__mro__):
            yield from vars(cls)["rules"](self) if "rules" in vars(cls) else ()

    def say(self, name: str) -> str:
        """A field as a user writes it: `--micro-batch-size 2`, `--no-rope-fusion`."""
        return get_settings(type(self))[name].spell(getattr(self, name))

    def flag(self, name: str) -> str:
        """The spelling of a field's flag that we print: `--micro-batch-size`."""
        return get_settings(type(self))[name].name


AnyConfigT = TypeVar("AnyConfigT")
ConfigT = TypeVar("ConfigT", bound=CheckedConfig)


def check(config: CheckedConfig, reported: Collection[str] = ()) -> list[str]:
    """Derive a config's values and list what is wrong with it.

    No rule reads a value that has not been judged: a field whose value is wrong gets its default, one that is missing
    an example (`fill_missing`), so that the relations of all others can be checked; sentences that name its flag are
    left out. reported: fields of which the caller has complained already.
    """
    config.normalize()
    twin = copy.copy(config)
    missing = fill_missing(config)
    relations = _check_values_and_relations(config, {*reported, *missing})
    if missing:
        fill_missing(twin, 2)
        relations = keep_common(relations, _check_values_and_relations(twin, {*reported, *missing}))
    return [*(problem for name, problem in missing.items() if name not in reported), *relations]


def fill_missing(config: CheckedConfig, multiple: int = 1) -> dict[str, str]:
    """Give each field that must be given, and is not, so many times its example; field -> the sentence about it.

    What rules say then is true whatever the value is where they say it of several multiples: see `keep_common`.
    """
    settings = get_settings(type(config))
    missing = {name: s for name, s in settings.items() if s.example is not None and getattr(config, name) is None}
    for name, setting in missing.items():
        object.__setattr__(config, name, multiple * setting.example)
    return {name: find_field_problem(setting, None) or "" for name, setting in missing.items()}


def keep_common(sentences: Sequence[str], others: Collection[str]) -> list[str]:
    """The sentences that are among the others, too."""
    return [text for text in sentences if text in others]


def _check_values_and_relations(config: CheckedConfig, reported: Collection[str]) -> list[str]:
    settings = get_settings(type(config))
    broken = _broken_fields(config)
    for name in broken:
        # Configs may be frozen dataclasses.
        object.__setattr__(config, name, settings[name].default)
    config.derive()
    # One sentence for one mistake: a relation that names a broken field would judge its default.
    spellings = {spelling for name in {*broken, *reported} for spelling in settings[name].spellings}
    relations = [text for text in config.problems() if not names_any(text, spellings)]
    return [*(problem for name, problem in broken.items() if name not in reported), *relations]


def names_any(sentence: str, spellings: Collection[str]) -> bool:
    """Return whether a sentence names one of these flags."""
    return any(word in spellings for word in re.findall(r"[\w-]+", sentence))


def restore(config_class: type[ConfigT], saved: Mapping[str, Any]) -> ConfigT:
    """The config of settings that an earlier run was saved with.

    That run's version checked them; bounds and rules that have come since are not asked, so that its checkpoint stays
    usable. Names that this version does not know are ignored. Raises ConfigError for values of the wrong type or
    missing ones, which are no settings of any version.
    """
    settings = get_settings(config_class)
    config = unchecked(config_class, {name: value for name, value in saved.items() if name in settings})
    config.normalize()
    problems = [_restored_problem(setting, getattr(config, name)) for name, setting in settings.items()]
    if any(problems):
        raise ConfigError([problem for problem in problems if problem is not None])
    config.derive()
    return config


def _restored_problem(setting: Setting, value: Any) -> str | None:
    if value is None:
        return find_field_problem(setting, None) if setting.example is not None else None
    return None if has_type(value, setting.annotation) else describe_type_problem(setting, str(value))


def unchecked(config_class: type[AnyConfigT], values: Mapping[str, Any]) -> AnyConfigT:
    """A config with these values and the defaults of the other fields, neither derived nor checked."""
    # Past __init__, which would derive and check.
    config = object.__new__(config_class)
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        if field.name in values:
            value = values[field.name]
        else:
            value = field.default_factory() if callable(field.default_factory) else field.default
        object.__setattr__(config, field.name, value)
    return config


def name_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around a value that is none, for a sentence: `8 or 16`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else str(unit)


def name_divisors(number: int, value: int) -> str:
    """The divisors of `number` around a value that is none, for a sentence: `4 or 8`. Looks 4096 steps either way."""
    # Bounded, because the number may be a count of tokens in the billions.
    below = next((n for n in range(value - 1, max(0, value - 4096), -1) if number % n == 0), 1)
    above = next((n for n in range(value + 1, min(number, value + 4096) + 1) if number % n == 0), None)
    return str(below) if above is None else f"{below} or {above}"
