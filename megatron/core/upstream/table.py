# SPDX-License-Identifier: Apache-2.0
"""Upstream's names below megatron.core that are not where upstream has them: see names.py."""

from __future__ import annotations

from megatron.core.upstream.names import UpstreamNames
from megatron.core.upstream.refused import ABSENT, REFUSED

_BATCHES = "megatron.core.upstream.batches"
_CHECKPOINTS = "megatron.core.upstream.checkpoints"
_FUNCTIONS = "megatron.core.upstream.functions"
_LAYERS = "megatron.core.upstream.layers"
_MODULES = "megatron.core.upstream.modules"
_TOKENIZERS = "megatron.core.upstream.tokenizers"
_STATE_DICTS = "megatron.core.dist_checkpointing.state_dicts"
_EMBEDDINGS = "megatron.core.models.common.embeddings"
_EXPERTS = "megatron.core.upstream.experts"
_FUSIONS = "megatron.core.upstream.fusions"
_LOSSES = "megatron.core.upstream.losses"
_OPTIMIZERS = "megatron.core.upstream.optimizers"
_PIPELINES = "megatron.core.upstream.pipelines"
_PROCESS = "megatron.core.upstream.process_tools"
_SHARDED = "megatron.core.upstream.sharded"
_SPECS = "megatron.core.upstream.specs"
_WATCHING = "megatron.core.upstream.watching"


# Modules are given as strings and imported when a name is used: `import megatron.core` loads none of them.
def _in(module: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, module)


