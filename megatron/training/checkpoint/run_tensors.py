# SPDX-License-Identifier: Apache-2.0
"""The tensors of a run as a checkpoint sees them: parameters and optimizer state by key, each with its place in the
whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from megatron.core.dist_checkpointing.mapping import (
    OPTIMIZER_PREFIX,
    ShardedStateDict,
    ShardedTensor,
    model_state,
)
from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.placement import Placement, get_placement
from megatron.core.stacked_parameters import list_parameters
from megatron.core.tensor_parallel.fp8_products import HasScales
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.training.run import Run


def build_sharded_model_state(run: Run, *, main: bool = False) -> ShardedStateDict:
    """The parameters of this process's pipeline chunks, or its slices of them.

    main: where replicas divide parameters, the memory of the main parameters itself, for a loader that has nothing
    better for them; otherwise copies in the network's dtype.
    """
    return build_sharded_chunk_state(run.model, main=main)


def build_sharded_chunk_state(chunks: Iterable[ModelChunk], *, main: bool = False) -> ShardedStateDict:
    """The same of chunks without a run."""
    starts: dict[str, int] = {}
    held: list[tuple[torch.Tensor, Placement]] = []
    for chunk, parameter, placement in iterate_placed_parameters(chunks):
        data, start = chunk.get_held_part(parameter, main=main)
        held.append((data, placement))
        if start is not None:
            starts[placement.name] = start
    return model_state(held, starts)


def build_sharded_optimizer_state(run: Run) -> ShardedStateDict:
    """The optimizer's tensors that this process keeps: whole shards, or its slices of them."""
    state: ShardedStateDict = run.optimizer.shard_state()
    return state


def build_sharded_fp8_state(run: Run) -> ShardedStateDict:
    """The scales of FP8 products and what they follow from, the same on all processes of a pipeline stage; a run with
    scales that finds none in a checkpoint begins with the operands' scales."""
    return {key: tensor for key, tensor, _ in _list_fp8_state(chunk.module for chunk in run.model)}


def build_sharded_fallbacks(modules: Iterable[nn.Module]) -> ShardedStateDict:
    """Return the part that says which layers multiply in 16 bits: it belongs to the weights, also without an optimizer.
    `recall_fallbacks` applies what was loaded."""
    return {key: tensor for key, tensor, kind in _list_fp8_state(modules) if kind == "fallen_back"}


def _list_fp8_state(modules: Iterable[nn.Module]) -> Iterator[tuple[str, ShardedTensor, str]]:
    """Key, tensor and name of each buffer of FP8 products."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, HasScales):
                layer = find_global_name(module, name.rpartition(".")[0])
                for kind, data in part.named_buffers(recurse=False):
                    key = f"{OPTIMIZER_PREFIX}fp8_{kind}.{layer}"
                    yield key, dataclasses.replace(ShardedTensor.whole(key, data), is_optional=True), kind


def select_tensors(run: Run, *, with_optimizer: bool, with_main: bool = False) -> ShardedStateDict:
    """Return what to load, but for random-number states: with the optimizer's state, or (with_main) with the main
    parameters of it, where they are other memory than the parameters, or the parameters alone."""
    if not with_optimizer and not with_main:
        return build_sharded_model_state(run, main=True)
    state = build_sharded_optimizer_state(run)
    if with_optimizer:
        return build_sharded_model_state(run) | state | build_sharded_fp8_state(run)
    main = {key: tensor for key, tensor in state.items() if tensor.fallback_key is not None}
    return build_sharded_model_state(run) | main


def iterate_placed_parameters(
    chunks: Iterable[ModelChunk],
) -> Iterator[tuple[ModelChunk, torch.nn.Parameter, Placement]]:
    """Yield the parameters, each with its chunk and its placement in the whole model."""
    for chunk in chunks:
        # With --overlap-param-gather a gather may still be under way, and the parameters old.
        chunk.finish_param_sync()
        for name, parameter in list_parameters(chunk.module):
            yield chunk, parameter, get_placement(parameter, name)
