# SPDX-License-Identifier: Apache-2.0
"""Arguments of upstream's parallel layers that ours have no use for, and the groups that they name."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.parameters import fill_alone

take_layer_arguments = take_arguments(
    "* name=... tp_comm_buffer_name=... stride=1 keep_master_weight_for_test=False embedding_activation_buffer=None "
    "grad_output_buffer=None disable_grad_reduce=False output_dtype=None",
    "sub-blocks of outputs are parts=, weights are gathered along their partition_dim, the gradient of an input that "
    "all ranks share is their sum, and a caller can cast the output",
)


def find_layer_group(
    layer: nn.Module, tp_group: Group | None, is_expert: bool = False, groups: ProcessGroupCollection | None = None
) -> Group:
    """The group that divides a layer. is_expert: it is part of one expert, divided over the processes that share it.
    groups: of which one divides it unless tp_group does. Raises ConfigError for experts that lie elsewhere, too."""
    if tp_group is not None and not is_expert:
        return tp_group
    groups = groups if groups is not None else ProcessGroupCollection.current()
    if not is_expert:
        return groups.tp
    # A parameter of a single expert cannot say that other processes have other experts.
    if groups.ep.size() > 1 or groups.expt_tp.size() != groups.tp.size():
        raise ConfigError(
            f"{type(layer).__name__}(is_expert=True) with --expert-model-parallel-size {groups.ep.size()}, "
            f"--expert-tensor-parallel-size {groups.expt_tp.size()} and --tensor-model-parallel-size "
            f"{groups.tp.size()}: experts that are divided so are built whole, by MoELayer; leave is_expert out for "
            "a layer that every rank has"
        )
    return tp_group if tp_group is not None else groups.expt_tp


def finish_layer(layer: nn.Module, config: Any, is_alone: bool) -> None:
    """Fill the parameters of a layer that a program makes by itself (is_alone); our models, which hand over a group and
    nothing of upstream's, fill all of theirs at once, when the global names are known."""
    if is_alone and getattr(config, "perform_initialization", True):
        fill_alone(layer)
