# SPDX-License-Identifier: Apache-2.0
"""Upstream's names below megatron.training that are not where upstream has them: see megatron.core.upstream.names."""

from __future__ import annotations

from megatron.core.upstream.names import UpstreamNames, read_table

DEFINED = read_table(
    "megatron.training",
    """
. @steps get_model
. @settings get_train_valid_test_num_samples initialize_megatron is_last_rank print_rank_last
argument_utils @settings gpt_config_from_args pretrain_cfg_container_from_args
arguments @settings parse_and_validate_args validate_args
async_utils @checkpoints maybe_finalize_async_save
async_utils @batches _async_calls_queue
checkpointing @checkpoints get_checkpoint_name get_checkpoint_tracker_filename get_load_checkpoint_path_by_args isfile
    load_args_from_checkpoint load_checkpoint read_metadata save_checkpoint
datasets.fim_dataset megatron.core.datasets.fim_dataset GPTFIMDataset GPTFIMDatasetConfig
datasets.sft_dataset megatron.core.datasets.sft_dataset SFTDataset
global_vars @settings _build_tokenizer set_args set_global_variables unset_global_variables
initialize @settings initialize_megatron
initialize @batches _initialize_tp_communicators
theoretical_memory_usage @settings report_theoretical_memory
tokenizer.tokenizer megatron.core.upstream.tokenizers _vocab_size_with_padding=vocab_size_with_padding
training @steps evaluate_and_print_results get_model setup_model_and_optimizer train_step training_log
training @settings update_train_iters
utils @steps average_losses_across_data_parallel_group calc_params_l2_norm
utils @batches get_ltor_masks_and_position_ids
utils .global_vars print_rank_0
utils @settings get_blend_and_blend_per_split is_first_or_last_pipeline_stage is_hybrid_model is_last_rank
    print_rank_last
yaml_arguments @settings core_transformer_config_from_yaml
""",
)

# What an ImportError says for a name that has no counterpart.
ABSENT: dict[str, str] = {
    "megatron.training.inprocess_restart": "pretrain() does it itself with --inprocess-restart",
    "megatron.training.set_startup_timestamps": "--timing-log-level 2 tells how long the parts of a step take",
    "megatron.training.argument_utils.hybrid_config_from_args": "it waits for hybrid models (Mamba)",
    "megatron.training.arguments._add_tokenizer_args": "flags of one's own go through extra_args_provider",
    "megatron.training.distillation": "it waits for distillation; a loss of one's own does as examples/custom_loss.py",
    "megatron.training.global_vars.get_telemetry": "there is no telemetry; --metrics-dir tells what a run does",
    "megatron.training.training.update_seqlen_stats_from_cu_seqlens": "throughput is counted from --seq-length",
    "megatron.training.utils.check_adlr_autoresume_termination": "--exit-signal-handler saves and ends a run",
}

TRAINING_NAMES = UpstreamNames(DEFINED, ABSENT)
