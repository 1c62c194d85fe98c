# SPDX-License-Identifier: Apache-2.0
"""One setting: its name, its spellings, which values it may have, and the sentences about those it may not.

The command line judges what it has parsed, a config what it was given, both here, in the same words.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

# What an int64 tensor, and thus a checkpoint, can hold.
LARGEST_INTEGER = 2**63 - 1

FieldKind = Literal["shape", "function", "shorthand", "layout", "numerics", "kernel", "report"]
"""Kind of fact that a field is.

| kind      | a change of it ...                                                                   |
|-----------|--------------------------------------------------------------------------------------|
| shape     | gives the checkpoint other tensors or other shapes, or changes nothing               |
| function  | lets tensors of the same shapes compute something else, in evaluation, too           |
| shorthand | is a change of other fields, for whose values it stands                              |
| layout    | divides the same run over processes, or its work over time, in another way           |
| numerics  | trains otherwise: other data, updates, noise, dtypes                                 |
| kernel    | computes the same in another way; numbers differ by rounding at most                 |
| report    | shows or keeps something else                                                        |

Only settings say which function a checkpoint's weights are for, so that a run refuses to go on where one differs.
"""

Status = Literal["works", "planned", "not supported"]

_PATH = "path"
PathText = Annotated[str, _PATH]
"""The type of a field that names a file or a directory, also in object storage. An empty one is refused: it comes from
a shell variable that is not set, and would mean the current directory."""


@dataclass(frozen=True)
class Needs:
    """The condition under which a field has anything to do: else "--x has no effect without WORDS" is noted."""

    words: str
    """Setting that would give it something to do: `--use-mup`, `gradients in 16 bits, --grad-reduce-in-bf16`."""
    met: Callable[[Any], bool]
    """True if the settings of a run meet it. The argument has the fields of all configs of a run by name, after
    derivation (`lambda run: run.use_mup`), and `given`, the names of the fields that the user set."""


@dataclass(frozen=True)
class NeedsGPU:
    """A wish that only a CUDA device can fulfil, and what happens where there is none.

    Only fields that change no number have one: elsewhere another run would take place than the one that was asked for.
    """

    asked: Callable[[Any], bool]
    """True if a run has the wish: `lambda run: run.attention_backend == "fused"`. The argument is the same as for
    Needs.met."""
    otherwise: str
    """Consequence without it, after "X needs a GPU; without one, "."""
    instead: Mapping[str, Any] = field(default_factory=dict)
    """Values that take the place of the wish there, by field; none where the field has no effect there anyway."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting: its name, its spellings, and which values it may have."""

    dest: str
    """Name of the config field, upstream's `dest`."""
    names: tuple[str, ...]
    """Spellings that store the value (a switch: True). The first is the one we print."""
    off_names: tuple[str, ...] = ()
    """Spellings that store False. A field that is on by default gets `--no-x` and `--disable-x` without any."""
    value_type: type = str
    """bool for a switch, otherwise the type of the value or of each value."""
    nargs: int | str | None = None
    """None: one value; "+", "*" or a number: a list."""
    choices: tuple[Any, ...] | None = None
    default: Any = None
    parse: Callable[[str], Any] | None = None
    """Text to value; raises ValueError with a sentence."""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive lower bound."""
    repeats: bool = False
    """Given several times, the values of all occurrences count; otherwise only the last one's."""
    example: Any = None
    """A value for the sentence "--x is missing; ... for example --x 12". A field with an example must be given."""
    unit: str | None = None
    """tokens, samples, iterations, seconds, bytes, ..."""
    status: Status = "works"
    explanation: str = ""
    """planned, and planned choices: the coming capability; not supported: the reason."""
    alternative: str = ""
    """Remedy, as an imperative."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for what happens anyway, accepted whatever the status; the default is always one."""
    planned_choices: tuple[Any, ...] = ()
    """Values among the choices that belong to a coming capability and are refused until then."""
    unsupported_choices: tuple[Any, ...] = ()
    """Values among the choices that upstream knows and this system does not plan to have."""
    kind: FieldKind | None = None
    needs: tuple[Needs, ...] = ()
    """All of them must be met for the field to have an effect; the first that is not is named."""
    gpu: tuple[NeedsGPU, ...] = ()
    """Parts of it that only a CUDA device can do. A run on the CPU goes on without, with a note."""
    metavar: str | tuple[str, ...] | None = None
    """Stand-in for the value in the help."""
    hidden: bool = False
    """True for a field without a flag: derived, or set by code."""
    annotation: Any = Any
    """The field's type as a whole."""
    is_path: bool = False
    """True if the value, or each of its values, names a file or a directory."""
    owner: type | None = None
    """Class that declares the field; None for a flag without one."""
    group: str = ""
    """Heading in the help: what the flags of one class have in common."""

    @property
    def help(self) -> str:
        """The field's docstring. Found when asked for, because reading a command line does not need it."""
        return "" if self.owner is None else _read_field_docs(self.owner).get(self.dest, "")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings: those that store the value, then those that store False."""
        return self.names + self.off_names

    @property
    def name(self) -> str:
        """The spelling we print."""
        return self.spellings[0]

    @property
    def is_switch(self) -> bool:
        """True if the flag takes no value."""
        return self.value_type is bool

    @property
    def offered_choices(self) -> tuple[Any, ...]:
        """The choices without those that are refused."""
        return tuple(c for c in self.choices or () if c not in self.planned_choices + self.unsupported_choices)

    def spell(self, value: Any) -> str:
        """Return how a user writes this value: `--lr 0.1`, `--bf16`, `--no-bias-linear`."""
        if self.is_switch:
            return (self.names if value else self.off_names or self.names)[0]
        return f"{self.name} {self.format_value(value)}"

    def format_value(self, value: Any) -> str:
        """A value that is not a switch as it would be typed: several values, or one written as a tuple or list."""
        if not isinstance(value, list | tuple):
            return str(value)
        written = (" " if self.nargs else ",").join(map(str, value))
        return f"[{written}]" if isinstance(value, list) and not self.nargs else written


@functools.cache
def _read_field_docs(cls: type) -> dict[str, str]:
    """The string literal below each field of this class."""
    # Python keeps no docstrings of fields, so the source is read: one text serves the reader of the code and --help.
    # Not inspect.getsource, which tokenizes the whole file, and only the fields, because all that is parsed here is
    # parsed at every --help.
    _, header, rest = _read_source(cls.__module__).partition(f"\nclass {cls.__name__}(")
    definition = ast.parse(header + re.split(_AFTER_FIELDS, rest, maxsplit=1)[0]).body[0]
    body = typing.cast(ast.ClassDef, definition).body
    docs = {}
    for statement, below in zip(body, body[1:], strict=False):
        is_doc = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if is_doc and isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = typing.cast(ast.Constant, typing.cast(ast.Expr, below).value).value
            docs[statement.target.id] = " ".join(str(text).split())
    return docs


# A method, a decorator, or the two empty lines after a class.
_AFTER_FIELDS = r"\n    (?:def |@)|\n\n\n"


@functools.cache
def _read_source(module_name: str) -> str:
    return Path(str(sys.modules[module_name].__file__)).read_text(encoding="utf-8")


def find_value_problem(setting: Setting, value: Any, text: str | None = None) -> str | None:
    """Return what is wrong with one value (of a list: one element) of the right type, as a sentence; None where nothing
    is.

    text: how the user wrote it, where not as `str(value)`.
    """
    shown = _show(str(value) if text is None else text)
    # Types are compared, too: in Python 1 == True == 1.0.
    if setting.choices is not None and not any(isinstance(value, type(c)) and value == c for c in setting.choices):
        return f"{setting.name} {shown} is not one of its values; give {describe_expected(setting)}"
    if isinstance(value, int | float) and not _is_in_range(setting, value):
        return f"{setting.name} {shown} is out of range; give {describe_expected(setting)}"
    if setting.is_path and not str(value).strip():
        return f"{setting.name} {shown} is empty, like a shell variable that is not set; name a path, or leave it out"
    # Neither a path nor the argument of another program can hold one.
    if isinstance(value, str) and "\0" in value:
        return f"{setting.name} holds a NUL character; give {describe_expected(setting)}"
    return None


def describe_type_problem(setting: Setting, text: str) -> str:
    """The sentence for a value that is not of the setting's type."""
    if setting.is_switch:
        return f"{setting.name} is a switch; give true or false"
    return f"{setting.name} {_show(text)} is not valid; give {describe_expected(setting)}"


