# SPDX-License-Identifier: Apache-2.0
"""Memory of a training run by formula: parameters with their optimizer state, and activations.

The figures are those that users know from the reference system, in bytes of 16-bit training with float32 main weights
and gradients. What a process really holds is measured by benchmarks/memory.py.

    weights       a matrix is divided by tp, an expert's by ep etp, norms, routers and projections to latent vectors are
                  not; layers by pp. The most loaded stage has the embedding, the output layer where it is the only one,
                  and multi-token prediction, of which the transformer layers count. Biases and learned positions do not
                  count. 18 bytes each (weight 2, gradient 4, main weight 4, moments 8); with the distributed optimizer
                  6 + 12 / replicas, of which there are dp cp, of experts fewer.
    activations   with sequence parallelism s b h (18 + 4 f / h) / tp a layer, else s b h (10 + 24 / tp): attention
                  scores are not kept (Korthikanti et al., 2022, table 2, which the second form gives for f = 4 h);
                  the layers of min(pp, microbatches) microbatches under way; the ends. Of a layer in FP8 the inputs
                  of the projection to queries, keys and values (h), and of both layers of the MLP (h, f), take one
                  byte a value and their scales, instead of two.

    offloaded     what is on the host does not count: of the optimizer's 12 bytes of a parameter the fraction that is
                  named; of activations, in 16 bits, the elements in docs/memory.md, but never more than the above,
                  or all of so many of a stage's layers.

s: tokens of a sequence on one process, b: microbatch, h: hidden size, f: width of the MLP, v: padded vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.transformer.layer_patterns import has_experts

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

_MEGABYTE = 1024 * 1024
_BILLION = 10**9
_TOKEN_NUMBER_BYTES = 8
_BYTES_PER_ELEMENT = 2
_ALLOCATOR_SHARE = 1.05  # of the form without sequence parallelism, which counts tensors one by one


@dataclass(frozen=True)
class LayerCounts:
    """Elements of some layers."""

    layer_matrices: int
    """Matrices of attention, dense MLPs and shared experts."""
    expert_matrices: int
    """Matrices of all experts but shared ones."""
    active_expert_matrices: int
    """Matrices of the experts that work on one token."""
    expert_projections: int
    """Projections to the latent vectors that experts work on, and back (--moe-latent-size): a part of `replicated`."""
    replicated: int
    """Norms, routers and projections to latent vectors, which tensor parallelism does not divide."""

    @property
    def sum_of_all(self) -> int:
        """Elements of all kinds."""
        return self.layer_matrices + self.expert_matrices + self.replicated

    @property
    def idle(self) -> int:
        """What does not work on a given token."""
        return self.expert_matrices - self.active_expert_matrices


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of the whole model."""

    decoder: LayerCounts
    """All layers and the final norm."""
    prediction: LayerCounts
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
        """What does not work on a given token."""
        return self.decoder.idle + self.prediction.idle


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a process works on: what the memory of a run depends on beside the configs of its model and its replicas."""

    padded_vocab_size: int
    """Rows of the embedding over all ranks, in tokens."""
    has_output_layer: bool
    """The output layer has a matrix of its own instead of sharing the embedding's."""
    seq_length: int
    """Tokens of a whole sequence, over all context-parallel ranks."""
    micro_batch_size: int
    """Sequences of one forward pass."""
    num_microbatches: int
    """Microbatches of one step on one model replica."""
    data_parallel_size: int
    """Model replicas with data of their own; context-parallel ranks share them."""
    offloaded_state: float = 0.0
    """Share of the optimizer's state that is on the host."""


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
    fully_sharded: float
    """The same where all three are divided over the replicas, as with FSDP2."""
    layer_activations: float
    """Bytes of one layer and one microbatch."""
    activations: float
    """Bytes of all microbatches that are under way at once."""
    microbatches_in_flight: float | None
    """Microbatches whose activations wait for backward at once, over all stages; None without pipeline stages."""
    interleaving_penalty: float | None
    """Activations with virtual stages, in units of those without; None where there are none."""

    state_on_host: float = 0.0
    """Bytes of optimizer state that are no part of weight_and_optimizer."""
    activations_on_host: float = 0.0
    """Bytes of activations that are no part of `activations`."""

    @property
    def total(self) -> float:
        """Bytes of weights, gradients, optimizer state and activations together."""
        return self.weight_and_optimizer + self.activations


