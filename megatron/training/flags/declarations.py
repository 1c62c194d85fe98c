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
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import flag_spec, settings_of
from megatron.core.flag_texts import decimal, integer
from megatron.core.setting import Setting, type_problem, value_problem
from megatron.training.config.container import group_classes


@dataclass(frozen=True, kw_only=True)
class Flag(Setting):
    """A setting as the help and the documentation show it."""

    metavar: str | tuple[str, ...] | None = None
    help: str = ""
    group: str = ""
    """Heading in the help: what the flags of one class have in common."""
    config: str | None = None
    """Group of RunConfig that holds the setting; None for the table's flags."""


@functools.cache
def declared_flags() -> tuple[Flag, ...]:
    """The flags of all config dataclasses, in the order of RunConfig's groups."""
    flags: list[Flag] = []
    for group, config_class in group_classes().items():
        flags.extend(flags_of(config_class, group))
    return tuple(flags)


def flags_of(config_class: type, config: str) -> Iterator[Flag]:
    """One Flag per field that is not hidden."""
    owners = {name: cls for cls in reversed(config_class.__mro__) for name in vars(cls).get("__annotations__", {})}
    settings = settings_of(config_class)
    for field in dataclasses.fields(config_class):
        spec, owner = flag_spec(field), owners[field.name]
        if not spec.hidden:
            yield Flag(
                **vars(settings[field.name]),
                metavar=spec.metavar,
                help=field_docs(owner).get(field.name, ""),
                group=(inspect.getdoc(owner) or owner.__name__).splitlines()[0].rstrip("."),
                config=config,
            )


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
        value = (flag.parse or _PARSERS.get(flag.value_type, str))(text)
    except ValueError:
        raise ValueError(type_problem(flag, text)) from None
    problem = value_problem(flag, value, text)
    if problem is not None:
        raise ValueError(problem)
    return value


_PARSERS: dict[type, Callable[[str], Any]] = {int: integer, float: decimal}
