# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: replicas that see other samples and keep equal weights.

The wrapper moves parameters and gradients into flat buffers. During backward a gradient reaches its place in one of
two ways: a linear layer adds its weight-gradient product straight into `param.main_grad`, or autograd fills
`param.grad` and the hook below adds it. `finish_grad_sync` combines the buffers of the replicas, whichever way they
were filled; with overlap_grad_reduce, most of that is done by then (bucket.py).

With use_distributed_optimizer each replica then has the combined gradients of only its slice of every bucket; the
optimizer updates the parameters of that slice and gathers the others'.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatron.core.collectives import all_gather_in_place
from megatron.core.distributed.bucket import (
    Bucket,
    GradSync,
    ParamGather,
    Reduction,
    choose_expert_reduction,
    choose_reduction,
)
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.distributed.param_and_grad_buffer import (
    ALIGNMENT,
    HIGH_BANDWIDTH_PADDING,
    BufferLayout,
    NamedParams,
    ParamAndGradBuffer,
    lay_out,
)
from megatron.core.distributed.upstream_wrapper import UpstreamWrapper
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters


class DistributedDataParallel(UpstreamWrapper, ModelChunk):
    """Wraps one pipeline chunk of the model; every replica has whole parameters.

    module: a network whose parameters may carry a Placement; one that carries none counts as held whole by everyone.
    pg_collection: the process groups; the current ones when None. `flat_buffers` holds one ParamAndGradBuffer for each
    dtype. disable_bucketing: one bucket for the whole chunk.
    Raises ConfigError for switches that contradict each other.
    """

    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        full_param_layout: None = None,
    ) -> None:
        super().__init__()
        if full_param_layout is not None:
            raise ConfigError("full_param_layout is not supported: buffers are laid out by lay_out(); leave it out")
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.groups = pg_collection or ProcessGroupCollection.current()
        reduction = choose_reduction(config, ddp_config, self.groups)
        self.reductions = {False: reduction, True: choose_expert_reduction(reduction, ddp_config, self.groups)}
        self.flat_buffers: list[ParamAndGradBuffer] = list(
            _make_buffers(module, ddp_config, self.reductions, disable_bucketing)
        )
        self._show_buffers()
        # Fixed once and alike on all replicas, because collectives of a group must start in the same order everywhere.
        backward_order = _order_buckets_by_use(module, self.flat_buffers)[::-1]
        self.grad_sync = GradSync(backward_order)
        self.param_gather = ParamGather(module, backward_order[::-1], overlap=ddp_config.overlap_param_gather)
        is_needed = any(buffer.reduction.is_needed for buffer in self.flat_buffers)
        self.overlaps_grad_reduce = ddp_config.overlap_grad_reduce and is_needed
        # Without overlap nobody waits for single gradients, and the report would be a call for each parameter and
        # microbatch.
        add = _make_reporting_hook(self.grad_sync) if self.overlaps_grad_reduce else _add_to_main_grad
        for buffer in self.flat_buffers:
            for param in buffer.params:
                param.register_post_accumulate_grad_hook(add)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The wrapped module's forward."""
        return self.module(*inputs, **named_inputs)

    # ---- gradients

    def zero_grad_buffer(self) -> None:
        """Clear all gradients; call before the first microbatch of a step."""
        self.grad_sync.reset()
        for buffer in self.flat_buffers:
            buffer.zero_grad()

    def enable_grad_sync(self) -> None:
        """The next backward is this chunk's last of the step: with overlap_grad_reduce, reduce each bucket as soon as
        its gradients are there. Without this call `finish_grad_sync` does it all."""
        if self.overlaps_grad_reduce:
            self.grad_sync.expect_last()

    def start_grad_sync(self) -> None:
        """With overlap_grad_reduce, start to reduce whatever is not under way yet; all gradients must be there."""
        if self.overlaps_grad_reduce:
            self.grad_sync.start()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Combine the gradients of the replicas; call after the last microbatch of a step. force_all_reduce: also where
        replicas divide the optimizer's state each gets all of them, not only its slices."""
        self.grad_sync.finish()
        if force_all_reduce:
            for bucket in self.grad_sync.buckets:
                all_gather_in_place(bucket.grads, bucket.reduction.shards)

    # ---- parameters

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """After the optimizer has updated its slices: gather the others'. With overlap_param_gather this returns at
        once, and forward waits for each layer's parameters; other readers call `finish_param_sync`.

        force_sync: wait in any case. unused, force_dispatch: of upstream's signature, in which a hook calls this for a
        layer; here the call is about all of them, and always begins at once."""
        self.param_gather.start()
        if force_sync or not (self.ddp_config.overlap_param_gather and self.waits_in_forward):
            self.param_gather.finish()

    def finish_param_sync(self) -> None:
        """Wait until all parameters have the values of the last update."""
        self.param_gather.finish()

    def get_held_part(self, param: nn.Parameter, *, main: bool = False) -> tuple[torch.Tensor, int | None]:
        """Return what this process holds of a parameter's shard: (values, None) where that is all of it, else (flat
        slice, its first element). main: of main parameters, where they are all there is; otherwise as the network sees
        them."""
        return param, None

    def broadcast_params(self) -> None:
        """Give every replica the parameters of the first one."""
        for buffer in self.flat_buffers:
            buffer.broadcast_params(self.groups.get_replicas(buffer.is_expert))


