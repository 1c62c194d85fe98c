# SPDX-License-Identifier: Apache-2.0
"""Their weights on disk, tensor by tensor: `model.safetensors`, its numbered shards, or `pytorch_model*.bin`.

A safetensors file is 8 bytes (length of the header, little endian), a header in JSON (name -> dtype, shape,
[begin, end) in the data), and the data. It is read and written here directly: no value is touched but those asked for,
and a file is checked against its length before anything is believed.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.durable import storage_errors
from megatron.core.dist_checkpointing.safe_pickle import read_restricted, refuse_expanded
from megatron.core.errors import CheckpointError
from megatron.core.placement import Box
from megatron.training.recipes.hf_config import read_weight_map

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes by their names in a header."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER_BYTES = 100_000_000
_SHARD_BYTES = 5_000_000_000
_BY_A_RUN = "pretrain_gpt.py --save-hf"
_SMALLEST_READ = 4096
"""Bytes: a page, the least that is read from a disk anyway."""
_LARGEST_READ = 16_000_000
"""Bytes that are read at once in addition to the ones needed."""
_INDEX_NAME = "model.safetensors.index.json"


class HFTensor(NamedTuple):
    """Facts about a tensor before it is read."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Position of its first byte in a safetensors file; -1 in others."""


class TensorDirectory(Protocol):
    """The weights of a directory: a table of contents, and single tensors on demand."""

    @property
    def contents(self) -> Mapping[str, HFTensor]:
        """Facts about every tensor, by its name."""

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises CheckpointError."""

    def read_box(self, name: str, box: Box) -> Tensor:
        """A part of a tensor: (start, length) for each dimension. No more than that is read where it is worth it."""


def open_tensors(directory: Path, stem: str = "model") -> TensorDirectory:
    """The weights in a directory; only headers are read. Raises CheckpointError for missing and damaged files. stem: of
    the files' names; peft's adapters are in adapter_model."""
    pickled = "pytorch_model" if stem == "model" else stem
    if shards := _find_shards(directory, stem, "safetensors"):
        return _SafetensorsFiles(shards)
    if shards := _find_shards(directory, pickled, "bin"):
        return _TorchFiles(shards)
    raise CheckpointError(
        f"{directory} holds neither {stem}.safetensors nor {pickled}.bin (nor {stem}.safetensors.index.json); "
        "give the directory that save_pretrained() wrote"
    )


def _find_shards(directory: Path, stem: str, suffix: str) -> dict[Path, set[str] | None]:
    """File -> names of the tensors that the index promises in it, None without an index."""
    single, index = directory / f"{stem}.{suffix}", directory / f"{stem}.{suffix}.index.json"
    if not index.is_file():
        return {single: None} if single.is_file() else {}
    shards: dict[Path, set[str] | None] = {}
    for name, file in read_weight_map(index).items():
        # The index comes with the model, from a stranger: it must not make us read files elsewhere.
        if Path(file).name != file:
            raise CheckpointError(f"{index} names the file {file!r} outside of {directory} for {name}; refused")
        names = shards.setdefault(directory / file, set())
        assert names is not None
        names.add(name)
    for shard, promised in shards.items():
        if not shard.is_file():
            raise CheckpointError(f"{shard} is missing; {index.name} names it for {len(promised or ())} tensors")
    return shards


class _SafetensorsFiles:
    def __init__(self, shards: Mapping[Path, set[str] | None]) -> None:
        self.contents: dict[str, HFTensor] = {}
        for file, promised in shards.items():
            found = _read_header(file)
            _refuse_missing(file, promised, found)
            self.contents.update(found)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises CheckpointError."""
        return self.read_box(name, tuple((0, length) for length in self.contents[name].shape))

    def read_box(self, name: str, box: Box) -> Tensor:
        """A part of a tensor: (start, length) for each dimension. Raises CheckpointError."""
        stored = self.contents[name]
        # The last dimension that is cut: what lies in one step of it is contiguous.
        cut = max((dim for dim, span in enumerate(box) if span != (0, stored.shape[dim])), default=0)
        strides = [math.prod(stored.shape[dim + 1 :]) * stored.dtype.itemsize for dim in range(len(box))]
        if cut > 0 and box[cut][1] * strides[cut] < _SMALLEST_READ:
            return self._read_wider(name, box, cut)
        part = torch.empty([length for _, length in box], dtype=stored.dtype)
        view, begin = _view_bytes(part), 0
        run = len(view) // max(1, math.prod(length for _, length in box[:cut]))
        try:
            with open(stored.file, "rb", buffering=0) as file:
                for leading in itertools.product(*(range(start, start + length) for start, length in box[:cut])):
                    place = (*leading, box[cut][0]) if box else ()
                    offset = sum(index * stride for index, stride in zip(place, strides, strict=False))
                    _read_bytes(file, stored.offset + offset, view[begin : begin + run], name)
                    begin += run
        except OSError as error:
            raise CheckpointError(f"{stored.file} cannot be read: {error.strerror or error}") from error
        return part

    def _read_wider(self, name: str, box: Box, cut: int) -> Tensor:
        """The same by reading more than is asked for: single elements from all over a file would take longer."""
        stored = self.contents[name]
        whole = box[:cut] + tuple((0, length) for length in stored.shape[cut:])
        row = math.prod(length for _, length in whole[1:]) * stored.dtype.itemsize
        step = max(1, _LARGEST_READ // max(1, row))
        first, count = whole[0]
        part = torch.empty([length for _, length in box], dtype=stored.dtype)
        for start in range(first, first + count, step):
            rows = (start, min(step, first + count - start))
            part[start - first :][: rows[1]] = self.read_box(name, (rows, *whole[1:])).narrow(cut, *box[cut])
        return part


def _read_bytes(file: io.FileIO, offset: int, view: memoryview, name: str) -> None:
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise CheckpointError(f"{file.name!s} ends inside {name}; download it again")
        done += count


def _view_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    # As bytes: numpy, through which torch shows its memory, has no bfloat16.
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array) if tensor.numel() else memoryview(bytearray())


