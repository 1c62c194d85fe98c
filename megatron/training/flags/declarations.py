# SPDX-License-Identifier: Apache-2.0
"""Flags of the training program: its own, the configs', and flags that are planned or refused.

flag.py, which defines a flag, does not load the configs: a tool that takes a few flags starts without them.
"""

from __future__ import annotations

import functools

from megatron.training.config.program import ProgramFlags
from megatron.training.config.run_groups import group_classes
from megatron.training.flags.flag import Flag, flags_of, table_flags


@functools.cache
def declared_flags() -> tuple[Flag, ...]:
    """The flags of all config dataclasses, in the order of RunConfig's groups."""
    flags: list[Flag] = []
    for group, config_class in group_classes().items():
        flags.extend(flags_of(config_class, group))
    return tuple(flags)


@functools.cache
def program_flags() -> tuple[Flag, ...]:
    """Return the flags of the program itself: --config, --print-config, ..."""
    return tuple(flags_of(ProgramFlags, "program"))


def known_flags() -> tuple[Flag, ...]:
    """Every flag of today: the program's, the configs', the table's."""
    return program_flags() + declared_flags() + table_flags()


@functools.cache
def flags_by_spelling() -> dict[str, Flag]:
    """Return every spelling that this program knows, except other releases'."""
    known: dict[str, Flag] = {}
    for flag in known_flags():
        for spelling in flag.spellings:
            if spelling in known:
                # A mistake of ours, not of the user; a test runs into it first.
                raise AssertionError(f"{spelling} is declared twice: {known[spelling].dest} and {flag.dest}")
            known[spelling] = flag
    return known
