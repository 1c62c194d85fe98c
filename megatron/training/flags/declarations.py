"""What one command-line flag is, and the flags that the config dataclasses declare.

A `Flag` is all that parsing, help, documentation and the status table need to know. Flags come from two places: fields
of the config dataclasses (here), and the table of upstream flags that no dataclass declares (flag_table.py).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.config_base import FlagSpec, flag_spec
from megatron.core.flag_texts import decimal, integer
from megatron.training.config.container import group_classes

Status = Literal["works", "planned", "not supported"]
LARGEST_INTEGER = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One setting and its spellings."""

    dest: str
    """Name of the setting, upstream's `dest`."""
    names: tuple[str, ...]
    """Spellings that store the value (a switch: True)."""
    off_names: tuple[str, ...] = ()
    """Spellings that store False."""
    kind: type = str
    """bool for a switch, otherwise the type of the value or of each value."""
    nargs: int | str | None = None
    """None: one value; "+", "*" or a number: a list."""
    choices: tuple[Any, ...] | None = None
    default: Any = None
    parse: Callable[[str], Any] | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    unit: str | None = None
    metavar: str | tuple[str, ...] | None = None
    help: str = ""
    group: str = ""
    """Heading in the help: what the flags of one class have in common."""
    status: Status = "works"
    explanation: str = ""
    """planned: the coming capability; not supported: the reason."""
    alternative: str = ""
    """What to do instead, as an imperative."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for what happens anyway, accepted whatever the status; the default is always one."""
    planned_choices: tuple[Any, ...] = ()
    unsupported_choices: tuple[Any, ...] = ()
    config: str | None = None
    """Group of RunConfig that holds the setting; None for the table's flags."""

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.names + self.off_names

    @property
    def name(self) -> str:
        """The spelling we print."""
        return self.spellings[0]

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    def spelling_for(self, value: Any) -> str:
        """How a user writes this value: `--lr 0.1`, `--bf16`, `--no-bias-linear`."""
        if self.is_switch:
            return (self.names if value else self.off_names or self.names)[0]
        return f"{self.name} {self.text_of(value)}"

    def text_of(self, value: Any) -> str:
        """A value that is not a switch as it would be typed: several values, or one written as a tuple or list."""
        if not isinstance(value, list | tuple):
            return str(value)
        written = (" " if self.nargs else ",").join(map(str, value))
        return f"[{written}]" if isinstance(value, list) and not self.nargs else written


@functools.cache
def declared_flags() -> tuple[Flag, ...]:
    """The flags of all config dataclasses, in the order of RunConfig's groups."""
    flags: list[Flag] = []
    for group, config_class in group_classes().items():
        flags.extend(flags_of(config_class, group))
    return tuple(flags)


def flags_of(config_class: type, config: str) -> Iterator[Flag]:
    """One Flag per field that is not hidden."""
    hints = typing.get_type_hints(config_class, localns={"torch": types.SimpleNamespace(dtype=object)})
    owners = {name: cls for cls in reversed(config_class.__mro__) for name in vars(cls).get("__annotations__", {})}
    mro = config_class.__mro__
    # Fields of the nearest class first: dataclasses list those of the furthest base class first.
    fields = sorted(dataclasses.fields(config_class), key=lambda field: mro.index(owners[field.name]))
    for field in fields:
        spec = flag_spec(field)
        if not spec.hidden:
            yield _flag_of(field, spec, hints[field.name], owners[field.name], config)


def _flag_of(field: dataclasses.Field[Any], spec: FlagSpec, hint: Any, owner: type, config: str) -> Flag:
    kind, nargs, choices = _kind_of(hint)
    default = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    names, off_names = _spellings(field.name, spec, is_switch=kind is bool, default=default)
    return Flag(
        dest=field.name,
        names=names,
        off_names=off_names,
        kind=kind,
        nargs=spec.nargs if spec.nargs is not None else nargs,
        choices=spec.choices or choices,
        default=default,
        parse=spec.parse,
        minimum=spec.minimum,
        maximum=spec.maximum,
        above=spec.above,
        unit=spec.unit,
        metavar=spec.metavar,
        help=field_docs(owner).get(field.name, ""),
        group=(inspect.getdoc(owner) or owner.__name__).splitlines()[0].rstrip("."),
        status="planned" if spec.planned else "works",
        explanation=spec.planned or spec.coming or "",
        planned_choices=spec.planned_choices,
        unsupported_choices=spec.unsupported_choices,
        config=config,
    )


