# SPDX-License-Identifier: Apache-2.0
"""The limit on the files, sockets included, that this process may have open."""

from __future__ import annotations

import contextlib
import resource

from megatron.core.errors import StorageError

_OTHER_FILES = 512
"""Files of a training process other than its data."""
_FEWEST = 64
"""With fewer, libraries hang or crash in unpredictable places."""
_PER_LOADER = 16


def allow_open_files(count: int) -> int:
    """Raise this process's limit so that `count` further files can be open, as far as the system permits; return how
    many it may have open now, at least `count` where there is no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft >= wanted:
        return soft
    # Best effort: where the system refuses, opening the files will say which limit to raise.
    with contextlib.suppress(ValueError, OSError):
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return allowed
    return soft


def require_open_files(loaders: int) -> None:
    """Raise StorageError where a run with so many data loader processes could not open what it needs."""
    needed = _FEWEST + _PER_LOADER * loaders
    allowed = allow_open_files(needed)
    if allowed < needed:
        raise StorageError(
            f"this process may have {allowed} files open, and a run with --num-workers {loaders} needs {needed}; "
            "raise the limit with ulimit -n"
        )
