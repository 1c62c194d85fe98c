"""All checks in one list."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.flags.checks import (
    experts,
    hybrid_context,
    layout,
    memory,
    model,
    optimizer,
    pipeline,
    precision,
    sharding,
)
from megatron.training.flags.settings import Settings

_SUBJECTS = (
    layout,
    hybrid_context,
    sharding,
    pipeline,
    model,
    precision,
    optimizer,
    memory,
    experts,
)


def violations(s: Settings) -> Iterator[str]:
    """Every violated rule as a sentence."""
    for subject in _SUBJECTS:
        for check in subject.CHECKS:
            yield from check(s)