def count_parameters(model: TransformerConfig, *, padded_vocab_size: int, untied: bool) -> ParameterCounts:
    """Parameters of a GPT model with `padded_vocab_size` rows of embedding; untied: with an output layer of its own."""
    first_further = model.num_layers + 1
    embedding = padded_vocab_size * model.hidden_size
    return ParameterCounts(
        decoder=count_layers(model, range(1, first_further), has_final_norm=True),
        prediction=count_layers(model, range(first_further, first_further + model.count_layers_with_weights())),
        embedding=embedding,
        output_layer=embedding if untied else 0,
    )


def count_layers(model: TransformerConfig, numbers: range, *, has_final_norm: bool = False) -> LayerCounts:
    """Parameters of the transformer layers with these numbers, counted from 1; those of multi-token prediction follow
    the decoder's."""
    assert model.ffn_hidden_size is not None
    hidden, layers = model.hidden_size, len(numbers)
    attention, to_latents = count_attention(model)
    matrices = 3 if model.gated_linear_unit else 2
    width_of_one = matrices * hidden  # matrices of an MLP with one inner channel
    width_of_experts = matrices * model.expert_channels
    moe_layers = sum(has_experts(model, number) for number in numbers)
    experts = model.num_moe_experts or 0
    projections = 2 * moe_layers * hidden * (model.moe_latent_size or 0)
    shared = moe_layers * (model.moe_shared_expert_intermediate_size or 0)
    # LayerNorm has a bias beside the weight, RMSNorm has none.
    norm = (2 if model.normalization == "LayerNorm" else 1) * hidden
    return LayerCounts(
        layer_matrices=layers * attention + width_of_one * ((layers - moe_layers) * model.ffn_hidden_size + shared),
        expert_matrices=moe_layers * experts * width_of_experts * model.moe_ffn_hidden_size,
        active_expert_matrices=moe_layers * model.moe_router_topk * width_of_experts * model.moe_ffn_hidden_size,
        expert_projections=projections,
        replicated=(2 * layers + has_final_norm) * norm
        + moe_layers * hidden * experts
        + layers * to_latents
        + projections,
    )


def count_attention(model: TransformerConfig) -> tuple[int, int]:
    """Elements of one layer's attention: of the matrices that tensor parallelism divides, and of what it does not.

    The second are the projections to latent vectors and, as the reference system counts, a norm of each.
    """
    hidden, heads = model.hidden_size, model.num_attention_heads
    queries, output = heads * model.query_width, heads * model.value_width * hidden
    if not model.multi_latent_attention:
        assert model.num_query_groups is not None
        gates = queries if model.attention_output_gate else 0
        return hidden * (queries + gates + 2 * model.num_query_groups * model.query_width) + output, 0
    to_heads = model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
    to_latents = model.kv_lora_rank * (hidden + 1) + hidden * model.qk_pos_emb_head_dim
    if model.q_lora_rank is None:
        return hidden * queries + to_heads + output, to_latents
    return model.q_lora_rank * queries + to_heads + output, to_latents + model.q_lora_rank * (hidden + 1)


