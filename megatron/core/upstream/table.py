# SPDX-License-Identifier: Apache-2.0
"""Upstream's names below megatron.core that are not where upstream has them: see names.py."""

from __future__ import annotations

from megatron.core.upstream.names import UpstreamNames, read_table
from megatron.core.upstream.refused import ABSENT, REFUSED

# Only names that programs import, as public scripts show; private ones (`_get_main_grad_attr`) among them.
DEFINED = read_table(
    "megatron.core",
    """
backwards_compatibility_decorators @functions deprecated
config @functions is_experimental_enabled set_experimental_flag
config_logger @process_tools has_config_logger_enabled log_config_to_disk
datasets.utils .datasets.index_builders compile_helpers
dist_checkpointing.core @checkpoints CheckpointingConfig maybe_load_config save_config
dist_checkpointing.mapping .dist_checkpointing.sharded_object ShardedObject
dist_checkpointing.serialization .dist_checkpointing.state_dicts check_is_distributed_checkpoint load
    load_common_state_dict load_content_metadata load_tensors_metadata save
dist_checkpointing.serialization @checkpoints StrictHandling get_default_load_sharded_strategy
    get_default_save_sharded_strategy
dist_checkpointing.strategies.async_utils .dist_checkpointing.async_requests AsyncCallsQueue AsyncRequest
dist_checkpointing.strategies.common @checkpoints COMMON_STATE_FNAME load_common save_common
dist_checkpointing.strategies.fully_parallel @checkpoints FullyParallelLoadStrategyWrapper
    FullyParallelSaveStrategyWrapper
dist_checkpointing.strategies.torch @checkpoints TorchDistLoadShardedStrategy TorchDistSaveShardedStrategy
dist_checkpointing.utils @sharded apply_prefix_mapping replace_prefix_for_sharding
dist_checkpointing.validation @checkpoints StrictHandling verify_checkpoint
distributed.finalize_model_grads @modules _get_main_grad_attr _reshard_if_dtensor _unshard_if_dtensor
    get_attr_wrapped_model
distributed.finalize_model_grads torch._utils _flatten_dense_tensors _unflatten_dense_tensors
distributed.fsdp .distributed FullyShardedDataParallel
distributed.fsdp.mcore_fsdp_adapter .distributed FullyShardedDataParallel
extensions.transformer_engine_spec_provider @specs TESpecProvider
fp8_utils @fusions correct_amax_history_if_needed get_fp8_context
fusions.fused_bias_dropout @fusions bias_dropout_add_fused_train get_bias_dropout_add
fusions.fused_bias_geglu @fusions quick_gelu
fusions.fused_bias_gelu @fusions bias_gelu
fusions.fused_bias_swiglu @fusions bias_swiglu
fusions.fused_cross_entropy .tensor_parallel.cross_entropy fused_vocab_parallel_cross_entropy
fusions.fused_layer_norm @fusions FusedLayerNorm
inference.communication_utils @process_tools broadcast_from_last_pipeline_stage recv_from_prev_pipeline_rank_
    send_to_next_pipeline_rank
inference.config @inference InferenceConfig KVCacheManagementMode MambaInferenceStateConfig
inference.contexts @inference BaseInferenceContext DynamicInferenceContext StaticInferenceContext
inference.contexts.dynamic_context @inference DynamicInferenceContext
inference.contexts.static_context @inference StaticInferenceContext
inference.engines @inference DynamicInferenceEngine StaticInferenceEngine
inference.engines.dynamic_engine @inference DynamicInferenceEngine EngineState
inference.engines.static_engine @inference StaticInferenceEngine
inference.inference_request @inference DynamicInferenceRequest DynamicInferenceRequestRecord InferenceRequest
inference.model_inference_wrappers.gpt.gpt_inference_wrapper @inference GPTInferenceWrapper
inference.sampling_params @inference SamplingParams
inference.text_generation_controllers.text_generation_controller @inference TextGenerationController
jit @process_tools jit_fuser
models.backends @specs LocalSpecProvider
models.common.embeddings .transformer.config_fields.positions _yarn_get_mscale=compute_yarn_magnitude
models.common.embeddings.yarn_rotary_pos_embedding @specs _yarn_get_concentration_factor_from_config
models.common.language_module.language_module .models.common.language_module LanguageModule
models.gpt.experimental_attention_variant_module_specs @specs get_dsa_module_spec_for_backend
    get_transformer_block_with_experimental_attention_variant_spec
    get_transformer_layer_with_experimental_attention_variant_spec is_gated_delta_net_variant
    is_linear_attention_variant
models.gpt.moe_module_specs .transformer.mlp MLPSubmodules
models.gpt.moe_module_specs .models.gpt.gpt_layer_specs get_moe_module_spec
models.mamba .models.hybrid.hybrid_model MambaModel
models.mamba.mamba_layer_specs .models.hybrid.hybrid_layer_specs mamba_inference_stack_spec mamba_stack_spec
models.mamba.mamba_model .models.hybrid.hybrid_model MambaModel
num_microbatches_calculator @batches destroy_num_microbatches_calculator get_current_global_batch_size
    get_current_running_global_batch_size get_micro_batch_size get_num_microbatches init_num_microbatches_calculator
    reconfigure_num_microbatches_calculator unset_num_microbatches_calculator update_num_microbatches
optimizer @optimizers Adam AdamOptimizerConfig CPUAdam SGDOptimizerConfig param_group_identifier_keys
optimizer.distrib_optimizer @optimizers Adam
optimizer.distrib_optimizer .optimizer.megatron_optimizer DistributedOptimizer
optimizer.muon @optimizers get_megatron_muon_optimizer
optimizer.optimizer .optimizer.megatron_optimizer MegatronOptimizer
optimizer.optimizer @optimizers SEPARATE_GRAD_NORM_GROUPS
pipeline_parallel.p2p_communication @process_tools _batched_p2p_ops
pipeline_parallel.schedules .pipeline_parallel.forward_backward get_forward_backward_func
pipeline_parallel.schedules @pipelines get_schedule_table get_tensor_shapes
pipeline_parallel.utils @modules unwrap_model
pipeline_parallel.utils @pipelines is_vp_first_stage is_vp_last_stage
post_training.modelopt.gpt.model_specs @specs get_gpt_modelopt_spec
post_training.modelopt.layers @specs Linear
rerun_state_machine @watching RerunDataIterator RerunDiagnostic RerunMode RerunState RerunStateMachine
    destroy_rerun_state_machine get_rerun_state_machine
ssm.mamba_hybrid_layer_allocation .models.hybrid.hybrid_layer_allocation ParsedHybridPattern Symbols
    get_hybrid_layer_counts get_hybrid_total_layer_count get_hybrid_total_pipeline_segment_count
    get_layer_maps_from_layer_type_list parse_hybrid_pattern pattern_from_ratios select_pipeline_segment
ssm.mlp_layer .transformer.transformer_layer MLPLayer=TransformerLayer
tensor_parallel.utils @layers VocabUtility
tokenizers @tokenizers MegatronTokenizer
tokenizers.text @tokenizers MegatronTokenizerText
tokenizers.utils.build_tokenizer @tokenizers build_tokenizer vocab_size_with_padding
transformer .transformer.transformer_config MLATransformerConfig
transformer.dot_product_attention .transformer.core_attention.dot_product_attention DotProductAttention
transformer.experimental_attention_variant.dsa @specs rotate_activation
transformer.mlp @sharded apply_swiglu_sharded_factory
transformer.moe.moe_utils @layers topk_routing_with_score_function
transformer.moe.moe_utils @experts RouterGatingLinearFunction apply_random_logits apply_router_token_dropping
    compute_routing_scores_for_aux_loss group_limited_topk
transformer.moe.moe_utils @process_tools get_default_pg_collection
transformer.moe.router @losses MoEAuxLossAutoScaler
transformer.multi_latent_attention .models.common.embeddings.rope_utils apply_rotary_pos_emb
transformer.multi_latent_attention @process_tools deprecate_inference_params
transformer.multi_latent_attention .tensor_parallel.mappings gather_from_tensor_model_parallel_region
    scatter_to_sequence_parallel_region
transformer.multi_token_prediction @layers get_mtp_ranks mtp_on_this_rank
transformer.multi_token_prediction @losses MTPLossAutoScaler MTPLossLoggingHelper get_mtp_layer_offset roll_tensor
transformer.pipeline_parallel_layer_layout @pipelines PipelineParallelLayerLayout
transformer.torch_norm @fusions L2Norm WrappedTorchNorm
transformer.transformer_block @layers get_num_layers_to_build get_transformer_layer_offset
transformer.transformer_layer @layers get_transformer_layer_offset
transformer.utils @layers is_layer_window_attention
transformer.utils @sharded make_sharded_tensors_for_checkpoint sharded_state_dict_default
transformer.utils @process_tools ensure_metadata_has_dp_cp_group
typed_torch @process_tools apply_module
utils @functions deprecated divide experimental_api internal_api trace_async_exceptions
utils @modules get_attr_wrapped_model get_model_config unwrap_model
utils @batches flatten_batch_for_packed_sequences get_batch_on_this_cp_rank get_batch_on_this_tp_rank
utils @process_tools WrappedTensor check_param_hashes_across_dp_replicas deprecate_inference_params get_pg_rank
    get_pg_size get_te_version get_tensor_model_parallel_group_if_none get_torch_version is_fa_min_version
    is_te_min_version is_torch_min_version make_viewless_tensor nvtx_range_pop nvtx_range_push
utils @sharded make_tp_sharded_tensor_for_checkpoint
utils @watching StragglerDetector
""",
)

