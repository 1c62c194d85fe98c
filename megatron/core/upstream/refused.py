# SPDX-License-Identifier: Apache-2.0
"""Upstream's names without anything behind them: those that programs import and cannot call, and absent ones."""

from __future__ import annotations

# Each is the rest of a sentence, "MODULE.NAME has nothing behind it here: ...", and says what to do instead.
_IMAGES = "models are of text only; build your own from the layers, as examples/custom_model.py does"
_HYBRID = "mixers exchange states, and norms by group are MambaMixer's own; see docs/hybrids.md"
_FSDP = "FSDP is PyTorch's: TorchFullyShardedDataParallel, --use-torch-fsdp2"
_OTHER_ATTENTION = "attention is SelfAttention or MLASelfAttention; give one of your own by --spec or in a ModuleSpec"
_ENGINE = "generation is megatron.core.inference.generate.generate(); see docs/generation.md"
_RESHARDING = (
    "weights are copied between layouts by dist_checkpointing.save and load, or through megatron.hf.AutoBridge"
)
_BALANCE = "each TopKRouter's take_losses() gives its balancing losses; a run logs them by itself"
_GRAPHS = "graphs are recorded by --cuda-graph-impl, for whole steps or layers"
_EXCHANGE = "experts exchange tokens by torch's all-to-all: --moe-token-dispatcher-type alltoall"
_OPTIMIZER = "make optimizers by get_megatron_optimizer(config, model_chunks)"
_REPLAY = "routes are recorded by --moe-routing-trace-path, and replayed with --moe-enable-routing-replay"
_ASYNC = "saving beside training is dist_checkpointing.save(async_sharded_save=True) with AsyncCallsQueue"


def _all(sentence: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, sentence)


_SPECS = (
    "DSAIndexer", "_get_backend_spec_provider", "get_dsa_module_spec_for_backend", "is_linear_attention_variant",
    "get_transformer_block_with_experimental_attention_variant_spec",
    "get_transformer_layer_with_experimental_attention_variant_spec", "is_gated_delta_net_variant",
)  # fmt: skip

