"""The table of flags that no config dataclass declares, and the flags of earlier releases.

flag_table.tsv    every other upstream flag: planned (with the coming capability) or not supported (with the reason
                  and the alternative)
former_flags.tsv  spellings that are accepted with a note because something equivalent exists, or refused with what
                  replaced them
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron.core.flag_texts import layer_pattern, window
from megatron.core.setting import Status
from megatron.training.flags.declarations import Flag, parse_value

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
    """What the note, or the refusal, says after the flag's name."""
    is_refused: bool
    is_upstream: bool
    """Upstream's parser of today still knows it."""

    def replacement(self, values: list[str]) -> list[str]:
        return [value for part in self.becomes for value in (values if part == "{}" else [part])]


@functools.cache
def table_flags() -> tuple[Flag, ...]:
    """The flags of flag_table.tsv."""
    return tuple(_table_flag(row) for row in _rows("flag_table.tsv"))


@functools.cache
def former_flags() -> tuple[FormerFlag, ...]:
    """The flags of former_flags.tsv."""
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
    )


def _rows(file_name: str) -> Iterator[dict[str, str]]:
    with Path(__file__).with_name(file_name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def _nargs(text: str) -> int | str | None:
    return int(text) if text.isdecimal() else text or None


def _table_flag(row: dict[str, str]) -> Flag:
    value_type, parse = _KINDS[row["kind"]]
    choices = tuple(value_type(choice) for choice in row["choices"].split(",")) if row["choices"] else None
    bare = Flag(
        dest=row["dest"],
        names=tuple(row["options"].split()),
        off_names=tuple(row["off"].split()),
        value_type=value_type,
        nargs=_nargs(row["nargs"]),
        choices=choices,
        parse=parse,
        group=row["group"],
        status=cast(Status, row["status"]),
        explanation=row["capability_or_reason"],
        alternative=row["alternative"],
    )
    values = {column: _table_value(bare, row[column]) for column in ("default", "neutral")}
    neutral = () if values["neutral"] is None else (values["neutral"],)
    return Flag(**{**vars(bare), "default": values["default"], "neutral": neutral})


def _table_value(flag: Flag, text: str) -> Any:
    if not text:
        return None
    if flag.is_switch:
        return text == "true"
    if flag.nargs is not None:
        return [parse_value(flag, part) for part in text.strip("[]").split(",") if part]
    return parse_value(flag, text)