def _refuse_missing(file: Path, promised: set[str] | None, found: Iterable[str]) -> None:
    missing = sorted((promised or set()) - set(found))
    if missing:
        raise CheckpointError(
            f"{file} lacks {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}, "
            "which the index names; download it again"
        )


def _read_header(path: Path) -> dict[str, HFTensor]:
    """The table of contents of a safetensors file, checked against the file's length."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, _LARGEST_HEADER_BYTES):
                raise CheckpointError(
                    f"{path} ({size} bytes) is no safetensors file, or was cut off; download it again"
                )
            header = json.loads(file.read(length))
        begin, found = 8 + length, {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(
                    f"{path}: {name} has the number format {entry['dtype']}; known are {', '.join(DTYPES)}"
                )
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            first, last = entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
                raise ValueError(entry)
            if not 0 <= first <= last <= size - begin or last - first != math.prod(shape) * dtype.itemsize:
                raise CheckpointError(
                    f"{path} ({size} bytes): {name} of shape {shape} is said to lie in bytes {first} to {last} of "
                    f"{size - begin}; the file was cut off or is damaged, download it again"
                )
            found[str(name)] = HFTensor(path, dtype, shape, begin + first)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} has a header that is no table of tensors; download it again") from None
    return found


class _TorchFiles:
    """Pickled state dicts, read without running anything they contain, and mapped instead of loaded."""

    def __init__(self, shards: Mapping[Path, set[str] | None]) -> None:
        self.contents: dict[str, HFTensor] = {}
        self._opened: dict[Path, Mapping[str, Tensor]] = {}
        for file, promised in shards.items():
            tensors = self._load(file)
            _refuse_missing(file, promised, tensors)
            for name, tensor in tensors.items():
                self.contents[name] = HFTensor(file, tensor.dtype, tuple(tensor.shape), -1)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises CheckpointError."""
        return self._find(name).contiguous()

    def read_box(self, name: str, box: Box) -> Tensor:
        """A part of a tensor: (start, length) for each dimension. Raises CheckpointError."""
        return self._find(name)[tuple(slice(start, start + length) for start, length in box)].clone()

    def _find(self, name: str) -> Tensor:
        file = self.contents[name].file
        if file not in self._opened:
            self._opened = {file: self._load(file)}  # one at a time: pages of others can be given back
        return self._opened[file][name]

    def _load(self, file: Path) -> Mapping[str, Tensor]:
        content = read_restricted(file, str(file), mmap=True)
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise CheckpointError(f"{file} holds more than a table of tensors; convert it to safetensors first")
        for name, tensor in content.items():
            refuse_expanded(tensor, f"{file}: {name}")
        return content


