# SPDX-License-Identifier: Apache-2.0
"""Choice, proportions and split of datasets: --data-path and --split as texts, and their arithmetic.

numpy is imported only where it is used, because settings are checked with what is here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import Enum

from megatron.core.errors import ConfigError

Blend = tuple[list[str], list[float] | None]
"""Dataset prefixes, and a weight for each or None for weights by size."""

SplitMatrix = list[tuple[float, float] | None]
"""For training, validation and test: the share of the documents [begin, end) in 0..1, or None for no documents."""


class DataSplit(Enum):
    """The three uses of a dataset; the value is the place in every list of three."""

    train = 0
    valid = 1
    test = 2


def parse_blend(items: Sequence[str], flag: str = "--data-path") -> Blend:
    """Dataset prefixes, optionally each after its weight: `[a]`, `[a, b]`, `[0.3, a, 0.7, b]`. Looks at no file.

    The same prefix may occur twice. Raises ConfigError for weights that are missing, negative, zero, not finite.
    """
    texts = [item.strip() for item in items]
    if not texts or not all(texts):
        raise ConfigError(f"{flag} is empty; give dataset prefixes (paths without .bin/.idx)")
    numbers = [_as_number(text) for text in texts]
    if all(number is None for number in numbers):
        return texts, None
    if len(texts) % 2 == 1:
        raise ConfigError(
            f"{flag} has {len(texts)} entries, some of them numbers: expected weight and prefix in turn, or prefixes "
            f"only (write a prefix that looks like a number as ./{texts[0] if numbers[0] is not None else 7})"
        )
    weights: list[float] = []
    for weight, text, prefix, prefix_number in zip(numbers[0::2], texts[0::2], texts[1::2], numbers[1::2], strict=True):
        if weight is None:
            raise ConfigError(f"{flag}: {text!r} stands where a weight is expected; give weight and prefix in turn")
        if prefix_number is not None:
            raise ConfigError(f"{flag}: {prefix!r} stands where a prefix is expected; give weight and prefix in turn")
        if not math.isfinite(weight) or weight <= 0:
            raise ConfigError(
                f"{flag}: the weight of {prefix} is {text}, expected a number above 0; leave out what is not to be used"
            )
        weights.append(weight)
    return texts[1::2], weights


def read_shares(text: str, flag: str = "--split") -> list[float]:
    """Three numbers, the shares of training, validation and test, from `99,1,0`, `949, 50, 1` or `100`; drops quotes.

    Raises ConfigError for numbers that are negative, not finite, too many, or all 0.
    """
    parts = [part for part in re.split(r"[,/\s]+", text.strip().strip("\"'").strip()) if part]
    shares = [_as_number(part) for part in parts]
    if not 1 <= len(parts) <= 3 or not all(
        share is not None and math.isfinite(share) and share >= 0 for share in shares
    ):
        raise ConfigError(
            f"{flag} is {text!r}, expected up to three numbers of 0 or more for training, validation and test, "
            "as 99,1,0"
        )
    values = [share or 0.0 for share in shares] + [0.0] * (3 - len(shares))
    if sum(values) == 0:
        raise ConfigError(f"{flag} is {text!r}: all shares are 0, so no document is used; give as 99,1,0")
    return values


def parse_split(text: str, flag: str = "--split") -> list[float]:
    """The same, divided by their sum."""
    return normalize(read_shares(text, flag))


def split_matrix(shares: Sequence[float]) -> SplitMatrix:
    """Shares that sum to 1 -> consecutive ranges of 0..1; None for a share of 0."""
    matrix: SplitMatrix = []
    begin = 0.0
    for share in shares:
        matrix.append((begin, begin + share) if share > 0 else None)
        begin += share
    return matrix


def normalize(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum (numpy's, in float64, so that the last bit is the reference's)."""
    import numpy as np

    values = np.asarray(weights, dtype=np.float64)
    normalized: list[float] = (values / np.sum(values)).tolist()
    return normalized


def samples_per_dataset(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """Return how many samples each dataset of a blend must offer; `surplus` is the extra share that hides rounding."""
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
