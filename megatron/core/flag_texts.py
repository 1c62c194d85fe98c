# SPDX-License-Identifier: Apache-2.0
"""Texts of flags whose form is special, read without evaluating code. Parsers raise ValueError with what is expected.

A list with one value per layer, such as `([0]*2+[1]*6)`, has this grammar:

    pattern = number                      every n-th layer
            | list { ("+" list) }         one entry per layer
    list    = "[" numbers "]" [ "*" n ] | "(" pattern ")" [ "*" n ]

Its length is bounded: nobody has more than LONGEST layers, and nobody waits for `[1]*10**9`.
"""

from __future__ import annotations

import math
import re

LONGEST = 65536
_LONGEST_TEXT = 4096
_DEEPEST = 20
_TOKENS = re.compile(r"\s*([0-9]+|[][()*+,])")
# ASCII digits only: int() and float() also take "1_000", " 7 " and digits of other scripts.
_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LONGEST_NUMBER = 64


def integer(text: str) -> int:
    """A whole number in ASCII digits."""
    if len(text) > _LONGEST_NUMBER or not _INTEGER.fullmatch(text):
        raise ValueError("a whole number")
    return int(text)


def decimal(text: str) -> float:
    """A finite number such as 3, 0.5 or 1e-4."""
    if len(text) > _LONGEST_NUMBER or not _DECIMAL.fullmatch(text) or not math.isfinite(float(text)):
        raise ValueError("a number such as 0.1 or 1e-4")
    return float(text)


def whole_or_decimal(text: str) -> int:
    """A whole number, also written as a decimal one: 500000 or 5e5."""
    number = decimal(text)
    if number != int(number):
        raise ValueError("a whole number, such as 500000 or 5e5")
    return int(number)


def layer_pattern(text: str) -> int | list[int]:
    """A whole number, or one number per layer written as a list expression such as ([0]*2+[1]*6)."""
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return integer(text)
    return _TextCursor(_split(text)).read()


def window(text: str) -> tuple[int, int]:
    """Two whole numbers, such as 127,0: how far a token sees to the left and to the right."""
    numbers = [integer(part.strip()) for part in text.strip().removeprefix("(").removesuffix(")").split(",")]
    if len(numbers) != 2:
        raise ValueError("two numbers")
    return numbers[0], numbers[1]


def _split(text: str) -> list[str]:
    if len(text) > _LONGEST_TEXT:
        raise ValueError("too long")
    tokens, position = [], 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKENS.match(text, position)
        if match is None:
            raise ValueError(f"unexpected {text[position]!r}")
        tokens.append(match[1])
        position = match.end()
    return tokens


class _TextCursor:
    """Recursive descent over the grammar above."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.depth = 0

    def read(self) -> list[int]:
        values = self._sum()
        if self.tokens:
            raise ValueError(f"unexpected {self.tokens[0]!r}")
        return values

    def _next(self, *wanted: str) -> str:
        if not self.tokens or (wanted and self.tokens[0] not in wanted):
            raise ValueError("unfinished")
        return self.tokens.pop(0)

    def _sum(self) -> list[int]:
        values = self._product()
        while self.tokens[:1] == ["+"]:
            self._next()
            values = values + self._product()
            _bounded(len(values), 1, values)
        return values

    def _product(self) -> list[int]:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError("nested too deeply")
        values = self._list() if self._next("[", "(") == "[" else self._group()
        while self.tokens[:1] == ["*"]:
            self._next()
            values = _bounded(len(values), self._number(), values)
        self.depth -= 1
        return values

    def _group(self) -> list[int]:
        values = self._sum()
        self._next(")")
        return values

    def _list(self) -> list[int]:
        values: list[int] = []
        while self.tokens[:1] != ["]"]:
            values.append(self._number())
            if self.tokens[:1] != ["]"]:
                self._next(",")
        self._next("]")
        return values

    def _number(self) -> int:
        return integer(self._next())


def _bounded(length: int, times: int, values: list[int]) -> list[int]:
    if length * times > LONGEST:
        raise ValueError(f"more than {LONGEST} layers")
    return values * times
