# SPDX-License-Identifier: Apache-2.0
"""Arguments of upstream's parallel layers that ours have no parameter for, each obeyed, without effect, or refused."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import nn

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.parameters import fill_alone


class UpstreamArguments(TypedDict, total=False):
    """Arguments that upstream's column- and row-parallel layers take beside ours."""

    pg_collection: ProcessGroupCollection | None
    """The groups of which one divides the layer, unless tp_group does."""
    is_expert: bool
    """The layer is part of one expert, divided over the processes that share it."""
    name: str | None
    """For messages of Transformer Engine."""
    tp_comm_buffer_name: str | None
    """A buffer of Transformer Engine's overlap; ours needs no names."""
    stride: int
    keep_master_weight_for_test: bool
    embedding_activation_buffer: Any
    grad_output_buffer: Any
    disable_grad_reduce: bool
    output_dtype: Any


_REFUSED = {
    "stride": (1, "sub-blocks of the outputs are given as parts="),
    "keep_master_weight_for_test": (False, "weights are drawn whole and cut: gather them along their partition_dim"),
    "embedding_activation_buffer": (None, "--defer-embedding-wgrad-compute is the executor's here"),
    "grad_output_buffer": (None, "--defer-embedding-wgrad-compute is the executor's here"),
    "disable_grad_reduce": (False, "the gradient of an input that all ranks share is their sum"),
    "output_dtype": (None, "cast the output"),
}
"""Argument -> (what is accepted, what to do instead of another value)."""
_KNOWN = set(UpstreamArguments.__annotations__)


def read_upstream_arguments(layer: nn.Module, tp_group: Group | None, given: UpstreamArguments) -> Group:
    """The group that divides the layer. Raises ConfigError for what is not done here, TypeError for no argument of
    upstream's."""
    name = type(layer).__name__
    for argument, value in given.items():
        if argument not in _KNOWN:
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
        accepted, remedy = _REFUSED.get(argument, (value, ""))
        if value not in (accepted, None):
            raise ConfigError(f"{name}({argument}={value!r}) is not done here; leave it out: {remedy}")
    if tp_group is not None and not given.get("is_expert"):
        return tp_group
    groups = given.get("pg_collection")
    if groups is None:
        groups = ProcessGroupCollection.current()
    if not given.get("is_expert"):
        return groups.tp
    # A parameter of one expert alone cannot say that other processes have other experts.
    if groups.ep.size() > 1 or groups.expt_tp.size() != groups.tp.size():
        raise ConfigError(
            f"{name}(is_expert=True) with --expert-model-parallel-size {groups.ep.size()}, "
            f"--expert-tensor-parallel-size {groups.expt_tp.size()} and --tensor-model-parallel-size "
            f"{groups.tp.size()}: experts that are divided so are built whole, by MoELayer; leave is_expert out for "
            "a layer that every rank has"
        )
    return tp_group if tp_group is not None else groups.expt_tp


def finish_layer(layer: nn.Module, config: Any, tp_group: Group | None, given: UpstreamArguments) -> None:
    """Fill the parameters of a layer that a program makes by itself; our models, which hand over a group and nothing of
    upstream's, fill all of theirs at once, when the global names are known."""
    if (tp_group is None or given) and getattr(config, "perform_initialization", True):
        fill_alone(layer)
