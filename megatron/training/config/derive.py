"""Values that follow from others, so that a user need not repeat himself; what upstream does after parsing.

Every function fills in a subject's missing values and notes what a user may not expect. None refuses anything.
"""

from __future__ import annotations

from megatron.core.errors import ConfigError
from megatron.core.num_microbatches_calculator import parse_step_schedule
from megatron.core.transformer.pipeline_layout import layout_stages
from megatron.training.config.flag_values import decimal
from megatron.training.config.fully_sharded import asked_for_sharding, derive_sharding
from megatron.training.config.settings import Settings


def derive(s: Settings) -> None:
    """All derived values, in the order in which they depend on each other."""
    _layout(s)
    _batch(s)
    _model(s)
    _attention(s)
    _precision(s)
    _experts(s)
    _optimizer(s)
    _data(s)
    _checkpoint(s)
    _without_effect(s)


def _layout(s: Settings) -> None:
    model_processes = s.tensor_model_parallel_size * s.pipeline_model_parallel_size * s.context_parallel_size
    if s.world_size % model_processes == 0:
        s.data_parallel_size = s.world_size // model_processes
    if s.sequence_parallel and s.tensor_model_parallel_size == 1:
        s.note("--sequence-parallel has no effect with --tensor-model-parallel-size 1")
        s.derive(sequence_parallel=False)
    if s.expert_tensor_parallel_size is None:
        s.derive(expert_tensor_parallel_size=s.tensor_model_parallel_size)
    s.derive(virtual_pipeline_model_parallel_size=_virtual_stages(s))
    if s.overlap_p2p_comm_warmup_flush:
        s.note("--overlap-p2p-communication-warmup-flush has no effect: transfers overlap in every phase already")
    if "use_layer_wise_param_layout" in s.given:
        s.note(
            "--use-layer-wise-param-layout has no effect: matrices that lie on a cut are put together for their update"
        )
    if s.use_gigatoken:
        s.note("--use-gigatoken has no effect here: tools/preprocess_data.py encodes text, training reads token ids")
    if not s.use_gloo_process_groups:
        s.note("--disable-gloo-process-groups has no effect: no groups are made beside those of the run's own backend")


