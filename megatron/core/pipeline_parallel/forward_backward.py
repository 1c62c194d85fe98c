"""get_forward_backward_func: upstream's door to the schedules and the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from megatron.core.pipeline_parallel.executor import Executor, ForwardStep, activation_shape
from megatron.core.process_groups_config import ProcessGroupCollection


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """The function that runs one step's microbatches; the same for every pipeline, since the schedule is data.

    pp_size, vp_size: part of upstream's signature; the process groups and the number of chunks say both.
    """
    return forward_backward


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
    A `finalize_model_grads_func` set on the model's config is called after the last backward, as upstream.
    """
    groups = pg_collection or ProcessGroupCollection.current()
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    config = next((found for found in map(_config_of, chunks) if found is not None), None)
    shape = None
    if groups.pp.size() > 1:
        shape = activation_shape(config, groups, decoder_seq_length or seq_length, micro_batch_size)
    executor = Executor(chunks, groups, config, activation_shape=shape)
    actions = executor.pipeline.program(groups.pp.rank(), num_microbatches, forward_only)
    outputs = executor.run(actions, forward_step_func, data_iterator, forward_only, collect_non_loss_data)
    finalize = getattr(config, "finalize_model_grads_func", None)
    if finalize is not None and not forward_only:
        per_token = getattr(config, "calculate_per_token_loss", False)
        finalize(chunks, outputs.num_tokens if per_token else None, pg_collection=groups)
    return outputs.loss_dicts


def _config_of(chunk: nn.Module) -> Any:
    return getattr(chunk, "config", None) or getattr(getattr(chunk, "module", None), "config", None)