def estimate_memory(
    model: TransformerConfig, replicas: DistributedDataParallelConfig, workload: Workload
) -> MemoryEstimate:
    """Bytes that the most loaded process of a run holds; the head of this file says what counts, and the sources.

    model: its shape and layout. replicas: whether they divide the optimizer's state among them.
    """
    stages, ranks = model.pipeline_model_parallel_size, model.tensor_model_parallel_size
    counts = count_parameters(model, padded_vocab_size=workload.padded_vocab_size, untied=workload.has_output_layer)
    decoder, prediction = counts.decoder, counts.prediction
    dense = (decoder.layer_matrices / ranks + decoder.replicated) / stages
    expert_ranks = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or ranks)
    experts = decoder.expert_matrices / expert_ranks / stages
    further_experts = prediction.expert_matrices / expert_ranks
    # The first stage has the embedding, the last one the output layer; the first is the fuller of the two, because more
    # microbatches wait there.
    ends = (counts.embedding + (counts.output_layer if stages == 1 else 0)) / ranks
    ends += prediction.layer_matrices / ranks + prediction.replicated
    num_replicas = workload.data_parallel_size * model.context_parallel_size
    # Experts take their ranks from data, context and tensor parallelism together, which leaves fewer replicas.
    num_expert_replicas = num_replicas * ranks / expert_ranks
    tokens = workload.seq_length // model.context_parallel_size * workload.micro_batch_size
    divides = replicas.use_distributed_optimizer
    in_flight = _count_layers_in_flight(model, workload.num_microbatches)
    layer = _estimate_layer_activations(model, tokens) - _count_spared_by_rounding(model, tokens)
    kept = _estimate_activations(model, layer, tokens, workload)
    on_host = _estimate_layer_on_host(model, layer, tokens) * model.num_layers * in_flight
    # 12 of the bytes of a parameter are the optimizer's.
    state_on_host = workload.offloaded_state * (
        (dense + ends) * 12 / (num_replicas if divides else 1)
        + (experts + further_experts) * 12 / (num_expert_replicas if divides else 1)
    )
    return MemoryEstimate(
        parameters=counts,
        most_loaded_shard=dense + experts + further_experts + ends,
        other_shards=dense + experts,
        weight_and_optimizer=(dense + ends) * _count_parameter_bytes(num_replicas, divides)
        + (experts + further_experts) * _count_parameter_bytes(num_expert_replicas, divides)
        - state_on_host,
        fully_sharded=(dense + ends) * _count_parameter_bytes(1, False) / num_replicas
        + (experts + further_experts) * _count_parameter_bytes(1, False) / num_expert_replicas,
        layer_activations=layer,
        activations=kept - on_host,
        state_on_host=state_on_host,
        activations_on_host=on_host,
        microbatches_in_flight=None if stages == 1 else stages * in_flight,
        interleaving_penalty=in_flight if model.virtual_pipeline_model_parallel_size else None,
    )


def _count_parameter_bytes(replicas: float, distributed_optimizer: bool) -> float:
    """Bytes of one parameter with its gradient and optimizer state."""
    # Weight (2) and gradient (4) are whole everywhere; main weight (4) and moments (8) are divided.
    return 6 + 12 / replicas if distributed_optimizer else 18


def _estimate_layer_activations(model: TransformerConfig, tokens: int) -> float:
    """Bytes one layer keeps of one microbatch for its backward pass."""
    assert model.ffn_hidden_size is not None
    hidden, ranks = model.hidden_size, model.tensor_model_parallel_size
    if model.sequence_parallel:
        return tokens * (18 * hidden + 4 * model.ffn_hidden_size) / ranks
    return tokens * hidden * (10 + 24 / ranks)


def _count_spared_by_rounding(model: TransformerConfig, tokens: int) -> float:
    """Bytes that one layer spares where inputs wait in 8 bits; on average, where some layers stay in 16."""
    if model.rounded_input_bytes is None:
        return 0.0
    assert model.ffn_hidden_size is not None
    ranks = model.tensor_model_parallel_size
    of_column_layers = 2 * model.hidden_size / (ranks if model.sequence_parallel else 1)
    share = sum(model.is_fp8_layer(number + 1) for number in range(model.num_layers)) / model.num_layers
    values = tokens * (of_column_layers + model.ffn_hidden_size / ranks) * share
    return values * (2 - model.rounded_input_bytes)