# Upstream's files hold these in addition to the names they define, and users' models take them by `import *`.
_EVERYWHERE = """
typing Any Callable List Optional Tuple Union
torch Tensor torch=
torch.nn nn=
dataclasses dataclass
contextlib nullcontext
logging logging=
.parallel_state parallel_state=
.tensor_parallel tensor_parallel=
.inference.contexts BaseInferenceContext
megatron.core InferenceParams
.transformer.module MegatronModule
.transformer.spec_utils ModuleSpec build_module
.packed_seq_params PackedSeqParams
.process_groups_config ProcessGroupCollection
.transformer.transformer_config TransformerConfig
@process_tools HAVE_FA3 deprecate_inference_params is_te_min_version nvtx_range_pop nvtx_range_push
.extensions.transformer_engine HAVE_TE
"""
_STARRED = ("transformer.attention", "transformer.transformer_block", "models.common.embeddings.rope_utils")
_STAR_ONLY = read_table(
    "megatron.core",
    "\n".join(f"{module} {row}" for module in _STARRED for row in _EVERYWHERE.strip().splitlines())
    + """
transformer.attention .enums AttnMaskType
transformer.attention .extensions.transformer_engine SplitAlongDim
transformer.attention .models.common.embeddings.rope_utils apply_rotary_pos_emb
transformer.attention @functions divide
transformer.attention @process_tools is_fa_min_version
transformer.transformer_block .enums Fp8Recipe LayerType
transformer.transformer_block .extensions.transformer_engine TENorm te_checkpoint
transformer.transformer_block .transformer.transformer_layer TransformerLayer
transformer.transformer_block @process_tools WrappedTensor make_viewless_tensor
transformer.transformer_block @fusions get_fp8_context
transformer.transformer_block @sharded replace_prefix_for_sharding sharded_state_dict_default
""",
)
for _module, _names in _STAR_ONLY.items():
    DEFINED[_module] = _names | DEFINED.get(_module, {})

CORE_NAMES = UpstreamNames(DEFINED, ABSENT, REFUSED, {module: tuple(DEFINED[module]) for module in _STAR_ONLY})
