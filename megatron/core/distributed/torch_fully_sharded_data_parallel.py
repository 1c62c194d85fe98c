# SPDX-License-Identifier: Apache-2.0
"""Replicas that divide parameters, gradients and optimizer state, through torch's fully_shard (FSDP2).

    forward    gather a layer's rows from all processes   compute   drop the others' rows
    backward   gather them again                          compute   drop them; sum gradients, keep our rows

ZeRO-3 (Rajbhandari et al., 2020). With ZeRO-2 the rows that were gathered stay until the step's last backward, and only
gradients and optimizer state are divided all the time. Gathers and sums overlap the computation of the neighbouring
layers. Tensor-parallel shards are cut further: torch sees a process's shard as the whole parameter.

Experts are separate units inside their layer, and divided over the processes that hold the same ones (expert data
parallelism), everything else over all replicas. Their weights [experts, out, in] become [experts x out, in] first, so
that more processes can divide them than there are experts here; where one process alone holds its experts, their unit
has one member.

With several optimizer instances (HSDP) the processes form as many groups of neighbours. Each group divides a copy of
the whole, and the copies' gradients are summed once a step, after the last microbatch's sum inside the groups.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from megatron.core.collectives import Handle, all_gather_into_tensor, reduce_scatter_tensor
from megatron.core.device import current_device
from megatron.core.distributed.bucket import Reduction, choose_expert_reduction, choose_reduction
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig, FullyShardedConfig
from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.distributed.sharded_params import ShardedParamBuffer, find_first_element, get_local_shard
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.placement import Placement, get_placement
from megatron.core.process_groups_config import (
    Group,
    MeteredGroup,
    ProcessGroupCollection,
    SingleRankGroup,
    group_ranks,
    torch_group,
)
from megatron.core.taken_arguments import take_arguments

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TorchFullyShardedDataParallel(ModelChunk):
    """Wraps one pipeline chunk of the model, whose parameters are divided over the replicas.

    module: the network; its parameters are replaced by sharded ones, which keep their Placement. Needs at least two
    processes that hold the same parameters. fill: gives parameters of a part that were built on the meta device memory
    and values; it is called for one unit after the other, just before the unit is divided.
    """

    @take_arguments(
        "config ddp_config module sub_modules_to_wrap=None disable_bucketing=... process_group=None",
        "layers are wrapped, over the replicas of pg_collection",
    )
    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        fill: Callable[[nn.Module], None] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.groups = pg_collection or ProcessGroupCollection.current()
        # fully_shard decides when to overlap, so there is no moment at which stages could begin together.
        self.overlaps_grad_reduce, self.reduces_every_microbatch = False, True
        as_divided = _as_divided_optimizer(ddp_config)
        dense = choose_reduction(config, as_divided, self.groups)
        self.reductions = {False: dense, True: choose_expert_reduction(dense, as_divided, self.groups)}
        # A stage that a layout leaves without layers has nothing to divide, in any dtype.
        self._param_dtype = next((param.dtype for param in module.parameters()), torch.float32)
        self.formats = Formats.build(ddp_config, self._param_dtype)
        self.keeps_gathered = ddp_config.data_parallel_sharding_strategy == "optim_grads"
        if any(hasattr(param, "part_of") for param in module.parameters()):
            raise ConfigError(
                "FSDP divides the experts of a layer as one weight, and the layer spec shows each as its own; build "
                "the model by get_gpt_layer_spec(), or leave out --use-torch-fsdp2"
            )
        # Read now: fully_shard replaces the parameters by new ones without our attributes.
        placements = [(get_placement(param, name), param.dtype) for name, param in module.named_parameters()]
        self._fill = fill
        self.module = self._shard(module)
        self.flat_buffers: list[ShardedParamBuffer] = list(self._make_buffers(placements))

    def _shard(self, module: nn.Module) -> nn.Module:
        """Main parameters, cut over the replicas, one unit for each layer or as large as asked for."""
        ddp_config = self.ddp_config
        # The network decides the dtype of a layer's input.
        policy = MixedPrecisionPolicy(
            param_dtype=self._param_dtype, reduce_dtype=self.formats.sent, cast_forward_inputs=False
        )
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nobody writes into it
        frees = ddp_config.torch_fsdp2_reshard_after_forward and not self.keeps_gathered
        has_experts = next(find_expert_parts(module), None) is not None
        meshes = {
            of_experts: _make_mesh(self.groups.get_replicas(of_experts), self.reductions[of_experts])
            for of_experts in ((False, True) if has_experts else (False,))
        }
        kept_whole = set(_find_kept_whole(module))

        def shard(unit: list[nn.Module], *, of_experts: bool, reshard_after_forward: bool) -> None:
            for part in unit:
                self._prepare(part)
                # Before fully_shard, whose hook after forward frees the parameters: hooks run in this order.
                if part is not module:
                    part.register_forward_hook(replace_returned_parameters)
            fully_shard(
                unit,
                mesh=meshes[of_experts],
                mp_policy=policy,
                reshard_after_forward=reshard_after_forward,
                ignored_params=kept_whole,
            )
            for part in unit:
                self._configure(part, self.reductions[of_experts])

        # What belongs to no unit stays through backward.
        for unit in [*find_sharding_units(module, ddp_config), [module]]:
            experts = [part for whole in unit for part in find_expert_parts(whole)]
            if experts:
                shard(experts, of_experts=True, reshard_after_forward=frees)
            shard(unit, of_experts=False, reshard_after_forward=frees and unit != [module])
        return module

    def _configure(self, part: Any, reduction: Reduction) -> None:
        """Set how an FSDPModule sums gradients."""
        # A plain sum, so that all libraries and sizes round alike; then a division.
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0 if _is_divided_later(reduction) else 1.0 / reduction.scale)
        if self.ddp_config.nccl_ub:
            part.set_allocate_memory_from_process_group_for_comm(True)
        count_traffic(part, reduction)

    def _prepare(self, part: nn.Module) -> None:
        """Allocate real values, in the dtype of main parameters, for what is not divided yet."""
        if self._fill is not None:
            self._fill(part)
        kept_whole = set(_find_kept_whole(part))
        for param in part.parameters():
            if isinstance(param, DTensor) or param in kept_whole:
                continue
            data = param.data.to(self.formats.params)
            # Rows of all experts: fully_shard cuts along dimension 0, and slices of flat memory are what it must cut.
            is_stack = get_placement(param, "").is_expert and data.dim() > 1
            param.data = data.flatten(0, 1) if is_stack else data

    def _make_buffers(self, placements: list[tuple[Placement, torch.dtype]]) -> Iterator[ShardedParamBuffer]:
        self._model_dtypes = {placement.name: model_dtype for placement, model_dtype in placements}
        # One buffer for each format that the network computes in: its slices are updated by one kernel.
        by_kind: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for param, (placement, model_dtype) in zip(self.module.parameters(), placements, strict=True):
            # A DTensor shows the whole shape, of which the placement's is a view.
            assert param.numel() == math.prod(placement.local_shape), f"{placement.name} has shape {tuple(param.shape)}"
            param.placement = placement  # type: ignore[attr-defined]
            if param.requires_grad:
                by_kind[placement.is_expert, model_dtype].append((placement.name, param))
        for (of_experts, model_dtype), named_params in by_kind.items():
            yield ShardedParamBuffer(named_params, self.reductions[of_experts], model_dtype, self.formats.grads)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The wrapped module's forward."""
        return self.module(*inputs, **named_inputs)

    # ---- gradients

    def zero_grad_buffer(self) -> None:
        """Clear all gradients; call before the first microbatch of a step."""
        for buffer in self.flat_buffers:
            buffer.zero_grad()
        self._keep_gathered(self.keeps_gathered)
        self._sum_over_copies(not self._sums_once)

    def enable_grad_sync(self) -> None:
        """The next backward is the last of the step: what was gathered is dropped after it, and several optimizer
        instances sum their gradients, which therefore need this call."""
        self._keep_gathered(False)
        self._sum_over_copies(True)

    def start_grad_sync(self) -> None:
        """Does nothing, because gradients are summed as they come."""

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Call after the last microbatch of a step; gradients have been summed already. force_all_reduce: refused, for
        each replica has memory for its share only."""
        if force_all_reduce:
            raise ConfigError("force_all_reduce needs whole gradients, which FSDP divides; leave it out")
        assert self._copies_are_summed, "enable_grad_sync() must be called before a step's last backward"
        for buffer in self.flat_buffers:
            buffer.collect_grads()
            if _is_divided_later(buffer.reduction):
                buffer.grad_data.mul_(buffer.reduction.scale)

    # ---- parameters

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Does nothing, because forward gathers what it needs."""

    def finish_param_sync(self) -> None:
        """Drop what was gathered, so that the module's parameters are the sharded ones."""
        for part in _find_fsdp_modules(self.module):
            # While a part is gathered its parameters are whole tensors; the optimizer and checkpoints must find shards.
            part.reshard()

    def get_held_part(self, param: nn.Parameter, *, main: bool = False) -> tuple[torch.Tensor, int | None]:
        """Our rows as a flat slice: the memory itself, or a copy in the network's dtype."""
        if not isinstance(param, DTensor):
            return param, None
        flat, placement = get_local_shard(param).view(-1), get_placement(param)
        start = find_first_element(param, self.reductions[placement.is_expert].shards)
        return flat if main else flat.to(self._model_dtypes[placement.name]), start

    def broadcast_params(self) -> None:
        """Does nothing, because no two processes hold the same elements."""

    @property
    def _sums_once(self) -> bool:
        """True if copies wait for the last microbatch, which must not cost digits: torch adds up what it sends."""
        return self._has_copies and self.formats.sent == self.formats.grads

    @property
    def _has_copies(self) -> bool:
        # Experts have copies only where dense weights have some.
        return self.reductions[False].copies.size() > 1

    def _sum_over_copies(self, sums: bool) -> None:
        self._copies_are_summed = sums
        for part in _find_fsdp_modules(self.module) if self._has_copies else ():
            part.set_requires_all_reduce(sums, recurse=False)

    def _keep_gathered(self, keeps: bool) -> None:
        for part in _find_fsdp_modules(self.module):
            part.set_reshard_after_backward(not keeps, recurse=False)


