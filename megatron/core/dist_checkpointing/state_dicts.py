# SPDX-License-Identifier: Apache-2.0
"""Save and load a nested dictionary, with upstream's signatures: one checkpoint in a separate directory.

    save({"model": model.sharded_state_dict(), "iteration": 10, "rng": a tensor}, "checkpoint")
    state = load({"model": model.sharded_state_dict()}, "checkpoint")
    model.load_state_dict(state["model"])

| a value                                            | where it goes                                               |
|----------------------------------------------------|-------------------------------------------------------------|
| ShardedTensor                                      | its shard with the other processes' shards, by its key      |
| torch tensor                                       | whole, from the first process; load() returns it unasked    |
| number, text, bool, None, list or dictionary of it | common.json, from the first process; load() returns it too  |
| ShardedObject                                      | objects.json, from each process that has it                 |

serialization.py writes the files, complete or invisible, with a manifest.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.collectives import all_gather_object
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.async_requests import AsyncRequest
from megatron.core.dist_checkpointing.finding import FoundCheckpoint
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.sharded_object import ShardedObject
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.dist_checkpointing.validation import shorten_list
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments

CONTENT, OBJECTS = "content_metadata", "objects"
"""Documents of what describes the content, and of single processes' objects."""
COMMON = "common"
"""Document of what is no tensor, and prefix of the keys of tensors that are not sharded."""


@take_arguments(
    "sharded_state_dict checkpoint_dir sharded_strategy validate_access_integrity async_sharded_save "
    "preprocess_common_before_consistancy_check content_metadata async_strategy verify_integrity=..."
)  # checksums are always written, and looked at by every load
def save(
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[dict[str, Any]], Any] | None = None,
    content_metadata: Mapping[str, Any] | None = None,
    async_strategy: str | None = None,
) -> AsyncRequest | None:
    """Save on all processes together; they must be in the same place of the program.

    sharded_state_dict: nested dictionaries whose keys are texts or numbers, and lists of what is not
        sharded, see above.
    checkpoint_dir: an earlier checkpoint in it is replaced, with a warning; the new one appears when it is complete.
    sharded_strategy, common_strategy: None, or objects for the one format, torch_dist. content_metadata: kept beside
    it, for `load_content_metadata`. preprocess_common_before_consistancy_check, async_strategy: of upstream's
    signature; what is no tensor is the first process's, and there is one way to save beside a loop.
    validate_access_integrity: that every element of every
    tensor is saved once is always checked. async_sharded_save: save nothing yet, and return a request
    for AsyncCallsQueue.schedule_async_request (async_requests.py); what is no tensor is saved as it is now.
    Raises CheckpointError when the directory holds anything else, StorageError when the disk fails.
    """
    _refuse_strategies(sharded_strategy, common_strategy)
    tensors: ShardedStateDict = {}
    objects: list[ShardedObject] = []
    common = _without_tensors(dict(sharded_state_dict), (), tensors, objects=objects)
    iteration = common.get("iteration", 0)
    number = iteration if isinstance(iteration, int) and iteration >= 0 else 0
    path, group = Path(checkpoint_dir), _everyone()
    documents: dict[str, Any] = {COMMON: common}
    documents |= {CONTENT: dict(content_metadata or {}), OBJECTS: _gather(objects, group)}
    if async_sharded_save:
        # Training goes on and changes them before they are written.
        documents = copy.deepcopy(documents)
        return AsyncRequest(
            lambda saver: saver.start(tensors, path, number, documents=documents, group=group, is_alone=True), group
        )
    serialization.save(tensors, path, number, documents=documents, group=group, is_alone=True)
    return None