# Only names that users' programs import, as public scripts show; private ones (`_get_main_grad_attr`) among them.
DEFINED: dict[str, dict[str, str]] = {
    "megatron.core.backwards_compatibility_decorators": _in(_FUNCTIONS, "deprecated"),
    "megatron.core.config": _in(_FUNCTIONS, "set_experimental_flag", "is_experimental_enabled"),
    "megatron.core.datasets.utils": _in("megatron.core.datasets.index_builders", "compile_helpers"),
    "megatron.core.dist_checkpointing.core": _in(
        _CHECKPOINTS, "CheckpointingConfig", "maybe_load_config", "save_config"
    ),
    "megatron.core.dist_checkpointing.serialization": _in(
        _STATE_DICTS,
        "check_is_distributed_checkpoint",
        "load",
        "load_common_state_dict",
        "load_content_metadata",
        "load_tensors_metadata",
        "save",
    )
    | _in(_CHECKPOINTS, "StrictHandling", "get_default_load_sharded_strategy", "get_default_save_sharded_strategy"),
    "megatron.core.dist_checkpointing.mapping": _in("megatron.core.dist_checkpointing.sharded_object", "ShardedObject"),
    "megatron.core.dist_checkpointing.strategies.async_utils": _in(
        "megatron.core.dist_checkpointing.async_requests", "AsyncCallsQueue", "AsyncRequest"
    ),
    "megatron.core.dist_checkpointing.strategies.common": _in(_CHECKPOINTS, "load_common", "save_common"),
    "megatron.core.dist_checkpointing.strategies.fully_parallel": _in(
        _CHECKPOINTS, "FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper"
    ),
    "megatron.core.dist_checkpointing.strategies.torch": _in(
        _CHECKPOINTS, "TorchDistLoadShardedStrategy", "TorchDistSaveShardedStrategy"
    ),
    "megatron.core.dist_checkpointing.validation": _in(_CHECKPOINTS, "StrictHandling", "verify_checkpoint"),
    "megatron.core.distributed.finalize_model_grads": {
        **_in(_MODULES, "_get_main_grad_attr", "_reshard_if_dtensor", "_unshard_if_dtensor", "get_attr_wrapped_model"),
        "_flatten_dense_tensors": "torch._utils",
        "_unflatten_dense_tensors": "torch._utils",
    },
    "megatron.core.fusions.fused_cross_entropy": _in(
        "megatron.core.tensor_parallel.cross_entropy", "fused_vocab_parallel_cross_entropy"
    ),
    "megatron.core.models.common.embeddings": {
        "_yarn_get_mscale": "megatron.core.transformer.config_fields.positions:compute_yarn_magnitude",
    },
    "megatron.core.models.common.language_module.language_module": _in(
        "megatron.core.models.common.language_module", "LanguageModule"
    ),
    "megatron.core.models.mamba": {"MambaModel": "megatron.core.models.hybrid.hybrid_model"},
    "megatron.core.models.mamba.mamba_layer_specs": _in(
        "megatron.core.models.hybrid.hybrid_layer_specs",
        "mamba_inference_stack_spec",
        "mamba_stack_spec",
    ),
    "megatron.core.models.mamba.mamba_model": {"MambaModel": "megatron.core.models.hybrid.hybrid_model"},
    "megatron.core.num_microbatches_calculator": _in(
        _BATCHES,
        "destroy_num_microbatches_calculator",
        "get_current_global_batch_size",
        "get_current_running_global_batch_size",
        "get_micro_batch_size",
        "get_num_microbatches",
        "init_num_microbatches_calculator",
        "reconfigure_num_microbatches_calculator",
        "unset_num_microbatches_calculator",
        "update_num_microbatches",
    ),
    "megatron.core.optimizer.optimizer": _in("megatron.core.optimizer.megatron_optimizer", "MegatronOptimizer"),
    "megatron.core.pipeline_parallel.schedules": _in(
        "megatron.core.pipeline_parallel.forward_backward", "get_forward_backward_func"
    ),
    "megatron.core.pipeline_parallel.utils": _in(_MODULES, "unwrap_model"),
    "megatron.core.ssm.mamba_hybrid_layer_allocation": _in(
        "megatron.core.models.hybrid.hybrid_layer_allocation",
        "ParsedHybridPattern",
        "Symbols",
        "get_hybrid_layer_counts",
        "get_hybrid_total_layer_count",
        "get_hybrid_total_pipeline_segment_count",
        "get_layer_maps_from_layer_type_list",
        "parse_hybrid_pattern",
        "pattern_from_ratios",
        "select_pipeline_segment",
    ),
    "megatron.core.ssm.mlp_layer": {"MLPLayer": "megatron.core.transformer.transformer_layer:TransformerLayer"},
    "megatron.core.tensor_parallel.utils": _in(_LAYERS, "VocabUtility"),
    "megatron.core.tokenizers": _in(_TOKENIZERS, "MegatronTokenizer"),
    "megatron.core.tokenizers.text": _in(_TOKENIZERS, "MegatronTokenizerText"),
    "megatron.core.tokenizers.utils.build_tokenizer": _in(_TOKENIZERS, "build_tokenizer", "vocab_size_with_padding"),
    "megatron.core.transformer.moe.moe_utils": _in(_LAYERS, "topk_routing_with_score_function"),
    "megatron.core.transformer.transformer_block": _in(
        _LAYERS, "get_num_layers_to_build", "get_transformer_layer_offset"
    ),
    "megatron.core.transformer.multi_token_prediction": _in(_LAYERS, "get_mtp_ranks", "mtp_on_this_rank"),
    "megatron.core.transformer.transformer_layer": _in(_LAYERS, "get_transformer_layer_offset"),
    "megatron.core.transformer.utils": _in(_LAYERS, "is_layer_window_attention"),
    "megatron.core.utils": _in(
        _FUNCTIONS,
        "deprecated",
        "divide",
        "experimental_api",
        "get_te_version",
        "get_torch_version",
        "internal_api",
        "trace_async_exceptions",
    )
    | _in(_MODULES, "get_attr_wrapped_model", "get_model_config", "unwrap_model")
    | _in(_BATCHES, "flatten_batch_for_packed_sequences", "get_batch_on_this_cp_rank", "get_batch_on_this_tp_rank"),
}