def shards_parameters(ddp_config: DistributedDataParallelConfig, groups: ProcessGroupCollection) -> bool:
    """Return whether this run divides its parameters: asked for, and with somebody to divide them with."""
    return ddp_config.use_torch_fsdp2 and not isinstance(groups.dp_cp, SingleRankGroup)


def _as_divided_optimizer(ddp_config: DistributedDataParallelConfig) -> DistributedDataParallelConfig:
    """The gradients are combined as for a divided optimizer."""
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=ddp_config.grad_reduce_in_fp32,
        num_distributed_optimizer_instances=ddp_config.num_distributed_optimizer_instances,
    )


def _make_mesh(holders: Group, reduction: Reduction) -> DeviceMesh:
    """Make the mesh of those who divide a copy; with several copies [copies, shards]. holders: all of them."""
    device = current_device().type
    shards, copies = reduction.shards, reduction.copies
    # One process may hold its experts alone. Only members make such a group, so that it costs no communication.
    ours = (
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
        if isinstance(shards, SingleRankGroup)
        else torch_group(shards)
    )
    if isinstance(copies, SingleRankGroup):
        return DeviceMesh.from_group(ours, device)
    # Those who divide a copy are neighbours among the holders, hence rows of this matrix.
    ranks = torch.tensor(group_ranks(holders)).view(copies.size(), shards.size())
    return DeviceMesh.from_group([torch_group(copies), ours], device, mesh=ranks, mesh_dim_names=("copies", "shards"))