def _spellings(
    field_name: str, spec: FlagSpec, *, is_switch: bool, default: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Every switch that is on by default can be switched off, and can also be spelled positively."""
    written = field_name.replace("_", "-")
    names = spec.names or (f"--{written}",)
    off_names = spec.off_names
    if is_switch and default is True and not off_names:
        off_names = (f"--no-{written}", f"--disable-{written}")
    return names + spec.aliases, off_names


def _kind_of(hint: Any) -> tuple[type, str | None, tuple[Any, ...] | None]:
    """Type of one value, nargs and choices of a type annotation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in inner if part is not type(None)]
        return _kind_of(parts[0]) if len(parts) == 1 else (str, None, None)  # several: `parse` tells them apart
    if origin is Literal:
        return type(inner[0]), None, inner
    if origin is list:
        return inner[0], "+", None
    return (str if origin is tuple else hint), None, None


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string literal below each field of this class."""
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body
    docs = {}
    for statement, below in zip(body, body[1:], strict=False):
        is_doc = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if is_doc and isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = typing.cast(ast.Constant, typing.cast(ast.Expr, below).value).value
            docs[statement.target.id] = " ".join(str(text).split())
    return docs


def parse_value(flag: Flag, text: str) -> Any:
    """One value of a flag. Raises ValueError with the sentence `--flag text is not …; give …`."""
    try:
        value = (flag.parse or _PARSERS.get(flag.kind, str))(text)
    except ValueError:
        raise ValueError(f"{flag.name} {_shown(text)} is not valid; give {expected(flag)}") from None
    if flag.choices is not None and value not in flag.choices:
        raise ValueError(f"{flag.name} {_shown(text)} is not one of its values; give {expected(flag)}")
    if isinstance(value, int | float) and not _in_range(flag, value):
        raise ValueError(f"{flag.name} {_shown(text)} is out of range; give {expected(flag)}")
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"{flag.name} holds a NUL character; give {expected(flag)}")
    return value


def _in_range(flag: Flag, value: float) -> bool:
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return False
    above_minimum = flag.minimum is None or value >= flag.minimum
    above_bound = flag.above is None or value > flag.above
    return above_minimum and above_bound and (flag.maximum is None or value <= flag.maximum)


def _shown(text: str) -> str:
    """The text as typed; quoted where spaces or odd characters would hide in the sentence."""
    shown = text if text.isascii() and text.isprintable() and text and " " not in text else ascii(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


_PARSERS: dict[type, Callable[[str], Any]] = {int: integer, float: decimal}
_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text"}


def expected(flag: Flag) -> str:
    """What a value must be, in words: `a whole number of at least 1 (iterations)`."""
    if flag.choices is not None:
        offered = [c for c in flag.choices if c not in flag.planned_choices + flag.unsupported_choices]
        return "one of " + ", ".join(map(str, offered or flag.choices))
    words = _KIND_NAMES.get(flag.kind, "a value")
    if flag.parse is not None and flag.kind is str:
        words = (flag.parse.__doc__ or "a value").splitlines()[0].rstrip(".")
        words = words[0].lower() + words[1:]
    if flag.above is not None:
        words += f" above {flag.above:g}"
    if flag.minimum is not None and flag.maximum is not None:
        words += f" from {_number(flag.minimum)} to {_number(flag.maximum)}"
    elif flag.minimum is not None:
        words += f" of at least {_number(flag.minimum)}"
    elif flag.maximum is not None:
        words += f" of at most {_number(flag.maximum)}"
    elif flag.kind is int:
        words += f" of at most {LARGEST_INTEGER}"
    return words + (f" ({flag.unit})" if flag.unit else "")


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
