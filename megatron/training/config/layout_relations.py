# SPDX-License-Identifier: Apache-2.0
"""Rules between settings of different groups about how processes share the work: sizes, sequences, sharding.

Each function yields a sentence for every violation. Rules about only the model are in the `rules` of
TransformerConfig's groups of fields.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config_base import name_divisors, name_multiples
from megatron.core.context_parallel.planning import count_ranks_of_sample, cutting_problem
from megatron.core.mesh import find_instances_problem, size_problems
from megatron.core.optimizer.rule_table import needs_whole_matrices
from megatron.core.pipeline_parallel.schedules import interleaved_problem
from megatron.training.config.run_groups import RunGroups
from megatron.training.config.sites import split_addresses

_FORMATS = ("megatron_fsdp_main_params_dtype", "megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype")


def sizes_fit_the_processes(run: RunGroups) -> Iterator[str]:
    """Every process belongs to one copy of the model, and the experts to the processes of a stage."""
    model = run.model
    sizes = {
        "tp": model.tensor_model_parallel_size,
        "cp": model.context_parallel_size,
        "pp": model.pipeline_model_parallel_size,
        "ep": model.expert_model_parallel_size,
        "etp": model.expert_tensor_parallel_size or model.tensor_model_parallel_size,
    }
    sites = run.sites.sites_of_job
    if run.world_size % sites:
        yield (
            f"{run.say('diloco_replicas')} does not divide the {run.world_size} processes into equal sites; use "
            f"{name_divisors(run.world_size, sites)}, or a job for each site (--datacenter-id)"
        )
    else:
        yield from size_problems(run.site_size, sizes)


def microbatches_fill_the_pipeline(run: RunGroups) -> Iterator[str]:
    """Every step of the run, and the evaluations; `growing_batch_is_possible` has the sizes of a batch that grows."""
    batch, replicas = run.training.global_batch_size, run.data_parallel_size
    micro_batch, stages = run.training.micro_batch_size or 1, run.model.pipeline_model_parallel_size
    if not _is_interleaved(run) or batch is None or not run.is_divisible:
        return
    microbatches = batch // (micro_batch * replicas)
    if microbatches < stages:
        yield (
            f"the interleaved schedule needs as many microbatches as stages, but {run.say('global_batch_size')} / "
            f"({run.say('micro_batch_size')} x data-parallel size {replicas}) = {microbatches} and "
            f"{run.say('pipeline_model_parallel_size')}; use --global-batch-size {stages * micro_batch * replicas} or "
            "more"
        )
    elif batch % (micro_batch * replicas) == 0:
        problem = find_interleaving_problem(run, microbatches)
        if problem is not None:
            yield f"{run.say('global_batch_size')}: {problem}"


def find_interleaving_problem(run: RunGroups, microbatches: int) -> str | None:
    """Return why the interleaved schedule cannot run so many microbatches; None where it can, or another schedule runs
    them."""
    stages = run.model.pipeline_model_parallel_size
    group = run.model.microbatch_group_size_per_vp_stage or stages
    # Groups below the number of stages are refused by a rule of the model's.
    if not _is_interleaved(run) or stages == 1 or group < stages:
        return None
    return interleaved_problem(stages, microbatches, group)


def _is_interleaved(run: RunGroups) -> bool:
    # zb-v has two chunks per stage too, but fills its pipeline by different rules.
    return run.model.virtual_pipeline_model_parallel_size is not None and run.model.pipeline_schedule != "zb-v"


def sequences_are_divisible(run: RunGroups) -> Iterator[str]:
    """Context, sequence and expert parallelism divide the tokens of a sequence."""
    model, length = run.model, run.data.seq_length
    cp, tp = model.context_parallel_size, model.tensor_model_parallel_size
    if not length:
        return
    problem = cutting_problem(run.say("seq_length"), length, cp)
    if problem is not None:
        yield problem
    if model.sequence_parallel and tp > 1 and length % (tp * cp):
        yield (
            f"{run.say('seq_length')} is not divisible by {run.say('tensor_model_parallel_size')} x "
            f"{run.say('context_parallel_size')}, as --sequence-parallel needs; use {name_multiples(length, tp * cp)} "
            "tokens"
        )
    # Without sequence parallelism a layer with experts divides the tokens itself.
    if model.num_moe_experts is not None and not length % cp and length // cp % tp:
        yield (
            f"{run.say('num_moe_experts')}: {run.say('seq_length')} does not divide by "
            f"{run.say('tensor_model_parallel_size')} x {run.say('context_parallel_size')}; "
            f"use {name_multiples(length, tp * cp)} tokens"
        )


def conversations_can_be_planned(run: RunGroups) -> Iterator[str]:
    """--hybrid-context-parallel: microbatches are planned from the lengths of conversations."""
    if not run.model.hybrid_context_parallel:
        return
    if not run.data.sft:
        yield (
            "--hybrid-context-parallel divides conversations of different lengths, which need --sft; add it, or leave "
            "the flag out"
        )
    if run.data.dataloader_type == "external":
        yield (
            f"--hybrid-context-parallel cannot plan what {run.say('dataloader_type')} yields; use --dataloader-type "
            "single or cyclic"
        )


def planned_sequences_fit_the_ranks(run: RunGroups) -> Iterator[str]:
    """The longest sequence fits all ranks together, which exchange it as --cp-comm-type says."""
    model, length, most = run.model, run.data.seq_length, run.model.max_seqlen_per_dp_cp_rank
    if not model.hybrid_context_parallel or most is None:
        return
    ranks = run.data_parallel_size * model.context_parallel_size
    # A power of two has one bit; groups of 1, 2, 4, ... ranks then nest in one another.
    if run.is_divisible and ranks & (ranks - 1):
        below = 1 << (ranks.bit_length() - 1)
        yield (
            f"--hybrid-context-parallel needs a power of two of data- and context-parallel processes, not {ranks}; "
            f"use {below} or {2 * below}"
        )
    elif run.is_divisible and length and length > most * ranks:
        yield (
            f"{run.say('seq_length')} is longer than {run.say('max_seqlen_per_dp_cp_rank')} x {ranks} data- and "
            f"context-parallel processes = {most * ranks}; use at least --max-seqlen-per-dp-cp-rank "
            f"{-(length // -ranks)}"
        )
    heads, tp = model.num_attention_heads, model.tensor_model_parallel_size
    if length and "a2a" in model.cp_comm_type and heads and heads % tp == 0:
        ranks = count_ranks_of_sample(length, most)
        if heads // tp % ranks:
            yield (
                f"--cp-comm-type a2a with {run.say('seq_length')} and {run.say('max_seqlen_per_dp_cp_rank')} divides "
                f"sequences over up to {ranks} ranks, which {run.say('num_attention_heads')} / "
                f"{run.say('tensor_model_parallel_size')} = {heads // tp} heads are not a multiple of; "
                f"use {name_multiples(heads, tp * ranks)} heads, or --cp-comm-type p2p"
            )


def copies_of_the_optimizer_state_divide_the_replicas(run: RunGroups) -> Iterator[str]:
    """Groups of neighbours divide one copy each; with divided parameters there are at least two neighbours."""
    instances, replicas = run.ddp.num_distributed_optimizer_instances, _replicas(run)
    if replicas is None or instances == 1:
        return
    problem = find_instances_problem(instances, replicas)
    if problem is not None:
        yield problem
    if run.ddp.use_torch_fsdp2 and instances == replicas:
        yield (
            f"{run.say('num_distributed_optimizer_instances')} leaves each of the {instances} model copies whole, and "
            f"{sharding_flag(run)} nothing to divide; use fewer, or --data-parallel-sharding-strategy no_shard"
        )


def sites_sum_gradients_inside_first(run: RunGroups) -> Iterator[str]:
    """Plain copies of the model would sum them across the sites as if these were one."""
    divides = run.ddp.use_distributed_optimizer or run.ddp.use_torch_fsdp2
    if run.sites.site_topology is not None and run.sites.diloco_replicas == 1 and not divides:
        yield f"{run.say('site_topology')} needs --use-distributed-optimizer, by which a site has a copy of the state"


def divided_parameters_stand_alone(run: RunGroups) -> Iterator[str]:
    """Yield what fully sharded data parallelism cannot be combined with."""
    ddp, model, asked = run.ddp, run.model, sharding_flag(run)
    if not ddp.use_torch_fsdp2:
        return
    if ddp.use_distributed_optimizer:
        yield f"{asked} already divides the optimizer state; leave out --use-distributed-optimizer"
    # A layer's weights are gathered for one micro-batch and let go before the next one comes to it.
    if model.overlap_dispatch_backward_with_experts_wgrad:
        yield (
            f"--overlap-dispatch-backward-with-experts-wgrad cannot be combined with {asked}, which adds up weight "
            "gradients itself; use --use-distributed-optimizer"
        )
    if model.overlap_moe_expert_parallel_comm:
        yield f"--overlap-moe-expert-parallel-comm cannot be combined with {asked}; use --use-distributed-optimizer"
    # fully_shard sums a layer's gradients, and lets them go, when the layer's backward ends.
    if model.defers_weight_gradients:
        yield (
            f"{run.say('pipeline_schedule')} computes weight gradients when {asked} has summed the layer's already; "
            "use --pipeline-schedule 1f1b"
        )
    if model.defer_embedding_wgrad_compute:
        yield (
            f"--defer-embedding-wgrad-compute computes a weight gradient when {asked} has summed the layer's already; "
            "leave it out"
        )
    if ddp.overlap_grad_reduce or ddp.overlap_param_gather:
        given = "--overlap-grad-reduce" if ddp.overlap_grad_reduce else "--overlap-param-gather"
        yield f"{asked} always sums and gathers beside the computation; leave out {given}"
    # Fewer key-value heads than tensor-parallel ranks: several ranks then hold the same rows, whose gradients are
    # partial.
    groups = model.num_query_groups
    if groups and groups != model.num_attention_heads and groups < model.tensor_model_parallel_size:
        yield (
            f"{asked} cannot be combined with {run.say('num_query_groups')} below "
            f"{run.say('tensor_model_parallel_size')}: several ranks would hold a key-value head; use at most "
            f"--tensor-model-parallel-size {groups}"
        )
    if needs_whole_matrices(run.optimizer.optimizer):
        yield (f"{run.say('optimizer')} needs whole matrices, which {asked} divides; use --use-distributed-optimizer")
    if run.optimizer.main_params_dtype == "fp16":
        yield (
            f"{run.say('main_params_dtype')} cannot be had with {asked}; use fp32, or --megatron-fsdp-main-params-dtype"
        )


def registered_memory_is_not_counted(run: RunGroups) -> Iterator[str]:
    """With NCCL's user buffers, transfers are hidden from what counts them."""
    if run.ddp.nccl_ub and run.logger.log_comm_volume:
        yield f"{run.say('nccl_ub')} cannot be combined with --log-comm-volume; leave one out"


