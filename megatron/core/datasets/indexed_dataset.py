# SPDX-License-Identifier: Apache-2.0
"""Read and write token datasets: `PREFIX.bin` with the ids, `PREFIX.idx` with the places (see indexed_format).

Reading checks both files when they are opened; a damaged pair is refused with a sentence, never read as other data.
Writing happens under temporary names; the final names appear when everything is on disk, the index last.

When `.bin` shrinks while it is open, reading ends with a StorageError (exit code 74): both ways of reading compare its
size before each access, because touching a mapped page that is gone would kill the process (SIGBUS).

Where the pair has a `PREFIX.sum` (see checksums), what is read is compared with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import uuid
import weakref
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.checksums import Checksums, get_sum_path, read_checksums
from megatron.core.datasets.indexed_format import (
    HEADER,
    MAGIC,
    VERSION,
    Array,
    DType,
    get_bin_path,
    get_idx_path,
    read_index,
)
from megatron.core.datasets.object_storage import ObjectFile, is_object, local_copy
from megatron.core.errors import DataError, StorageError
from megatron.core.taken_arguments import take_arguments

__all__ = ["DType", "IndexedDataset", "IndexedDatasetBuilder", "get_bin_path", "get_idx_path"]

_SCAN_BYTES = 1 << 24
_INT32_MAX = 2**31 - 1


class IndexedDataset:
    """Sequences of token ids, by number. Opening costs one pass over the index; tokens are read when asked for.

    path_prefix      path without .bin/.idx, also in object storage (see object_storage)
    multimodal       the index also holds a mode per sequence; reads then return (tokens, mode)
    mmap             map .bin into memory; otherwise each read is a system call (pread)
    index_directory  where copies of indices from object storage are kept

    Raises DataError for a pair of files that is missing, damaged or without sequences.
    """

    @take_arguments(
        "path_prefix multimodal mmap object_storage_config=None s3_config=None fast_cache_load=False "
        "sequences_per_dataset=None dtype_code=None",
        "the index says it, and objects are read through fsspec, with --object-storage-cache-path",
    )
    def __init__(
        self, path_prefix: str, multimodal: bool = False, mmap: bool = True, index_directory: str | None = None
    ) -> None:
        self.path_prefix = path_prefix
        self.multimodal = multimodal
        self.mmap = mmap
        self.index_directory = index_directory
        in_objects = is_object(path_prefix)
        self._idx_path = get_idx_path(path_prefix)
        if in_objects:
            self._idx_path = local_copy(self._idx_path, index_directory)
        self.index = read_index(path_prefix, multimodal, self._idx_path)
        if len(self.index) == 0:
            raise DataError(
                f"{get_idx_path(path_prefix)}: the dataset has no sequences; check the corpus it was made from"
            )
        self._itemsize = self.index.dtype.itemsize
        self._idx_digest: str | None = None
        self._bin: _BinFile | ObjectFile
        if in_objects:  # whose storage keeps checksums
            self._bin = ObjectFile(get_bin_path(path_prefix), self.index.bin_bytes)
            return
        # The index is compared at once: a wrong length in it would shift every token after it.
        checksums = read_checksums(path_prefix)
        if checksums is not None:
            checksums.check_index()
        self._bin = _BinFile(get_bin_path(path_prefix), self.index.bin_bytes, mmap, checksums)

    def __getstate__(self) -> tuple[str, bool, bool, str | None]:
        """A worker process gets the path and opens the files itself: mappings and descriptors cannot be pickled."""
        return self.path_prefix, self.multimodal, self.mmap, self.index_directory

    def __setstate__(self, state: tuple[str, bool, bool, str | None]) -> None:
        path_prefix, multimodal, mmap, index_directory = state
        self.__init__(path_prefix, multimodal, mmap, index_directory=index_directory)  # type: ignore[misc]

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.index)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Sequence `index`, or the list of sequences of a slice; with its mode (or their modes) if multimodal."""
        # Upstream's datasets support slices; training reads one sequence at a time.
        if isinstance(index, slice):
            numbers = range(*index.indices(len(self)))
            sequences = [self._tokens(i, 0, None) for i in numbers]
            modes = self.index.sequence_modes
            return sequences if modes is None else (sequences, modes[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.path_prefix}")
        return self.get(index % len(self))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Any:
        """Tokens [offset, offset + length) of sequence `index`, read-only; up to its end without a length."""
        tokens = self._tokens(index, offset, length)
        modes = self.index.sequence_modes
        return tokens if modes is None else (tokens, modes[index])

    def _tokens(self, index: int, offset: int, length: int | None) -> Array:
        sequence_length = int(self.index.sequence_lengths[index])
        if length is None:
            length = sequence_length - offset
        if offset < 0 or length < 0 or offset + length > sequence_length:
            raise IndexError(f"tokens {offset} to {offset + length} of sequence {index}, which has {sequence_length}")
        pointer = int(self.index.sequence_pointers[index]) + offset * self._itemsize
        return self._bin.read(pointer, length, self.index.dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the token ids on disk."""
        return self.index.dtype

    @property
    def sequence_lengths(self) -> Array:
        """int32 [sequences], tokens."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> Array:
        """int64 [documents + 1]: document k is the sequences [k] .. [k+1]."""
        return self.index.document_indices

    @property
    def sequence_modes(self) -> Array | None:
        """int8 [sequences], or None."""
        return self.index.sequence_modes

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """True when both files of the pair are there."""
        return os.path.exists(get_idx_path(path_prefix)) and os.path.exists(get_bin_path(path_prefix))

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the layout of this dataset: the size of .bin and a digest of .idx."""
        if self._idx_digest is None:  # each split of the dataset asks
            with open(self._idx_path, "rb") as file:
                self._idx_digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return {"bin_bytes": self.index.bin_bytes, "idx_blake2b": self._idx_digest}

    def pieces(self, tokens_at_once: int) -> Iterator[tuple[int, Array]]:
        """All tokens of .bin in order, in pieces of at most this many: (number of the first one, tokens)."""
        total = self.index.bin_bytes // self._itemsize
        for start in range(0, total, tokens_at_once):
            count = min(tokens_at_once, total - start)
            yield start, self._bin.read(start * self._itemsize, count, self.index.dtype)

    def first_token_outside(self, vocab_size: int) -> tuple[int, int, int] | None:
        """The first token id outside [0, vocab_size) as (sequence, offset, id), or None. Reads all of .bin."""
        # Two reductions decide whether a piece needs a closer look; nearly none does.
        for start, tokens in self.pieces(_SCAN_BYTES // self._itemsize):
            if int(tokens.max()) < vocab_size and int(tokens.min()) >= 0:
                continue
            position = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
            at = (start + position) * self._itemsize
            # The last sequence that starts at or before the token: empty ones before it start there too.
            sequence = int(np.searchsorted(self.index.sequence_pointers, at, side="right")) - 1
            offset = (at - int(self.index.sequence_pointers[sequence])) // self._itemsize
            return sequence, offset, int(tokens[position])
        return None


class _BinFile:
    """Typed reads from a file of known size that must not have shrunk since it was opened."""

    def __init__(self, path: str, size: int, use_mmap: bool, checksums: Checksums | None) -> None:
        self.path = path
        self.size = size
        self.checksums = checksums
        self._descriptor = -1
        self._mapped: mmap.mmap | None = None
        with _opened(path) as descriptor:
            # An empty file cannot be mapped. The mapping outlives the descriptor, which spares one per dataset of a
            # blend.
            if use_mmap and size > 0:
                self._mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
            else:
                self._descriptor = os.dup(descriptor)
                weakref.finalize(self, os.close, self._descriptor)

    def read(self, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
        """`count` values from byte `offset`."""
        if count == 0:
            return np.zeros(0, dtype=dtype)
        if self.checksums is not None:
            self.checksums.check(offset, count * dtype.itemsize, self._bytes)
        return np.frombuffer(self._bytes(offset, count * dtype.itemsize), dtype=dtype)

    def _bytes(self, offset: int, size: int) -> bytes | memoryview:
        if self._mapped is None:
            return self._pread(offset, size)
        # One fstat per read. A page beyond the end of a file that was cut raises SIGBUS, which no Python code can
        # catch.
        found = self._mapped.size()
        if found < self.size:
            raise self._shrunk(found)
        return memoryview(self._mapped)[offset : offset + size]

    def _pread(self, offset: int, size: int) -> bytes:
        pieces: list[bytes] = []
        while size > 0:
            try:
                # pread leaves the file's position alone, so forked workers can share the descriptor; it may return less
                # than asked.
                piece = os.pread(self._descriptor, size, offset)
            except OSError as error:
                raise StorageError(f"{self.path}: reading byte {offset}: {error.strerror}") from error
            if not piece:
                raise self._shrunk(os.fstat(self._descriptor).st_size)
            pieces.append(piece)
            offset += len(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _shrunk(self, size: int) -> StorageError:
        return StorageError(
            f"{self.path}: had {self.size} bytes when it was opened, has {size}; something cut it while in use"
        )


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor for reading, closed at the end of the block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


class IndexedDatasetBuilder:
    """Write a dataset document by document; it exists from `finalize` on.

    bin_path   the final name of the token file; the tokens go to a temporary name beside it until then
    dtype      type of the ids on disk (see DType); an id that does not fit is refused, never wrapped

    Use it as a context manager, or call `abort()` on failure, to leave no temporary file behind.
    """

    def __init__(self, bin_path: str, dtype: npt.DTypeLike = np.int32, multimodal: bool = False) -> None:
        self.bin_path = bin_path
        self.dtype = DType.dtype_from_code(DType.code_from_dtype(dtype))
        self.multimodal = multimodal
        # Compact arrays instead of lists: a corpus has hundreds of millions of sequences.
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b")
        is_integer = self.dtype.kind in "iu"
        self._bounds = (int(np.iinfo(self.dtype).min), int(np.iinfo(self.dtype).max)) if is_integer else None
        self._temporary_path = _temporary_name(bin_path)
        with _storage_errors(bin_path):
            self._file = open(self._temporary_path, "wb", buffering=1 << 20)  # noqa: SIM115 (closed by finalize or abort)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def add_item(self, tokens: npt.ArrayLike, mode: int = 0) -> None:
        """Append one sequence to the current document."""
        values = self._as_array(tokens)
        self._write(values)
        self._append_lengths([len(values)], [mode])

    def add_document(self, tokens: npt.ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append a whole document: its tokens and the lengths of the sequences they form (none: an empty document)."""
        values = self._as_array(tokens)
        if sum(lengths) != len(values):
            raise ValueError(f"sequence lengths sum to {sum(lengths)}, the document has {len(values)} tokens")
        self._write(values)
        self._append_lengths(lengths, modes)
        self.end_document()

    def end_document(self) -> None:
        """Close the current document; the next sequence starts another one."""
        self._documents.append(len(self._lengths))

    def add_index(self, path_prefix: str) -> None:
        """Append all documents of another dataset of the same token type."""
        other = read_index(path_prefix, self.multimodal)
        if other.dtype != self.dtype:
            raise DataError(
                f"{get_idx_path(path_prefix)}: token type {other.dtype.name} cannot be appended to {self.bin_path} "
                f"of type {self.dtype.name}; write both with the same tokenizer"
            )
        first = len(self._lengths)
        # Bytes, not values: merging corpora stays as fast as copying the files.
        self._lengths.frombytes(np.ascontiguousarray(other.sequence_lengths, dtype=np.int32).tobytes())
        self._documents.frombytes((other.document_indices[1:] + first).astype(np.int64).tobytes())
        if other.sequence_modes is not None:
            self._modes.frombytes(other.sequence_modes.tobytes())
        with _storage_errors(self.bin_path), open(get_bin_path(path_prefix), "rb") as source:
            shutil.copyfileobj(source, self._file, 1 << 22)

    def finalize(self, idx_path: str) -> None:
        """Bring everything to disk and give both files their final names, the index last."""
        temporary_idx = _temporary_name(idx_path)
        try:
            with _storage_errors(self.bin_path):
                _close_on_disk(self._file)
            with _storage_errors(idx_path):
                with open(temporary_idx, "wb") as file:
                    self._write_index(file)
                    _close_on_disk(file)
                # An older index must not describe the new tokens, not even for a moment; older checksums neither.
                for older in (idx_path, get_sum_path(idx_path.removesuffix(".idx"))):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(older)
                # The index comes last: tokens without an index are no dataset, an index without its tokens would be a
                # wrong one.
                os.replace(self._temporary_path, self.bin_path)
                os.replace(temporary_idx, idx_path)
                _sync_directory(os.path.dirname(idx_path) or ".")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary_idx)
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written under a temporary name; nothing to do after `finalize`."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary_path)

    def _as_array(self, tokens: npt.ArrayLike) -> Array:
        values = np.asarray(tokens)
        if values.size == 0:
            return np.zeros(0, dtype=self.dtype)
        # numpy would wrap an id that is too large into another valid id.
        if self._bounds is not None and values.dtype != self.dtype:
            smallest, largest = self._bounds
            if int(values.min()) < smallest or int(values.max()) > largest:
                found = values.min() if int(values.min()) < smallest else values.max()
                raise DataError(
                    f"{self.bin_path}: token id {found} does not fit the token type {self.dtype.name} "
                    f"({smallest} to {largest}); give the tokenizer's real vocabulary size"
                )
        return np.ascontiguousarray(values.reshape(-1), dtype=self.dtype)

    def _write(self, values: Array) -> None:
        with _storage_errors(self.bin_path):
            self._file.write(values.data)

    def _append_lengths(self, lengths: Sequence[int], modes: Sequence[int] | None) -> None:
        if any(length < 0 or length > _INT32_MAX for length in lengths):
            raise DataError(
                f"{self.bin_path}: a sequence has more than {_INT32_MAX} tokens, the format's limit; split it"
            )
        self._lengths.extend(lengths)
        if self.multimodal:
            self._modes.extend(modes if modes is not None else [0] * len(lengths))

    def _write_index(self, file: Any) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, dtype=np.int32)
        # Byte offsets follow from the lengths, so they are never kept while writing.
        pointers = np.cumsum(lengths, dtype=np.int64)
        pointers -= lengths
        pointers *= self.dtype.itemsize
        code = DType.code_from_dtype(self.dtype)
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._documents)))
        for values, dtype in (
            (lengths, "<i4"),
            (pointers, "<i8"),
            (np.frombuffer(self._documents, dtype=np.int64), "<i8"),
        ):
            file.write(np.ascontiguousarray(values, dtype=dtype).data)
        if self.multimodal:
            file.write(self._modes.tobytes())


def _temporary_name(path: str) -> str:
    return f"{path}.tmp-{uuid.uuid4().hex}"


@contextlib.contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    """Turn an OSError into a sentence with the file's final name."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise DataError(
            f"{path}: {error.strerror}; create the output directory or choose another output prefix"
        ) from error
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}; nothing was left under this name") from error


def _close_on_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_directory(path: str) -> None:
    """Make renames in a directory survive a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
