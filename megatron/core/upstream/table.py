# SPDX-License-Identifier: Apache-2.0
"""Upstream's names below megatron.core that are not where upstream has them: see names.py."""

from __future__ import annotations

from megatron.core.upstream.names import UpstreamNames

_BATCHES = "megatron.core.upstream.batches"
_CHECKPOINTS = "megatron.core.upstream.checkpoints"
_FUNCTIONS = "megatron.core.upstream.functions"
_LAYERS = "megatron.core.upstream.layers"
_MODULES = "megatron.core.upstream.modules"
_TOKENIZERS = "megatron.core.upstream.tokenizers"
_STATE_DICTS = "megatron.core.dist_checkpointing.state_dicts"
_EMBEDDINGS = "megatron.core.models.common.embeddings"


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
        _STATE_DICTS, "load_common_state_dict", "load_tensors_metadata"
    ),
    "megatron.core.dist_checkpointing.strategies.async_utils": _in(
        "megatron.core.dist_checkpointing.async_requests", "AsyncCallsQueue", "AsyncRequest"
    ),
    "megatron.core.dist_checkpointing.strategies.common": _in(_CHECKPOINTS, "load_common", "save_common"),
    "megatron.core.dist_checkpointing.strategies.fully_parallel": _in(_CHECKPOINTS, "FullyParallelLoadStrategyWrapper"),
    "megatron.core.dist_checkpointing.strategies.torch": _in(_CHECKPOINTS, "TorchDistLoadShardedStrategy"),
    "megatron.core.dist_checkpointing.validation": _in(_CHECKPOINTS, "verify_checkpoint"),
    "megatron.core.distributed.finalize_model_grads": {
        **_in(_MODULES, "_get_main_grad_attr", "_reshard_if_dtensor", "_unshard_if_dtensor", "get_attr_wrapped_model"),
        "_flatten_dense_tensors": "torch._utils",
        "_unflatten_dense_tensors": "torch._utils",
    },
    "megatron.core.fusions.fused_cross_entropy": _in(
        "megatron.core.tensor_parallel.cross_entropy", "fused_vocab_parallel_cross_entropy"
    ),
    "megatron.core.models.common.embeddings": {
        "RotaryEmbedding": f"{_EMBEDDINGS}.rotary_pos_embedding",
        "YarnRotaryEmbedding": f"{_EMBEDDINGS}.yarn_rotary_pos_embedding",
        "_yarn_get_mscale": "megatron.core.transformer.config_fields.positions:compute_yarn_magnitude",
    },
    "megatron.core.models.common.embeddings.rope_utils": _in(_BATCHES, "get_pos_emb_on_this_cp_rank"),
    "megatron.core.models.common.language_module.language_module": _in(
        "megatron.core.models.common.language_module", "LanguageModule"
    ),
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
    "megatron.core.package_info": _in("megatron.core", "__version__"),
    "megatron.core.pipeline_parallel.schedules": _in(
        "megatron.core.pipeline_parallel.forward_backward", "get_forward_backward_func"
    ),
    "megatron.core.pipeline_parallel.utils": _in(_MODULES, "unwrap_model"),
    "megatron.core.tensor_parallel.utils": _in(_LAYERS, "VocabUtility"),
    "megatron.core.tokenizers": _in(_TOKENIZERS, "MegatronTokenizer"),
    "megatron.core.tokenizers.text": _in(_TOKENIZERS, "MegatronTokenizerText"),
    "megatron.core.tokenizers.utils.build_tokenizer": _in(_TOKENIZERS, "build_tokenizer", "vocab_size_with_padding"),
    "megatron.core.transformer.module": _in(_MODULES, "Float16Module"),
    "megatron.core.transformer.moe.moe_utils": _in(_LAYERS, "topk_routing_with_score_function"),
    "megatron.core.transformer.spec_utils": _in(_MODULES, "get_submodules", "import_module"),
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

# Each is the rest of a sentence, "MODULE is not part of this system: ...", and says what to do instead.
_MULTIMODAL = "models are of text only; build your own from the layers, as examples/custom_model.py does"
_HYBRID = "it waits for hybrid models (Mamba); GPTModel has attention layers"
_TE = "layers get Transformer Engine by --transformer-impl; take ColumnParallelLinear and RowParallelLinear"
_OTHER_ATTENTION = "attention is SelfAttention or MLASelfAttention; give one of your own by --spec or in a ModuleSpec"
_REPLAY = "routes are recorded by --moe-routing-trace-path, and replayed with --moe-enable-routing-replay"
_DTENSOR = "gradients and parameters are plain tensors here, also with FSDP; its sharding is that of PyTorch's FSDP2"

# A row hides what it names, a file of ours too: whoever builds such a module removes its row.
ABSENT: dict[str, str] = {
    "megatron.core.datasets.indexed_dataset._IndexReader": "it is private; use IndexedDataset",
    "megatron.core.datasets.multimodal_dataset": _MULTIMODAL,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": (
        "saving beside training is dist_checkpointing.save(async_sharded_save=True) with AsyncCallsQueue"
    ),
    "megatron.core.distributed.fsdp": _DTENSOR,
    "megatron.core.extensions": _TE,
    "megatron.core.extensions.transformer_engine": _TE,
    "megatron.core.extensions.transformer_engine_spec_provider": _TE,
    "megatron.core.models.common.embeddings.rotary_pos_embedding.MultimodalRotaryEmbedding": _MULTIMODAL,
    "megatron.core.models.gpt.experimental_attention_variant_module_specs": _OTHER_ATTENTION,
    "megatron.core.models.gpt.heterogeneous": "all layers of a model have one spec; leave out the heterogeneous config",
    "megatron.core.models.hybrid": _HYBRID,
    "megatron.core.models.multimodal": _MULTIMODAL,
    "megatron.core.msc_utils": "object storage is read through fsspec: --object-storage-cache-path",
    "megatron.core.rerun_state_machine": (
        "steps are not run again to find faults; --check-for-nan-in-loss-and-grad and --check-for-spiky-loss end a run"
    ),
    "megatron.core.telemetry": "there is no telemetry; --metrics-dir and --timing-log-level show what a run does",
    "megatron.core.transformer.moe.fused_a2a": "experts exchange tokens by torch's all-to-all; use it",
    "megatron.core.transformer.moe.moe_utils.RouterGatingLinearFunction": (
        "the router's product is torch's; --moe-router-dtype says its number format"
    ),
    "megatron.core.transformer.moe.router_replay": _REPLAY,
    "megatron.core.transformer.moe.router_trace": _REPLAY,
    "megatron.core.transformer.multi_token_prediction.MTPLossLoggingHelper": (
        "the log has the losses by name (mtp_1 loss, ...); GPTModel.mtp_loss.take_sums() returns those of this process"
    ),
    "megatron.core.utils.StragglerDetector": "slow ranks show in --timing-log-level 2 with --timing-log-option all",
    "megatron.core.utils.configure_nvtx_profiling": "--nvtx-ranges names the parts of a step in profiles",
    "megatron.energon": "its data loaders are not used; a dataset of your own does as examples/custom_dataset.py shows",
    "megatron.schedules": "use megatron.core.pipeline_parallel.get_forward_backward_func",
}

CORE_NAMES = UpstreamNames(DEFINED, ABSENT)
