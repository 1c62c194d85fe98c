"""Notes on flags that the other settings leave nothing to do."""

from __future__ import annotations

from megatron.training.flags.fully_sharded import asked_for_sharding
from megatron.training.flags.settings import Settings

Idle = tuple[str, bool, str]
"""A setting, whether it has nothing to do, and what would give it something."""


def note_idle_flags(s: Settings) -> None:
    """Say of each flag that was given whether it has no effect."""
    for dest, is_idle, needed in (*_of_the_run(s), *_of_the_optimizer(s), *_of_the_layout(s), *_of_the_model(s)):
        if is_idle and dest in s.given and s.values[dest] != s.flags[dest].default:
            s.note(f"{s.say(dest)} has no effect without {needed}")


_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
_MUON = tuple(
    f"muon_{name}"
    for name in (
        "momentum", "nesterov", "split_qkv", "scale_mode", "extra_scale_factor", "coefficient_type", "num_ns_steps",
        "fp32_matmul_prec", "tp_mode", "scalar_optimizer", "use_syrk",
    )
)  # fmt: skip
_DYNAMIC_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_FILL_IN = ("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix", "fim_prefix_token")
_GATED = ("activation_func_clamp_value", "glu_linear_offset")
_ROTARY = (
    "rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor", "rotary_interleaved", "no_rope_freq",
    "rotary_base_local",
)  # fmt: skip
_YARN = (
    "rotary_scaling_factor", "mscale", "mscale_all_dim", "yarn_original_max_position_embeddings", "yarn_beta_fast",
    "yarn_beta_slow", "yarn_correction_range_round_to_int",
)  # fmt: skip
_TP_OVERLAP = ("tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad",
               "tp_comm_overlap_rs_dgrad")  # fmt: skip
_FULL_RECOMPUTATION = ("recompute_method", "recompute_num_layers")

_SHARDING = "--use-torch-fsdp2 or --use-megatron-fsdp"
_SHARDED = ("data_parallel_sharding_strategy", "megatron_fsdp_main_params_dtype", "megatron_fsdp_main_grads_dtype",
            "megatron_fsdp_grad_comm_dtype")  # fmt: skip
_DIVIDED = ("init_model_with_meta_device", "torch_fsdp2_reshard_after_forward", "suggested_communication_unit_size",
            "megatron_fsdp_enable_fine_grained_param_gather")  # fmt: skip
_EVALUATION = ("start_eval_at_iter", "eval_global_batch_size", "eval_micro_batch_size")
_TORCH = (
    "profile_dir",
    "pytorch_profiler_collect_shapes",
    "pytorch_profiler_collect_callstack",
    "pytorch_profiler_collect_chakra",
)
_FLIGHT_RECORDER = tuple(
    f"flight_recorder_{name}"
    for name in (
        "trace_buffer_size", "dump_on_timeout", "include_stack_trace", "include_only_active", "extra_dump_on_exec",
    )
)  # fmt: skip
_WINDOW = ("profile_step_start", "profile_step_end")
_WANDB = ("wandb_exp_name", "wandb_entity", "wandb_save_dir")
_CURVES = (
    "tensorboard_log_interval",
    "log_timers_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_world_size_to_tensorboard",
)


def _of_the_run(s: Settings) -> list[Idle]:
    """Saving, evaluation, logs, profiles, data."""
    return [
        ("save_interval", s.save is None, "--save"),
        ("eval_iters", s.eval_interval is None and s.eval_iters > 0, "--eval-interval"),
        ("manual_gc_interval", not s.manual_gc, "--manual-gc"),
        *((dest, s.tensorboard_dir is None and s.wandb_project is None, "--tensorboard-dir") for dest in _CURVES),
        ("tensorboard_queue_size", s.tensorboard_dir is None, "--tensorboard-dir"),
        *((dest, s.wandb_project is None, "--wandb-project") for dest in _WANDB),
        ("timing_log_option", s.timing_log_level == 0, "--timing-log-level"),
        ("use_mp_args_from_checkpoint_args", not s.use_checkpoint_args, "--use-checkpoint-args"),
        ("save_retain_interval", s.save is None, "--save"),
        ("exit_signal", not s.exit_signal_handler, "--exit-signal-handler"),
        ("exit_signal_handler_for_dataloader", not s.exit_signal_handler, "--exit-signal-handler"),
        *((dest, s.eval_interval is None and not s.skip_train, "--eval-interval") for dest in _EVALUATION),
        ("log_progress", s.save is None, "--save"),
        *((dest, not (s.profile and s.use_pytorch_profiler), "--profile --use-pytorch-profiler") for dest in _TORCH),
        ("use_pytorch_profiler", not s.profile, "--profile"),
        ("record_shapes", not s.profile or s.use_pytorch_profiler, "--profile for Nsight Systems"),
        ("memory_snapshot_path", not s.record_memory_history, "--record-memory-history"),
        ("profile_ranks", not (s.profile or s.record_memory_history), "--profile"),
        *((dest, not s.profile and s.pipeline_trace_dir is None, "--profile") for dest in _WINDOW),
        *((dest, not s.fim_data, "--fim-data") for dest in _FILL_IN),
    ]


