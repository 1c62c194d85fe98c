# SPDX-License-Identifier: Apache-2.0
"""Memory of a training run by formula: parameters with their optimizer state, and activations.

The figures are those that users know from the reference system, in bytes of 16-bit training with float32 main weights
and gradients; they are printed to be compared, and nothing is decided by them. What a process of this program holds is
step_memory.py's to say.

    weights       a matrix is divided by tp, an expert's by ep etp, norms, routers and projections to latent vectors are
                  not; layers by pp. The most loaded stage has the embedding, the output layer where it is the only one,
                  and multi-token prediction, of which the transformer layers count. Biases and learned positions do not
                  count. 18 bytes each (weight 2, gradient 4, main weight 4, moments 8); with the distributed optimizer
                  6 + 12 / replicas, of which there are dp cp, of experts fewer.
    activations   with sequence parallelism s b h (18 + 4 f / h) / tp a layer, else s b h (10 + 24 / tp): attention
                  scores are not kept (Korthikanti et al., 2022, table 2, which the second form gives for f = 4 h).
                  The first form only where attention is recomputed, too (--recompute-granularity selective), although
                  flash attention never keeps its scores; the layers of min(pp, microbatches) microbatches under way;
                  the ends. What is offloaded, recomputed whole or in 8 bits counts in full.

s: tokens of a sequence on one process, b: microbatch, h: hidden size, f: width of the MLP, v: padded vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.plan.branch_kind import Counts, count_connection, count_norm
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import LayerPlan
from megatron.core.plan.read import read_plan

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

_MEGABYTE = 1024 * 1024
_BILLION = 10**9
_TOKEN_NUMBER_BYTES = 8
_ALLOCATOR_SHARE = 1.05  # of the second form, which counts tensors one by one


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of the whole model."""

    decoder: Counts
    """All layers and the final norm."""
    prediction: Counts
    """Transformer layers of multi-token prediction."""
    embedding: int
    """One table, padded."""
    output_layer: int
    """0 where it shares the embedding."""

    @property
    def total(self) -> int:
        """Elements of the whole model."""
        return self.decoder.sum_of_all + self.prediction.sum_of_all + self.embedding + self.output_layer

    @property
    def idle(self) -> int:
        """Parameters that do not work on a given token."""
        return self.decoder.idle + self.prediction.idle


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Work of a process: the facts that the memory of a run depends on, in addition to the configs of its model and its
    replicas."""

    padded_vocab_size: int
    """Rows of the embedding over all ranks, in tokens."""
    has_output_layer: bool
    """True if the output layer has a separate matrix instead of sharing the embedding's."""
    seq_length: int
    """Tokens of a whole sequence, over all context-parallel ranks."""
    micro_batch_size: int
    """Sequences of one forward pass."""
    num_microbatches: int
    """Microbatches of one step on one model replica."""
    data_parallel_size: int
    """Model replicas with different data; context-parallel ranks share them."""
    offloaded_state: float = 0.0
    """Share of the optimizer's state that is on the host."""
    outer_bytes: int = 0
    """Of the outer state of a weight, where several sites exchange theirs (core/many_sites/)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the most loaded process, and the counts that lead to them."""

    parameters: ParameterCounts
    most_loaded_shard: float
    """Parameters (elements, not bytes) on the first pipeline stage."""
    other_shards: float
    """Parameters on a stage without embedding."""
    weight_and_optimizer: float
    """Bytes of weights, gradients and optimizer state."""
    layer_activations: float
    """Bytes of one layer and one microbatch."""
    activations: float
    """Bytes of all microbatches that are under way at once."""
    microbatches_in_flight: float | None
    """Microbatches whose activations are saved for backward at once, over all stages; None without pipeline stages."""
    interleaving_penalty: float | None
    """Activations with virtual stages, in units of those without; None where there are none."""

    @property
    def total(self) -> float:
        """Bytes of weights, gradients, optimizer state and activations together."""
        return self.weight_and_optimizer + self.activations


