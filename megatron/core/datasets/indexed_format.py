# SPDX-License-Identifier: Apache-2.0
"""The .bin/.idx format: what the bytes of an index mean, and the check that both files hold together.

`PREFIX.bin` holds token ids and nothing else. `PREFIX.idx` says where each sequence lies (little endian):

    offset  type                field
    0       9 bytes             magic "MMIDIDX" and two zero bytes
    9       uint64              version, 1
    17      uint8               dtype code of the token ids (see DType)
    18      uint64              sequence count n
    26      uint64              document index count d (documents + 1)
    34      int32  [n]          sequence_lengths, in tokens
            int64  [n]          sequence_pointers, byte offset in .bin
            int64  [d]          document_indices: document k is the sequences [k] .. [k+1]
            int8   [n]          sequence_modes, only in multimodal datasets

The format is Megatron-LM's. An empty document has an entry in document_indices and no sequence.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.object_storage import is_object, object_size
from megatron.core.errors import DataError, StorageError

Array = npt.NDArray[Any]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_VERSION_AT, _DTYPE_AT, _SEQUENCES_AT, _DOCUMENTS_AT = 9, 17, 18, 26
_CHUNK = 1 << 20  # sequences checked at once: bounds the temporary memory of the check

REMEDY = "copy the dataset again or write it anew with tools/preprocess_data.py"


class DType(IntEnum):
    """Codes of the token types an index can name; the member names are numpy's."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, dtype: npt.DTypeLike) -> int:
        """The code of a numpy dtype; DataError when the format has none for it."""
        name = np.dtype(dtype).name
        if name not in cls.__members__:
            raise DataError(
                f"token type {name} cannot be stored in a .bin/.idx dataset; use one of {', '.join(cls.__members__)}"
            )
        return cls[name].value

    @classmethod
    def dtype_from_code(cls, code: int) -> np.dtype[Any]:
        """The little-endian numpy dtype of a code; ValueError for an unknown code."""
        return np.dtype(cls(code).name).newbyteorder("<")

    @classmethod
    def optimal_dtype(cls, vocab_size: int | None) -> type[np.generic]:
        """The type in which a vocabulary's ids are stored: uint16 below 65500 ids, else int32."""
        # 65500 rather than 65536 is upstream's limit; files stay equal byte for byte.
        return np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32


def get_bin_path(path_prefix: str) -> str:
    """The file of token ids that belongs to a prefix."""
    return path_prefix + ".bin"


def get_idx_path(path_prefix: str) -> str:
    """The index file that belongs to a prefix."""
    return path_prefix + ".idx"


@dataclass(frozen=True)
class SequenceIndex:
    """A checked index. The arrays are read-only views of the mapped file."""

    dtype: np.dtype[Any]
    """Type of the token ids in .bin."""
    sequence_lengths: Array
    """int32 [n], tokens."""
    sequence_pointers: Array
    """int64 [n], bytes."""
    document_indices: Array
    """int64 [documents + 1]."""
    sequence_modes: Array | None
    """int8 [n], or None where the dataset is not multimodal."""
    bin_bytes: int
    """Size of .bin that the index describes, and that was found."""

    def __len__(self) -> int:
        return len(self.sequence_lengths)


def file_size(path: str) -> int:
    """Bytes of a dataset file or object; DataError when it is missing, not an ordinary file, or unreadable."""
    if is_object(path):
        return object_size(path)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: not an ordinary file; give the path of the dataset without .bin or .idx")
        # Asked now, so that one unreadable file of a blend is reported before hours of index building.
        if not os.access(path, os.R_OK):
            raise DataError(f"{path}: not readable by this user; change its permissions")
    except (FileNotFoundError, NotADirectoryError):
        base, suffix = os.path.splitext(path)
        if suffix not in (".bin", ".idx"):
            raise DataError(f"{path}: no such file; give one that exists") from None
        # Of `--data-path corpus.bin` the index would be corpus.bin.idx.
        prefix, suffix = os.path.splitext(base)
        remedy = f"drop the suffix and give {prefix}" if suffix in (".bin", ".idx") else "give its PREFIX"
        raise DataError(f"{path}: no such file; a dataset is the pair PREFIX.bin and PREFIX.idx; {remedy}") from None
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    return status.st_size


def map_file(path: str, size: int) -> Array:
    """The file as uint8 [size], mapped read-only; an ordinary empty array for an empty file."""
    if size == 0:
        return np.zeros(0, dtype=np.uint8)
    try:
        return np.memmap(path, dtype=np.uint8, mode="r", shape=(size,))
    except OSError as error:
        remedy = "; raise the limit with ulimit -n" if error.errno == errno.EMFILE else ""
        raise StorageError(f"{path}: cannot be mapped into memory: {error.strerror}{remedy}") from error