def formats_of_divided_parameters_fit(run: RunGroups) -> Iterator[str]:
    """Each is float32 or the model's; main gradients are the main parameters' or the model's."""
    ddp = run.ddp
    is_asked_for = ddp.use_torch_fsdp2 or ddp.use_megatron_fsdp
    if not is_asked_for and ddp.data_parallel_sharding_strategy not in ("no_shard", "optim"):
        return
    model = "bf16" if run.model.bf16 else "fp16" if run.model.fp16 else "fp32"
    foreign = [name for name in _FORMATS if getattr(ddp, name) not in ("auto", "fp32", model)]
    for name in foreign:
        yield f"{run.say(name)} is neither float32 nor the model's {model}; use fp32, auto, or --{getattr(ddp, name)}"
    # The rules below compare formats, which are not known here.
    if foreign:
        return
    # "auto" is the model's format for parameters, and whatever fits for the others.
    params, grads, sent = (getattr(ddp, name) for name in _FORMATS)
    params = model if params == "auto" else params
    if are_parameters_divided(run):
        if grads == "fp32" != params:
            yield (
                f"{run.say(_FORMATS[1])} cannot be had with {run.say(_FORMATS[0])}: sums arrive in the number format "
                f"of the divided parameters; use {run.flag(_FORMATS[1])} auto"
            )
        return
    if params != "fp32":
        yield f"{run.say(_FORMATS[0])} needs divided parameters, which this run has not; use fp32"
    if "auto" not in (grads, sent) and grads != sent:
        yield (
            f"{run.say(_FORMATS[1])} and {run.say(_FORMATS[2])} differ, but gradients of parameters that are not "
            "divided are sent as they are kept; use one format for both"
        )


