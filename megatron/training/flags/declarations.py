# SPDX-License-Identifier: Apache-2.0
"""Flags of the training program: its own, the configs', and flags that are planned or refused.

flag.py does not load the configs: a tool that takes a few flags starts without them.
"""

from __future__ import annotations

import functools

from megatron.core.config_base import get_settings
from megatron.core.setting import Setting
from megatron.training.config.program import ProgramFlags
from megatron.training.config.run_groups import list_settings
from megatron.training.flags.flag import table_flags


@functools.cache
def declared_flags() -> tuple[Setting, ...]:
    """The flags of all config dataclasses, in the order of RunConfig's groups."""
    return tuple(setting for _, setting in list_settings() if not setting.hidden)


@functools.cache
def program_flags() -> tuple[Setting, ...]:
    """Return the flags of the program itself: --config, --print-config, ..."""
    return tuple(get_settings(ProgramFlags).values())


def known_flags() -> tuple[Setting, ...]:
    """Every flag of today: the program's, the configs', the table's."""
    return program_flags() + declared_flags() + table_flags()


@functools.cache
def flags_by_spelling() -> dict[str, Setting]:
    """Return every spelling that this program knows, except other releases'."""
    known: dict[str, Setting] = {}
    for flag in known_flags():
        for spelling in flag.spellings:
            if spelling in known:
                # A mistake of ours, not of the user; a test runs into it first.
                raise AssertionError(f"{spelling} is declared twice: {known[spelling].dest} and {flag.dest}")
            known[spelling] = flag
    return known
