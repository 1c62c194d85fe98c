# SPDX-License-Identifier: Apache-2.0
"""Upstream's names without anything behind them: those that programs import and cannot call, and absent ones."""

from __future__ import annotations

_IMAGES = "images are read by LLaVAModel, of CLIPViTModel, MultimodalProjector and a GPT; see docs/images.md"
_FSDP = "FSDP is PyTorch's: TorchFullyShardedDataParallel, --use-torch-fsdp2"
_REPLAY = "routes are recorded by --moe-routing-trace-path, and replayed with --moe-enable-routing-replay"

# The rest of a sentence, "MODULE.NAME has nothing behind it here: ...", that says what to do instead -> a module below
# megatron.core and names there, row by row.
_REFUSED = {
    "generation keeps its state by itself: megatron.core.inference": ". InferenceParams",
    "apply_swiglu_sharded_factory cuts gate and up apart": "dist_checkpointing.mapping ShardedTensorFactory",
    "saving beside training is dist_checkpointing.save(async_sharded_save=True) with AsyncCallsQueue": """
dist_checkpointing.strategies.filesystem_async FileSystemWriterAsync
dist_checkpointing.strategies.torch get_async_strategy""",
    _FSDP: """
distributed FullyShardedDataParallel
distributed.fsdp.mcore_fsdp_adapter FullyShardedDataParallelV1 FullyShardedDataParallelV2""",
    "products are torch's; use torch.matmul": "extensions.transformer_engine te_general_gemm",
    "there is no coordinator: every rank adds the same requests, or clients ask python -m megatron serve": """
inference.config PrefixCachingCoordinatorPolicy
inference.inference_client InferenceClient
inference.shards build_inference_pg_collection
inference.text_generation_server.dynamic_text_gen_server.text_generation_server start_text_gen_server""",
    "--log-memory-interval tells a device's memory": "inference.utils device_memory_summary",
    "experts' exchange runs beside computation by --overlap-moe-expert-parallel-comm":
        "models.common.model_chunk_schedule_plan TransformerModelChunkSchedulePlan",
    "attention is SelfAttention or MLASelfAttention; give one of your own by --spec or in a ModuleSpec": """
models.gpt.experimental_attention_variant_module_specs _get_backend_spec_provider""",
    "an indexer is built with the attention it chooses for, by get_dsa_module_spec_for_backend(config)":
        "models.gpt.experimental_attention_variant_module_specs DSAIndexer",
    "each SparseCore's take_loss() gives its indexer's loss; a run logs them by itself":
        "transformer.experimental_attention_variant.dsa DSAIndexerLossLoggingHelper",
    "keys are chosen by choose_keys of megatron.core.transformer.core_attention.chosen_keys":
        "transformer.experimental_attention_variant.dsa fused_qk_topk_naive",
    "use get_gpt_decoder_block_spec(config), its layers follow from the config":
        "models.gpt.heterogeneous.heterogeneous_layer_specs get_gpt_heterogeneous_layer_spec",
    "models of Hugging Face are converted by megatron.hf": "models.huggingface HuggingFaceModule",
    "other options for chosen parameters are get_megatron_optimizer(config_overrides={ParamKey: ...})":
        "optimizer _get_param_groups",
    "the state lies on the host by --optimizer-cpu-offload":
        "optimizer.cpu_offloading.hybrid_optimizer HybridDeviceOptimizer",
    "activations are offloaded by --offload-modules":
        "pipeline_parallel.fine_grained_activation_offload PipelineOffloadManager",
    "weights are copied between layouts by dist_checkpointing.save and load, or through megatron.hf.AutoBridge": """
resharding.copy_services.gloo_copy_service GlooCopyService
resharding.copy_services.nccl_copy_service NCCLCopyService
resharding.copy_services.nvshmem_copy_service NVSHMEMCopyService
resharding.refit prepare_swap_model_weights swap_model_weights""",
    "GatedDeltaNet is built from its config alone; see docs/hybrids.md":
        "ssm.gated_delta_net tensor_a2a_cp2hp tensor_a2a_hp2cp torch_chunk_gated_delta_rule",
    "mixers exchange states, and norms by group are MambaMixer's own; see docs/hybrids.md": """
ssm.mamba_context_parallel _undo_attention_load_balancing
ssm.mamba_mixer ExtendedRMSNorm _split_tensor_factory""",
    "graphs are recorded by --cuda-graph-impl, for whole steps or layers": """
transformer.cuda_graphs CudaGraphManager
transformer.enums InferenceCudaGraphScope
transformer.utils toggle_cuda_graphs""",
    "the experts of a layer are one class, Experts, whose weights are stacked":
        "transformer.moe.experts SequentialMLP TEGroupedMLP",
    "experts exchange tokens by torch's all-to-all: --moe-token-dispatcher-type alltoall":
        "transformer.moe.fused_a2a fused_combine get_buffer get_hidden_bytes",
    "each TopKRouter's take_losses() gives its balancing losses; a run logs them by itself": """
transformer.moe.moe_logging get_moe_metrics_tracker
transformer.moe.moe_utils clear_aux_losses_tracker get_moe_layer_wise_logging_tracker
    reduce_aux_losses_tracker_across_ranks track_moe_metrics""",
}  # fmt: skip
REFUSED: dict[str, dict[str, str]] = {}
for _sentence, _rows in _REFUSED.items():
    for _row in _rows.strip().replace("\n    ", " ").splitlines():
        _module, *_names = _row.split()
        _place = "megatron.core" if _module == "." else f"megatron.core.{_module}"
        REFUSED.setdefault(_place, {}).update(dict.fromkeys(_names, _sentence))

# Each is the rest of a sentence, "MODULE does not exist here: ...", of what programs import in a try, or not at all. A
# row hides what it names, even a file of ours: adding such a module means removing its row.
ABSENT: dict[str, str] = {
    "megatron.core.datasets.indexed_dataset._IndexReader": "it is private; use IndexedDataset",
    "megatron.core.datasets.multimodal_dataset": _IMAGES,
    "megatron.core.distributed.fsdp.src": _FSDP,
    "megatron.core.models.multimodal.context_parallel": _IMAGES,
    "megatron.core.models.multimodal.llava_model.VIDEO_TOKEN": "a film is its images, one token for each",
    "megatron.core.models.multimodal.llava_model.pixel_shuffle": "features go to the text model as they are",
    "megatron.core.models.multimodal.llava_spec": "layers are made by get_gpt_layer_local_spec",
    "megatron.core.msc_utils": "object storage is read through fsspec: --object-storage-cache-path",
    "megatron.core.telemetry": "there is no telemetry; --metrics-dir and --timing-log-level show what a run does",
    "megatron.core.transformer.moe.router_trace": _REPLAY,
    "megatron.core.utils.configure_nvtx_profiling": "--nvtx-ranges names the parts of a step in profiles",
    "megatron.energon": "its data loaders are not used; a dataset of your own does as examples/custom_dataset.py shows",
    "megatron.schedules": "use megatron.core.pipeline_parallel.get_forward_backward_func",
}
