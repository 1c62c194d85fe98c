# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, gradients and optimizer state: of a stage's parameters, and of one element.

Weight, gradient, main weight and moments have separate dtypes, and are divided over the replicas by the
distributed optimizer or FSDP2, which also gathers weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.plan.branch_kind import Counts, count_bytes, count_norm
from megatron.core.plan.model_plan import LayerPlan
from megatron.core.plan.read import read_plan
from megatron.core.plan.stages import StageContent
from megatron.planner.memory import Workload, count_layers

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_STATE_TENSORS = {"sgd": 1, "lion": 1, "muon": 1}
"""Tensors of the parameters' size that an update rule keeps; two for every other one."""


class Elements(NamedTuple):
    """Parameters on a process."""

    dense: float
    """Outside of experts."""
    experts: float
    frozen: float
    """Outside of experts, which nothing trains."""


def count_rank_parameters(model: TransformerConfig, workload: Workload, chunks: Sequence[StageContent]) -> Elements:
    """Elements on a process. Biases and positions are left out."""
    plan, ranks = read_plan(model), model.tensor_model_parallel_size
    table = workload.padded_vocab_size * model.hidden_size / ranks
    dense = experts = frozen = 0.0
    has_table = False
    for content in chunks:
        layers = plan.decoder[content.layers.start : content.layers.stop]
        if content.has_prediction:
            # With its layers each depth has the matrices that join tokens and states, norms, and a sum of streams.
            layers += plan.prediction
            joining = 2 * model.hidden_size**2 / ranks + 3 * count_norm(model)
            joining += model.enable_hyper_connections * model.num_residual_streams * model.stream_width
            dense += joining * len(plan.list_depths())
        counts = count_layers(model, layers, has_final_norm=content.ends_decoder)
        of_layers = divide_parameters(model, counts)
        dense, experts = dense + of_layers[0] - counts.frozen, experts + of_layers[1]
        frozen += counts.frozen
        for is_there, is_own in (
            (content.has_embedding or content.has_prediction, False),
            (content.has_loss, workload.has_output_layer),
        ):
            # Tied tables are one where they meet on a process.
            if is_there and (is_own or not has_table):
                dense += table
                has_table = has_table or not is_own
    return Elements(dense, experts, frozen)


def divide_parameters(model: TransformerConfig, count: Counts) -> tuple[float, float]:
    """Of a count the elements on a process: outside of experts, and of experts."""
    ranks = model.tensor_model_parallel_size
    expert_ranks = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or ranks)
    return count.matrices / ranks + count.replicated, count.expert_matrices / expert_ranks


def count_gradient_bytes(model: TransformerConfig, replicas: DistributedDataParallelConfig) -> int:
    """Bytes of an element of the gradients; in float32 where they are summed so, else as the weights."""
    return 2 if (model.bf16 or model.fp16) and not replicas.grad_reduce_in_fp32 else 4


def count_state_bytes(
    model: TransformerConfig,
    replicas: DistributedDataParallelConfig,
    optimizer: OptimizerConfig,
    workload: Workload,
    parameters: Elements,
    adapters: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Bytes of weights, gradients and optimizer state of a process with so many parameters; with adapters, only these
    are trained. adapters: outside of experts, and of experts."""
    total, gradient = parameters.frozen * count_bytes(model), count_gradient_bytes(model, replicas)
    for elements, of_experts, is_trained in (
        (parameters.dense, False, model.lora_rank is None), (parameters.experts, True, model.lora_rank is None),
        (adapters[0], False, True), (adapters[1], True, True),
    ):  # fmt: skip
        total += elements * count_element_bytes(
            replicas, optimizer, weight=count_bytes(model), gradient=gradient if is_trained else 0,
            copies=count_copies(model, workload.data_parallel_size, of_experts=of_experts),
            offloaded=workload.offloaded_state, outer=workload.outer_bytes,
        )  # fmt: skip
    return total


def count_copies(model: TransformerConfig, data_parallel_size: int, *, of_experts: bool) -> float:
    """Count the processes that hold the same shard of a weight outside of experts, or of experts."""
    copies, ranks = data_parallel_size * model.context_parallel_size, model.tensor_model_parallel_size
    if not of_experts:
        return copies
    return copies * ranks / model.expert_model_parallel_size / (model.expert_tensor_parallel_size or ranks)


def count_element_bytes(
    replicas: DistributedDataParallelConfig,
    optimizer: OptimizerConfig,
    *,
    weight: int,
    gradient: int,
    copies: float,
    offloaded: float = 0.0,
    outer: int = 0,
) -> float:
    """Bytes of an element of the parameters with its gradient and optimizer state on one of `copies` processes.

    weight, gradient: bytes of either; a weight that is not trained has a gradient of 0 bytes. offloaded: fraction of
    the state that is on the host. outer: bytes of outer state, which is divided as the optimizer's.
    """
    moments = [_BYTES[optimizer.exp_avg_dtype], _BYTES[optimizer.exp_avg_sq_dtype]]
    kept: float = sum(moments[: _STATE_TENSORS.get(optimizer.optimizer, 2)]) if gradient else 0
    if replicas.use_torch_fsdp2:
        # The optimizer's float32 shards are the only ones: 16-bit weights exist gathered, and in no other form.
        return (4 + gradient + kept * (1 - offloaded)) / copies
    # In float32 the weights themselves are what the optimizer updates.
    kept += _BYTES[optimizer.main_params_dtype] if gradient and weight == 2 else 0
    kept = kept * (1 - offloaded) + outer
    return weight + gradient + kept / (copies if replicas.use_distributed_optimizer else 1)


def list_layers(model: TransformerConfig, content: StageContent) -> tuple[tuple[LayerPlan, ...], int]:
    """Layers that a stage runs, with layers of multi-token prediction behind the decoder's, and the depths of these."""
    plan = read_plan(model)
    depths = (model.mtp_num_layers or 0) if content.has_prediction else 0
    further = itertools.islice(itertools.cycle(plan.list_depths()), depths)
    layers = plan.decoder[content.layers.start : content.layers.stop]
    return (*layers, *itertools.chain.from_iterable(further)), depths