REFUSED: dict[str, dict[str, str]] = {
    "megatron.core": _all("generation keeps its state by itself: megatron.core.inference", "InferenceParams"),
    "megatron.core.dist_checkpointing.mapping": _all(
        "apply_swiglu_sharded_factory cuts gate and up apart", "ShardedTensorFactory"
    ),
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _all(_ASYNC, "FileSystemWriterAsync"),
    "megatron.core.dist_checkpointing.strategies.torch": _all(_ASYNC, "get_async_strategy"),
    "megatron.core.distributed": _all(_FSDP, "FullyShardedDataParallel"),
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": _all(
        _FSDP, "FullyShardedDataParallelV1", "FullyShardedDataParallelV2"
    ),
    "megatron.core.extensions.transformer_engine": _all(
        "products are torch's; use torch.matmul", "te_general_gemm"
    ),
    "megatron.core.inference.config": _all(
        _ENGINE, "InferenceConfig", "KVCacheManagementMode", "MambaInferenceStateConfig",
        "PrefixCachingCoordinatorPolicy",
    ),
    "megatron.core.inference.contexts": _all(_ENGINE, "BaseInferenceContext", "StaticInferenceContext"),
    "megatron.core.inference.contexts.dynamic_context": _all(_ENGINE, "DynamicInferenceContext"),
    "megatron.core.inference.engines": _all(_ENGINE, "StaticInferenceEngine"),
    "megatron.core.inference.engines.dynamic_engine": _all(_ENGINE, "DynamicInferenceEngine", "EngineState"),
    "megatron.core.inference.inference_client": _all(_ENGINE, "InferenceClient"),
    "megatron.core.inference.inference_request": _all(_ENGINE, "DynamicInferenceRequest", "InferenceRequest"),
    "megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper": _all(
        _ENGINE, "GPTInferenceWrapper"
    ),
    "megatron.core.inference.sampling_params": _all(
        "how tokens are drawn is megatron.core.inference.sampling.Sampling", "SamplingParams"
    ),
    "megatron.core.inference.shards": _all(_ENGINE, "build_inference_pg_collection"),
    "megatron.core.inference.text_generation_controllers.text_generation_controller": _all(
        _ENGINE, "TextGenerationController"
    ),
    "megatron.core.inference.text_generation_server.dynamic_text_gen_server.text_generation_server": _all(
        _ENGINE, "start_text_gen_server"
    ),
    "megatron.core.inference.utils": _all("--log-memory-interval tells a device's memory", "device_memory_summary"),
    "megatron.core.models.common.embeddings.rotary_pos_embedding": _all(_IMAGES, "MultimodalRotaryEmbedding"),
    "megatron.core.models.common.model_chunk_schedule_plan": _all(
        "experts' exchange runs beside computation by --overlap-moe-expert-parallel-comm",
        "TransformerModelChunkSchedulePlan",
    ),
    "megatron.core.models.common.vision_module.vision_module": _all(_IMAGES, "VisionModule"),
    "megatron.core.models.gpt.experimental_attention_variant_module_specs": _all(_OTHER_ATTENTION, *_SPECS),
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": _all(
        "use get_gpt_decoder_block_spec(config), its layers follow from the config", "get_gpt_heterogeneous_layer_spec"
    ),
    "megatron.core.models.huggingface": _all(
        "models of Hugging Face are converted by megatron.hf", "HuggingFaceModule"
    ),
    "megatron.core.models.multimodal.llava_model": _all(_IMAGES, "LLaVAModel"),
    "megatron.core.models.vision.clip_vit_model": _all(_IMAGES, "CLIPViTModel"),
    "megatron.core.models.vision.multimodal_projector": _all(_IMAGES, "MultimodalProjector"),
    "megatron.core.models.vision.vit_layer_specs": _all(_IMAGES, "get_vit_layer_with_transformer_engine_spec"),
    "megatron.core.optimizer": _all(
        "other options for chosen parameters are get_megatron_optimizer(config_overrides={ParamKey: ...})",
        "_get_param_groups",
    ),
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": _all(
        "the state lies on the host by --optimizer-cpu-offload", "HybridDeviceOptimizer"
    ),
    "megatron.core.pipeline_parallel.fine_grained_activation_offload": _all(
        "activations are offloaded by --offload-modules", "PipelineOffloadManager"
    ),
    "megatron.core.resharding.copy_services.gloo_copy_service": _all(_RESHARDING, "GlooCopyService"),
    "megatron.core.resharding.copy_services.nccl_copy_service": _all(_RESHARDING, "NCCLCopyService"),
    "megatron.core.resharding.copy_services.nvshmem_copy_service": _all(_RESHARDING, "NVSHMEMCopyService"),
    "megatron.core.resharding.refit": _all(_RESHARDING, "prepare_swap_model_weights", "swap_model_weights"),
    "megatron.core.ssm.gated_delta_net": _all(
        "GatedDeltaNet is built from its config alone; see docs/hybrids.md",
        "tensor_a2a_cp2hp", "tensor_a2a_hp2cp", "torch_chunk_gated_delta_rule",
    ),
    "megatron.core.ssm.mamba_context_parallel": _all(_HYBRID, "_undo_attention_load_balancing"),
    "megatron.core.ssm.mamba_mixer": _all(_HYBRID, "ExtendedRMSNorm", "_split_tensor_factory"),
    "megatron.core.transformer.cuda_graphs": _all(_GRAPHS, "CudaGraphManager"),
    "megatron.core.transformer.enums": _all(_GRAPHS, "InferenceCudaGraphScope"),
    "megatron.core.transformer.experimental_attention_variant.dsa": _all(
        _OTHER_ATTENTION, "DSAIndexerLossLoggingHelper", "fused_qk_topk_naive", "rotate_activation"
    ),
    "megatron.core.transformer.moe.experts": _all(
        "the experts of a layer are one class, Experts, whose weights are stacked", "SequentialMLP", "TEGroupedMLP"
    ),
    "megatron.core.transformer.moe.fused_a2a": _all(_EXCHANGE, "fused_combine", "get_buffer", "get_hidden_bytes"),
    "megatron.core.transformer.moe.moe_logging": _all(_BALANCE, "get_moe_metrics_tracker"),
    "megatron.core.transformer.moe.moe_utils": _all(
        _BALANCE, "clear_aux_losses_tracker", "get_moe_layer_wise_logging_tracker",
        "reduce_aux_losses_tracker_across_ranks", "track_moe_metrics",
    ),
    "megatron.core.transformer.utils": _all(_GRAPHS, "toggle_cuda_graphs"),
}  # fmt: skip

# Each is the rest of a sentence, "MODULE does not exist here: ...", of what programs import in a try, or not at all. A
# row hides what it names, a file of ours too: whoever builds such a module removes its row.
ABSENT: dict[str, str] = {
    "megatron.core.datasets.indexed_dataset._IndexReader": "it is private; use IndexedDataset",
    "megatron.core.datasets.multimodal_dataset": _IMAGES,
    "megatron.core.distributed.fsdp.src": _FSDP,
    "megatron.core.models.multimodal.context_parallel": _IMAGES,
    "megatron.core.models.multimodal.llava_model.DEFAULT_IMAGE_TOKEN_INDEX": _IMAGES,
    "megatron.core.models.multimodal.llava_spec": _IMAGES,
    "megatron.core.msc_utils": "object storage is read through fsspec: --object-storage-cache-path",
    "megatron.core.telemetry": "there is no telemetry; --metrics-dir and --timing-log-level show what a run does",
    "megatron.core.transformer.moe.router_trace": _REPLAY,
    "megatron.core.utils.configure_nvtx_profiling": "--nvtx-ranges names the parts of a step in profiles",
    "megatron.energon": "its data loaders are not used; a dataset of your own does as examples/custom_dataset.py shows",
    "megatron.schedules": "use megatron.core.pipeline_parallel.get_forward_backward_func",
}