def explain_refusal(setting: Setting, value: Any, written: str) -> tuple[Status, str] | None:
    """Return why a value that upstream knows is refused here, with its sentence; None where it is accepted."""
    values = value if isinstance(value, list | tuple) else [value]
    kind = setting.status
    if value == setting.default or value in setting.neutral:
        return None
    if any(item in setting.unsupported_choices for item in values):
        kind = "not supported"
    elif any(item in setting.planned_choices for item in values):
        kind = "planned"
    if kind == "works":
        return None
    instead = _suggest_instead(setting)
    if kind == "planned":
        what = setting.explanation or "a later version"
        return kind, f"{written} is planned, not available yet: it comes with {what}; {instead}"
    why = f": {setting.explanation}" if setting.status == "not supported" else ""
    return kind, f"{written} is not supported{why}; {instead}"


def _suggest_instead(setting: Setting) -> str:
    """Return what to do about a refused setting. To leave out what a model or its training consists of is no advice."""
    offered = setting.offered_choices
    if setting.status == "works" and offered:
        if setting.kind in CHANGES_THE_RUN:
            return f"available are {', '.join(map(str, offered))}, which give another run"
        return f"use {' or '.join(map(str, offered))}"
    if setting.alternative:
        return setting.alternative
    if setting.kind in CHANGES_THE_RUN:
        return CHANGES_THE_RUN[setting.kind]
    if setting.is_switch or setting.default in (None, []):
        return "leave it out; the numbers stay the same"
    return f"leave it out or give {setting.spell(setting.default)}; the numbers stay the same"


