"""Reading torch's `.metadata` without running what is in it.

torch.distributed.checkpoint pickles its table of contents. A pickle can call any function it names; this reader looks
up only the record types the table is made of, and refuses everything else by name.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

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
