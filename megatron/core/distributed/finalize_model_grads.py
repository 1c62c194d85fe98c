# SPDX-License-Identifier: Apache-2.0
"""The end of a step's gradients, before the update: combine replicas, sum what is partial, divide by tokens; then each
module's work at the end of the step."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.collectives import all_reduce, broadcast
from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.placement import Placement, Split
from megatron.core.process_groups_config import Group, ProcessGroupCollection, SingleRankGroup
from megatron.core.timers import Timers


def finalize_model_grads(
    model: Sequence[ModelChunk],
    num_tokens: Tensor | int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
    *,
    timers: Timers | None = None,
) -> None:
    """Combine gradients over the data-parallel replicas, sum partial ones over their axes, finish the modules' step.

    model: this process's pipeline chunks. num_tokens: with calculate_per_token_loss, the tokens that counted on this
    process; 0 before the last stage. The gradients, which are sums then, are divided by the tokens of all processes.
    force_all_reduce: give each replica all gradients, also where they divide the optimizer's state.
    timers: what to time the parts with.

    A gradient is partial where each process saw a part of the tokens (norms under sequence parallelism) or holds a
    copy of the parameter (tied embeddings: first and last stage), or holds whole what others of its axis hold as well
    (keys and values of few query groups); its Placement says so.

    A module that gathers numbers in the forward passes of a step and acts on them before the next one (a router's
    expert biases, scales of FP8, bounds of attention scores) has a method `finish_step(groups)`. It is called at the
    end, at the same point on every process that holds the module, so that it may use collectives; it must not wait for
    the device. Where its class has `finish_steps(modules, groups)`, that is called once for all of them instead.
    """
    groups = pg_collection or ProcessGroupCollection.current()
    timers = timers or Timers(log_level=0)
    with timers("all-grads-sync", 1, barrier=True):
        for chunk in model:
            chunk.finish_grad_sync(force_all_reduce)
    partial: dict[str, list[Tensor]] = defaultdict(list)
    for chunk in model:
        for axis, params in chunk.partial_params.items():
            partial[axis] += [param.main_grad for param in params]  # type: ignore[attr-defined]
    for axis, grads in partial.items():
        group = getattr(groups, axis)
        if group is None or isinstance(group, SingleRankGroup):
            continue
        with timers("embedding-grads-all-reduce" if "embd" in axis else "layernorm-grads-all-reduce", 1):
            # One message for all of them: norms and biases are so small that an all-reduce of each would be nothing but
            # latency.
            flat = torch.cat([grad.flatten() for grad in grads])
            all_reduce(flat, group)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))
    replicated = [(placement, param.main_grad) for chunk in model for placement, param in chunk.replicated_params]  # type: ignore[attr-defined]
    if replicated:
        sum_replicated_grads(replicated, groups)
    if num_tokens is not None:
        _divide_by_tokens(model, num_tokens, groups)
    together: dict[type[Any], list[nn.Module]] = defaultdict(list)
    for module in itertools.chain.from_iterable(chunk.module.modules() for chunk in model):
        # Asked of the class: a miss on the instance goes through nn.Module.__getattr__, which is slow.
        if hasattr(type(module), "finish_steps"):
            together[type(module)].append(module)
        elif hasattr(type(module), "finish_step"):
            module.finish_step(groups)  # type: ignore[operator]
    for kind, modules in together.items():
        kind.finish_steps(modules, groups)


def _divide_by_tokens(
    model_chunks: Sequence[ModelChunk], num_tokens: Tensor | int, groups: ProcessGroupCollection
) -> None:
    device = model_chunks[0].device
    # float64 counts exactly, where float32 rounds from 2^24 tokens on. A copy, because the collectives overwrite it.
    if isinstance(num_tokens, Tensor):
        total = num_tokens.to(device, torch.float64, copy=True)
    else:
        # Stages that count nothing. Written on the device: a copy from the host would make it wait.
        total = torch.full((), num_tokens, dtype=torch.float64, device=device)
    # Only the last stage computes the loss and knows which tokens counted.
    broadcast(total, groups.pp, groups.last_stage)
    all_reduce(total, groups.dp_cp)
    for chunk in model_chunks:
        # Where every token of the step is masked the gradients stay 0 instead of becoming nan.
        chunk.scale_gradients(1.0 / total.clamp(min=1))


def sum_replicated_grads(grads: Iterable[tuple[Placement, Tensor]], groups: ProcessGroupCollection) -> None:
    """Sum, in place, the parts that several shards hold over those shards.

    These are keys and values where tensor-parallel ranks outnumber the query groups: each holder attends with different
    queries, so that its gradient of the common part is a partial sum. The sum over the holders is one all-reduce over
    the full axis, in which every part has a separate place; who does not hold it adds zeros:

        parts        | k0 v0 | k1 v1 |
        rank 0, 1    | dk dv |  0  0 |      afterwards every holder of a part has the same sum, bit for bit
        rank 2, 3    |  0  0 | dk dv |

    grads: placement and gradient (this process's shard) of every parameter, in the same order on all processes.
    """
    by_axis: dict[str, list[tuple[Placement, Split, Tensor]]] = defaultdict(list)
    for placement, grad in grads:
        for split in placement.splits:
            if split.replicated_parts(placement.full_shape[split.dim]):
                by_axis[split.axis].append((placement, split, grad))
    for axis, found in by_axis.items():
        _sum_in_one(found, getattr(groups, axis))


def _sum_in_one(found: list[tuple[Placement, Split, Tensor]], group: Group) -> None:
    """One all-reduce for all parameters."""
    places: list[tuple[Tensor | None, int]] = []  # (the part in this shard's gradient, its elements)
    for placement, split, grad in found:
        elements_per_index = grad.numel() // grad.shape[split.dim]
        for length, start in split.replicated_parts(placement.full_shape[split.dim]):
            part = None if start is None else grad.narrow(split.dim, start, length)
            places.append((part, length * elements_per_index))
    first = found[0][2]
    flat = torch.zeros(sum(numel for _, numel in places), dtype=first.dtype, device=first.device)
    slots = flat.split([numel for _, numel in places])
    for (part, _), slot in zip(places, slots, strict=True):
        if part is not None:
            slot.view(part.shape).copy_(part)
    all_reduce(flat, group)
    for (part, _), slot in zip(places, slots, strict=True):
        if part is not None:
            part.copy_(slot.view(part.shape))
