# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: what a complete one consists of. It is written last, so its presence means "complete".

`manifest.json` is JSON in one canonical form:

    {"crc32": <of the line below, rendered alone>, "content": {
        "format": "megatron-dist-checkpoint", "format_version": 1, "iteration": 10, "run_id": "...", "world_size": 1,
        "files": {"__0_0.distcp": {"bytes": 3991588, "crc32": 305419896}, ...}}}

The reader renders what it has read once more and compares bytes, so that any change of the manifest itself is seen;
sizes and checksums then show any change of the other files. crc32 finds damage, not forgery.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.checksums import FileSegment, compute_checksums, join_checksums, list_segments
from megatron.core.dist_checkpointing.durable import read_file, write_file
from megatron.core.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT = "megatron-dist-checkpoint"
FORMAT_VERSION = 1

_LARGEST_MANIFEST_BYTES = 256 * 2**20
_BLOCK_BYTES = 1 << 20


class DamagedCheckpointError(CheckpointError):
    """A file is not as it was written; another checkpoint may be."""

    lacking: frozenset[str] = frozenset()
    """Tensors of the model that the damaged checkpoint did not fill; all others may hold anything."""


class FileRecord(NamedTuple):
    """Expected size and checksums of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, by path relative to its directory, and where they come from."""

    iteration: int
    run_id: str
    """The same for all files of one save, different for every save."""
    world_size: int
    """Processes that wrote it."""
    files: Mapping[str, FileRecord]

    def render(self) -> bytes:
        """The bytes of manifest.json."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "iteration": self.iteration,
            "run_id": self.run_id,
            "world_size": self.world_size,
            "files": {name: self.files[name]._asdict() for name in sorted(self.files)},
        }
        return _render(content)

    def write(self, directory: Path) -> None:
        """Write it: from now on the directory holds a complete checkpoint. Raises OSError."""
        write_file(directory / MANIFEST_NAME, self.render(), "manifest")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in `directory`.

    Raises CheckpointError when there is none (an interrupted save, or another program's checkpoint), when it is
    damaged, or when a later version of the format wrote it.
    """
    path = directory / MANIFEST_NAME
    try:
        if path.stat().st_size > _LARGEST_MANIFEST_BYTES:
            raise CheckpointError(f"{path} is {path.stat().st_size} bytes long, too long for a manifest")
        rendered = read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{directory} holds no {MANIFEST_NAME}: it is no complete checkpoint of ours") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        document = json.loads(rendered)
        content = document["content"]
        intact = _render(content) == rendered
        version = content["format_version"]
        if intact and content["format"] == FORMAT and version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} was written in version {version} of the format; this program reads version {FORMAT_VERSION}. "
                "Load it with a later release"
            )
        manifest = _from_content(content, path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is damaged: it is not a manifest any more") from None
    if not intact:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content")
    return manifest


def verify_files(
    directory: Path,
    manifest: Manifest,
    on_block: Callable[[int], None] = lambda size: None,
    compute: Callable[[list[FileSegment]], list[int]] | None = None,
) -> None:
    """Raise CheckpointError unless every file of the manifest is there, as long as it says and with its checksum.

    on_block: hears of the bytes of each block that was read. compute: returns the checksum of each segment; by default
    this process reads them all.
    """
    check_lengths(directory, manifest)
    segments = list_segments({name: record.bytes for name, record in manifest.files.items()})
    try:
        checksums = compute(segments) if compute else compute_checksums(directory, segments, on_block)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing; the manifest names it") from None
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    compare_checksums(directory, manifest.files, join_checksums(segments, checksums))


def compare_checksums(directory: Path, records: Mapping[str, FileRecord], found: Mapping[str, int]) -> None:
    """Raise DamagedCheckpointError unless each file's checksum equals its record's; `found` has the checksums of files
    with content."""
    for name, record in records.items():
        _compare(directory / name, found.get(name, 0), record)


def check_lengths(directory: Path, manifest: Manifest) -> None:
    """The same without checksums, for which all files would have to be read: are they there, and as long?"""
    for name, record in manifest.files.items():
        verify_file(directory / name, record)


def verify_file(path: Path, record: FileRecord, read: Callable[[Path], int] | None = None) -> None:
    """Raise CheckpointError unless the file is there, as long as the record says, and, where `read` returns its
    checksum, with the record's checksum."""
    try:
        found_bytes = path.stat().st_size
        if not path.is_file():
            raise CheckpointError(f"{path} is no regular file")
        if found_bytes != record.bytes:
            raise CheckpointError(f"{path} is {found_bytes} bytes long; its manifest says {record.bytes}")
        found = record.crc32 if read is None else read(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the manifest names it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    _compare(path, found, record)


def _compare(path: Path, found: int, record: FileRecord) -> None:
    if found != record.crc32:
        raise DamagedCheckpointError(
            f"{path} is damaged: its checksum is {found:08x}, the manifest says {record.crc32:08x}"
        )


def checksum(path: Path, on_block: Callable[[int], None] = lambda size: None) -> int:
    """crc32 of a file's content; on_block hears of the bytes of each block that was read. Raises OSError."""
    value = 0
    with open(path, "rb") as file:
        # In blocks: a shard may be larger than the memory that is left.
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
            on_block(len(block))
    return value


def record_file(path: Path) -> FileRecord:
    """The record of a file that has just been written. Raises OSError."""
    return FileRecord(path.stat().st_size, checksum(path))


def _render(content: dict[str, Any]) -> bytes:
    # The manifest vouches for all other files, so it needs a separate checksum.
    crc32 = zlib.crc32(json.dumps(content).encode())
    return (json.dumps({"crc32": crc32, "content": content}, indent=1) + "\n").encode()


def _from_content(content: Mapping[str, Any], path: Path) -> Manifest:
    if content["format"] != FORMAT:
        raise ValueError(content["format"])
    files = {_inside(name, path): FileRecord(int(r["bytes"]), int(r["crc32"])) for name, r in content["files"].items()}
    return Manifest(int(content["iteration"]), str(content["run_id"]), int(content["world_size"]), files)


def _inside(name: str, manifest: Path) -> str:
    """The name, when it is a path below the checkpoint's directory."""
    path = PurePosixPath(name)
    # A manifest comes with the checkpoint, which anyone may have made: it must not make us read or trust files
    # elsewhere.
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise CheckpointError(f"{manifest} names the file {name!r}, which lies outside the checkpoint; refused")
    return name
