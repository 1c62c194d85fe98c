# SPDX-License-Identifier: Apache-2.0
"""Bytes that products hold in addition to their operands, mostly in 8 or 4 bits: rounded weights, and temporaries of
backward.

A weight that both directions round alike is rounded once a step and kept to its end. Where a kernel multiplies, the
gradient of a product's output is rounded into two layouts, the weight turned for the input's gradient, and the weight's
gradient added where it lies, or made in float32 before it is added to fewer bits; emulated, both operands and the
result of a product are there in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.plan.branch_kind import Tokens
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import Branch
from megatron.core.plan.read import read_plan
from megatron.core.plan.stages import StageContent
from megatron.planner.memory import Workload

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig


def count_rounded_weights(model: TransformerConfig, chunks: Sequence[StageContent], workload: Workload) -> float:
    """Bytes of the weights that linear layers keep in 8 bits from their first product of a step to its end."""
    if not model.rounded_weight_bytes:
        return 0.0
    plan, ranks, elements = read_plan(model), model.tensor_model_parallel_size, 0.0
    expert_ranks = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or ranks)
    for content in chunks:
        layers = plan.decoder[content.layers.start : content.layers.stop]
        layers += plan.prediction if content.has_prediction else ()
        for branch in (branch for layer in layers for branch in layer.branches if branch.low_precision):
            count = find_kind(branch.kind).count(model, branch)
            elements += count.matrices / ranks + count.expert_matrices / expert_ranks + count.projections
        if content.has_loss and model.fp8_output_proj:
            elements += workload.padded_vocab_size * model.hidden_size / ranks
    return elements * model.rounded_weight_bytes


class _Product(NamedTuple):
    """The matrix of a linear layer on one process, and the rows that it is multiplied with."""

    inputs: float
    outputs: float
    rows: float


def count_product_temporaries(
    model: TransformerConfig, replicas: DistributedDataParallelConfig, branch: Branch, tokens: Tokens
) -> tuple[float, float]:
    """Bytes that the weight gradients of the first and of the last product of a branch take; of a branch with other
    products than attention and MLPs have, the most twice."""
    if model.few_bits_recipe is None or not branch.low_precision:
        if branch.kind == "experts" and model.moe_grouped_gemm and model.bf16 and not replicas.grad_reduce_in_fp32:
            # Only into float32 sums does the kernel that makes them add all experts' gradients.
            first, _ = _list_products(model, branch, tokens)
            taken = 2 * first.inputs * first.outputs * (model.num_moe_experts or 0) / model.expert_model_parallel_size
            return taken, taken
        return 0.0, 0.0
    found = [_count(model, replicas, product) for product in _list_products(model, branch, tokens)]
    if not found:
        return 0.0, 0.0
    return (found[0], found[-1]) if branch.kind in ("attention", "mlp") else (max(found), max(found))


def count_head_temporaries(
    model: TransformerConfig, replicas: DistributedDataParallelConfig, tokens: Tokens, workload: Workload
) -> float:
    """Bytes that the weight gradient of the output layer takes."""
    if model.few_bits_recipe is None or not model.fp8_output_proj:
        return 0.0
    rows = workload.padded_vocab_size / model.tensor_model_parallel_size
    return _count(model, replicas, _Product(model.hidden_size, rows, tokens.all))


def _count(model: TransformerConfig, replicas: DistributedDataParallelConfig, product: _Product) -> float:
    inputs, outputs, rows = product
    if model.multiplies_few_bits_natively:
        # Of the weight gradient's operands under sequence parallelism the input's rows lie apart until they are turned.
        of_grad = rows * inputs if model.sequence_parallel or not model.fp8_wgrad else 0
        if model.fp8_wgrad and not (model.gradient_accumulation_fusion and replicas.grad_reduce_in_fp32):
            of_grad += 4 * inputs * outputs
        return rows * 2 * outputs + max(of_grad, inputs * outputs)
    multiplied = rows * outputs + 4 * (rows * outputs + rows * inputs + inputs * outputs)
    if model.few_bits_recipe != "nvfp4":
        return multiplied
    # Rounded at random in float32: the gradient scaled, three steps of its rounding, and what is added; transformed
    # before, where the weight's gradient reads it so. Also scales of 16 values, three times.
    return max(multiplied, rows * outputs * 4 * (5 + model.fp8_wgrad + 3 / 16))


def _list_products(model: TransformerConfig, branch: Branch, tokens: Tokens) -> Iterator[_Product]:
    """In the order of forward."""
    hidden, ranks, inner = model.hidden_size, model.tensor_model_parallel_size, 2 if model.gated_linear_unit else 1
    if branch.kind == "mlp":
        of_rank = (branch.options.ffn_hidden_size or model.ffn_hidden_size or 0) / ranks
        yield _Product(hidden, inner * of_rank, tokens.all)
        yield _Product(of_rank, hidden, tokens.all)
    elif branch.kind == "experts":
        sharers = model.expert_tensor_parallel_size or 1
        rows, width = tokens.all / ranks * model.moe_router_topk * sharers, (model.moe_ffn_hidden_size or 0) / sharers
        # All rows are rounded at once; weight gradients are made for one expert after the other.
        for inputs, outputs in ((model.expert_channels, inner * width), (width, model.expert_channels)):
            yield _Product(inputs, outputs, rows)
    elif branch.kind in ("attention", "parallel"):
        heads, groups = model.num_attention_heads, branch.options.query_groups or model.num_query_groups
        gates = heads if model.attention_output_gate else 0
        yield _Product(hidden, (heads + gates + 2 * max(groups, ranks)) * model.query_width / ranks, tokens.all)
        yield _Product(heads * model.value_width / ranks, hidden, tokens.all)
    elif branch.kind in ("latent_attention", "sparse_attention"):
        of_rank, to_keys = model.num_attention_heads / ranks, model.qk_head_dim + model.v_head_dim
        yield _Product(model.q_lora_rank or hidden, of_rank * model.query_width, tokens.all)
        yield _Product(model.kv_lora_rank, of_rank * to_keys, tokens.all)
        yield _Product(of_rank * model.value_width, hidden, tokens.all)
