# SPDX-License-Identifier: Apache-2.0
"""Layers and losses whose tensors are split over the tensor-parallel group.

Names of upstream, imported when they are asked for; inside megatron/ import the defining module.
"""

from __future__ import annotations

from megatron.core.lazy_names import load_when_used

_DEFINED_IN = {
    "ColumnParallelLinear": "layers",
    "RowParallelLinear": "layers",
    "VocabParallelEmbedding": "layers",
    "param_is_not_tensor_parallel_duplicate": "layers",
    "set_defaults_if_not_set_tensor_model_parallel_attributes": "layers",
    "set_tensor_model_parallel_attributes": "layers",
    "all_gather_last_dim_from_tensor_parallel_region": "mappings",
    "copy_to_tensor_model_parallel_region": "mappings",
    "gather_from_sequence_parallel_region": "mappings",
    "gather_from_tensor_model_parallel_region": "mappings",
    "reduce_from_tensor_model_parallel_region": "mappings",
    "reduce_scatter_to_sequence_parallel_region": "mappings",
    "scatter_to_sequence_parallel_region": "mappings",
    "scatter_to_tensor_model_parallel_region": "mappings",
    "vocab_parallel_cross_entropy": "cross_entropy",
    "CudaRNGStatesTracker": "random",
    "CheckpointWithoutOutput": "random",
    "checkpoint": "random",
    "get_cuda_rng_tracker": "random",
    "model_parallel_cuda_manual_seed": "random",
}
__all__ = list(_DEFINED_IN)
__getattr__ = load_when_used(__name__, _DEFINED_IN)
