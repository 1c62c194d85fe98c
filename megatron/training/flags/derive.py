# SPDX-License-Identifier: Apache-2.0
"""Derivation of settings from a command line beyond its words: short forms, flags of other systems, and values that
imply others.

Every function works on the settings of a run before they are checked (a RunConfig of unchecked groups). It yields notes
on what a user may not expect, and refuses nothing. Values that follow from others however a config was made are filled
in by the configs themselves (`derive`) and between them (config/relations.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from megatron.core.errors import ConfigError
from megatron.core.flag_texts import decimal
from megatron.core.num_microbatches_calculator import sort_step_schedule
from megatron.core.plan.letters import split_letters
from megatron.core.tokenizers.tokenizer_options import DEFAULT_TYPE
from megatron.training.config.container import Fields, RunConfig
from megatron.training.config.layout_relations import sharding_flag
from megatron.training.config.model_relations import find_what_no_graph_repeats
from megatron.training.config.relations import compute_schedule_lengths, samples_per_scheduled_iteration
from megatron.training.config.run_groups import list_settings
from megatron.training.flags.declarations import declared_flags
from megatron.training.flags.flag import notes_of_idle_flags


def derive(run: RunConfig, given: Set[str]) -> Iterator[str]:
    """Derive everything, in the order in which settings depend on each other; yield notes. given: names of the settings
    that a user wrote."""
    yield from _idle_flags(run, given)
    yield from _letters(run, given)
    yield from _processes(run, given)
    yield from _batch(run)
    expand_short_forms(run)
    yield from _attention(run)
    yield from _sharding(run, given)
    yield from _optimizer(run)
    yield from _learning(run)
    yield from _graphs(run, given)
    yield from _checkpoint(run)
    yield from _data(run)


def _idle_flags(run: RunConfig, given: Set[str]) -> Iterator[str]:
    """Note the switches that have nothing to do here, whatever else is asked."""
    for flag in declared_flags():
        if flag.dest in given and (note := notes_of_idle_flags().get(run.say(flag.dest))):
            yield f"{run.say(flag.dest)} {note}"


def _letters(run: RunConfig, given: Set[str]) -> Iterator[str]:
    """Check what the letters of a hybrid say against other flags that say it otherwise."""
    model, asked = run.model, run.say("hybrid_layer_pattern")
    if model.experimental_attention_variant == "gated_delta_net":
        yield "--experimental-attention-variant gated_delta_net is an earlier name of gdn"
    if not isinstance(model.hybrid_layer_pattern, str):
        if model.mtp_hybrid_override_pattern is not None and model.mtp_num_layers is None:
            yield "--mtp-hybrid-override-pattern has no effect without --hybrid-layer-pattern and --mtp-num-layers"
            model.mtp_hybrid_override_pattern = None
        return
    letters = split_letters(model.hybrid_layer_pattern)
    if "hybrid_override_pattern" in given:
        yield "--hybrid-override-pattern is an earlier name of --hybrid-layer-pattern"
    if "mtp_hybrid_override_pattern" in given and model.mtp_hybrid_override_pattern is None:
        yield f"--mtp-hybrid-override-pattern is an earlier way to write {asked}"
    elif model.mtp_hybrid_override_pattern is not None:
        yield f"--mtp-hybrid-override-pattern has no effect: {asked} says which layers there are"
        model.mtp_hybrid_override_pattern = None
    for name, says in (
        ("num_layers", max(1, len(letters.decoder))),
        ("mtp_num_layers", len(letters.predictions) or None),
        ("moe_layer_freq", 1),
        ("linear_attention_freq", None),
    ):
        if getattr(model, name) != says:
            yield f"{run.say(name)} has no effect: {asked} says which layers there are"
            setattr(model, name, says)


def _processes(run: RunConfig, given: Set[str]) -> Iterator[str]:
    model = run.model
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        yield "--sequence-parallel has no effect with --tensor-model-parallel-size 1"
        model.sequence_parallel = False
    if "use_layer_wise_param_layout" in given:
        yield (
            "--use-layer-wise-param-layout has no effect: matrices that lie on a cut are put together for their update"
        )
    if model.moe_token_dispatcher_type == "flex":
        yield (
            "--moe-token-dispatcher-type flex becomes alltoall, by the collectives of torch.distributed instead of "
            "DeepEP, HybridEP or NCCL EP; the numbers stay the same"
        )
    if run.gpt.transformer_impl == "transformer_engine":
        yield "--transformer-impl transformer_engine: on a CPU, which it is not for, the layers run on plain torch"


def _batch(run: RunConfig) -> Iterator[str]:
    if run.training.micro_batch_size is None:
        yield "--micro-batch-size is not given; 1 is used"
    schedule = run.training.step_batch_size_schedule
    if schedule is not None:
        try:
            ordered = sort_step_schedule(schedule)
        except ConfigError:
            return  # growing_batch_is_possible says what is wrong
        if ordered.split() != schedule.replace(",", " ").split():
            yield f"--step-batch-size-schedule {schedule} is out of order; it is taken as {ordered}"
            run.training.step_batch_size_schedule = ordered


def expand_short_forms(run: RunConfig) -> None:
    """Put in the values of the model's settings that short forms, such as --swiglu, stand for."""
    model, gpt = run.model, run.gpt
    if run.training.recompute_activations and model.recompute_granularity is None:
        model.recompute_granularity = "selective"
    if gpt.use_rotary_position_embeddings:
        model.position_embedding_type = "rope"
    if not gpt.add_position_embedding and model.position_embedding_type == "learned_absolute":
        model.position_embedding_type = "none"
    model.gated_linear_unit = gpt.swiglu or gpt.geglu or gpt.quick_geglu
    model.bias_activation_fusion = gpt.bias_swiglu_fusion if model.gated_linear_unit else gpt.bias_gelu_fusion
    chosen = (
        (gpt.swiglu, "silu"),
        (gpt.quick_geglu, "quick_gelu"),
        (gpt.squared_relu, "squared_relu"),
        (gpt.relu, "relu"),
        (gpt.openai_gelu, "gelu_tanh"),
    )
    model.activation_func = next((name for is_chosen, name in chosen if is_chosen), "gelu")


