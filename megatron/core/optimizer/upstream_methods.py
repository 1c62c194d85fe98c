# SPDX-License-Identifier: Apache-2.0
"""Methods of the optimizer that only programs written for upstream call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_object, broadcast_object
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, optimizer_state, whole_optimizer_state
from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.errors import CheckpointError
from megatron.core.optimizer.clip_grads import ModelSum
from megatron.core.optimizer.grad_statistics import count_zeros
from megatron.core.optimizer.group_state import GroupState, StateSlice
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.optimizer.torch_view import TorchView, park, unpark
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters

_TENSORS = "state"


class UpstreamMethods(ABC):
    """An optimizer as upstream's ChainedOptimizer and the one optimizer in it, both in one object."""

    is_stub_optimizer = False
    model_chunks: list[ModelChunk]
    groups: ProcessGroupCollection
    model_sum: ModelSum
    _groups: list[ParamGroup]
    _states: list[GroupState]
    _step: Tensor
    _device: torch.device
    _view: TorchView | None = None
    _parked: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def chained_optimizers(self) -> list[Any]:
        """Itself: there is one optimizer."""
        return [self]

    @property
    def optimizer(self) -> TorchView:
        """A torch optimizer's attributes: `param_groups`, `state`."""
        if self._view is None:
            self._view = TorchView(self._groups, self._step)
        return self._view

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """Main parameter -> its state, see `optimizer`."""
        return self.optimizer.state

    @property
    def shard_fp32_from_float16_groups(self) -> list[list[Tensor]]:
        """Of each group the main parameters of parameters in 16 bits; their `.data` may be moved."""
        return self.optimizer.copies

    def get_parameters(self) -> list[Tensor]:
        """Return what is updated here, main parameters where there are any."""
        return list(self.optimizer.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients. set_to_none: of upstream's signature; gradients lie in flat memory that stays."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    @property
    @abstractmethod
    def loss_scale(self) -> float:
        """Factor on the next step's loss."""

    def get_loss_scale(self) -> Tensor:
        """Return what losses are multiplied by, [1] float32; 1 without loss scaling."""
        return torch.tensor([self.loss_scale], dtype=torch.float32, device=self._device)

    def count_zeros(self) -> float:
        """Count the zeros among the gradients of the whole model; every process calls this."""
        buffers = [buffer for chunk in self.model_chunks for buffer in chunk.flat_buffers]
        return float(count_zeros(buffers, self.model_sum))

    def offload_to_cpu(self) -> None:
        """Move main parameters and state to the host; only `restore_from_cpu` may follow."""
        self.collect()
        self._parked = park(self._states)

    def restore_from_cpu(self) -> None:
        """Bring them back."""
        unpark(self._parked)
        self._parked = ()

    def collect(self) -> None:
        """Bring back what a program has moved away through `optimizer.state`."""
        if self._view is not None:
            self._view.collect()

    # ---- checkpoints

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """Return what of the state is no tensor."""

    @abstractmethod
    def load_numbers(self, state: Mapping[str, Any]) -> None:
        """Take it back."""

    @abstractmethod
    def named_slices(self) -> dict[str, StateSlice]:
        """Return the state of this process by the parameter's name."""

    @abstractmethod
    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of it."""

    @abstractmethod
    def whole_state(self) -> dict[str, dict[str, Tensor]]:
        """Return state that is not shaped like a parameter."""

    @abstractmethod
    def stack_starts(self) -> dict[str, int]:
        """Return the numbers of the first matrices in `whole_state`."""

    @abstractmethod
    def after_load(self) -> None:
        """Let the network see main parameters that were written."""

    def state_dict(self) -> dict[str, Any]:
        """All of this process's state: numbers, and tensors by the parameter's name and their kind, which are views."""
        self.collect()
        return {**self.numbers(), _TENSORS: self.named_state(), "whole_state": self.whole_state()}

    def sharded_state_dict(
        self, model_sharded_state_dict: Mapping[str, Any], is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """All state for dist_checkpointing.save() and load(); what load() returns goes to `load_state_dict`.

        model_sharded_state_dict, is_loading, metadata: of upstream's signature; placements say where everything lies.
        """
        self.collect()
        return {**self.numbers(), _TENSORS: self.shard_state()}

    def shard_state(self) -> ShardedStateDict:
        """The tensors that this process keeps, by key: whole shards, or its slices of them."""
        placements = {
            placement.name: placement
            for chunk in self.model_chunks
            for placement in (get_placement(param, name) for name, param in list_parameters(chunk.module))
        }
        slices = self.named_slices()
        # A distributed optimizer holds a slice of a parameter that begins at any element; whole ones need no start.
        starts = {name: found.start for name, found in slices.items() if not found.is_whole}
        state = optimizer_state({name: found.tensors for name, found in slices.items()}, placements, starts)
        stacks = {name: (start, placements[name].full_shape[0]) for name, start in self.stack_starts().items()}
        return state | whole_optimizer_state(self.whole_state(), stacks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, or what load() gave for `sharded_state_dict`. Raises CheckpointError where
        tensors are missing or have other shapes."""
        self.load_numbers(state)
        if _TENSORS not in state:
            return
        self.collect()
        ours = _flatten({_TENSORS: self.shard_state()}) if "whole_state" not in state else _flatten(self.state_dict())
        theirs = _flatten(state)
        for path, tensor in ours.items():
            found = theirs.get(path)
            if not isinstance(found, Tensor) or found.shape != tensor.shape:
                raise CheckpointError(f"the optimizer's state has no {'.'.join(path)} of shape {tuple(tensor.shape)}")
            if found.data_ptr() != tensor.data_ptr():
                tensor.copy_(found)
        self.after_load()

    def save_parameter_state(self, filename: str) -> None:
        """Write the tensors of all replicas of this shard of the model to one file, from the first of them; every
        process calls this."""
        self.collect()
        own = {
            name: (found.start, {kind: tensor.flatten().cpu() for kind, tensor in found.tensors.items()})
            for name, found in self.named_slices().items()
        }
        group = self.groups.dp_cp
        everyone = all_gather_object(own, group)
        if group.rank() == 0:
            torch.save(everyone, filename)

    def load_parameter_state(self, filename: str) -> None:
        """Read what `save_parameter_state` wrote with as many replicas; every process calls this. Raises
        CheckpointError for state of another layout."""
        self.collect()
        group = self.groups.dp_cp
        read = torch.load(filename, weights_only=True) if group.rank() == 0 else None
        saved: list[Any] = read if group.size() == 1 else broadcast_object(read, group, 0)  # type: ignore[assignment]
        if len(saved) != group.size():
            raise CheckpointError(f"{filename} is of {len(saved)} replicas, this run has {group.size()}")
        for name, found in self.named_slices().items():
            start, tensors = saved[group.rank()].get(name, (None, {}))
            for kind, tensor in found.tensors.items():
                if start != found.start or kind not in tensors or tensors[kind].numel() != tensor.numel():
                    raise CheckpointError(f"{filename} lacks {kind} of {name} as this layout divides it")
                tensor.copy_(tensors[kind].view(tensor.shape))
        self.after_load()


def _flatten(state: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Tensor]:
    """Path -> tensor of everything in nested dictionaries; ShardedTensors by what they hold."""
    if isinstance(state, Mapping):
        found: dict[tuple[str, ...], Tensor] = {}
        for key, value in state.items():
            found |= _flatten(value, (*path, str(key)))
        return found
    data = getattr(state, "data", None)
    return {path: data} if isinstance(data, Tensor) else {}