def _virtual_stages(s: Settings) -> int | None:
    """Chunks of layers per pipeline stage; None without the interleaved schedule or where the numbers do not fit."""
    stages, per_chunk, chunks = s.pipeline_model_parallel_size, s.num_layers_per_virtual_pipeline_stage, 1
    if s.num_virtual_stages_per_pipeline_rank:
        chunks = s.num_virtual_stages_per_pipeline_rank
    elif s.pipeline_model_parallel_layout:
        chunks = len(layout_stages(s.pipeline_model_parallel_layout)) // stages
    elif s.pipeline_schedule == "zb-v":
        chunks = 2
    elif per_chunk and s.num_layers and per_chunk > 0 and (s.num_layers // stages) % per_chunk == 0:
        chunks = s.num_layers // stages // per_chunk
    return chunks if chunks > 1 else None


def _batch(s: Settings) -> None:
    if s.micro_batch_size is None:
        s.note("--micro-batch-size is not given; 1 is used")
        s.derive(micro_batch_size=1)
    if isinstance(s.step_batch_size_schedule, list):
        s.derive(step_batch_size_schedule=" ".join(s.step_batch_size_schedule))
    if s.step_batch_size_schedule is not None and "global_batch_size" not in s.given:
        s.derive(global_batch_size=_last_batch_size(s.step_batch_size_schedule))
    elif s.global_batch_size is None and s.data_parallel_size is not None:
        s.derive(global_batch_size=s.micro_batch_size * s.data_parallel_size)
    if s.eval_micro_batch_size is None:
        s.derive(eval_micro_batch_size=s.micro_batch_size)
    if s.eval_global_batch_size is None:
        s.derive(eval_global_batch_size=s.global_batch_size)


def _last_batch_size(schedule: str) -> int | None:
    """The batch a run with a step schedule ends with; None where the schedule cannot be read (a check says so)."""
    try:
        return parse_step_schedule(schedule)[-1].global_batch_size
    except ConfigError:
        return None


def _model(s: Settings) -> None:
    if s.use_rotary_position_embeddings:
        s.derive(position_embedding_type="rope")
    if s.rope_type == "yarn" and s.position_embedding_type == "rope":
        s.derive(position_embedding_type="yarn")
    if not s.add_position_embedding and s.position_embedding_type == "learned_absolute":
        s.derive(position_embedding_type="none")
    if s.max_position_embeddings is None and s.position_embedding_type != "learned_absolute":
        s.derive(max_position_embeddings=s.seq_length)
    if s.add_bias_linear:
        s.derive(add_qkv_bias=True)
    if s.transformer_impl == "transformer_engine":
        s.note("--transformer-impl transformer_engine: Transformer Engine is not used; the layers run on plain torch")
    if s.num_experts == 0:
        s.derive(num_experts=None)


def _attention(s: Settings) -> None:
    groups, heads = s.num_query_groups, s.num_attention_heads
    if s.group_query_attention and groups is None:
        s.derive(num_query_groups=1)
    elif not s.group_query_attention and groups not in (None, 0, heads):
        s.note(f"{s.say('num_query_groups')} implies --group-query-attention")
        s.derive(group_query_attention=True)
    if s.apply_query_key_layer_scaling:
        s.derive(attention_softmax_in_fp32=True)


def _precision(s: Settings) -> None:
    if s.bf16 and not s.grad_reduce_in_bf16 and s.main_grads_dtype == "fp32":
        s.derive(grad_reduce_in_fp32=True)


def _experts(s: Settings) -> None:
    if s.num_experts is not None and s.moe_ffn_hidden_size is None:
        s.derive(moe_ffn_hidden_size=s.ffn_hidden_size)
    if s.moe_use_upcycling:
        s.derive(no_load_optim=True, no_load_rng=True)


def _optimizer(s: Settings) -> None:
    derive_sharding(s)
    if s.no_weight_decay_cond_type == "apply_wd_to_qk_layernorm":
        s.derive(apply_wd_to_qk_layernorm=True)
    if s.optimizer == "dist_muon":
        s.note("--optimizer dist_muon is --optimizer muon with --use-distributed-optimizer")
        s.derive(optimizer="muon", use_distributed_optimizer=True)
    elif s.optimizer == "muon" and s.overlap_param_gather and not s.use_distributed_optimizer:
        s.note("--overlap-param-gather with --optimizer muon implies --use-distributed-optimizer")
        s.derive(use_distributed_optimizer=True)
    if s.weight_decay_incr_style == "constant" and s.start_weight_decay is None and s.end_weight_decay is None:
        s.derive(start_weight_decay=s.weight_decay, end_weight_decay=s.weight_decay)
    if s.recompute_activations and s.recompute_granularity is None:
        s.derive(recompute_granularity="selective")
    if s.recompute_granularity == "selective" and s.recompute_modules is None:
        s.derive(recompute_modules=["core_attn"])


def _data(s: Settings) -> None:
    for dest in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        paths = getattr(s, dest)
        if paths and len(paths) == 1 and " " in paths[0].strip() and _is_number(paths[0].split()[0]):
            s.note(f"{s.name(dest)} holds a whole blend in one text; it is divided at its spaces")
            s.derive(**{dest: paths[0].split()})
    if s.split is not None and s.split != s.split.strip("'\""):
        s.note(f"--split {s.split} is written with quotes; they are taken off")
        s.derive(split=s.split.strip("'\""))
    if s.split is None and (s.data_path or s.data_args_path):
        s.derive(split="969, 30, 1")
    if s.dataloader_type is None:
        s.derive(dataloader_type="single")
    if s.tokenizer_type is None and s.metadata_path is None:
        s.derive(tokenizer_type="GPT2BPETokenizer")
    has_data = s.mock_data or any(
        getattr(s, dest) for dest in ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    )
    if not has_data and s.dataloader_type != "external":
        s.note("no flag names data: pretrain_gpt.py will need --data-path, or --mock-data to try the settings out")


def _is_number(text: str) -> bool:
    try:
        decimal(text)
    except ValueError:
        return False
    return True


def _checkpoint(s: Settings) -> None:
    if s.skip_train:
        s.derive(no_load_optim=True)


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


def _uses_lion(s: Settings) -> bool:
    return bool(s.optimizer == "lion" or (s.optimizer == "muon" and s.muon_scalar_optimizer == "lion"))


def _is_gated(s: Settings) -> bool:
    return bool(s.swiglu or s.geglu or s.quick_geglu)


def _idle_choices_of_experts(s: Settings) -> list[tuple[str, bool, str]]:
    """Options of a router without what they belong to, as in `_without_effect`."""
    if s.num_experts is None:
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


def _without_effect(s: Settings) -> None:
    """Flags that the other settings leave nothing to do."""
    has_rotary = s.position_embedding_type in ("rope", "yarn")
    idle = [
        ("save_interval", s.save is None, "--save"),
        ("eval_iters", s.eval_interval is None and s.eval_iters > 0, "--eval-interval"),
        ("manual_gc_interval", not s.manual_gc, "--manual-gc"),
        ("lr_wsd_decay_iters", s.lr_decay_style != "WSD", "--lr-decay-style WSD"),
        ("lr_wsd_decay_samples", s.lr_decay_style != "WSD", "--lr-decay-style WSD"),
        ("lr_wsd_decay_style", s.lr_decay_style != "WSD", "--lr-decay-style WSD"),
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
        ("grad_reduce_in_bf16", not s.bf16, "--bf16"),
        ("apply_wd_to_qk_layernorm", not s.qk_layernorm, "--qk-layernorm"),
        ("sgd_momentum", s.optimizer != "sgd", "--optimizer sgd"),
        *((dest, not _uses_lion(s), "--optimizer lion") for dest in ("lion_beta1", "lion_beta2")),
        *((dest, s.optimizer != "muon", "--optimizer muon") for dest in _MUON),
        ("soap_precondition_frequency", s.optimizer != "soap", "--optimizer soap"),
        *((dest, s.optimizer in ("sgd", "lion"), "--optimizer adam") for dest in _ADAM),
        *((dest, not s.fp16, "--fp16") for dest in ("loss_scale", *_DYNAMIC_LOSS_SCALE)),
        *((dest, s.fp16 and s.loss_scale is not None, "a dynamic loss scale") for dest in _DYNAMIC_LOSS_SCALE),
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
        ("cross_entropy_fusion_impl", not s.cross_entropy_loss_fusion, "--cross-entropy-loss-fusion"),
        *((dest, s.flight_recorder_dump_path is None, "--flight-recorder-dump-path") for dest in _FLIGHT_RECORDER),
        ("distributed_timeout_seconds_after_init", s.world_size == 1, "several processes"),
        *((dest, not s.qk_clip, "--qk-clip") for dest in ("qk_clip_alpha", "qk_clip_threshold")),
        *_idle_choices_of_experts(s),
        ("qk_norm_scope", not s.qk_layernorm, "--qk-layernorm"),
        *((dest, not s.use_mup, "--use-mup") for dest in s.flags if dest.startswith("mup_")),
        *((dest, not _is_gated(s), "--swiglu, --geglu or --quick-geglu") for dest in _GATED),
        *((dest, not s.fim_data, "--fim-data") for dest in _FILL_IN),
        *((dest, not has_rotary, "--position-embedding-type rope") for dest in (*_ROTARY, "rope_type")),
        *((dest, s.position_embedding_type != "yarn", "--position-embedding-type yarn") for dest in _YARN),
        ("use_rope_scaling", s.position_embedding_type != "rope", "--position-embedding-type rope"),
        ("rope_scaling_factor", not s.use_rope_scaling, "--use-rope-scaling"),
        *((dest, s.window_size is None, "--window-size") for dest in ("rotary_base_local", "window_attn_skip_freq")),
    ]
    for dest, is_idle, needed in idle:
        if is_idle and dest in s.given and s.values[dest] != s.flags[dest].default:
            s.note(f"{s.say(dest)} has no effect without {needed}")
