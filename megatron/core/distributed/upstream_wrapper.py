# SPDX-License-Identifier: Apache-2.0
"""Methods of DistributedDataParallel that only programs written for upstream call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from megatron.core.distributed.bucket import Bucket, GradSync, ParamGather
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer


class BufferList(list[ParamAndGradBuffer]):
    """Flat buffers as a list; called, it is the method of nn.Module whose name it has."""

    def __init__(self, module: nn.Module, buffers: Sequence[ParamAndGradBuffer]) -> None:
        super().__init__(buffers)
        # In a tuple: a copy of the module copies it with the list.
        self._module = (module,)

    def __call__(self, recurse: bool = True) -> Iterator[Tensor]:
        return nn.Module.buffers(self._module[0], recurse)


class UpstreamWrapper(nn.Module):
    """The outside of upstream's wrapper."""

    flat_buffers: list[ParamAndGradBuffer]
    grad_sync: GradSync
    param_gather: ParamGather
    waits_in_forward = True
    """Whether, with overlap_param_gather, forward waits for parameters that are still under way."""

    def _show_buffers(self) -> None:
        """Flat buffers as upstream's attributes; `param_data` and `grad_data` of each hold the memory of everything, so
        that `untyped_storage().resize_(0)` frees it and a larger size with `copy_` gives it back."""
        dense = [buffer for buffer in self.flat_buffers if not buffer.is_expert]
        self.buffers = BufferList(self, dense)  # type: ignore[assignment]
        self.expert_parallel_buffers = [buffer for buffer in self.flat_buffers if buffer.is_expert]

    @property
    def bucket_groups(self) -> list[Bucket]:
        """Buckets of dense weights; each is reduced for itself."""
        return [bucket for buffer in self.flat_buffers if not buffer.is_expert for bucket in buffer.buckets]

    @property
    def expert_parallel_bucket_groups(self) -> list[Bucket]:
        """Bucket groups of experts."""
        return [bucket for buffer in self.expert_parallel_buffers for bucket in buffer.buckets]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """While open, backward only adds up gradients; `finish_grad_sync` sums them over the replicas."""
        was_last, self.grad_sync.is_last = self.grad_sync.is_last, False
        try:
            yield
        finally:
            self.grad_sync.is_last = was_last

    def enable_forward_pre_hook(self) -> None:
        """With overlap_param_gather, let updates return before parameters are gathered."""
        self.waits_in_forward = True

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Gather all parameters at once from now on. param_sync: also gather the last update's now."""
        self.waits_in_forward = False
        if param_sync:
            self.param_gather.finish()

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """As state_dict()."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Free the memory of all gradients. synchronize, empty_cache: of upstream's signature; memory goes back to
        torch's allocator, which orders its use."""
        for buffer in self.flat_buffers:
            buffer.grad_data.untyped_storage().resize_(0)

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Give gradients memory again, with zeros. synchronize: of upstream's signature."""
        for buffer in self.flat_buffers:
            size = buffer.grad_data.numel() * buffer.grad_data.element_size()
            buffer.grad_data.untyped_storage().resize_(size)
            buffer.grad_data.zero_()

    def free_overlap_buffers(self) -> None:
        """Nothing to free: what overlaps uses the buffers themselves."""