_PART_OF_THE_MODEL = "it is part of the model, and no other flag gives the same one until then"
CHANGES_THE_RUN: dict[FieldKind | None, str] = {
    "shape": _PART_OF_THE_MODEL,
    "function": _PART_OF_THE_MODEL,
    "shorthand": _PART_OF_THE_MODEL,
    "numerics": "it is part of what is computed, and no other flag gives the same run until then",
}
"""Kinds of settings without which another run takes place, and what is said where such a setting is not available."""


def describe_expected(setting: Setting) -> str:
    """Return what a value must be, in words: `a whole number of at least 1 (iterations)`."""
    if setting.choices is not None:
        return "one of " + ", ".join(map(str, setting.offered_choices or setting.choices))
    words = _TYPE_NAMES.get(setting.value_type, "a value")
    if setting.parse is not None and setting.value_type is str:
        # The docstring of a parser says what its text must be: one place for help and errors.
        words = (setting.parse.__doc__ or "a value").splitlines()[0].rstrip(".")
        words = words[0].lower() + words[1:]
    if setting.above is not None:
        words += f" above {setting.above:g}"
    if setting.minimum is not None and setting.maximum is not None:
        words += f" from {_format_number(setting.minimum)} to {_format_number(setting.maximum)}"
    elif setting.minimum is not None:
        words += f" of at least {_format_number(setting.minimum)}"
    elif setting.maximum is not None:
        words += f" of at most {_format_number(setting.maximum)}"
    elif setting.value_type is int:
        words += f" of at most {LARGEST_INTEGER}"
    return words + (f" ({setting.unit})" if setting.unit else "")


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text"}