# ---- writing


Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors by name."""


def plan_files(shapes: Shapes, num_writers: int = 1, shard_bytes: int = _SHARD_BYTES) -> dict[str, list[str]]:
    """The files of a directory and the names of their tensors, in the order of `shapes`: one file, or numbered shards,
    at least one for each writer where there is enough."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in shapes.items()}
    most = min(shard_bytes, -(-sum(sizes.values()) // num_writers))
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": names for number, names in enumerate(shards, 1)}


def write_tensors(
    directory: Path,
    shapes: Shapes,
    tensors: Iterator[tuple[str, Tensor]],
    files: Mapping[str, Sequence[str]] | None = None,
    *,
    share: tuple[int, int] = (0, 1),
    by_a_run: bool = False,
) -> None:
    """Write tensors into a directory as safetensors: one file, or numbered shards with an index.

    shapes: of every tensor, in order, so that each file's header can be written before its data, and no more than one
    tensor is in memory. files: as plan_files() returned them. share: this writer's number and how many there are; it
    writes the files that list_own_names() means, and `tensors` yields theirs. by_a_run: `is_written_by_a_run` is to be
    true of the directory. Raises StorageError.
    """
    files = plan_files(shapes) if files is None else files
    with storage_errors(f"writing {directory}"):
        for file, names in list(files.items())[share[0] :: share[1]]:
            _write_file(directory / file, {name: shapes[name] for name in names}, tensors, by_a_run)
        if len(files) > 1 and share[0] == 0:
            total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
            places = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (directory / _INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def list_own_names(files: Mapping[str, Sequence[str]], share: tuple[int, int]) -> set[str]:
    """The tensors in the files that one writer of several writes."""
    return {name for names in list(files.values())[share[0] :: share[1]] for name in names}


def _write_file(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterator[tuple[str, Tensor]],
    by_a_run: bool,
) -> None:
    # transformers refuses a file that does not say it is of PyTorch.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **({"written_by": _BY_A_RUN} if by_a_run else {})}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    rendered = json.dumps(header, separators=(",", ":")).encode()
    rendered += b" " * (-len(rendered) % 8)  # data that starts at a multiple of 8 can be mapped
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(rendered)))
        file.write(rendered)
        for expected, (dtype, shape) in shapes.items():
            name, tensor = next(tensors)
            assert (name, tensor.dtype, tuple(tensor.shape)) == (expected, dtype, shape), f"{name} after {expected}"
            file.write(_view_bytes(tensor.cpu().contiguous()))
        file.flush()
        os.fsync(file.fileno())


def is_written_by_a_run(directory: Path) -> bool:
    """Return whether the weights in a directory are those that a run left there at its end, so that the next run may
    replace them: never the published ones that somebody trains on."""
    for file in sorted(directory.glob("model*.safetensors"))[:1]:
        with open(file, "rb") as opened:
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            header = opened.read(min(length, _LARGEST_HEADER_BYTES))
        return f'"written_by":"{_BY_A_RUN}"'.encode() in header
    return False


def is_buffer(name: str) -> bool:
    """Return whether a tensor in their files is no weight but a mask or a table of frequencies that old releases
    stored."""
    return re.search(r"\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$", f".{name}") is not None
