# SPDX-License-Identifier: Apache-2.0
"""Checks of paths that are to be directories, in words for the user."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from megatron.core.errors import StorageError


def explain_no_directory(path: Path) -> str | None:
    """Return what is in the place of a directory, as the end of a sentence: `is a file`; None where it is a
    directory."""
    # Not is_dir() and exists(), which take a loop of links and a directory that is closed to us for absent.
    try:
        return None if stat.S_ISDIR(path.stat().st_mode) else "is a file, not a directory"
    except FileNotFoundError:
        if path.is_symlink():
            return f"is a symbolic link to {os.readlink(path)}, which does not exist"
        return "does not exist"
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            return f"cannot be looked at ({error.strerror})"
        if path.is_symlink():
            return "is a symbolic link that leads back to itself"
        lowest = next(part for part in path.absolute().parents if os.path.lexists(part))
        return f"does not exist: {lowest} {explain_no_directory(lowest)}"


def explain_unmakeable_directory(path: Path) -> str | None:
    """Return why the path neither is a directory nor can be made one by a single mkdir; None where nothing is known
    against it."""
    problem = explain_no_directory(path)
    if problem is None:
        return None
    if problem != "does not exist":
        return f"{problem}; give a directory"
    above = path.absolute().parent
    problem = explain_no_directory(above)
    return None if problem is None else f"cannot be made: the directory above it, {above}, {problem}; make it first"


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file whole or not at all. Raises StorageError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}; give a file in a directory that can be written"
        ) from None