def _is_divided_later(reduction: Reduction) -> bool:
    """Return whether gradients are divided after the step's last sum instead of by torch, which (2.13) divides twice
    where a group of one process shards a parameter."""
    return isinstance(reduction.shards, SingleRankGroup)


def _find_fsdp_modules(module: nn.Module) -> Iterator[Any]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def find_sharding_units(module: nn.Module, config: FullyShardedConfig) -> Iterator[list[nn.Module]]:
    """The layers (elements of module lists), and the parts before and after them, embedding and output layer.

    Parts of layers come before the layer that keeps the rest. Embedding and output layer that share their weight, or
    are used several times in a forward pass, belong to the whole network, as everything that is in no unit.
    """
    layers = list(_find_layers(module))
    if config.megatron_fsdp_enable_fine_grained_param_gather:
        for layer in layers:
            yield from (
                [part] for part in layer.children() if len(list(part.children())) > 0 and _count_elements(part) > 0
            )
    # After their parts: fully_shard takes the inner modules before those around them.
    yield from _join_layers(layers, config.suggested_communication_unit_size or 0)
    # A tied weight in two units would have two owners that gather and free it.
    is_reused = ("reuses_end_weights", "share_embeddings_and_output_weights")
    if not any(getattr(module, name, False) for name in is_reused):
        for child in module.children():
            if next(_find_layers(child), None) is None and _count_elements(child) > 0:
                yield [child]


