"""The end of a step's gradients, before the update: combine replicas, sum what is partial, divide by tokens; then each
module's own end of the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce, broadcast
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.replicated_grads import sum_replicated_grads
from megatron.core.finish_step import finish_step
from megatron.core.placement import Placement, placement_of
from megatron.core.process_groups_config import ProcessGroupCollection, SingleRankGroup
from megatron.core.timers import Timers


def finalize_model_grads(
    model_chunks: Sequence[DistributedDataParallel],
    num_tokens: Tensor | int | None = None,
    *,
    pg_collection: ProcessGroupCollection | None = None,
    timers: Timers | None = None,
) -> None:
    """Combine gradients over the data-parallel replicas, sum partial ones over their axes, finish the modules' step.

    num_tokens: with calculate_per_token_loss, the tokens that counted on this process; 0 before the last stage. The
    gradients, which are sums then, are divided by the tokens of all processes.

    A gradient is partial where each process saw a part of the tokens (norms under sequence parallelism) or holds a
    copy of the parameter (tied embeddings: first and last stage), or holds whole what others of its axis hold as well
    (keys and values of few query groups); its Placement says so. timers: what to time the parts with.

    Modules that act once per step (`FinishesStep`: a router moves its expert biases) do so at the end.
    """
    groups = pg_collection or ProcessGroupCollection.current()
    timers = timers or Timers(log_level=0)
    with timers("all-grads-sync", 1, barrier=True):
        for chunk in model_chunks:
            chunk.finish_grad_sync()
    for axis, grads in _partial_grads(model_chunks).items():
        group = getattr(groups, axis)
        if group is None or isinstance(group, SingleRankGroup):
            continue
        with timers("embedding-grads-all-reduce" if "embd" in axis else "layernorm-grads-all-reduce", 1):
            flat = torch.cat([grad.flatten() for grad in grads])
            all_reduce(flat, group)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))
    sum_replicated_grads(_placed_grads(model_chunks), groups)
    if num_tokens is not None:
        _divide_by_tokens(model_chunks, num_tokens, groups)
    finish_step((chunk.module for chunk in model_chunks), groups)


def _divide_by_tokens(
    model_chunks: Sequence[DistributedDataParallel], num_tokens: Tensor | int, groups: ProcessGroupCollection
) -> None:
    device = model_chunks[0].flat_buffers[0].grad_data.device
    total = torch.as_tensor(num_tokens).to(device, torch.float64, copy=True)
    broadcast(total, groups.pp, groups.last_stage)
    all_reduce(total, groups.dp_cp)
    for chunk in model_chunks:
        chunk.scale_gradients(1.0 / total.clamp(min=1))


def _placed_grads(model_chunks: Sequence[DistributedDataParallel]) -> Iterator[tuple[Placement, Tensor]]:
    for chunk in model_chunks:
        for name, param in chunk.module.named_parameters():
            if param.requires_grad:
                yield placement_of(param, name), param.main_grad  # type: ignore[attr-defined]


def _partial_grads(model_chunks: Sequence[DistributedDataParallel]) -> dict[str, list[Tensor]]:
    """Gradients to sum, by axis."""
    by_axis: dict[str, list[Tensor]] = defaultdict(list)
    for chunk in model_chunks:
        for name, param in chunk.module.named_parameters():
            if param.requires_grad:
                for axis in placement_of(param, name).partial_grad_axes:
                    by_axis[axis].append(param.main_grad)  # type: ignore[attr-defined]
    return dict(by_axis)