@take_arguments(
    "sharded_state_dict checkpoint_dir sharded_strategy validate_access_integrity strict verify_integrity=... "
    "process_group=None",
    "all processes load",
)
def load(
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = None,
) -> Any:
    """The dictionary with tensors in place of ShardedTensors, and with all that was saved with them.

    The tensors are the ShardedTensors' data, filled in place. strict, a member of StrictHandling or its text, says what
    becomes of keys that are asked for and not in the checkpoint ("unexpected") and of those in it that no process asks
    for ("missing"). assume_ok_unexpected, the default, and raise_unexpected refuse the former, raise_all both. With the
    other values the former have no entry in the result. log_* warn of them, log_all of the latter too; return_* return
    (dictionary, missing, unexpected), with what is missing for return_all.
    Raises CheckpointError for a checkpoint that is not complete, ModelMismatchError for a tensor that it lacks or that
    has another shape.
    """
    _refuse_strategies(sharded_strategy, common_strategy)
    found = _find(checkpoint_dir, _everyone())
    tensors: ShardedStateDict = {}
    how = str(getattr(strict, "value", strict) or "assume_ok_unexpected")
    if how not in STRICT:
        raise ConfigError(f"load() has no strict={strict!r}; use one of {', '.join(STRICT)}")
    objects: list[ShardedObject] = []
    wanted = _without_tensors(dict(sharded_state_dict), (), tensors, keep=True, objects=objects)
    missing, unexpected = _compare_keys(found.path, tensors, objects, with_missing=how.endswith("_all"))
    if missing and how == "raise_all":
        raise CheckpointError(f"{checkpoint_dir} also holds {_join(missing)}, which nobody asked for")
    if missing and how == "log_all":
        warnings.warn(f"{checkpoint_dir} also holds {_join(missing)}", stacklevel=2)
    if unexpected and how not in _REFUSE:
        if how.startswith("log"):
            warnings.warn(f"{checkpoint_dir} lacks {_join(unexpected)}", stacklevel=2)
        tensors, objects = {}, []
        kept = _leave_out(sharded_state_dict, unexpected)
        wanted = _without_tensors(kept, (), tensors, keep=True, objects=objects)
    _fill_objects(objects, found.path)
    wanted = _with_objects(wanted)
    common, whole = _common_of(found.path)
    tensors |= {tensor.key: tensor for tensor in whole if tensor.key not in tensors}
    serialization.load(tensors, found, _everyone(), may_have_more=True)
    state = _merged(common, wanted)
    return (state, missing, unexpected) if how.startswith("return") else state


STRICT = ("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "return_unexpected",
          "return_all", "ignore_all")  # fmt: skip
"""Values of `strict`: the treatment of keys that only the request or only the checkpoint has."""
_REFUSE = ("assume_ok_unexpected", "raise_unexpected", "raise_all")
"""Those with which all keys that are asked for have to be there."""


def load_content_metadata(checkpoint_dir: str | Path | None = None, *, preloaded_state_dict: Any = None) -> Any:
    """Return what save() was given as content_metadata; None where a checkpoint has none. preloaded_state_dict: one in
    which it was put under that name, in place of a directory."""
    if preloaded_state_dict is not None:
        return preloaded_state_dict.get(CONTENT)
    return _read(_find(str(checkpoint_dir)).path, CONTENT) or None


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """Return whether the directory holds a checkpoint in the format of save(), ours or upstream's."""
    return (Path(checkpoint_dir) / METADATA_NAME).is_file()


def _find(directory: str | Path, group: Group | None = None) -> FoundCheckpoint:
    """The checkpoint of a directory, as all members of `group` find it; by default this process alone."""
    found = serialization.find(Path(directory), None, group or ProcessGroupCollection.single().world)
    if found is None:
        raise CheckpointError(f"{directory} holds no checkpoint")
    return found


def _read(checkpoint: Path, name: str) -> dict[str, Any]:
    return dict(serialization.read_document(checkpoint, name)) if (checkpoint / f"{name}.json").exists() else {}


def _compare_keys(
    checkpoint: Path, tensors: ShardedStateDict, objects: Sequence[ShardedObject], *, with_missing: bool
) -> tuple[set[str], set[str]]:
    """Return the keys of tensors that no process asks for, if with_missing, and all keys that the checkpoint lacks of
    those that this process asks for."""
    held, saved = set(load_tensors_metadata(checkpoint)), _read(checkpoint, OBJECTS) if objects else {}
    of_tensors = {
        tensor.key
        for tensor in tensors.values()
        if not tensor.is_optional and held.isdisjoint((tensor.key, tensor.fallback_key))
    }
    lacking = of_tensors | {one.key for one in objects if one.unique_key not in saved}
    if not with_missing:
        return set(), lacking
    asked = {name for tensor in tensors.values() for name in (tensor.key, tensor.fallback_key)}
    whole = {tensor.key for tensor in _common_of(checkpoint)[1]}
    return held - whole - set().union(*all_gather_object(asked, _everyone())), lacking


def _leave_out(state: Any, keys: set[str]) -> Any:
    """The dictionary without the sharded entries of these keys."""
    if not isinstance(state, Mapping):
        return state
    return {
        name: _leave_out(value, keys)
        for name, value in state.items()
        if not (isinstance(value, ShardedTensor | ShardedObject) and value.key in keys)
    }


