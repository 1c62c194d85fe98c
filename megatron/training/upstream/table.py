# SPDX-License-Identifier: Apache-2.0
"""Upstream's names below megatron.training that are not where upstream has them: see megatron.core.upstream.names."""

from __future__ import annotations

from megatron.core.upstream.names import UpstreamNames

_SETTINGS = "megatron.training.upstream.settings"
_STEPS = "megatron.training.upstream.steps"
_CHECKPOINTS = "megatron.training.upstream.checkpoints"
_BATCHES = "megatron.training.upstream.batches"
_TRAINING = ("evaluate_and_print_results", "get_model", "setup_model_and_optimizer", "train_step", "training_log")


def _in(module: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, module)


# Upstream's module -> name -> the module that defines it here.
DEFINED: dict[str, dict[str, str]] = {
    "megatron.training": _in(_STEPS, "get_model")
    | _in(_SETTINGS, "get_train_valid_test_num_samples", "initialize_megatron", "is_last_rank", "print_rank_last"),
    "megatron.training.argument_utils": _in(_SETTINGS, "gpt_config_from_args", "pretrain_cfg_container_from_args"),
    "megatron.training.arguments": _in(_SETTINGS, "parse_and_validate_args", "validate_args"),
    "megatron.training.async_utils": _in(_CHECKPOINTS, "maybe_finalize_async_save")
    | _in(_BATCHES, "_async_calls_queue"),
    "megatron.training.checkpointing": _in(
        _CHECKPOINTS,
        "get_checkpoint_name",
        "get_checkpoint_tracker_filename",
        "get_load_checkpoint_path_by_args",
        "isfile",
        "load_args_from_checkpoint",
        "load_checkpoint",
        "read_metadata",
        "save_checkpoint",
    ),
    "megatron.training.datasets.fim_dataset": _in(
        "megatron.core.datasets.fim_dataset", "GPTFIMDataset", "GPTFIMDatasetConfig"
    ),
    "megatron.training.datasets.sft_dataset": _in("megatron.core.datasets.sft_dataset", "SFTDataset"),
    "megatron.training.global_vars": _in(
        _SETTINGS, "_build_tokenizer", "set_args", "set_global_variables", "unset_global_variables"
    ),
    "megatron.training.initialize": _in(_SETTINGS, "initialize_megatron")
    | _in(_BATCHES, "_initialize_tp_communicators"),
    "megatron.training.theoretical_memory_usage": _in(_SETTINGS, "report_theoretical_memory"),
    "megatron.training.tokenizer.tokenizer": {
        "_vocab_size_with_padding": "megatron.core.upstream.tokenizers:vocab_size_with_padding"
    },
    "megatron.training.training": _in(_STEPS, *_TRAINING) | _in(_SETTINGS, "update_train_iters"),
    "megatron.training.utils": _in(_STEPS, "average_losses_across_data_parallel_group", "calc_params_l2_norm")
    | _in(_BATCHES, "get_ltor_masks_and_position_ids")
    | _in("megatron.training.global_vars", "print_rank_0")
    | _in(
        _SETTINGS,
        "get_blend_and_blend_per_split",
        "is_first_or_last_pipeline_stage",
        "is_hybrid_model",
        "is_last_rank",
        "print_rank_last",
    ),
    "megatron.training.yaml_arguments": _in(_SETTINGS, "core_transformer_config_from_yaml"),
}

# What an ImportError says for a name that has no counterpart.
ABSENT: dict[str, str] = {
    "megatron.training.inprocess_restart": "a lost process ends the job with exit code 75; start it again",
    "megatron.training.set_startup_timestamps": "--timing-log-level 2 tells how long the parts of a step take",
    "megatron.training.argument_utils.hybrid_config_from_args": "it waits for hybrid models (Mamba)",
    "megatron.training.arguments._add_tokenizer_args": "flags of one's own go through extra_args_provider",
    "megatron.training.distillation": "it waits for distillation; a loss of one's own does as examples/custom_loss.py",
    "megatron.training.global_vars.get_telemetry": "there is no telemetry; --metrics-dir tells what a run does",
    "megatron.training.training.update_seqlen_stats_from_cu_seqlens": "throughput is counted from --seq-length",
    "megatron.training.utils.check_adlr_autoresume_termination": "--exit-signal-handler saves and ends a run",
}

TRAINING_NAMES = UpstreamNames(DEFINED, ABSENT)
