# SPDX-License-Identifier: Apache-2.0
"""Values of flags as they are written: numbers, and patterns of layers."""

from __future__ import annotations

from collections.abc import Sequence


def describe_number(value: float) -> str:
    """Write a number, without a point where it is whole."""
    return str(int(value) if value == int(value) else value)


def describe_pattern(is_other: Sequence[bool], other: str, usual: str, *, divides: bool = False) -> str:
    """Describe the layers that are not like the others: n for every n-th, or an entry for each layer.

    divides: n must divide the number of layers.
    """
    # A single number where possible: it also fits a model with more layers.
    period = is_other.index(True) + 1
    may_repeat = not divides or len(is_other) % period == 0
    if may_repeat and list(is_other) == [(index + 1) % period == 0 for index in range(len(is_other))]:
        return str(period)
    return f"[{','.join(other if entry else usual for entry in is_other)}]"


def describe_period(holds: Sequence[bool]) -> str:
    """An entry for each layer, 1 where it holds, written as a period and how often it comes."""
    size = len(holds)
    period = next(n for n in range(1, size + 1) if size % n == 0 and list(holds) == list(holds[:n]) * (size // n))
    return f"[{','.join(str(int(entry)) for entry in holds[:period])}]*{size // period}"