def _join(keys: set[str]) -> str:
    return ", ".join(shorten_list(sorted(keys)))


# ---- objects of single processes


def _gather(objects: Sequence[ShardedObject], group: Group) -> dict[str, Any]:
    """Return the entries of all processes, by key and offset, as text; of replicas the first one's."""
    own = {found.unique_key: found.to_text() for found in objects if found.is_main_replica}
    return {key: text for one in all_gather_object(own, group) for key, text in one.items()}


def _fill_objects(objects: Sequence[ShardedObject], checkpoint: Path) -> None:
    saved = _read(checkpoint, OBJECTS) if objects else {}
    for found in objects:
        if found.unique_key not in saved:
            raise CheckpointError(f"{checkpoint} lacks the object {found.unique_key}")
        found.data = found.from_text(saved[found.unique_key])


def _with_objects(value: Any) -> Any:
    if isinstance(value, ShardedObject):
        return value.data
    return {key: _with_objects(item) for key, item in value.items()} if isinstance(value, dict) else value


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Return what a checkpoint holds in addition to sharded tensors. Raises CheckpointError."""
    found, alone = _find(checkpoint_dir), ProcessGroupCollection.single().world
    common, whole = _common_of(found.path)
    serialization.load({tensor.key: tensor for tensor in whole}, found, alone, may_have_more=True)
    return dict(_merged(common, {}))


def load_tensors_metadata(checkpoint_dir: str | Path, sharded_strategy: Any = None) -> ShardedStateDict:
    """Key, shape and dtype of every tensor in a checkpoint, as ShardedTensors without values (on the device `meta`).
    Raises CheckpointError."""
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


def _without_tensors(
    value: Any,
    path: tuple[str, ...],
    tensors: ShardedStateDict,
    *,
    keep: bool = False,
    objects: list[ShardedObject] | None = None,
) -> Any:
    """The value with its tensors taken out into `tensors`: what common.json can hold. keep: for load(), the tensors
    themselves stay in their places, and all other values are left out."""
    where = ".".join(path) or "the state dictionary"
    if isinstance(value, ShardedTensor):
        # Of a tied weight both holders may be there: the owner's is the one that is saved.
        if value.key not in tensors or not value.is_copy:
            tensors[value.key] = value
        return value.data if keep else _Nothing
    if isinstance(value, ShardedObject):
        assert objects is not None
        objects.append(value)
        return value if keep else _Nothing
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str | int)]
        if odd or len({str(key) for key in value}) < len(value):
            raise ConfigError(f"{where} has the keys {odd or [*value]}; keys are different texts or whole numbers")
        found = {
            key: _without_tensors(item, (*path, str(key)), tensors, keep=keep, objects=objects)
            for key, item in value.items()
        }
        left = {key: item for key, item in found.items() if item is not _Nothing}
        # Keys of a JSON object are texts; torch's optimizers number their parameters.
        return left if keep or all(isinstance(key, str) for key in left) else {_ITEMS: [*map(list, left.items())]}
    if keep:
        return _Nothing
    if isinstance(value, Tensor):
        key = ".".join((COMMON, *path))
        tensors[key] = ShardedTensor.whole(key, value)
        return {_TENSOR: [key, str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, list | tuple):
        items = [
            _without_tensors(item, (*path, str(index)), tensors, objects=objects) for index, item in enumerate(value)
        ]
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
"""Key of the entry in common.json that stands for a tensor: its key, dtype and shape."""
_ITEMS = "__items__"
"""Key of the entry that stands for a dictionary whose keys are numbers: its keys and values."""


def _common_of(checkpoint: Path) -> tuple[dict[str, Any], list[ShardedTensor]]:
    """common.json with empty tensors in the places of those it mentions, and these to be filled."""
    try:
        common = _with_tensors(_read(checkpoint, COMMON))
        return dict(common), list(_tensors_in(common))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint / COMMON}.json is not as it was written: {error}") from None


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {_TENSOR}:
        key, dtype, shape = value[_TENSOR]
        return ShardedTensor.whole(key, torch.empty(shape, dtype=getattr(torch, dtype)))
    if isinstance(value, dict) and set(value) == {_ITEMS}:
        return {key: _with_tensors(item) for key, item in value[_ITEMS]}
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