# What programs import that are built upon megatron.core, beside its own scripts.
_FOR_PROGRAMS: dict[str, dict[str, str]] = {
    "megatron.core.config_logger": _in(_PROCESS, "has_config_logger_enabled", "log_config_to_disk"),
    "megatron.core.dist_checkpointing.strategies.common": _in(_CHECKPOINTS, "COMMON_STATE_FNAME"),
    "megatron.core.dist_checkpointing.utils": _in(_SHARDED, "apply_prefix_mapping", "replace_prefix_for_sharding"),
    "megatron.core.distributed.fsdp": _in("megatron.core.distributed", "FullyShardedDataParallel"),
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": _in("megatron.core.distributed", "FullyShardedDataParallel"),
    "megatron.core.extensions.transformer_engine_spec_provider": _in(_SPECS, "TESpecProvider"),
    "megatron.core.fp8_utils": _in(_FUSIONS, "correct_amax_history_if_needed", "get_fp8_context"),
    "megatron.core.fusions.fused_bias_dropout": _in(_FUSIONS, "bias_dropout_add_fused_train", "get_bias_dropout_add"),
    "megatron.core.fusions.fused_bias_geglu": _in("megatron.core.activations", "quick_gelu"),
    "megatron.core.fusions.fused_bias_gelu": _in(_FUSIONS, "bias_gelu"),
    "megatron.core.fusions.fused_bias_swiglu": _in(_FUSIONS, "bias_swiglu"),
    "megatron.core.fusions.fused_layer_norm": _in(_FUSIONS, "FusedLayerNorm"),
    "megatron.core.inference.communication_utils": _in(
        _PROCESS, "broadcast_from_last_pipeline_stage", "recv_from_prev_pipeline_rank_", "send_to_next_pipeline_rank"
    ),
    "megatron.core.jit": _in(_PROCESS, "jit_fuser"),
    "megatron.core.models.backends": _in(_SPECS, "LocalSpecProvider"),
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": _in(
        _SPECS, "_yarn_get_concentration_factor_from_config"
    ),
    "megatron.core.models.gpt.moe_module_specs": {
        "MLPSubmodules": "megatron.core.transformer.mlp",
        "get_moe_module_spec": "megatron.core.models.gpt.gpt_layer_specs",
    },
    "megatron.core.optimizer": _in(
        _OPTIMIZERS, "Adam", "AdamOptimizerConfig", "CPUAdam", "SGDOptimizerConfig", "param_group_identifier_keys"
    ),
    "megatron.core.optimizer.distrib_optimizer": _in(_OPTIMIZERS, "Adam")
    | _in("megatron.core.optimizer.megatron_optimizer", "DistributedOptimizer"),
    "megatron.core.optimizer.muon": _in(_OPTIMIZERS, "get_megatron_muon_optimizer"),
    "megatron.core.optimizer.optimizer": _in(_OPTIMIZERS, "SEPARATE_GRAD_NORM_GROUPS"),
    "megatron.core.pipeline_parallel.p2p_communication": _in(_PROCESS, "_batched_p2p_ops"),
    "megatron.core.pipeline_parallel.schedules": _in(_PIPELINES, "get_schedule_table", "get_tensor_shapes"),
    "megatron.core.pipeline_parallel.utils": _in(_PIPELINES, "is_vp_first_stage", "is_vp_last_stage"),
    "megatron.core.post_training.modelopt.gpt.model_specs": _in(_SPECS, "get_gpt_modelopt_spec"),
    "megatron.core.post_training.modelopt.layers": _in(_SPECS, "Linear"),
    "megatron.core.rerun_state_machine": _in(
        _WATCHING,
        "RerunDataIterator",
        "RerunDiagnostic",
        "RerunMode",
        "RerunState",
        "RerunStateMachine",
        "destroy_rerun_state_machine",
        "get_rerun_state_machine",
    ),
    "megatron.core.transformer": _in("megatron.core.upstream.configs", "MLATransformerConfig"),
    "megatron.core.transformer.transformer_config": _in("megatron.core.upstream.configs", "MLATransformerConfig"),
    "megatron.core.transformer.dot_product_attention": _in(
        "megatron.core.transformer.core_attention.dot_product_attention", "DotProductAttention"
    ),
    "megatron.core.transformer.mlp": _in(_SHARDED, "apply_swiglu_sharded_factory"),
    "megatron.core.transformer.moe.moe_utils": _in(
        _EXPERTS,
        "RouterGatingLinearFunction",
        "apply_random_logits",
        "apply_router_token_dropping",
        "compute_routing_scores_for_aux_loss",
        "group_limited_topk",
    )
    | _in(_PROCESS, "get_default_pg_collection"),
    "megatron.core.transformer.moe.router": _in(_LOSSES, "MoEAuxLossAutoScaler"),
    "megatron.core.transformer.multi_latent_attention": {
        "apply_rotary_pos_emb": f"{_EMBEDDINGS}.rope_utils",
        "deprecate_inference_params": _PROCESS,
        "gather_from_tensor_model_parallel_region": "megatron.core.tensor_parallel.mappings",
        "scatter_to_sequence_parallel_region": "megatron.core.tensor_parallel.mappings",
    },
    "megatron.core.transformer.multi_token_prediction": _in(
        _LOSSES, "MTPLossAutoScaler", "MTPLossLoggingHelper", "get_mtp_layer_offset", "roll_tensor"
    ),
    "megatron.core.transformer.pipeline_parallel_layer_layout": _in(_PIPELINES, "PipelineParallelLayerLayout"),
    "megatron.core.transformer.torch_norm": _in(_FUSIONS, "L2Norm", "WrappedTorchNorm"),
    "megatron.core.transformer.utils": _in(
        _SHARDED, "make_sharded_tensors_for_checkpoint", "sharded_state_dict_default"
    )
    | _in(_PROCESS, "ensure_metadata_has_dp_cp_group"),
    "megatron.core.typed_torch": _in(_PROCESS, "apply_module"),
    "megatron.core.utils": _in(
        _PROCESS,
        "WrappedTensor",
        "check_param_hashes_across_dp_replicas",
        "deprecate_inference_params",
        "get_pg_rank",
        "get_pg_size",
        "get_tensor_model_parallel_group_if_none",
        "is_fa_min_version",
        "is_te_min_version",
        "is_torch_min_version",
        "make_viewless_tensor",
        "nvtx_range_pop",
        "nvtx_range_push",
    )
    | _in(_SHARDED, "make_tp_sharded_tensor_for_checkpoint")
    | _in(_WATCHING, "StragglerDetector"),
}
for _module, _names in _FOR_PROGRAMS.items():
    DEFINED[_module] = DEFINED.get(_module, {}) | _names