def gathers_parameters(run: RunGroups) -> bool:
    """Return whether ranks gather parameters that others have updated."""
    ddp = run.ddp
    return ddp.use_distributed_optimizer or ddp.use_megatron_fsdp or ddp.use_torch_fsdp2


def low_precision_gathers_have_something_to_gather(run: RunGroups) -> Iterator[str]:
    """--fp8-param-gather and --fp4-param-gather concern low-precision parameters that are gathered."""
    for name in ("fp8", "fp4"):
        if not getattr(run.model, f"{name}_param_gather"):
            continue
        if getattr(run.model, name) is None:
            yield f"--{name}-param-gather needs --{name}-format"
        if not gathers_parameters(run):
            yield f"--{name}-param-gather needs --use-distributed-optimizer, or fully sharded data parallelism"


def are_parameters_divided(run: RunGroups) -> bool:
    """Return whether several processes hold parts of each parameter."""
    return run.ddp.use_torch_fsdp2 and _replicas(run) != 1


def sharding_flag(run: RunGroups) -> str:
    """The switch of fully sharded data parallelism as the user wrote it."""
    return "--use-megatron-fsdp" if run.ddp.use_megatron_fsdp else "--use-torch-fsdp2"


def _replicas(run: RunGroups) -> int | None:
    """Processes that hold the same shard of the model; None where the layout does not fit."""
    # Context-parallel ranks hold the same weights, so parameters are divided over them as well.
    return run.site_replicas * run.model.context_parallel_size if run.is_divisible else None


