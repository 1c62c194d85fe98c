# SPDX-License-Identifier: Apache-2.0
"""Upstream's ways to describe the tensors of a program's modules to a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.errors import ConfigError
from megatron.core.placement import Part, Placement, Split
from megatron.core.process_groups_config import Group, ProcessGroupCollection


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: Any = None,
    prepend_offsets: Sequence[Any] = (),
    *,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
) -> ShardedTensor:
    """This rank's part of a tensor that the tensor-parallel group divides along tp_axis. replica_id, dp_cp_group: who
    writes it is decided when it is saved. Raises ConfigError for prepend_offsets."""
    _check_offsets(prepend_offsets)
    group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
    shape = list(tensor.shape)
    shape[tp_axis] *= group.size()
    splits = (Split(tp_axis, "tp", group.size(), group.rank()),) if group.size() > 1 else ()
    return ShardedTensor.from_placement(tensor, Placement(key, tuple(shape), splits))


def make_sharded_tensors_for_checkpoint(
    state_dict: Mapping[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: Sequence[Any] = (),
    extra_state_suffix: str = "_extra_state",
    *,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
) -> dict[str, ShardedTensor]:
    """The tensors of a module by prefix + name; the map's are divided along its axis, the others are unsharded.

    What ends with extra_state_suffix is left out: layers here have none. Raises ConfigError for sharded_offsets.
    """
    _check_offsets(sharded_offsets)
    axes = tensor_parallel_layers_axis_map or {}
    found = {}
    for name, tensor in state_dict.items():
        if name.endswith(extra_state_suffix):
            continue
        key = prefix + name
        if name in axes:
            found[key] = make_tp_sharded_tensor_for_checkpoint(tensor, key, axes[name], tp_group=tp_group)
        else:
            found[key] = ShardedTensor.whole(key, tensor)
    return found


def sharded_state_dict_default(
    module: nn.Module,
    prefix: str = "",
    sharded_offsets: tuple[Any, ...] = (),
    metadata: dict[str, Any] | None = None,
    tp_group: Group | None = None,
) -> dict[str, ShardedTensor]:
    """The module's sharded_state_dict, or where it has none its tensors as unsharded ones."""
    own = getattr(module, "sharded_state_dict", None)
    if own is not None:
        result: dict[str, ShardedTensor] = own(prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata)
        return result
    state = module.state_dict(keep_vars=True)
    return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets, tp_group=tp_group)


def apply_swiglu_sharded_factory(
    original_sh_ten: ShardedTensor,
    sharded_offsets: Sequence[Any],
    singleton_local_shards: bool = False,
    tp_group: Group | None = None,
    dp_group: Group | None = None,
) -> ShardedTensor:
    """The same shard where each rank in turn has a local (gate | up), so that all gates are before all ups in the full
    tensor. Raises ConfigError for singleton_local_shards, sharded_offsets, and a shard that has parts already."""
    _check_offsets(sharded_offsets)
    rows, whole = original_sh_ten.data.shape[0], original_sh_ten.global_shape
    if singleton_local_shards or len(original_sh_ten.blocks) != 1:
        raise ConfigError(
            f"{original_sh_ten.key}: gate and up are cut from one shard; leave out singleton_local_shards"
        )
    first = original_sh_ten.blocks[0].box[0][0]
    parts = (Part(whole[0] // 2, name="gate"), Part(whole[0] // 2, name="up"))
    splits = (Split(0, "tp", whole[0] // rows, first // rows, parts),)
    return ShardedTensor.from_placement(original_sh_ten.data, Placement(original_sh_ten.key, whole, splits))


def replace_prefix_for_sharding(sharded_state_dict: dict[str, Any], old_prefix: str, new_prefix: str) -> None:
    """Rename the keys of all ShardedTensors, in the dictionary itself. Raises ValueError where one begins otherwise."""

    def rename(key: str) -> str:
        if not key.startswith(old_prefix):
            raise ValueError(f"{key} does not begin with {old_prefix}")
        return new_prefix + key.removeprefix(old_prefix)

    _rename(sharded_state_dict, rename)


def apply_prefix_mapping(sharded_state_dict: dict[str, Any], prefix_map: Mapping[str, str]) -> None:
    """Rename the keys that begin with one of the prefixes, in the dictionary itself; others stay."""

    def rename(key: str) -> str:
        old = next((prefix for prefix in prefix_map if key.startswith(prefix)), "")
        return prefix_map[old] + key.removeprefix(old) if old in prefix_map else key

    _rename(sharded_state_dict, rename)


def _rename(state: Any, rename: Any) -> None:
    for name, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, dict | list):
            _rename(value, rename)
        elif dataclasses.is_dataclass(value) and hasattr(value, "key"):
            state[name] = dataclasses.replace(value, key=rename(value.key))  # type: ignore[type-var]


def _check_offsets(offsets: Sequence[Any]) -> None:
    if offsets:
        raise ConfigError(f"sharded_offsets={tuple(offsets)}: each layer has a key of its own here; leave them out")
