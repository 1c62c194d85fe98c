# SPDX-License-Identifier: Apache-2.0
"""Datasets in object storage: `s3://bucket/prefix`, or any other protocol that fsspec and its plugins know.

The index is copied to a local directory once, as every value of it is used; token ids are read when they are asked for,
in blocks, of which each process keeps the last ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core import optional_deps
from megatron.core.errors import ConfigError, DataError, StorageError

BLOCK_BYTES = 1 << 20
_BLOCKS_KEPT = 64
_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_object(path: str) -> bool:
    """Return whether a path is in object storage: it begins with a protocol."""
    return _PROTOCOL.match(path) is not None


def object_size(path: str) -> int:
    """Bytes of an object. Raises ConfigError for a protocol that cannot be used, DataError where it is missing."""
    file_system, name = _open_file_system(path)
    return int(_information(file_system, name, path)["size"])


def local_copy(path: str, directory: str | None) -> str:
    """The path of a local copy of an object, made unless it is there. A changed object is another copy.

    Raises ConfigError without a directory.
    """
    if directory is None:
        raise ConfigError(
            f"{path} is in object storage, where --object-storage-cache-path is needed: a local directory for copies "
            "of index files; give one, or copy the dataset to a disk"
        )
    file_system, name = _open_file_system(path)
    _information(file_system, name, path)
    stem, ending = os.path.splitext(os.path.basename(name))
    # ukey changes with the object's content (its ETag or time), so a new version never meets an old copy.
    copy = os.path.join(directory, f"{stem}-{file_system.ukey(name)[:32]}{ending}")
    if os.path.exists(copy):
        return copy
    temporary = f"{copy}.tmp-{uuid.uuid4().hex}"
    try:
        os.makedirs(directory, exist_ok=True)
        file_system.get_file(name, temporary)
        os.replace(temporary, copy)
    except OSError as error:
        raise StorageError(f"--object-storage-cache-path {directory}: copying {path}: {_reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return copy


class ObjectFile:
    """Typed reads from an object of known size. After a fork each process opens its connections and reads its blocks
    again."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        self._process = -1
        self._file_system: Any = None
        self._name = ""
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def read(self, offset: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """`count` values from byte `offset`. Raises StorageError where they cannot be had."""
        end = offset + count * dtype.itemsize
        if end == offset:
            return np.zeros(0, dtype=dtype)
        first, last = offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        pieces = [self._block(number) for number in range(first, last + 1)]
        whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return np.frombuffer(whole, dtype=dtype, count=count, offset=offset - first * BLOCK_BYTES)

    def _block(self, number: int) -> bytes:
        # Connections and their threads do not survive a fork.
        if self._process != os.getpid():
            self._file_system, self._name = _open_file_system(self.path)
            self._blocks.clear()
            self._process = os.getpid()
        block = self._blocks.get(number)
        if block is None:
            block = self._fetch(number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.size))
            self._blocks[number] = block
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        else:
            # Least recently used first, which is the one to go.
            self._blocks.move_to_end(number)
        return block

    def _fetch(self, start: int, end: int) -> bytes:
        try:
            content: bytes = self._file_system.cat_file(self._name, start=start, end=end)
        except Exception as error:  # each plugin raises different errors
            raise StorageError(f"{self.path}: reading byte {start}: {_reason(error)}") from error
        # Some servers answer a range beyond the end with what there is, without an error.
        if len(content) != end - start:
            raise StorageError(
                f"{self.path}: bytes {start} to {end} came as {len(content)}; it had {self.size} bytes when it was "
                "opened, and something cut it while in use"
            )
        return content


def _open_file_system(path: str) -> tuple[Any, str]:
    """(the fsspec file system, the name in it) of a path."""
    fsspec = optional_deps.require("fsspec", needed_by=f"the path {path}")
    try:
        file_system, name = fsspec.core.url_to_fs(path)
    except ImportError as error:
        raise ConfigError(f"{path}: fsspec needs a plugin for this protocol ({error}); pip install it") from error
    except Exception as error:  # unknown protocols, malformed addresses, each plugin in another way
        remedy = "give a local path or one like s3://…"
        if path.startswith("msc://"):
            remedy = f"pip install 'multi-storage-client[fsspec]' and describe the profile, or {remedy}"
        raise ConfigError(f"{path}: cannot be used ({_reason(error)}); {remedy}") from error
    return file_system, str(name)


def _information(file_system: Any, name: str, path: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = file_system.info(name)
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such object; a dataset is the pair PREFIX.bin and PREFIX.idx, give its PREFIX"
        ) from None
    except Exception as error:  # each plugin raises different errors
        raise StorageError(f"{path}: {_reason(error)}") from error
    if found.get("type") != "file":
        raise DataError(f"{path}: is a {found.get('type')}; give the path of the dataset without .bin or .idx")
    return found


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
