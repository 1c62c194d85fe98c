# SPDX-License-Identifier: Apache-2.0
"""get_forward_backward_func: upstream's entry to the schedules and the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from megatron.core.pipeline_parallel.executor import Executor, ForwardStep, compute_activation_shape
from megatron.core.pipeline_parallel.programs import Pipeline
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: ProcessGroupCollection | None = None,
) -> Callable[..., list[Any]]:
    """The function that runs one step's microbatches; the same for every pipeline, since the schedule is data.

    pp_size, vp_size: part of upstream's signature; the process groups and the number of chunks say both.
    schedule_pg_collection: the groups of a call that hands over none.
    """
    if schedule_pg_collection is None:
        return forward_backward
    return partial(forward_backward, pg_collection=schedule_pg_collection)


@take_arguments(
    "* first_val_step=... adjust_tensor_shapes_fn=None p2p_communicator=None force_all_reduce=False",
    "stages exchange what the model's config and its groups say",
)
def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[Any]:
    """Run all microbatches of a step; returns the loss dict of each, where the last layers are.

    seq_length, micro_batch_size: shape of what stages exchange. decoder_seq_length: takes the place of seq_length.
    A `finalize_model_grads_func` set on the model's config is called after the last backward, and a `grad_scale_func`
    set there multiplies each loss before its backward, as upstream.
    """
    groups = pg_collection or ProcessGroupCollection.current()
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    # Chunks may be wrapped, and a wrapper's config may be missing: the first one that is there counts for all.
    config = next((found for found in map(_find_config, chunks) if found is not None), None)
    shape = None
    # One process exchanges nothing; and a model that is not a transformer has no hidden size to ask for.
    if groups.pp.size() > 1:
        shape = compute_activation_shape(config, groups, decoder_seq_length or seq_length, micro_batch_size)
    executor = _executor_for(chunks, groups, config)
    # Set again in every step: the optimizer may be built, or replaced, after the executor.
    executor.grad_scale_func = getattr(config, "grad_scale_func", None)
    actions = executor.pipeline.program(groups.pp.rank(), num_microbatches, forward_only)
    outputs = executor.run(actions, forward_step_func, data_iterator, forward_only, collect_non_loss_data, shape)
    # Once per step and after the last backward: it sums over ranks, which every rank must enter equally often.
    finalize = getattr(config, "finalize_model_grads_func", None)
    if finalize is not None and not forward_only:
        per_token = getattr(config, "calculate_per_token_loss", False)
        finalize(chunks, outputs.num_tokens if per_token else None, pg_collection=groups)
    return outputs.loss_dicts


class _Kept:
    """The executor of a model, kept on its first chunk from one step to the next; a copy of the model makes another."""

    def __init__(self, executor: Executor | None = None) -> None:
        self.executor = executor

    def __reduce__(self) -> Any:
        return _Kept, ()


def _executor_for(chunks: list[nn.Module], groups: ProcessGroupCollection, config: Any) -> Executor:
    """Return the executor of the last step where chunks, groups and pipeline are still the same: with NCCL a new one
    would connect the stages again, and each looks through all modules for auxiliary losses."""
    kept = chunks[0].__dict__.get("_pipeline_executor")
    executor = kept.executor if isinstance(kept, _Kept) else None
    if (
        executor is None
        or executor.groups != groups
        or [*map(id, executor.chunks)] != [*map(id, chunks)]
        or executor.pipeline != Pipeline.from_config(config, groups, len(chunks))
    ):
        executor = Executor(chunks, groups, config)
        chunks[0].__dict__["_pipeline_executor"] = _Kept(executor)
    executor.config = config
    return executor


def _find_config(chunk: nn.Module) -> Any:
    return getattr(chunk, "config", None) or getattr(getattr(chunk, "module", None), "config", None)
