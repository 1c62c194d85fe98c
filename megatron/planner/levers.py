# SPDX-License-Identifier: Apache-2.0
"""Settings that make a run need less memory and train the same model, in the order of what they cost.

Here are single changes by name of the field. Whether they go together with all other settings of the run is for the
caller to ask, and what they save, too: the difference of two predictions of step_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.planner.memory import Workload

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

_LOSS_CHUNK = 1024
"""Positions whose logits are computed at once: few enough to be small, enough to keep a GPU busy."""


@dataclass(frozen=True)
class Lever:
    """A change of settings."""

    changes: Mapping[str, Any]
    """Field -> new value."""
    shrinks_tensors: bool = False
    """True if each activation becomes smaller by itself, and not only fewer of them are kept."""
    needs_gpu: bool = False
    """True if the memory saved is a device's, not the host's."""


def list_levers(
    model: TransformerConfig, replicas: DistributedDataParallelConfig, workload: Workload
) -> Iterator[Lever]:
    """Yield what is not in use yet, from the cheapest in time to the most expensive."""
    size = workload.micro_batch_size
    smaller = next((divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0), None)
    if smaller is not None:
        yield Lever({"micro_batch_size": smaller}, shrinks_tensors=True)
    num_replicas = workload.data_parallel_size * model.context_parallel_size
    shards = replicas.use_torch_fsdp2
    if num_replicas > 1 and not (replicas.use_distributed_optimizer or shards):
        yield Lever({"use_distributed_optimizer": True})
    if model.tensor_model_parallel_size > 1 and not model.sequence_parallel:
        yield Lever({"sequence_parallel": True})
    if model.loss_chunk_size is None and _count_positions(model, workload) >= 2 * _LOSS_CHUNK:
        yield Lever({"loss_chunk_size": _LOSS_CHUNK}, shrinks_tensors=True)
    if model.recompute_granularity is None and model.attention_backend in ("unfused", "local"):
        yield Lever({"recompute_granularity": "selective"})
    if model.recompute_granularity != "full":
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        # Modules belong to the selective granularity.
        yield Lever({**full, "recompute_modules": None})
    if not (model.fine_grained_activation_offloading or model.cpu_offloading_num_layers or model.compile):
        inner = ["core_attn", "attn_proj", "moe_act" if model.num_moe_experts else "mlp_act"]
        modules = ["attn_norm"] if model.recompute_granularity == "full" else inner
        yield Lever({"fine_grained_activation_offloading": True, "offload_modules": modules}, needs_gpu=True)
    if not workload.offloaded_state:
        yield Lever({"optimizer_cpu_offload": True}, needs_gpu=True)
    if num_replicas > 1 and not shards:
        yield Lever({"use_torch_fsdp2": True})
    if workload.data_parallel_size % 2 == 0:
        for axis in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            yield Lever({axis: 2 * getattr(model, axis)}, shrinks_tensors=axis.startswith("tensor"))


def _count_positions(model: TransformerConfig, workload: Workload) -> int:
    """Positions of a sequence whose hidden states are on one process."""
    ranks = model.tensor_model_parallel_size if model.sequence_parallel else 1
    return workload.seq_length // model.context_parallel_size // ranks
