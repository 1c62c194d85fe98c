# SPDX-License-Identifier: Apache-2.0
"""Upstream's names around losses in addition to the main one: MTP losses, and what a user's loop logs of them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.core.auxiliary_loss import AuxiliaryLossScale, attach_auxiliary_loss
from megatron.core.collectives import all_reduce
from megatron.core.errors import ConfigError
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.plan.stages import build_pipeline_layout
from megatron.core.process_groups_config import Group, ProcessGroupCollection, SingleRankGroup
from megatron.core.transformer.multi_token_prediction import TokenShift
from megatron.core.transformer.own_stage import find_own_stage
from megatron.core.transformer.transformer_config import TransformerConfig


def roll_tensor(
    tensor: Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: Group | None = None,
    packed_seq_params: PackedSeqParams | None = None,
    return_sum: bool = True,
) -> Any:
    """(the tensor one place earlier along `dims`, zero where a document ends; its sum), or only the tensor.

    cp_group: the ranks that share the sequence; it is whole when None. Raises ConfigError for other shifts than -1.
    """
    if shifts != -1:
        raise ConfigError(f"roll_tensor() moves by one place; found shifts={shifts}: call it as often")
    sequence = cp_group if cp_group is not None else SingleRankGroup()
    rows = tensor.movedim(dims, -1)
    length = rows.shape[-1] * sequence.size()
    documents = packed_seq_params.layout(length) if packed_seq_params is not None else None
    rolled = TokenShift(sequence, documents)(rows.reshape(-1, rows.shape[-1])).view_as(rows).movedim(-1, dims)
    return (rolled, rolled.sum()) if return_sum else rolled


def get_mtp_layer_offset(config: TransformerConfig, vp_stage: int | None = None) -> int:
    """Layers of multi-token prediction on stages before this one."""
    shape, own = find_own_stage(config, vp_stage)
    held = [stage.has_prediction for stage in build_pipeline_layout(config, shape)[:own]]
    return (config.mtp_num_layers or 0) if any(held) else 0


class _LossAutoScaler:
    """Hangs a loss on a tensor; the losses of our layers are scaled by the schedule and need nothing of this."""

    scale: ClassVar[AuxiliaryLossScale]

    @classmethod
    def apply(cls, output: Tensor, loss: Tensor) -> Tensor:
        """The tensor, whose backward also runs the backward of the scalar loss times the scale of that moment."""
        return attach_auxiliary_loss(output, loss, cls.scale)

    @classmethod
    def set_loss_scale(cls, scale: Tensor | float) -> None:
        """Set what the gradients of losses are multiplied by from now on: 1 at first."""
        cls.scale.value = scale


class MTPLossAutoScaler(_LossAutoScaler):
    """For MTP losses."""

    scale = AuxiliaryLossScale()


class MoEAuxLossAutoScaler(_LossAutoScaler):
    """For balancing losses."""

    scale = AuxiliaryLossScale()


class MTPLossLoggingHelper:
    """Sums up the MTP losses that a program saves here, by depth, until they are logged. The losses of GPTModel itself
    are taken by `model.mtp_loss.take_sums()`."""

    tracker: ClassVar[dict[str, Any]] = {}
    """values [depths], reduce_group, avg_group; empty before the first loss."""

    @classmethod
    def save_loss_to_tracker(
        cls,
        loss: Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: Group | None = None,
        avg_group: Group | None = None,
    ) -> None:
        """Add the loss of a depth, counted from 0; none where that is None. reduce_group: over which losses are summed,
        avg_group: over which their mean is taken, when they are logged."""
        if layer_number is None:
            return
        values = cls.tracker.setdefault("values", torch.zeros(num_layers, device=loss.device))
        values[layer_number] += loss.detach()
        cls.tracker.update(reduce_group=reduce_group, avg_group=avg_group)

    @classmethod
    def clean_loss_in_tracker(cls) -> None:
        """Start again."""
        if "values" in cls.tracker:
            cls.tracker["values"].zero_()
            cls.tracker.update(reduce_group=None, avg_group=None)

    @classmethod
    def reduce_loss_in_tracker(cls) -> None:
        """Sum the values over the pipeline and reduce_group, and take their mean over avg_group."""
        if "values" not in cls.tracker:
            return
        values, groups = cls.tracker["values"], ProcessGroupCollection.current()
        for group in (groups.pp, cls.tracker.get("reduce_group"), cls.tracker.get("avg_group")):
            if group is not None:
                all_reduce(values, group)
        if cls.tracker.get("avg_group") is not None:
            values /= cls.tracker["avg_group"].size()

    @classmethod
    def track_mtp_metrics(
        cls,
        loss_scale: float,
        iteration: int,
        writer: Any,
        wandb_writer: Any = None,
        total_loss_dict: MutableMapping[str, Any] | None = None,
    ) -> None:
        """Write the values times loss_scale as "mtp_1 loss", ..., add them to total_loss_dict, and start again."""
        cls.reduce_loss_in_tracker()
        for depth, value in enumerate(cls.tracker.get("values", ()), start=1):
            name, loss = f"mtp_{depth} loss", value * loss_scale
            if total_loss_dict is not None:
                total_loss_dict[name] = total_loss_dict.get(name, 0.0) + loss
            if writer is not None:
                writer.add_scalar(name, loss, iteration)
            if wandb_writer is not None:
                wandb_writer.log({name: loss}, iteration)
        cls.clean_loss_in_tracker()