def _attention(run: RunConfig) -> Iterator[str]:
    model, gpt = run.model, run.gpt
    if model.multi_latent_attention and model.position_embedding_type == "learned_absolute":
        yield (
            "--multi-latent-attention rotates a part of each head beside --position-embedding-type learned_absolute; "
            "for rotary positions alone, as DeepSeek has them, give --position-embedding-type rope"
        )
    if model.add_bias_linear:
        model.add_qkv_bias = True
    if gpt.group_query_attention and model.num_query_groups is None:
        model.num_query_groups = 1
    elif not gpt.group_query_attention and model.num_query_groups not in (None, 0, model.num_attention_heads):
        yield f"{run.say('num_query_groups')} implies --group-query-attention"
        gpt.group_query_attention = True


# What a script's fully sharded data parallelism becomes here, and what follows from that.
#
# | --data-parallel-sharding-strategy | divided                    | becomes                                |
# |-----------------------------------|----------------------------|----------------------------------------|
# | no_shard                          | nothing                    | plain data parallelism                 |
# | optim                             | optimizer state (ZeRO-1)   | --use-distributed-optimizer            |
# | optim_grads                       | and gradients (ZeRO-2)     | PyTorch's FSDP2, gathered once a step  |
# | optim_grads_params                | and parameters (ZeRO-3)    | PyTorch's FSDP2                        |
_DIVIDED = {"optim_grads": "gradients and optimizer state (ZeRO-2)", "optim_grads_params": "everything (ZeRO-3)"}
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather", "overlap_param_gather_with_optimizer_step")


def _sharding(run: RunConfig, given: Set[str]) -> Iterator[str]:
    ddp = run.ddp
    if not given & {"use_torch_fsdp2", "use_megatron_fsdp"}:
        return
    asked = sharding_flag(run)
    if ddp.use_megatron_fsdp and run.checkpoint.ckpt_format == "fsdp_dtensor":
        yield "--ckpt-format fsdp_dtensor is not written; checkpoints are saved as torch_dist, which any layout loads"
        run.checkpoint.ckpt_format = "torch_dist"
    ddp.use_torch_fsdp2 = ddp.data_parallel_sharding_strategy in _DIVIDED
    if not ddp.use_torch_fsdp2:
        yield from _without_divided_parameters(run, asked)
        return
    # Gradients are whole only until they are summed. What computes them later is refused with FSDP2 by name; a second
    # sentence about a switch that was never written would confuse.
    if not any(run.model.deferral_problems("--use-torch-fsdp2")):
        run.model.gradient_accumulation_fusion = False
    if ddp.use_megatron_fsdp:
        yield from _as_torch_does_it(run, asked)
    if run.is_divisible and run.site_replicas * run.model.context_parallel_size == 1:
        yield f"{asked} has no effect: one process holds each parameter, so there is nothing to divide"
        _sum_as_kept(run)
    for name in ("average_in_collective", "pad_buckets_for_high_nccl_busbw"):
        if getattr(ddp, name):
            yield f"{run.say(name)} has no effect with {asked}"