def find_expert_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The largest parts of a module that have weights of experts only, and are not divided yet."""
    params = list(module.parameters())
    if params and all(not isinstance(param, DTensor) and get_placement(param, "").is_expert for param in params):
        yield module
        return
    for child in module.children():
        yield from find_expert_parts(child)


def _find_kept_whole(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that a module changes by itself at the end of a step, such as the biases of a router: a few numbers,
    which it must find whole."""
    for part in module.modules():
        if hasattr(type(part), "finish_step"):
            yield from (param for param in part.parameters(recurse=False) if not param.requires_grad)


def _join_layers(layers: list[nn.Module], size: int) -> Iterator[list[nn.Module]]:
    """Neighbours until they have `size` parameters."""
    unit: list[nn.Module] = []
    for layer in layers:
        unit.append(layer)
        if sum(map(_count_elements, unit)) >= size:
            yield unit
            unit = []
    if unit:
        yield unit


def replace_returned_parameters(part: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook: return the output with copies in place of the part's parameters, and of views of them.

    A part may leave work to its caller, as attention and MLP return their last bias for the layer to add. The caller
    would read memory that is freed when the part's forward ends; a copy lives on, and hands its gradient back.
    """
    # Inner units are divided again by now, and have replaced what they returned.
    whole = (param for param in part.parameters() if not isinstance(param, DTensor))
    memory = {param.untyped_storage().data_ptr() for param in whole}
    return tree_map_only(Tensor, lambda t: t.clone() if t.untyped_storage().data_ptr() in memory else t, output)


def _count_elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _find_layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _find_layers(child)


class Formats(NamedTuple):
    """Dtypes in which divided parameters and their gradients are stored and sent."""

    params: torch.dtype
    """Dtype of the divided parameters, which the optimizer updates; the network gets copies in the dtype it computes
    in."""
    grads: torch.dtype
    """Dtype in which gradients are accumulated over microbatches."""
    sent: torch.dtype
    """Dtype in which gradients are sent, and summed over processes."""

    @classmethod
    def build(cls, config: DistributedDataParallelConfig, model: torch.dtype) -> Formats:
        """model: dtype in which the network computes. Raises ConfigError for a main gradient format that torch cannot
        keep."""
        params = _DTYPES.get(config.megatron_fsdp_main_params_dtype, model)
        grads = _DTYPES.get(config.megatron_fsdp_main_grads_dtype)
        sent = _DTYPES.get(config.megatron_fsdp_grad_comm_dtype, grads)
        # What plain data parallelism would send.
        if sent is None:
            sent = torch.float32 if config.grad_reduce_in_fp32 else model
        if grads not in (None, params, model):
            raise ConfigError(
                f"--megatron-fsdp-main-grads-dtype {config.megatron_fsdp_main_grads_dtype}: sums arrive in the number "
                "format of the divided parameters; use auto"
            )
        return cls(params, params if grads is None else grads, sent)


def count_traffic(part: Any, reduction: Reduction) -> None:
    """Let an FSDPModule communicate over groups that count: those that it divides and copies parameters over."""
    shards, copies = reduction.shards, reduction.copies
    if isinstance(shards, MeteredGroup):
        part.set_custom_all_gather(_CountedGather(shards))
        part.set_custom_reduce_scatter(_CountedSum(shards))
    if isinstance(copies, MeteredGroup):
        part.set_all_reduce_hook(_CountedCopies(copies))


class _Counted:
    """Base of the collectives that are handed to fully_shard: allocates the memory that they work on."""

    def __init__(self, group: MeteredGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory to send from or to receive into."""
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedGather(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Handle | None:
        return all_gather_into_tensor(output_tensor, input_tensor, self.group, async_op)


class _CountedSum(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Handle | None:
        assert op == dist.ReduceOp.SUM, f"{op}: sums are forced"
        return reduce_scatter_tensor(output_tensor, input_tensor, self.group, "sum", async_op)


class _CountedCopies:
    """Counts the all-reduce over the copies; called with what torch has summed."""

    def __init__(self, group: MeteredGroup) -> None:
        self.group = group

    def __call__(self, summed: Tensor) -> None:
        # torch calls this after its all-reduce: there is nothing left to do but to count.
        self.group.traffic.add(self.group.axis, "all_reduce", summed.nbytes, self.group.size())
