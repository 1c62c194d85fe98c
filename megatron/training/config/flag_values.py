"""Parsers for the texts of flags whose form is special; each raises ValueError with what is expected."""

from __future__ import annotations

import math
import re

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
