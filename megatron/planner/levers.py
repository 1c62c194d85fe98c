# SPDX-License-Identifier: Apache-2.0
"""Settings that make a run need less memory and train the same model, in the order of what they cost.

The saving of each is the difference of two estimates of memory.py, or a count of what it no longer keeps. Whether the
settings go together with all others of the run is for the caller to ask: here are single changes by name of the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.planner.memory import Workload, estimate_memory

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

_BYTES_PER_SCORE = 2
_INPUT_BYTES = 2
_LOSS_CHUNK = 1024
"""Positions whose logits are computed at once: few enough to be small, enough to keep a GPU busy."""


@dataclass(frozen=True)
class Lever:
    """A change of settings, and what it saves."""

    changes: Mapping[str, Any]
    """Field -> new value."""
    saved_bytes: float
    """On the most loaded process, by the formulas of memory.py; the machine may save more or less."""
    of_activations: bool = True
    """True if all of it are activations; else weights, gradients and optimizer state become fewer."""
    shrinks_tensors: bool = False
    """True if each activation becomes smaller by itself, and not only fewer of them are kept."""
    needs_gpu: bool = False
    """True if what is saved is the memory of a device beside the host."""


def list_levers(
    model: TransformerConfig, replicas: DistributedDataParallelConfig, workload: Workload
) -> Iterator[Lever]:
    """Yield what is not in use yet, from the cheapest in time to the most expensive."""
    now = estimate_memory(model, replicas, workload)
    size = workload.micro_batch_size
    smaller = next((divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0), None)
    if smaller is not None:
        yield Lever({"micro_batch_size": smaller}, now.activations * (1 - smaller / size), shrinks_tensors=True)
    num_replicas = workload.data_parallel_size * model.context_parallel_size
    shards = replicas.use_torch_fsdp2
    if num_replicas > 1 and not (replicas.use_distributed_optimizer or shards):
        # The formula reads this one field of the config.
        divided = estimate_memory(model, dataclasses.replace(replicas, use_distributed_optimizer=True), workload)
        yield Lever({"use_distributed_optimizer": True}, now.weight_and_optimizer - divided.weight_and_optimizer, False)
    if model.tensor_model_parallel_size > 1 and not model.sequence_parallel:
        tokens = _count_tokens(model, workload)
        ranks = model.tensor_model_parallel_size
        # What tensor parallelism alone leaves whole on every rank: ten bytes of each element of hidden states.
        per_layer = 10 * tokens * model.hidden_size * (1 - 1 / ranks)
        yield Lever({"sequence_parallel": True}, per_layer * _count_kept_layers(model, workload))
    positions = _count_positions(model, workload)
    # Zero-bubble schedules keep the gradients of all logits in any case.
    if model.loss_chunk_size is None and positions >= 2 * _LOSS_CHUNK and not model.defers_weight_gradients:
        logits = _INPUT_BYTES * _count_tokens(model, workload) * workload.padded_vocab_size
        logits //= model.tensor_model_parallel_size
        saved = logits * (1 - _LOSS_CHUNK / positions)
        yield Lever({"loss_chunk_size": _LOSS_CHUNK}, saved, shrinks_tensors=True)
    if model.recompute_granularity is None and model.attention_backend in ("unfused", "local"):
        yield Lever({"recompute_granularity": "selective"}, _count_score_bytes(model, workload))
    if model.recompute_granularity != "full":
        inputs = _INPUT_BYTES * _count_tokens(model, workload) * model.hidden_size
        scores = 0 if model.attention_backend == "flash" else _count_score_bytes(model, workload)
        saved = (now.layer_activations - inputs) * _count_kept_layers(model, workload) + scores
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        # Modules belong to the selective granularity.
        yield Lever({**full, "recompute_modules": None}, saved)
    if not (model.fine_grained_activation_offloading or model.cpu_offloading_num_layers or model.compile):
        changes: dict[str, Any] = {
            "fine_grained_activation_offloading": True,
            "offload_modules": ["attn_norm"]
            if model.recompute_granularity == "full"
            else ["core_attn", "attn_proj", *(["moe_act"] if model.num_moe_experts else ["mlp_act"])],
        }
        moved = estimate_memory(dataclasses.replace(model, **changes), replicas, workload).activations_on_host
        yield Lever(changes, moved, needs_gpu=True)
    if not workload.offloaded_state:
        state = estimate_memory(model, replicas, dataclasses.replace(workload, offloaded_state=1.0)).state_on_host
        yield Lever({"optimizer_cpu_offload": True}, state, False, needs_gpu=True)
    if num_replicas > 1 and not shards:
        yield Lever({"use_torch_fsdp2": True}, now.weight_and_optimizer - now.fully_sharded, False)
    if workload.data_parallel_size % 2 == 0:
        for axis in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            yield Lever(
                {axis: 2 * getattr(model, axis)}, now.total / 2, False, shrinks_tensors=axis.startswith("tensor")
            )


def _count_tokens(model: TransformerConfig, workload: Workload) -> int:
    """Tokens of a microbatch on one process."""
    return workload.seq_length // model.context_parallel_size * workload.micro_batch_size


def _count_positions(model: TransformerConfig, workload: Workload) -> int:
    """Positions of a sequence whose hidden states lie on one process."""
    ranks = model.tensor_model_parallel_size if model.sequence_parallel else 1
    return workload.seq_length // model.context_parallel_size // ranks


def _count_kept_layers(model: TransformerConfig, workload: Workload) -> float:
    """Layers of a stage, times the microbatches of which they keep activations at once."""
    stages = model.pipeline_model_parallel_size
    return model.num_layers / stages * min(stages, workload.num_microbatches)


def _count_score_bytes(model: TransformerConfig, workload: Workload) -> float:
    """Attention probabilities of all kept layers, where attention is written out."""
    heads = model.num_attention_heads / model.tensor_model_parallel_size
    pairs = _count_tokens(model, workload) * workload.seq_length
    return _BYTES_PER_SCORE * heads * pairs * _count_kept_layers(model, workload)