def read_index(path_prefix: str, multimodal: bool = False, idx_path: str | None = None) -> SequenceIndex:
    """Map `PREFIX.idx` and check every value of it, and the size of `PREFIX.bin`, in one vectorised pass.

    idx_path: where the index is, if not next to .bin.

    Raises DataError naming file, field, byte offset, the value found and the one expected. Sizes are compared
    before anything is allocated, so a damaged count cannot ask for memory.
    """
    idx_path, bin_path = idx_path or get_idx_path(path_prefix), get_bin_path(path_prefix)
    idx_bytes, bin_bytes = file_size(idx_path), file_size(bin_path)
    # Mapped, not read: every process of a node shares the pages of the index.
    buffer = map_file(idx_path, idx_bytes)
    dtype, sequences, documents = _read_header(idx_path, buffer)

    lengths_at = HEADER.size
    pointers_at = lengths_at + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    modes_at = documents_at + 8 * documents
    # Counts are compared with the file's size before anything is allocated from them.
    expected_bytes = modes_at + (sequences if multimodal else 0)
    if idx_bytes != expected_bytes:
        hint = "it may be multimodal" if idx_bytes == expected_bytes + sequences else REMEDY
        raise DataError(
            f"{idx_path}: expected {expected_bytes} bytes for {sequences} sequences and {documents} document indices, "
            f"have {idx_bytes}; {hint}"
        )
    index = SequenceIndex(
        dtype=dtype,
        sequence_lengths=np.frombuffer(buffer, dtype="<i4", count=sequences, offset=lengths_at),
        sequence_pointers=np.frombuffer(buffer, dtype="<i8", count=sequences, offset=pointers_at),
        document_indices=np.frombuffer(buffer, dtype="<i8", count=documents, offset=documents_at),
        sequence_modes=np.frombuffer(buffer, dtype="i1", count=sequences, offset=modes_at) if multimodal else None,
        bin_bytes=bin_bytes,
    )
    end = _check_sequences(idx_path, index, lengths_at, pointers_at)
    if end != bin_bytes:
        raise DataError(f"{bin_path}: expected {end} bytes for the sequences of {idx_path}, have {bin_bytes}; {REMEDY}")
    _check_documents(idx_path, index, documents_at)
    return index


def _read_header(idx_path: str, buffer: Array) -> tuple[np.dtype[Any], int, int]:
    """Token type, sequence count and document index count of an index file."""
    if len(buffer) < HEADER.size:
        raise DataError(f"{idx_path}: expected at least {HEADER.size} bytes of header, have {len(buffer)}; {REMEDY}")
    magic, version, code, sequences, documents = HEADER.unpack(buffer[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(f"{idx_path}: magic at byte 0 is {magic!r}, expected {MAGIC!r}; this is no index of a dataset")
    if version != VERSION:
        raise DataError(f"{idx_path}: version at byte {_VERSION_AT} is {version}, expected {VERSION}; {REMEDY}")
    try:
        dtype = DType.dtype_from_code(code)
    except ValueError:
        raise DataError(
            f"{idx_path}: dtype code at byte {_DTYPE_AT} is {code}, expected 1 to {max(DType)}; {REMEDY}"
        ) from None
    if documents < 1:
        raise DataError(
            f"{idx_path}: document index count at byte {_DOCUMENTS_AT} is 0, expected at least 1 "
            f"(sequence count at byte {_SEQUENCES_AT} is {sequences}); {REMEDY}"
        )
    return dtype, sequences, documents


def _check_sequences(idx_path: str, index: SequenceIndex, lengths_at: int, pointers_at: int) -> int:
    """Check that no length is negative and sequences follow one another without gaps; return where they end in .bin."""
    end = 0
    for start in range(0, len(index), _CHUNK):
        # In chunks: the cumulative sum of a billion lengths would take 8 GB at once.
        lengths = index.sequence_lengths[start : start + _CHUNK]
        pointers = index.sequence_pointers[start : start + _CHUNK]
        if lengths.min() < 0:
            i = start + int(np.argmax(lengths < 0))
            raise DataError(
                f"{idx_path}: sequence_lengths[{i}] at byte {lengths_at + 4 * i} is {index.sequence_lengths[i]}, "
                f"expected 0 or more; {REMEDY}"
            )
        ends = end + np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
        wrong = pointers[1:] != ends[:-1]
        if pointers[0] != end or wrong.any():
            # The first wrong entry tells what happened; those after it are wrong as a consequence.
            k = 0 if pointers[0] != end else 1 + int(np.argmax(wrong))
            i, expected = start + k, end if k == 0 else int(ends[k - 1])
            raise DataError(
                f"{idx_path}: sequence_pointers[{i}] at byte {pointers_at + 8 * i} is {pointers[k]}, expected "
                f"{expected}, the end of the sequences before it by their sequence_lengths; {REMEDY}"
            )
        end = int(ends[-1])
    return end


def _check_documents(idx_path: str, index: SequenceIndex, documents_at: int) -> None:
    """Check that documents start at sequence 0, never go back, and end at the last sequence."""
    documents = index.document_indices

    def wrong(i: int, expected: str) -> DataError:
        at = documents_at + 8 * i
        return DataError(
            f"{idx_path}: document_indices[{i}] at byte {at} is {documents[i]}, expected {expected}; {REMEDY}"
        )

    if documents[0] != 0:
        raise wrong(0, "0")
    for start in range(0, len(documents) - 1, _CHUNK):
        chunk = documents[start : start + _CHUNK + 1]
        backwards = chunk[1:] < chunk[:-1]
        if backwards.any():
            i = start + 1 + int(np.argmax(backwards))
            raise wrong(i, f"at least {documents[i - 1]} as in the entry before it")
    if documents[-1] != len(index):
        raise wrong(len(documents) - 1, f"the sequence count {len(index)}")