def _of_the_optimizer(s: Settings) -> list[Idle]:
    """Schedules, update rules, loss scaling."""
    return [
        ("lr_wsd_decay_iters", s.lr_decay_style != "WSD", "--lr-decay-style WSD"),
        ("lr_wsd_decay_samples", s.lr_decay_style != "WSD", "--lr-decay-style WSD"),
        ("lr_wsd_decay_style", s.lr_decay_style != "WSD", "--lr-decay-style WSD"),
        ("grad_reduce_in_bf16", not s.bf16, "--bf16"),
        ("apply_wd_to_qk_layernorm", not s.qk_layernorm, "--qk-layernorm"),
        ("sgd_momentum", s.optimizer != "sgd", "--optimizer sgd"),
        *((dest, not _uses_lion(s), "--optimizer lion") for dest in ("lion_beta1", "lion_beta2")),
        *((dest, s.optimizer != "muon", "--optimizer muon") for dest in _MUON),
        ("soap_precondition_frequency", s.optimizer != "soap", "--optimizer soap"),
        *((dest, s.optimizer in ("sgd", "lion"), "--optimizer adam") for dest in _ADAM),
        *((dest, not s.fp16, "--fp16") for dest in ("loss_scale", *_DYNAMIC_LOSS_SCALE)),
        *((dest, s.fp16 and s.loss_scale is not None, "a dynamic loss scale") for dest in _DYNAMIC_LOSS_SCALE),
        *((dest, not s.qk_clip, "--qk-clip") for dest in ("qk_clip_alpha", "qk_clip_threshold")),
    ]


def _of_the_layout(s: Settings) -> list[Idle]:
    """How work and memory are divided over processes."""
    return [
        (
            "microbatch_group_size_per_vp_stage",
            s.virtual_pipeline_model_parallel_size is None or s.pipeline_schedule == "zb-v",
            "the interleaved schedule, --num-virtual-stages-per-pipeline-rank",
        ),
        (
            "overlap_param_gather_with_optimizer_step",
            s.virtual_pipeline_model_parallel_size is None,
            "several chunks of layers per stage, --num-virtual-stages-per-pipeline-rank",
        ),
        ("overlap_p2p_comm", s.pipeline_model_parallel_size == 1, "--pipeline-model-parallel-size"),
        ("max_seqlen_per_dp_cp_rank", not s.hybrid_context_parallel, "--hybrid-context-parallel"),
        *((dest, not s.overlap_grad_reduce, "--overlap-grad-reduce") for dest in ("bucket_size", "num_buckets")),
        *((dest, not asked_for_sharding(s), _SHARDING) for dest in _SHARDED),
        *((dest, not s.use_torch_fsdp2, _SHARDING) for dest in _DIVIDED),
        ("megatron_fsdp_version", not s.use_megatron_fsdp, "--use-megatron-fsdp"),
        (
            "reduce_scatter_with_fp32_accumulation",
            s.use_distributed_optimizer and (s.grad_reduce_in_fp32 or not (s.bf16 or s.fp16)),
            "gradients in 16 bits, --grad-reduce-in-bf16",
        ),
        *((dest, not s.tp_comm_overlap, "--tp-comm-overlap") for dest in _TP_OVERLAP),
        *((dest, s.recompute_granularity is None, "--recompute-granularity full") for dest in _FULL_RECOMPUTATION),
        ("recompute_modules", s.recompute_granularity != "selective", "--recompute-granularity selective"),
        (
            "num_distributed_optimizer_instances",
            not (s.use_distributed_optimizer or s.use_torch_fsdp2),
            "--use-distributed-optimizer",
        ),
        *((dest, s.flight_recorder_dump_path is None, "--flight-recorder-dump-path") for dest in _FLIGHT_RECORDER),
        ("distributed_timeout_seconds_after_init", s.world_size == 1, "several processes"),
    ]


def _of_the_model(s: Settings) -> list[Idle]:
    """Shape, positions, experts, loss."""
    has_rotary = s.position_embedding_type in ("rope", "yarn")
    return [
        ("cross_entropy_fusion_impl", not s.cross_entropy_loss_fusion, "--cross-entropy-loss-fusion"),
        *_of_experts(s),
        ("qk_norm_scope", not s.qk_layernorm, "--qk-layernorm"),
        *((dest, not s.use_mup, "--use-mup") for dest in s.flags if dest.startswith("mup_")),
        *((dest, not _is_gated(s), "--swiglu, --geglu or --quick-geglu") for dest in _GATED),
        *((dest, not has_rotary, "--position-embedding-type rope") for dest in (*_ROTARY, "rope_type")),
        *((dest, s.position_embedding_type != "yarn", "--position-embedding-type yarn") for dest in _YARN),
        ("use_rope_scaling", s.position_embedding_type != "rope", "--position-embedding-type rope"),
        ("rope_scaling_factor", not s.use_rope_scaling, "--use-rope-scaling"),
        *((dest, s.window_size is None, "--window-size") for dest in ("rotary_base_local", "window_attn_skip_freq")),
    ]


def _uses_lion(s: Settings) -> bool:
    return bool(s.optimizer == "lion" or (s.optimizer == "muon" and s.muon_scalar_optimizer == "lion"))


def _is_gated(s: Settings) -> bool:
    return bool(s.swiglu or s.geglu or s.quick_geglu)


def _of_experts(s: Settings) -> list[Idle]:
    """Options of a router without what they belong to."""
    if s.num_moe_experts is None:
        return [(dest, True, "--num-experts") for dest in s.flags if dest.startswith("moe_")]
    losses = any(kind.endswith("aux_loss") for kind in s.moe_router_load_balancing_type)
    softmax = s.moe_router_score_function == "softmax"
    return [
        ("moe_aux_loss_coeff", not losses, "--moe-router-load-balancing-type aux_loss"),
        ("moe_router_pre_softmax", not softmax, "--moe-router-score-function softmax"),
        ("moe_router_bias_update_rate", not s.moe_router_enable_expert_bias, "--moe-router-enable-expert-bias"),
        ("moe_router_num_groups", s.moe_router_group_topk is None, "--moe-router-group-topk"),
        ("moe_token_drop_policy", s.moe_expert_capacity_factor is None, "--moe-expert-capacity-factor"),
    ]