def count_parameters(model: TransformerConfig, *, padded_vocab_size: int, untied: bool) -> ParameterCounts:
    """Parameters of a GPT model with `padded_vocab_size` rows of embedding; untied: with a separate output layer."""
    plan, embedding = read_plan(model), padded_vocab_size * model.hidden_size
    return ParameterCounts(
        decoder=count_layers(model, plan.decoder, has_final_norm=True),
        prediction=count_layers(model, plan.prediction),
        embedding=embedding,
        output_layer=embedding if untied else 0,
    )


def count_layers(model: TransformerConfig, layers: Iterable[LayerPlan], *, has_final_norm: bool = False) -> Counts:
    """Parameters of these layers."""
    branches = [branch for layer in layers for branch in layer.branches]
    counts = [find_kind(branch.kind).count(model, branch) for branch in branches]
    counts += [count_connection(model)] * len(branches)
    # After the last layer a norm, and the sum of the streams where it is learned.
    of_end = count_norm(model) + model.enable_hyper_connections * model.num_residual_streams * model.stream_width
    return Counts.sum([*counts, Counts(replicated=of_end if has_final_norm else 0)])


def estimate_memory(
    model: TransformerConfig,
    replicas: DistributedDataParallelConfig,
    workload: Workload,
) -> MemoryEstimate:
    """Bytes that the most loaded process of a run holds; the head of this file says what counts, and the sources.

    model: its shape and layout. replicas: whether they divide the optimizer's state among them.
    """
    is_divided = _is_sequence_divided(model)
    stages, ranks = model.pipeline_model_parallel_size, model.tensor_model_parallel_size
    counts = count_parameters(model, padded_vocab_size=workload.padded_vocab_size, untied=workload.has_output_layer)
    decoder, prediction = counts.decoder, counts.prediction
    dense = (decoder.matrices / ranks + decoder.replicated) / stages
    expert_ranks = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or ranks)
    experts = decoder.expert_matrices / expert_ranks / stages
    further_experts = prediction.expert_matrices / expert_ranks
    # The first stage has the embedding, the last one the output layer; the first is the fuller of the two, because more
    # microbatches wait there.
    ends = (counts.embedding + (counts.output_layer if stages == 1 else 0)) / ranks
    ends += prediction.matrices / ranks + prediction.replicated
    num_replicas = workload.data_parallel_size * model.context_parallel_size
    # Experts take their ranks from data, context and tensor parallelism together, which leaves fewer replicas.
    num_expert_replicas = num_replicas * ranks / expert_ranks
    tokens = workload.seq_length // model.context_parallel_size * workload.micro_batch_size
    divides = replicas.use_distributed_optimizer
    in_flight = _count_layers_in_flight(model, workload.num_microbatches)
    layer = _estimate_layer_activations(model, tokens, is_divided)
    return MemoryEstimate(
        parameters=counts,
        most_loaded_shard=dense + experts + further_experts + ends,
        other_shards=dense + experts,
        weight_and_optimizer=(dense + ends) * _count_parameter_bytes(num_replicas, divides)
        + (experts + further_experts) * _count_parameter_bytes(num_expert_replicas, divides),
        layer_activations=layer,
        activations=_estimate_activations(model, layer, tokens, workload, is_divided),
        microbatches_in_flight=None if stages == 1 else stages * in_flight,
        interleaving_penalty=in_flight if model.virtual_pipeline_model_parallel_size else None,
    )


def _count_parameter_bytes(replicas: float, distributed_optimizer: bool) -> float:
    """Bytes of one parameter with its gradient and optimizer state."""
    # Weight (2) and gradient (4) are whole everywhere; main weight (4) and moments (8) are divided.
    return 6 + 12 / replicas if distributed_optimizer else 18


def _is_sequence_divided(model: TransformerConfig) -> bool:
    """Return whether activations have the first form, in which all of a layer is divided."""
    return model.sequence_parallel and model.recompute_granularity == "selective"


def _estimate_layer_activations(model: TransformerConfig, tokens: int, is_divided: bool) -> float:
    """Bytes one layer keeps of one microbatch for its backward pass."""
    assert model.ffn_hidden_size is not None
    hidden, ranks = model.hidden_size, model.tensor_model_parallel_size
    if is_divided:
        return tokens * (18 * hidden + 4 * model.ffn_hidden_size) / ranks
    return tokens * hidden * (10 + 24 / ranks)