def _make_buffers(
    module: nn.Module,
    ddp_config: DistributedDataParallelConfig,
    reductions: Mapping[bool, Reduction],
    is_one_bucket: bool,
) -> Iterator[ParamAndGradBuffer]:
    """One buffer for each dtype, separately for experts. A parameter used in several places (tied embeddings) is in it
    once."""
    by_kind: dict[tuple[bool, torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, param in list_parameters(module):
        if param.requires_grad:
            placement = get_placement(param, name)
            # Experts apart: their gradients are summed over other processes than the gradients of dense layers.
            by_kind[placement.is_expert, param.dtype, param.device].append((placement.name, param))
    for (is_expert, dtype, _), named_params in by_kind.items():
        grad_dtype = torch.float32 if ddp_config.grad_reduce_in_fp32 else dtype
        reduction = reductions[is_expert]
        size = None if is_one_bucket else _choose_bucket_size(named_params, ddp_config, reduction)
        layout = _make_layout(named_params, ddp_config, reduction, size)
        yield ParamAndGradBuffer(named_params, grad_dtype, reduction, layout)


def _make_layout(
    named_params: NamedParams, ddp_config: DistributedDataParallelConfig, reduction: Reduction, bucket_size: int | None
) -> BufferLayout:
    """Buckets that all processes can divide, as many as overlap needs."""
    shards = reduction.shards.size()
    padding = ALIGNMENT * shards
    if ddp_config.pad_buckets_for_high_nccl_busbw:
        padding = math.lcm(padding, HIGH_BANDWIDTH_PADDING)
    # A tied embedding lies elsewhere in the other stage's buffer, yet both must be cut at the same elements, because
    # each process sums its slice of the two.
    placements = [get_placement(param, name) for name, param in named_params]
    tied = [index for index, found in enumerate(placements) if shards > 1 and "embd" in found.partial_grad_axes]
    return lay_out(
        [param.numel() for _, param in named_params],
        [placement.is_vector for placement in placements],
        bucket_size=bucket_size,
        padding=padding,
        alone=tied,
    )


def _choose_bucket_size(
    named_params: NamedParams, ddp_config: DistributedDataParallelConfig, reduction: Reduction
) -> int | None:
    """Elements of a bucket; None without overlap, where one collective is the fastest."""
    if not ddp_config.overlap_grad_reduce:
        return None
    if ddp_config.num_buckets is not None:
        return math.ceil(sum(param.numel() for _, param in named_params) / ddp_config.num_buckets)
    if ddp_config.bucket_size is not None:
        return ddp_config.bucket_size
    # Upstream's default. The more processes share a bucket, the smaller is each one's slice, and the larger it must be
    # for latency not to count.
    return max(40_000_000, 1_000_000 * reduction.shards.size() * reduction.copies.size())


def _order_buckets_by_use(
    module: nn.Module, buffers: list[ParamAndGradBuffer]
) -> list[tuple[Bucket, list[nn.Parameter]]]:
    """All buckets in the order in which forward needs them: by their first parameter in the module's order."""
    place = {param: index for index, param in enumerate(p for _, p in list_parameters(module))}
    buckets = list(itertools.chain.from_iterable(buffer.bucket_params() for buffer in buffers))
    return sorted(buckets, key=lambda entry: min(place[param] for param in entry[1]))


def _add_to_main_grad(param: nn.Parameter) -> None:
    """Post-accumulate hook: move what autograd left in `param.grad` to the flat buffer.

    autograd calls it also for a parameter whose operation added its gradient itself and returned none.
    """
    if param.grad is None:
        return
    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None


def _make_reporting_hook(grad_sync: GradSync) -> Callable[[nn.Parameter], None]:
    """The same hook for buckets that are reduced during backward."""

    def add_and_report(param: nn.Parameter) -> None:
        _add_to_main_grad(param)
        grad_sync.report_arrival(param)

    return add_and_report
