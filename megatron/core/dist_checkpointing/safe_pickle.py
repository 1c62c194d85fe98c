"""Reading pickles of checkpoints without running what is in them.

torch.distributed.checkpoint pickles its table of contents, `.metadata`, and upstream pickles its settings. A pickle can
call any function it names. The table is read by an unpickler that looks up only the record types it is made of; what
torch.save wrote, by torch's restricted unpickler (weights_only), where the other classes that upstream's files are
known to name, most of them among the settings, get inert stand-ins. Everything else is refused by name.
"""

from __future__ import annotations

import pickle
import re
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
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"refused class {module}.{name}")
        # Only now is anything imported: a refused name never reaches the import system.
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """torch's table of contents of a checkpoint. Raises CheckpointError for anything else, and runs none of it."""
    try:
        # A pickle of a few bytes can ask for any amount of memory; a long one certainly does.
        if path.stat().st_size > _LARGEST_METADATA_BYTES:
            raise CheckpointError(f"{path} is too long for a table of contents")
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything, MemoryError included
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else f"it is damaged ({type(error).__name__})"
        raise CheckpointError(f"{path} cannot be used: {reason}") from None
    # The allowed classes can still be put together into something else.
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{path} is no table of contents of torch.distributed.checkpoint")
    return metadata


# ---- what torch.save wrote

_HARMLESS_CLASSES = frozenset(
    ("argparse.Namespace", "signal.Signals", "numpy.dtype", "numpy.ndarray", "numpy.core.multiarray._reconstruct",
     "numpy._core.multiarray._reconstruct", "pathlib.PosixPath", "types.SimpleNamespace")
)  # fmt: skip
"""What upstream's files hold beside tensors: the arguments, the exit signal, numpy's random state."""
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
    """What torch.save wrote, on the CPU, with `StandIn`s for the classes that upstream's files name.

    name: of the source, for messages. mmap: leave the tensors in the file until they are used. Raises CheckpointError
    when it is damaged or names a class that is not known.
    """
    try:
        # torch's restricted unpickler refuses a file over one unknown class, even where it is not needed. So each known
        # one gets a stand-in for the time of this call, and only this call.
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


def _stand_in(class_name: str, source: str) -> Any:
    """What to put in the place of a class that a source names; the class itself is never looked up."""
    if class_name in _HARMLESS_CLASSES or _UPSTREAM_CLASS.fullmatch(class_name):
        return type(class_name.rpartition(".")[2], (StandIn,), {"__module__": __name__})
    raise CheckpointError(f"{source} cannot be used: refused class {class_name}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