# ---- star imports

# Upstream's files hold these beside their own names, and models of programs' own take them by `import *`.
_EVERYWHERE = (
    _in("typing", "Any", "Callable", "List", "Optional", "Tuple", "Union")
    | {
        "torch": "torch:",
        "Tensor": "torch",
        "nn": "torch.nn:",
        "dataclass": "dataclasses",
        "nullcontext": "contextlib",
        "logging": "logging:",
        "parallel_state": "megatron.core.parallel_state:",
        "tensor_parallel": "megatron.core.tensor_parallel:",
        "BaseInferenceContext": "megatron.core.inference.contexts",
        "InferenceParams": "megatron.core",
        "MegatronModule": "megatron.core.transformer.module",
        "ModuleSpec": "megatron.core.transformer.spec_utils",
        "build_module": "megatron.core.transformer.spec_utils",
        "PackedSeqParams": "megatron.core.packed_seq_params",
        "ProcessGroupCollection": "megatron.core.process_groups_config",
        "TransformerConfig": "megatron.core.transformer.transformer_config",
        "HAVE_FA3": _PROCESS,
        "HAVE_TE": "megatron.core.extensions.transformer_engine",
    }
    | _in(_PROCESS, "deprecate_inference_params", "is_te_min_version", "nvtx_range_pop", "nvtx_range_push")
)
_STAR_ONLY: dict[str, dict[str, str]] = {
    "megatron.core.transformer.attention": _EVERYWHERE
    | {
        "AttnMaskType": "megatron.core.enums",
        "SplitAlongDim": "megatron.core.extensions.transformer_engine",
        "apply_rotary_pos_emb": f"{_EMBEDDINGS}.rope_utils",
        "divide": _FUNCTIONS,
        "is_fa_min_version": _PROCESS,
    },
    "megatron.core.transformer.transformer_block": _EVERYWHERE
    | {
        "LayerType": "megatron.core.enums",
        "TENorm": "megatron.core.extensions.transformer_engine",
        "TransformerLayer": "megatron.core.transformer.transformer_layer",
        "WrappedTensor": _PROCESS,
        "get_fp8_context": _FUSIONS,
        "make_viewless_tensor": _PROCESS,
        "sharded_state_dict_default": _SHARDED,
        "te_checkpoint": "megatron.core.extensions.transformer_engine",
    },
    f"{_EMBEDDINGS}.rope_utils": _EVERYWHERE,
}
for _module, _names in _STAR_ONLY.items():
    DEFINED[_module] = _names | DEFINED.get(_module, {})
STARRED = {module: tuple(DEFINED[module]) for module in _STAR_ONLY}

CORE_NAMES = UpstreamNames(DEFINED, ABSENT, REFUSED, STARRED)
