# SPDX-License-Identifier: Apache-2.0
"""Interface of a wrapped part of the model, and of its flat memory, to the step, the optimizer and checkpoints.

Two implementations: DistributedDataParallel keeps full parameters on every replica (with a divided optimizer state if
asked for), TorchFullyShardedDataParallel divides the parameters themselves. A user's wrapper implements the same.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.core.device import current_device
from megatron.core.distributed.bucket import Reduction
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import BufferLayout
from megatron.core.flat_ranges import Range
from megatron.core.placement import Placement, get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters


class FlatBuffer(Protocol):
    """Parameters of one dtype and their gradients, as flat memory of which this process updates `owned`."""

    names: list[str]
    """Name of each parameter in the whole model."""
    params: list[nn.Parameter]
    starts: list[int]
    """First element of each parameter that is stored here, counted in the flattened parameter."""
    layout: BufferLayout
    grad_data: Tensor
    """[layout.numel], each gradient at its parameter's place."""
    reduction: Reduction
    """Over whom gradients are combined, and who divides the optimizer's state."""
    is_expert: bool
    """True if these are weights of experts, which have separate buffers."""
    device: torch.device
    dtype: torch.dtype
    """Dtype of the values here."""
    model_dtype: torch.dtype
    """Dtype in which the network computes with them; differs from `dtype` where they are main parameters of which the
    network gets rounded copies."""
    is_updated_as_it_is: bool
    """True if the optimizer updates these values, in any dtype; False where it keeps separate main parameters of 16-bit
    values."""

    @property
    def owned(self) -> list[Range]:
        """Elements that this process updates, as ascending ranges of the flat memory."""

    def values(self, start: int, stop: int) -> Tensor:
        """Elements of the parameters, inside one of the ranges that are `owned`: a view."""


class ModelChunk(nn.Module, ABC):
    """One pipeline chunk of the network, ready to be trained: `module` in flat memory.

    A step calls `zero_grad_buffer`, then forward and backward of all microbatches (before the last of them
    `enable_grad_sync`), `finish_grad_sync`, the optimizer's update, `start_param_sync`.
    """

    module: nn.Module
    ddp_config: DistributedDataParallelConfig
    groups: ProcessGroupCollection
    flat_buffers: Sequence[FlatBuffer]
    reductions: Mapping[bool, Reduction]
    """Over whom gradients of experts (True), and of all other weights, are combined; both, whatever is here."""
    overlaps_grad_reduce: bool
    """True if gradients are reduced during backward, so that pipeline stages may want to begin at the same moment."""
    reduces_every_microbatch: bool = False
    """True if gradients are reduced during every backward, not only the step's last one: `enable_grad_sync` is then
    called before the last one in any case."""

    @property
    def device(self) -> torch.device:
        """Device of its parameters; nothing of it need be trained, and a layout may leave a stage without any."""
        return next((param.device for param in self.module.parameters()), current_device())

    # ---- gradients

    @functools.cached_property
    def partial_params(self) -> dict[str, list[nn.Parameter]]:
        """By axis: the parameters of whose gradient each process of that axis has a partial sum.

        Found once: placements never change, and asking each parameter in every step would take longer than the sums.
        """
        by_axis: dict[str, list[nn.Parameter]] = defaultdict(list)
        for placement, param in self._placed_params():
            for axis in placement.partial_grad_axes:
                by_axis[axis].append(param)
        return dict(by_axis)

    @functools.cached_property
    def replicated_params(self) -> list[tuple[Placement, nn.Parameter]]:
        """The parameters of which several shards hold the same part: keys and values of few query groups."""
        return [
            (placement, param)
            for placement, param in self._placed_params()
            if any(split.replicated_parts(placement.full_shape[split.dim]) for split in placement.splits)
        ]

    def _placed_params(self) -> list[tuple[Placement, nn.Parameter]]:
        named = list_parameters(self.module)
        return [(get_placement(param, name), param) for name, param in named if param.requires_grad]

    @abstractmethod
    def zero_grad_buffer(self) -> None:
        """Clear all gradients; call before the first microbatch of a step."""

    @abstractmethod
    def enable_grad_sync(self) -> None:
        """The next backward is this chunk's last of the step."""

    @abstractmethod
    def start_grad_sync(self) -> None:
        """Start to combine whatever is not under way yet, where this can overlap other work; all gradients must be
        there."""

    @abstractmethod
    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Combine the gradients of the replicas; call after the last microbatch of a step."""

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients; a tensor is not waited for."""
        for buffer in self.flat_buffers:
            buffer.grad_data.mul_(factor)

    # ---- parameters

    @abstractmethod
    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """After the optimizer has updated what it owns: bring everyone the others' parameters, or begin to."""

    @abstractmethod
    def finish_param_sync(self) -> None:
        """Wait until all parameters have the values of the last update."""

    @abstractmethod
    def get_held_part(self, param: nn.Parameter, *, main: bool = False) -> tuple[Tensor, int | None]:
        """Return what this process holds of a parameter's shard: (values, None) where that is all of it, else (flat
        slice, its first element). main: of main parameters, where they are all there is; otherwise as the network sees
        them."""

    @abstractmethod
    def broadcast_params(self) -> None:
        """Give every replica the parameters of the first one, where replicas hold the same ones."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped module's state, without a prefix of ours."""
        self.finish_param_sync()
        # The gathers of the last update may still have been under way, hence the wait above.
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The wrapped module's parameters for dist_checkpointing.save() and load(), without a prefix of ours."""
        self.finish_param_sync()
        module: Any = self.module
        state: dict[str, Any] = module.sharded_state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module; the values land in the flat memory."""
        self.finish_param_sync()
        # Nor may a gather that ends later overwrite what is loaded.
        return self.module.load_state_dict(*args, **kwargs)
