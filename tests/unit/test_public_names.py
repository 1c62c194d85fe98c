"""The names we promise to code written for Megatron-LM: each can be imported from where upstream has it."""

from __future__ import annotations

import importlib

import pytest

PROMISED: dict[str, list[str]] = {
    "megatron.core": [
        "DistributedDataParallel",
        "ModelParallelConfig",
        "Timers",
        "mpu",
        "parallel_state",
        "tensor_parallel",
    ],
    "megatron.core.process_groups_config": ["ProcessGroupCollection"],
    "megatron.core.enums": ["ModelType"],
    "megatron.core.timers": ["Timers"],
    "megatron.core.model_parallel_config": ["ModelParallelConfig"],
    "megatron.core.num_microbatches_calculator": [],
    "megatron.core.optimizer_param_scheduler": ["OptimizerParamScheduler"],
    "megatron.core.parallel_state": [
        "destroy_model_parallel",
        "get_context_parallel_group",
        "get_context_parallel_rank",
        "get_context_parallel_world_size",
        "get_data_parallel_group",
        "get_data_parallel_rank",
        "get_data_parallel_world_size",
        "get_embedding_group",
        "get_expert_data_parallel_group",
        "get_expert_model_parallel_group",
        "get_expert_model_parallel_rank",
        "get_expert_model_parallel_world_size",
        "get_expert_tensor_parallel_group",
        "get_model_parallel_group",
        "get_pipeline_model_parallel_group",
        "get_pipeline_model_parallel_rank",
        "get_pipeline_model_parallel_world_size",
        "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_src_rank",
        "get_tensor_model_parallel_world_size",
        "initialize_model_parallel",
        "is_pipeline_first_stage",
        "is_pipeline_last_stage",
        "model_parallel_is_initialized",
    ],
    "megatron.core.tensor_parallel": [
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "copy_to_tensor_model_parallel_region",
        "gather_from_sequence_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "get_cuda_rng_tracker",
        "model_parallel_cuda_manual_seed",
        "reduce_from_tensor_model_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "scatter_to_sequence_parallel_region",
        "scatter_to_tensor_model_parallel_region",
        "vocab_parallel_cross_entropy",
    ],
    "megatron.core.tensor_parallel.random": ["model_parallel_cuda_manual_seed"],
    "megatron.core.transformer": ["TransformerConfig"],
    "megatron.core.transformer.transformer_config": ["TransformerConfig"],
    "megatron.core.transformer.module": ["MegatronModule"],
    "megatron.core.transformer.spec_utils": ["ModuleSpec", "build_module"],
    "megatron.core.transformer.enums": ["AttnBackend", "AttnMaskType"],
    "megatron.core.models.gpt": ["GPTModel"],
    "megatron.core.models.gpt.gpt_model": ["GPTModel"],
    "megatron.core.models.gpt.gpt_layer_specs": ["get_gpt_layer_local_spec"],
    "megatron.core.pipeline_parallel": ["get_forward_backward_func"],
    "megatron.core.distributed": ["DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"],
    "megatron.core.optimizer": ["OptimizerConfig", "get_megatron_optimizer"],
    "megatron.core.datasets.blended_megatron_dataset_builder": ["BlendedMegatronDatasetBuilder"],
    "megatron.core.datasets.gpt_dataset": ["GPTDataset", "GPTDatasetConfig", "MockGPTDataset"],
    "megatron.core.datasets.indexed_dataset": ["IndexedDataset", "IndexedDatasetBuilder"],
    "megatron.core.dist_checkpointing": ["load", "save"],
    "megatron.training": ["get_args", "get_timers", "get_tokenizer", "pretrain", "print_rank_0"],
    "megatron.training.global_vars": ["get_args", "get_timers", "get_tokenizer"],
}


@pytest.mark.parametrize("module", PROMISED)
def test_promised_names_can_be_imported(module: str) -> None:
    loaded = importlib.import_module(module)
    missing = [name for name in PROMISED[module] if getattr(loaded, name, None) is None]
    assert missing == []