def _as_torch_does_it(run: RunConfig, asked: str) -> Iterator[str]:
    ddp = run.ddp
    divided = _DIVIDED[ddp.data_parallel_sharding_strategy]
    yield f"{asked} becomes --use-torch-fsdp2, PyTorch's FSDP2, which divides {divided}"
    for name in ("use_distributed_optimizer", *_OVERLAPS):
        if getattr(ddp, name):
            yield f"{run.say(name)} has no effect with {asked}, which does so always"
            setattr(ddp, name, False)
    if ddp.megatron_fsdp_version != 1:
        yield f"{run.say('megatron_fsdp_version')} has no effect: PyTorch's FSDP2 takes the place of either version"


def _without_divided_parameters(run: RunConfig, asked: str) -> Iterator[str]:
    ddp = run.ddp
    divides_state = ddp.data_parallel_sharding_strategy == "optim"
    becomes = "--use-distributed-optimizer" if divides_state else "plain data parallelism"
    yield (
        f"{run.say('data_parallel_sharding_strategy')} divides no parameters; {asked} becomes {becomes}, and PyTorch's "
        "FSDP2 is not used"
    )
    ddp.use_distributed_optimizer = divides_state
    if ddp.overlap_param_gather and not divides_state:
        yield f"{run.say('overlap_param_gather')} has no effect: nothing is divided, so nothing is gathered"
        ddp.overlap_param_gather = ddp.overlap_param_gather_with_optimizer_step = False
    _sum_as_kept(run)


def _sum_as_kept(run: RunConfig) -> None:
    """Gradients that are not divided are summed as they are kept, so that one word says both."""
    ddp = run.ddp
    asked = {ddp.megatron_fsdp_main_grads_dtype, ddp.megatron_fsdp_grad_comm_dtype}
    if "fp32" in asked:
        ddp.grad_reduce_in_fp32 = True
    elif asked & {"bf16", "fp16"}:
        ddp.grad_reduce_in_bf16, ddp.grad_reduce_in_fp32 = run.model.bf16, False


def _optimizer(run: RunConfig) -> Iterator[str]:
    optimizer, ddp = run.optimizer, run.ddp
    if optimizer.no_weight_decay_cond_type == "apply_wd_to_qk_layernorm":
        optimizer.apply_wd_to_qk_layernorm = True
    if optimizer.optimizer == "dist_muon":
        yield "--optimizer dist_muon is --optimizer muon with --use-distributed-optimizer"
        optimizer.optimizer, ddp.use_distributed_optimizer = "muon", True
    elif optimizer.optimizer == "muon" and ddp.overlap_param_gather and not ddp.use_distributed_optimizer:
        yield "--overlap-param-gather with --optimizer muon implies --use-distributed-optimizer"
        ddp.use_distributed_optimizer = True


def _learning(run: RunConfig) -> Iterator[str]:
    """Values that are legal, and with which nothing, or not what one expects, is learnt: found out after hours."""
    model, optimizer = run.model, run.optimizer
    if model.hidden_dropout == 1:
        yield f"{run.say('hidden_dropout')} drops all outputs of layers and embedding: training sees none of the text"
    if model.attention_dropout == 1:
        yield f"{run.say('attention_dropout')} drops every attention weight: no token learns from another"
    begins_at_zero = [run.say("init_method_std")] if model.init_method_std == 0 else []
    if model.embedding_init_method_std == 0 and not run.gpt.untie_embeddings_and_output_weights:
        begins_at_zero.append(run.say("embedding_init_method_std"))
    # Both factors of a product that are 0 have gradients that are 0: the two matrices of an MLP or of attention, and an
    # embedding that is the output layer as well.
    for setting in begins_at_zero if model.perform_initialization else ():
        yield f"{setting} begins with matrices of zeros, whose gradients are zero, too: new weights learn nothing"
    if optimizer.lr == 0:
        yield f"{run.say('lr')} leaves every weight as it is"


def _graphs(run: RunConfig, given: Set[str]) -> Iterator[str]:
    model = run.model
    for name, becomes in (
        ("enable_cuda_graph", "--cuda-graph-impl local"),
        ("external_cuda_graph", "--cuda-graph-impl transformer_engine"),
        ("cuda_graph_scope_deprecated", "--cuda-graph-modules, without which whole layers are recorded"),
    ):
        if name in given and getattr(model, name):
            yield f"{run.say(name)} is an earlier name of {becomes}"
    what = find_what_no_graph_repeats(run)
    if what is not None and (model.cuda_graph_impl != "none" or model.enable_cuda_graph or model.external_cuda_graph):
        yield f"CUDA graphs have no effect with {what}: layers are launched one kernel at a time"
        model.cuda_graph_impl, model.cuda_graph_modules, model.cuda_graph_scope_deprecated = "none", [], None
        model.enable_cuda_graph = model.external_cuda_graph = False
        model.cuda_graph_warmup_steps = type(model).cuda_graph_warmup_steps
    if model.external_cuda_graph or model.cuda_graph_impl == "transformer_engine":
        yield "--cuda-graph-impl transformer_engine records layers as local does, without Transformer Engine"
    if "moe_preprocess" in model.cuda_graph_modules:
        yield "--cuda-graph-modules moe_preprocess is launched one kernel at a time, behind the graph of moe_router"
    if model.dsa_kernel_backend != "none":
        yield f"{model.say('dsa_kernel_backend')}: sparse attention is computed as with none, the same function"


