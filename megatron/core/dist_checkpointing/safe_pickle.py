# SPDX-License-Identifier: Apache-2.0
"""Reading pickles of checkpoints without running what is in them.

torch.distributed.checkpoint pickles its table of contents, `.metadata`, and upstream pickles its settings. A pickle can
call any function it names. The table is read by an unpickler that looks up only the record types it is made of; what
torch.save wrote, by torch's restricted unpickler (weights_only), where the other classes that upstream's files are
known to name, most of them among the settings, get inert stand-ins. Everything else is refused by name.
"""

from __future__ import annotations

import enum
import io
import pickle
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.core.errors import CheckpointError

_DCP = "torch.distributed.checkpoint"
_ALLOWED: frozenset[tuple[str, str]] = frozenset(
    {(f"{_DCP}.metadata", name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )}
    | {(f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")}
    | {(f"{_DCP}.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size")}
    | {("torch", name) for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )}
    | {("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("collections", "OrderedDict")}
)  # fmt: skip
"""(module, name) of all that a table of contents consists of; none of them does anything but hold values."""

_LARGEST_METADATA_BYTES = 2 * 2**30


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _find_member
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"refused class {module}.{name}")
        # Only now is anything imported: a refused name never reaches the import system.
        return super().find_class(module, name)


def _find_member(*arguments: Any) -> enum.Enum:
    """The one thing that getattr is called for: Python 3.11 up to 3.11.3 writes the member of an enumeration so."""
    if len(arguments) == 2 and isinstance(arguments[0], type) and issubclass(arguments[0], enum.Enum):
        owner, name = arguments
        if isinstance(name, str) and name in owner.__members__:
            return owner[name]
    raise pickle.UnpicklingError("refused class builtins.getattr")


def read_metadata(path: Path) -> Metadata:
    """torch's table of contents of a checkpoint. Raises CheckpointError for anything else, and runs none of it."""
    try:
        if path.stat().st_size > _LARGEST_METADATA_BYTES:
            raise CheckpointError(f"{path} is too long for a table of contents")
        content = path.read_bytes()
        _refuse_large_memo(content)
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything, MemoryError included
        reason = (
            _first_line(error)
            if isinstance(error, pickle.UnpicklingError)
            else f"it is damaged ({type(error).__name__})"
        )
        raise CheckpointError(f"{path} cannot be used: {reason}") from None
    # The allowed classes can still be put together into something else.
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{path} is no table of contents of torch.distributed.checkpoint")
    return metadata


def _refuse_large_memo(content: bytes) -> None:
    """Raise UnpicklingError for a pickle that numbers an object higher than it has bytes.

    Python's unpickler makes a list as long as the highest number: 6 bytes could ask for 64 GB.
    """
    position, end = 0, len(content)
    while position < end:
        code = content[position]
        position += 1
        size = _ARGUMENT_BYTES.get(code)
        if size is None:
            raise pickle.UnpicklingError(f"it is damaged at byte {position - 1}")
        if size >= 0:
            if code == _LONG_PUT and int.from_bytes(content[position : position + 4], "little") > end:
                raise pickle.UnpicklingError(f"refused object number at byte {position - 1}")
            position += size
        elif size >= -8:  # so many bytes say how many follow
            position += -size + int.from_bytes(content[position : position - size], "little")
        else:
            for _ in range(size // -_LINE):
                line = content.find(b"\n", position) + 1 or end
                # The number is text here.
                if code == _TEXT_PUT and line - position > len(str(end)) + 1:
                    raise pickle.UnpicklingError(f"refused object number at byte {position - 1}")
                position = line


_LINE = 16
_SIZES = {
    pickletools.UP_TO_NEWLINE: -_LINE, pickletools.TAKEN_FROM_ARGUMENT1: -1, pickletools.TAKEN_FROM_ARGUMENT4: -4,
    pickletools.TAKEN_FROM_ARGUMENT4U: -4, pickletools.TAKEN_FROM_ARGUMENT8U: -8,
}  # fmt: skip
_ARGUMENT_BYTES = {
    ord(opcode.code): 0 if opcode.arg is None
    else -2 * _LINE if opcode.arg.name == "stringnl_noescape_pair"
    else _SIZES.get(opcode.arg.n, opcode.arg.n)
    for opcode in pickletools.opcodes
}  # fmt: skip
"""Bytes in the argument of an opcode; below 0, the number of bytes that hold its length, or of lines that it takes."""
_LONG_PUT, _TEXT_PUT = ord("r"), ord("p")


def refuse_outside(directory: Path, name: Any) -> None:
    """Raise CheckpointError unless a name in a table of contents names a file in its directory."""
    # A table of contents may come from anywhere: "../../etc/passwd" is not read.
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name or "\0" in name:
        raise CheckpointError(f"{directory}: the table of contents names the file {name!r} outside of it; refused")


# ---- what torch.save wrote

_HARMLESS_CLASSES = frozenset(
    ("argparse.Namespace", "signal.Signals", "numpy.dtype", "numpy.ndarray", "numpy.core.multiarray._reconstruct",
     "numpy._core.multiarray._reconstruct", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
     "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath", "types.SimpleNamespace", "_io.BytesIO",
     "collections.defaultdict", "datetime.timedelta", "datetime.datetime")
)  # fmt: skip
"""Classes that upstream's files hold in addition to tensors: the arguments, the exit signal, numpy's random state, the
extra state of Transformer Engine's layers."""
_UPSTREAM_CLASS = re.compile(r"megatron\.(core|training|legacy)\.[A-Za-z0-9_.]+")


class StandIn:
    """Stands for an object of a class that we do not have: holds its arguments and its state, does nothing."""

    # Of the class: unpickling calls __init__ for some objects only.
    values: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_restricted(source: Path | BinaryIO, name: str, *, mmap: bool = False) -> Any:
    """Return what torch.save wrote, on the CPU, with `StandIn`s for the classes that upstream's files name.

    name: of the source, for messages. mmap: leave the tensors in the file until they are used. Raises CheckpointError
    when it is damaged or names a class that is not known.
    """
    try:
        # torch's restricted unpickler refuses a file over one unknown class, even where it is not needed. So each known
        # one gets a stand-in for the time of this call, and only this call.
        refuse_compressed(source, name)
        foreign = get_unsafe_globals_in_checkpoint(source)
        if not isinstance(source, Path):
            source.seek(0)
        with safe_globals([(_stand_in(found, name), found) for found in foreign]):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(f"{name} cannot be loaded: {_first_line(error)}") from None


def refuse_compressed(source: Path | BinaryIO, name: str) -> None:
    """Raise CheckpointError unless a file is an archive as torch.save writes it: nothing in it is compressed, so that
    what comes out of it is no longer than the file. Also where its pickle would ask for memory by itself."""
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.infolist()
            length = source.stat().st_size if isinstance(source, Path) else source.seek(0, io.SEEK_END)
            stored = all(e.compress_type == zipfile.ZIP_STORED and e.file_size == e.compress_size for e in entries)
            if not stored or sum(entry.file_size for entry in entries) > length:
                raise CheckpointError(f"{name} cannot be used: it is compressed, which torch.save never does; refused")
            pickles = (archive.read(entry) for entry in entries if entry.filename.endswith("/data.pkl"))
            # torch's unpickler takes it for harmless; called with a number it fills as many bytes.
            if any(b"\nbytearray\n" in content for content in pickles):
                raise CheckpointError(f"{name} cannot be used: refused class builtins.bytearray")
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error) as error:
        raise CheckpointError(f"{name} cannot be loaded: {_first_line(error)}") from None
    finally:
        if not isinstance(source, Path):
            source.seek(0)


def refuse_expanded(tensor: torch.Tensor, name: str) -> None:
    """Raise CheckpointError for a tensor that has more values than the file holds for it, each again and again."""
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{name} is said to be {tuple(tensor.shape)}, and the file holds fewer values; refused")


def _stand_in(class_name: str, source: str) -> Any:
    """Return what to put in the place of a class that a source names; the class itself is never looked up."""
    if class_name in _HARMLESS_CLASSES or _UPSTREAM_CLASS.fullmatch(class_name):
        return type(class_name.rpartition(".")[2], (StandIn,), {"__module__": __name__})
    raise CheckpointError(f"{source} cannot be used: refused class {class_name}")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    # torch would have the user run what is in the file.
    if text.startswith("Weights only load failed"):
        text = text.partition("\n\n")[2].strip()
    lines = text.splitlines() or [type(error).__name__]
    return lines[0][:300]