def sites_train_by_themselves(run: RunGroups) -> Iterator[str]:
    """Yield what several sites cannot be combined with."""
    if run.sites.diloco_replicas == 1:
        return
    several, sites = run.say("diloco_replicas"), run.sites
    if sites.diloco_timeout_seconds >= 60 * run.distributed.distributed_timeout_minutes:
        yield (
            f"{run.say('diloco_timeout_seconds')} is not less than {run.say('distributed_timeout_minutes')}: ranks "
            "that wait for one of theirs, which waits for another site, would give up first"
        )
    addresses = split_addresses(sites.diloco_address) if sites.diloco_address is not None else None
    if addresses is not None and run.site_size % len(addresses):
        yield (
            f"{run.say('diloco_address')} names {len(addresses)} nodes, which do not divide the {run.site_size} "
            "processes of a site equally; give one address for each node of the first site"
        )
    if sites.data_site and len(run.data.data_path or ()) != 1:
        yield f"{run.say('data_site')} is in place of the one prefix of --data-path; give that, without a blend"
    if run.ddp.use_torch_fsdp2:
        yield f"{several} cannot be combined with {sharding_flag(run)}; use --use-distributed-optimizer"
    if run.model.hybrid_context_parallel:
        yield f"{several} cannot be combined with --hybrid-context-parallel, which plans batches of one job"
    if run.profiling.dry_run:
        yield f"--dry-run tries one job, and {several} makes a job of each site; try one site, without it"
    if run.in_process.inprocess_restart:
        yield f"{several} cannot be combined with --inprocess-restart; let the launcher start a site again"
    has_copies = run.ties_embeddings or run.model.mtp_num_layers is not None
    if sites.diloco_exchange_dtype in ("int8", "e3m0") and has_copies and run.model.pipeline_model_parallel_size > 1:
        yield (
            f"{run.say('diloco_exchange_dtype')} would round the copies of the embedding on two pipeline stages "
            "differently; use bf16 or fp32, or --untie-embeddings-and-output-weights without --mtp-num-layers"
        )


LAYOUT_RELATIONS = (
    sizes_fit_the_processes, microbatches_fill_the_pipeline, sequences_are_divisible,
    conversations_can_be_planned, planned_sequences_fit_the_ranks,
    copies_of_the_optimizer_state_divide_the_replicas, divided_parameters_stand_alone,
    registered_memory_is_not_counted, formats_of_divided_parameters_fit,
    low_precision_gathers_have_something_to_gather, sites_train_by_themselves,
    sites_sum_gradients_inside_first,
)  # fmt: skip