def _estimate_layer_on_host(model: TransformerConfig, layer: float, tokens: int) -> float:
    """Bytes of a layer's activations, on the average over a stage's layers, that wait on the host."""
    if model.cpu_offloading_num_layers:
        return layer * min(1.0, model.cpu_offloading_num_layers * model.pipeline_model_parallel_size / model.num_layers)
    if not model.fine_grained_activation_offloading:
        return 0.0
    # What is recomputed is not kept; what is left of a layer that is recomputed whole is its input.
    is_selective = model.recompute_granularity == "selective"
    recomputed = set(model.recompute_modules or ()) if is_selective else set()
    ranks = model.tensor_model_parallel_size
    hidden = tokens * model.hidden_size / (ranks if model.sequence_parallel else 1)
    heads, inner = model.num_attention_heads, model.ffn_hidden_size or 0
    groups = heads if model.multi_latent_attention else (model.num_query_groups or heads)
    # The inputs of products that wait in 8 bits, in units of 16-bit ones.
    rounded = (model.rounded_input_bytes or _BYTES_PER_ELEMENT) / _BYTES_PER_ELEMENT
    sides = (2 if model.gated_linear_unit else 1) + ("mlp_act" not in recomputed) * rounded
    rows = tokens * model.moe_router_topk
    expert_sides = (2 if model.gated_linear_unit else 1) + 2 * ("moe_act" not in recomputed)
    experts = sum(has_experts(model, number) for number in range(1, model.num_layers + 1)) / model.num_layers
    elements = {
        "attn_norm": hidden,
        "qkv_linear": 0 if "layernorm" in recomputed else hidden * rounded,
        "core_attn": tokens * (heads * model.query_width + groups * (model.query_width + model.value_width)) / ranks,
        "attn_proj": tokens * heads * model.value_width / ranks,
        "mlp_norm": hidden,
        "mlp_fc1": (1 - experts) * (0 if "layernorm" in recomputed else hidden * rounded),
        "mlp_act": (1 - experts) * (0 if "mlp" in recomputed else sides * tokens * inner / ranks),
        "expert_fc1": experts * (0 if "moe" in recomputed else rows * model.expert_channels),
        "moe_act": experts * (0 if "moe" in recomputed else expert_sides * rows * (model.moe_ffn_hidden_size or 0)),
    }
    number = _BYTES_PER_ELEMENT * sum(elements[part] for part in set(model.offload_modules))
    return model.activation_offload_fraction * min(number, layer)


def _count_layers_in_flight(model: TransformerConfig, num_microbatches: int) -> float:
    """Microbatches of the first stage's layers that are kept at once, in units of all layers of the model."""
    stages, chunks = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size
    side_by_side = model.overlap_moe_expert_parallel_comm
    if chunks:
        # The longer warm-up of the interleaved schedule keeps more than one microbatch for each stage.
        return 1 + (stages - 1 + side_by_side) / (stages * chunks)
    # 1F1B: the first stage is as many microbatches ahead as there are stages, or has all there are; twice as many
    # where backwards run beside forwards.
    return min(2.0 if side_by_side else 1.0, num_microbatches / stages)


def _estimate_activations(model: TransformerConfig, layer: float, tokens: int, workload: Workload) -> float:
    """Bytes of the first stage, or of everything where it is the only one."""
    hidden, stages, ranks = model.hidden_size, model.pipeline_model_parallel_size, model.tensor_model_parallel_size
    divided = ranks if model.sequence_parallel else 1
    # Times the stages, because 1.0 layers in flight stands for that many microbatches.
    embedding = stages * tokens * (_TOKEN_NUMBER_BYTES + hidden) / divided
    kept = layer * model.num_layers + embedding
    kept *= _count_layers_in_flight(model, workload.num_microbatches)
    if stages == 1:
        if model.sequence_parallel:
            # 4 bytes an element here and 2 in the other form, as the reference system counts: its figures are what we
            # give.
            kept += 4 * tokens * (hidden + workload.padded_vocab_size) / ranks
        else:
            kept += 2 * tokens * (hidden + workload.padded_vocab_size / ranks)
    return kept if model.sequence_parallel else kept * _ALLOCATOR_SHARE


def describe_memory(memory: MemoryEstimate, model: TransformerConfig) -> str:
    """The estimate in the lines that users know from the reference system; MB are 1024 x 1024 bytes."""
    counts = memory.parameters
    form = "" if model.sequence_parallel else " (precise, without SP)"
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
    if memory.state_on_host or memory.activations_on_host:
        lines.append(
            f"On the host: optimizer state={memory.state_on_host / _MEGABYTE:.2f} MB, "
            f"activation={memory.activations_on_host / _MEGABYTE:.2f} MB"
        )
    return "\n".join(lines)
