# SPDX-License-Identifier: Apache-2.0
"""Save and load a nested dictionary, with upstream's signatures: one checkpoint in a directory of its own.

    save({"model": model.sharded_state_dict(), "iteration": 10, "rng": a tensor}, "checkpoint")
    state = load({"model": model.sharded_state_dict()}, "checkpoint")
    model.load_state_dict(state["model"])

| a value                                            | where it goes                                               |
|----------------------------------------------------|-------------------------------------------------------------|
| ShardedTensor                                      | its shard beside those of the other processes, by its key   |
| torch tensor                                       | whole, from the first process; load() returns it unasked    |
| number, text, bool, None, list or dictionary of it | common.json, from the first process; load() returns it too  |

The files are those of serialization.py, complete or invisible, with a manifest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.async_requests import AsyncRequest
from megatron.core.dist_checkpointing.directory import find_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.process_groups_config import Group, ProcessGroupCollection

COMMON = "common"
"""Document of what is no tensor, and prefix of the keys of tensors that are not sharded."""


def save(
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
) -> AsyncRequest | None:
    """Save on all processes together; they must be in the same place of the program.

    sharded_state_dict: nested dictionaries with text keys, and lists of what is not sharded, see above.
    checkpoint_dir: missing or empty; it appears when the checkpoint is complete. sharded_strategy, common_strategy:
    leave them None: there is one format, upstream's torch_dist. validate_access_integrity: that every element of every
    tensor is saved once is always checked. async_sharded_save: save nothing yet, and return a request
    for AsyncCallsQueue.schedule_async_request (async_requests.py); what is no tensor is saved as it is now.
    Raises CheckpointError when the directory holds something, StorageError when the disk fails.
    """
    _refuse_strategies(sharded_strategy, common_strategy)
    tensors: ShardedStateDict = {}
    common = _without_tensors(dict(sharded_state_dict), (), tensors)
    iteration = common.get("iteration", 0)
    number = iteration if isinstance(iteration, int) and iteration >= 0 else 0
    path, group = Path(checkpoint_dir), _everyone()
    if async_sharded_save:
        # Training goes on and changes them before they are written.
        documents = copy.deepcopy({COMMON: common})
        return AsyncRequest(
            lambda saver: saver.start_alone(tensors, path, number, documents=documents, group=group), group
        )
    serialization.save_alone(tensors, path, number, documents={COMMON: common}, group=group)
    return None


def load(
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: str | None = None,
) -> dict[str, Any]:
    """The dictionary with tensors in place of ShardedTensors, and with all that was saved beside them.

    The tensors are those of the ShardedTensors, filled in place. What the checkpoint holds beyond the ShardedTensors
    asked for is left alone; with strict="raise_all" it is refused. Raises CheckpointError for a checkpoint that is not
    complete or that lacks a tensor, ModelMismatchError for another shape.
    """
    _refuse_strategies(sharded_strategy, common_strategy)
    found = serialization.find(Path(checkpoint_dir), None, _everyone())
    if found is None:
        raise CheckpointError(f"{checkpoint_dir} holds no checkpoint")
    tensors: ShardedStateDict = {}
    wanted = _without_tensors(dict(sharded_state_dict), (), tensors, keep=True)
    common, whole = _common_of(found.path)
    tensors |= {tensor.key: tensor for tensor in whole if tensor.key not in tensors}
    serialization.load(tensors, found, _everyone(), may_have_more=not str(strict).endswith("raise_all"))
    return _merged(common, wanted)


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """What a checkpoint holds beside sharded tensors. Raises CheckpointError."""
    found = find_checkpoint(Path(checkpoint_dir))
    if found is None:
        raise CheckpointError(f"{checkpoint_dir} holds no checkpoint")
    common, whole = _common_of(found.path)
    alone = ProcessGroupCollection.single().world
    serialization.load({tensor.key: tensor for tensor in whole}, found, alone, may_have_more=True)
    return dict(_merged(common, {}))


def load_tensors_metadata(checkpoint_dir: str | Path, sharded_strategy: Any = None) -> ShardedStateDict:
    """Key, shape and number format of every tensor in a checkpoint, as ShardedTensors without values (on the device
    `meta`). Raises CheckpointError."""
    _refuse_strategies(sharded_strategy)
    metadata = read_metadata(Path(checkpoint_dir) / METADATA_NAME)
    return {
        key: ShardedTensor.whole(key, torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta"))
        for key, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


def _everyone() -> Group:
    return ProcessGroupCollection.current().world


def _refuse_strategies(*strategies: Any) -> None:
    for strategy in strategies:
        if strategy is not None and getattr(strategy, "backend", None) != "torch_dist":
            raise ConfigError(f"checkpoints have one format here, torch_dist; leave out the strategy {strategy!r}")


# ---- what is not sharded


def _without_tensors(value: Any, path: tuple[str, ...], tensors: ShardedStateDict, *, keep: bool = False) -> Any:
    """The value with its tensors taken out into `tensors`: what common.json can hold. keep: for load(), the tensors
    themselves stay in their places, and all other values are left out."""
    where = ".".join(path) or "the state dictionary"
    if isinstance(value, ShardedTensor):
        # Of a tied weight both holders may be there: the owner's is the one that is saved.
        if value.key not in tensors or not value.is_copy:
            tensors[value.key] = value
        return value.data if keep else _Nothing
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise ConfigError(f"{where}: the key {odd[0]!r} is no text; a checkpoint's dictionaries have text keys")
        entries = ((key, _without_tensors(item, (*path, key), tensors, keep=keep)) for key, item in value.items())
        return {key: item for key, item in entries if item is not _Nothing}
    if keep:
        return _Nothing
    if isinstance(value, Tensor):
        key = ".".join((COMMON, *path))
        tensors[key] = ShardedTensor.whole(key, value)
        return {_TENSOR: [key, str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, list | tuple):
        items = [_without_tensors(item, (*path, str(index)), tensors) for index, item in enumerate(value)]
        if any(item is _Nothing for item in items):
            raise ConfigError(f"{where} is a list with ShardedTensors in it; put them into a dictionary")
        return items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{where} is a {type(value).__name__}; a checkpoint holds sharded tensors, tensors, numbers, texts, lists and "
        "dictionaries: turn it into these"
    )


_Nothing: Any = object()
_TENSOR = "__tensor__"
"""Key of the entry in common.json that stands for a tensor: its key, number format and shape."""


def _common_of(checkpoint: Path) -> tuple[dict[str, Any], list[ShardedTensor]]:
    """common.json with empty tensors in the places of those it mentions, and these to be filled."""
    common = serialization.read_document(checkpoint, COMMON) if (checkpoint / f"{COMMON}.json").exists() else {}
    try:
        common = _with_tensors(common)
        return dict(common), list(_tensors_in(common))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint / COMMON}.json is not as it was written: {error}") from None


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {_TENSOR}:
        key, dtype, shape = value[_TENSOR]
        return ShardedTensor.whole(key, torch.empty(shape, dtype=getattr(torch, dtype)))
    if isinstance(value, dict):
        return {key: _with_tensors(item) for key, item in value.items()}
    return [_with_tensors(item) for item in value] if isinstance(value, list) else value


def _tensors_in(value: Any) -> Iterator[ShardedTensor]:
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _merged(common: Any, wanted: Any) -> Any:
    """Both together; loaded shards where both have a value."""
    if isinstance(common, ShardedTensor):
        return common.data
    if isinstance(common, list):
        return [_merged(item, None) for item in common]
    if not isinstance(common, dict):
        return common
    wanted = wanted if isinstance(wanted, dict) else {}
    merged = {key: _merged(item, wanted.get(key)) for key, item in common.items()}
    return merged | {key: item for key, item in wanted.items() if key not in common}
