# SPDX-License-Identifier: Apache-2.0
"""Where flags are defined, and how their texts become values.

fields of configs   the settings that have a place in a RunConfig
flag_table.tsv      every other upstream flag: planned (with the coming capability) or not supported (with the reason
                    and the alternative)
former_flags.tsv    spellings of earlier releases that are accepted with a note because something equivalent exists, or
                    refused with what replaced them; and flags that have a field, and nothing to do
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron.core.flag_texts import decimal, integer, layer_pattern, window
from megatron.core.setting import FieldKind, Setting, Status, describe_type_problem, find_value_problem


def parse_value(flag: Setting, text: str) -> Any:
    """One value of a flag. Raises ValueError with the sentence `--flag text is not …; give …`."""
    try:
        value = _choose_parser(flag.value_type, flag.parse)(text)
    except ValueError:
        # The parser's words ("invalid literal for int()") say nothing to a user.
        raise ValueError(describe_type_problem(flag, text)) from None
    problem = find_value_problem(flag, value, text)
    if problem is not None:
        raise ValueError(problem)
    return value


_PARSERS: dict[type, Callable[[str], Any]] = {int: integer, float: decimal}


def _choose_parser(value_type: type, parse: Callable[[str], Any] | None) -> Callable[[str], Any]:
    # integer and decimal instead of int and float, which take "1_000", " 7" and "nan".
    return parse or _PARSERS.get(value_type, str)


_KINDS: dict[str, tuple[type, Any]] = {
    "switch": (bool, None),
    "int": (int, None),
    "float": (float, None),
    "str": (str, None),
    "pattern": (str, layer_pattern),
    "window": (str, window),
}


@dataclass(frozen=True, kw_only=True)
class FormerFlag:
    """A spelling of another release, or a habit, and what it means here."""

    name: str
    nargs: int | str | None
    """0: a switch; None: one value; "+": several."""
    becomes: tuple[str, ...]
    """The command line it stands for; `{}` is its value. Empty: nothing."""
    text: str
    """Words of the note, or of the refusal, after the flag's name."""
    is_refused: bool
    is_upstream: bool
    """Upstream's parser of today still knows it."""

    def replacement(self, values: list[str]) -> list[str]:
        """Return the tokens of the command line that the flag with these values stands for."""
        return [value for part in self.becomes for value in (values if part == "{}" else [part])]


@functools.cache
def table_flags() -> tuple[Setting, ...]:
    """Read the flags of flag_table.tsv."""
    return tuple(_table_flag(row) for row in _rows("flag_table.tsv"))


@functools.cache
def upstream_settings() -> dict[str, Any]:
    """Read upstream_settings.tsv: settings that programs read and that no flag here has, with upstream's defaults."""
    found = {}
    for row in _rows("upstream_settings.tsv"):
        value_type, parse = _KINDS[row["kind"]]
        found[row["dest"]] = _table_value(row["default"], value_type, None, parse)
    return found


@functools.cache
def former_flags() -> tuple[FormerFlag, ...]:
    """Read the flags of former_flags.tsv."""
    return tuple(
        FormerFlag(
            name=row["flag"],
            nargs=_nargs(row["nargs"]),
            becomes=tuple(row["becomes"].split()),
            text=row["text"],
            is_refused=row["outcome"] == "refused",
            is_upstream=row["upstream"] == "current",
        )
        for row in _rows("former_flags.tsv")
        if row["outcome"] != "idle"
    )


@functools.cache
def notes_of_idle_flags() -> dict[str, str]:
    """Return the notes of former_flags.tsv on flags that have a field, by spelling, as they follow it."""
    return {row["flag"]: row["text"] for row in _rows("former_flags.tsv") if row["outcome"] == "idle"}


@functools.cache
def formers_by_name() -> dict[str, FormerFlag]:
    """Return the spellings of other releases, by name."""
    return {former.name: former for former in former_flags()}


def _rows(file_name: str) -> Iterator[dict[str, str]]:
    with Path(__file__).with_name(file_name).open(encoding="utf-8", newline="") as file:
        # Quotation marks are part of the sentences.
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def _nargs(text: str) -> int | str | None:
    return int(text) if text.isdecimal() else text or None


def _table_flag(row: dict[str, str]) -> Setting:
    value_type, parse = _KINDS[row["kind"]]
    nargs = _nargs(row["nargs"])
    choices = tuple(value_type(choice) for choice in row["choices"].split(",")) if row["choices"] else None
    default, neutral = (_table_value(row[column], value_type, nargs, parse) for column in ("default", "neutral"))
    return Setting(
        dest=row["dest"],
        names=tuple(row["options"].split()),
        off_names=tuple(row["off"].split()),
        value_type=value_type,
        nargs=nargs,
        choices=choices,
        default=default,
        parse=parse,
        group=row["group"],
        status=cast(Status, row["status"]),
        explanation=row["capability_or_reason"],
        alternative=row["alternative"],
        neutral=() if neutral is None else (neutral,),
        kind=cast(FieldKind, row["changes"]),
    )


def _table_value(text: str, value_type: type, nargs: int | str | None, parse: Callable[[str], Any] | None) -> Any:
    """The value, or the list of values, that a cell of the table holds."""
    if not text:
        return None
    if value_type is bool:
        return text == "true"
    read = _choose_parser(value_type, parse)
    # A list of values in the table: "[a,b]".
    if nargs is not None:
        return [read(part) for part in text.strip("[]").split(",") if part]
    return read(text)