def _checkpoint(run: RunConfig) -> Iterator[str]:
    checkpoint = run.checkpoint
    if checkpoint.ckpt_format == "torch_dcp":
        yield "--ckpt-format torch_dcp is not written; checkpoints are saved as torch_dist, which any layout loads"
        checkpoint.ckpt_format = "torch_dist"
    if checkpoint.save and checkpoint.save_interval is None and checkpoint.ckpt_convert_format is None:
        yield "--save without --save-interval saves when the run ends, and only then: a crash would lose all of it"


def _data(run: RunConfig) -> Iterator[str]:
    data = run.data
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        paths = getattr(data, name)
        if paths and len(paths) == 1 and " " in paths[0].strip() and _is_number(paths[0].split()[0]):
            yield f"{run.flag(name)} holds a whole blend in one text; it is divided at its spaces"
            setattr(data, name, paths[0].split())
    if data.split is not None and data.split != data.split.strip("'\""):
        yield f"--split {data.split} is written with quotes; they are taken off"
        data.split = data.split.strip("'\"")
    yield from _tokenizer(run)
    names = ("mock_data", "data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    if not any(getattr(data, name) for name in names) and data.dataloader_type != "external":
        yield "no flag names data: pretrain_gpt.py will need --data-path, or --mock-data to try the settings out"


def _tokenizer(run: RunConfig) -> Iterator[str]:
    tokenizer = run.tokenizer
    if tokenizer.metadata_path is not None:
        return  # it may say which tokenizer it is, and where
    missing = tokenizer.list_missing()
    if tokenizer.tokenizer_type is None:
        tokenizer.tokenizer_type = DEFAULT_TYPE
        if missing:
            yield (
                "no flag names a tokenizer: pretrain_gpt.py will need one, such as --tokenizer-type "
                "HuggingFaceTokenizer --tokenizer-model DIRECTORY"
            )
    elif missing:
        yield f"pretrain_gpt.py will need {' and '.join(missing)} for --tokenizer-type {tokenizer.tokenizer_type}"


def _is_number(text: str) -> bool:
    try:
        decimal(text)
    except ValueError:
        return False
    return True


def idle_notes(run: RunConfig, given: Set[str]) -> Iterator[str]:
    """A note for every setting that was written and has nothing to do, by what its field needs."""
    fields = Fields(run, given)
    for group, setting in list_settings():
        name = setting.dest
        if name in given and getattr(getattr(run, group), name) != setting.default:
            missing = next((needs.words for needs in setting.needs if not needs.met(fields)), None)
            if missing is not None:
                yield f"{run.say(name)} has no effect without {missing}"


def schedule_notes(run: RunConfig) -> Iterator[str]:
    """Yield what a schedule in iterations comes to where the batch grows, so that iterations are of different
    lengths."""
    training, scheduler = run.training, run.scheduler
    steps, ramp = training.step_batch_size_schedule, training.rampup_batch_size
    if training.train_iters is None or (steps is None and ramp is None):
        return
    lengths = compute_schedule_lengths(run)
    decays, weight_decay_grows = scheduler.lr_decay_style != "constant", scheduler.weight_decay_incr_style != "constant"
    parts = [
        (f"warm-up {lengths.lr_warmup_steps:g}", "--lr-warmup-samples", lengths.lr_warmup_steps > 0),
        (f"decay {lengths.lr_decay_steps}", "--lr-decay-samples", decays),
        (f"final decay {lengths.wsd_decay_steps}", "--lr-wsd-decay-samples", scheduler.lr_decay_style == "WSD"),
        (f"growth of the weight decay {lengths.wd_incr_steps}", "--train-samples", weight_decay_grows),
    ]
    found = [(words, flag) for words, flag, is_used in parts if is_used]
    if not found:
        return
    asked, unit = ("--rampup-batch-size", "--global-batch-size")
    if steps is not None:
        asked, unit = "--step-batch-size-schedule", "--micro-batch-size x data-parallel size"
    flags = dict.fromkeys(["--train-samples", *(flag for _, flag in found)])
    yield (
        f"{asked}: an iteration of a schedule counts as {samples_per_scheduled_iteration(run)} samples ({unit}), "
        f"however far the batch has grown; in samples: {', '.join(words for words, _ in found)}; "
        f"to write samples use {', '.join(flags)}"
    )