def _format_number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def _is_in_range(setting: Setting, value: float) -> bool:
    if setting.value_type is int and abs(value) > LARGEST_INTEGER:
        return False
    # Comparisons with nan are False, so that nan is in no range that has a bound.
    above_minimum = setting.minimum is None or value >= setting.minimum
    above_bound = setting.above is None or value > setting.above
    return above_minimum and above_bound and (setting.maximum is None or value <= setting.maximum)


def _show(text: str) -> str:
    """The text as typed; quoted where spaces or odd characters would hide in the sentence."""
    shown = text if text.isascii() and text.isprintable() and text and " " not in text else ascii(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def strip_path_mark(hint: Any) -> tuple[Any, bool]:
    """An annotation without PathText's mark, and whether it had one, alone, in a union, or in a list."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return inner[0], _PATH in inner[1:]
    if origin not in (list, typing.Union, types.UnionType):
        return hint, False
    parts = [strip_path_mark(part) for part in inner]
    if not any(marked for _, marked in parts):
        return hint, False
    if origin is list:
        return list[parts[0][0]], True  # type: ignore[misc]
    return functools.reduce(operator.or_, (part for part, _ in parts)), True


def has_type(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type. A whole number is also a number, a tuple also a list; a bool is
    no number, and neither are nan and infinity."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    # An annotation that was not evaluated, or that allows anything, leaves nothing to check.
    if hint is Any or hint is object or isinstance(hint, str | TypeVar):
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, part) for part in inner)
    if origin is Literal:
        # The type only: a wrong choice gets another sentence than a wrong type.
        return any(type(value) is type(choice) for choice in inner)
    if origin is tuple and Ellipsis not in inner:
        # JSON and YAML know lists only, so that a saved tuple comes back as one.
        fits = isinstance(value, list | tuple) and len(value) == len(inner)
        return fits and all(map(has_type, value, inner))
    if origin in (list, tuple, Sequence):
        return isinstance(value, list | tuple) and all(has_type(item, inner[0]) for item in value)
    if hint is Callable or origin is Callable:
        return callable(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, origin or hint)


def find_field_problem(setting: Setting, value: Any) -> str | None:
    """Return what is wrong with the value of a field: type, number of values, choices, bounds, status."""
    if value is None and setting.example is not None:
        return f"{setting.name} is missing; give the number, for example {setting.spell(setting.example)}"
    if value is None and setting.default is None or setting.annotation is Any:
        return None
    wrong_type = _find_type_problem(setting, value)
    if wrong_type is not None:
        return wrong_type
    items = value if isinstance(value, list | tuple) else [value]
    if isinstance(setting.nargs, int) and len(items) != setting.nargs:
        count = f"{setting.nargs} value{'s' * (setting.nargs != 1)}"
        return f"{setting.name} takes {count}, but {len(items)} are given"
    # The first wrong element only: one sentence for each field.
    problem = next(filter(None, (find_value_problem(setting, item) for item in items)), None)
    refused = None if problem is not None else explain_refusal(setting, value, setting.spell(value))
    return problem if refused is None else refused[1]


def _find_type_problem(setting: Setting, value: Any) -> str | None:
    if has_type(value, setting.annotation):
        return None
    # In a list the sentence is about the first element that is wrong, as the parser meets it.
    wrong = value
    for item in value if isinstance(value, list | tuple) and setting.nargs else []:
        if not has_type(item, setting.value_type):
            wrong = item
            break
        problem = find_value_problem(setting, item)
        if problem is not None:
            return problem
    is_choice = setting.choices is not None and not isinstance(wrong, list | tuple)
    return (find_value_problem(setting, wrong) if is_choice else None) or describe_type_problem(setting, str(wrong))