def _count_layers_in_flight(model: TransformerConfig, num_microbatches: int) -> float:
    """Microbatches of the first stage's layers that are kept at once, in units of all layers of the model."""
    stages, chunks = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size
    side_by_side = model.overlap_moe_expert_parallel_comm
    if chunks:
        # The longer warm-up of the interleaved schedule keeps more than one microbatch for each stage.
        return 1 + (stages - 1 + side_by_side) / (stages * chunks)
    # 1F1B: the first stage is as many microbatches ahead as there are stages, or has all there are; twice as many where
    # backwards overlap with forwards.
    return min(2.0 if side_by_side else 1.0, num_microbatches / stages)


def _estimate_activations(
    model: TransformerConfig, layer: float, tokens: int, workload: Workload, is_divided: bool
) -> float:
    """Bytes of the first stage, or of everything where it is the only one."""
    hidden, stages, ranks = model.hidden_size, model.pipeline_model_parallel_size, model.tensor_model_parallel_size
    divided = ranks if is_divided else 1
    # Times the stages, because 1.0 layers in flight stands for that many microbatches.
    embedding = stages * tokens * (_TOKEN_NUMBER_BYTES + hidden) / divided
    # The formula's layer has two branches; letters have one each.
    kept = embedding + layer * sum(len(planned.branches) for planned in read_plan(model).decoder) / 2
    kept *= _count_layers_in_flight(model, workload.num_microbatches)
    if stages == 1:
        if is_divided:
            # 4 bytes an element here and 2 in the other form, as the reference system counts: its figures are what we
            # give.
            kept += 4 * tokens * (hidden + workload.padded_vocab_size) / ranks
        else:
            kept += 2 * tokens * (hidden + workload.padded_vocab_size / ranks)
    return kept if is_divided else kept * _ALLOCATOR_SHARE


def describe_memory(memory: MemoryEstimate, model: TransformerConfig) -> str:
    """The estimate, made as the reference system makes it, in the lines that users know from there; MB are 1024 x 1024
    bytes."""
    counts = memory.parameters
    form = "" if _is_sequence_divided(model) else " (precise, without SP)"
    block = counts.decoder.sum_of_all
    further = f"Number of parameters in mtp block in billions: {counts.prediction.sum_of_all / _BILLION:.2f}"
    lines = [
        f"Number of parameters in transformer block in billions: {block / _BILLION:.2f}",
        f"Number of active parameters in transformer block in billions: {(block - counts.decoder.idle) / _BILLION:.2f}",
        *([] if model.mtp_num_layers is None else [further]),
        "Number of parameters in embedding layers in billions: "
        f"{(counts.embedding + counts.output_layer) / _BILLION:.2f}",
        f"Total number of parameters in billions: {counts.total / _BILLION:.2f}",
        f"Total number of active parameters in billions: {(counts.total - counts.idle) / _BILLION:.2f}",
        f"Number of parameters in most loaded shard in billions: {memory.most_loaded_shard / _BILLION:.4f}",
    ]
    if model.pipeline_model_parallel_size > 1:
        lines.append(f"Number of parameters in other shards in billions: {memory.other_shards / _BILLION:.4f}")
    per_layer = memory.layer_activations / _MEGABYTE
    lines.append(f"Activation memory footprint per transformer layer{form}: {per_layer:.1f} MB")
    if memory.interleaving_penalty is not None:
        lines.append(f"Memory penalty from interleaved schedule: {memory.interleaving_penalty:.2f}")
    if memory.microbatches_in_flight is not None:
        lines.append(f"Number of in-flight microbatches: {math.ceil(memory.microbatches_in_flight)}")
    lines.append(
        f"Theoretical memory footprints: weight and optimizer={memory.weight_and_optimizer / _MEGABYTE:.2f} MB, "
        f"activation={memory.activations / _MEGABYTE:.2f} MB, total={memory.total / _MEGABYTE:.2f} MB"
    )
    return "\n".join(lines)
