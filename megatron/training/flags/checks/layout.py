"""How processes share the model: sizes that must divide each other, pipeline stages, overlap of communication."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from megatron.core.config_base import divisors_near, multiples_near
from megatron.core.transformer.pipeline_layout import layout_problem, layout_stages
from megatron.training.flags.settings import Settings


def world_is_divisible(s: Settings) -> Iterator[str]:
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    product = prod(getattr(s, size) for size in sizes)
    if s.data_parallel_size is None:
        written = " x ".join(s.say(size) for size in sizes)
        yield (
            f"{written} = {product} processes per model copy does not divide the {s.world_size} processes of the job "
            f"(WORLD_SIZE); use sizes whose product is {divisors_near(s.world_size, product)}"
        )


def experts_fit_the_processes(s: Settings) -> Iterator[str]:
    """Experts are carved out of tensor x context x data parallelism; they do not multiply the world size."""
    if s.data_parallel_size is None or s.expert_model_parallel_size == 1 and s.num_moe_experts is None:
        return
    available = s.world_size // s.pipeline_model_parallel_size
    wanted = s.expert_tensor_parallel_size * s.expert_model_parallel_size
    if available % wanted:
        yield (
            f"{s.say('expert_tensor_parallel_size')} x {s.say('expert_model_parallel_size')} = {wanted} does not "
            "divide the "
            f"{available} processes of a pipeline stage ({s.world_size} / {s.say('pipeline_model_parallel_size')}); "
            f"use sizes whose product is {divisors_near(available, wanted)}"
        )


def heads_are_divisible(s: Settings) -> Iterator[str]:
    heads, groups, tp = s.num_attention_heads, s.num_query_groups, s.tensor_model_parallel_size
    if heads and heads % tp:
        yield (
            f"{s.say('num_attention_heads')} cannot be split over {s.say('tensor_model_parallel_size')}; "
            f"use {multiples_near(heads, tp)} heads, or a tensor-parallel size of {divisors_near(heads, tp)}"
        )
    if groups and groups % tp and tp % groups:
        yield (
            f"{s.say('num_query_groups')} must be a multiple or a divisor of {s.say('tensor_model_parallel_size')}; "
            f"use {divisors_near(tp, groups)} groups"
        )


def norms_over_heads_have_whole_heads(s: Settings) -> Iterator[str]:
    groups, tp = s.num_query_groups or s.num_attention_heads, s.tensor_model_parallel_size
    if s.qk_layernorm and s.qk_norm_scope == "all" and groups and groups % tp:
        yield (
            f"{s.say('qk_norm_scope')} cannot share {groups} key-value heads among "
            f"{s.say('tensor_model_parallel_size')}; use a divisor of {groups}"
        )


def layers_fill_the_stages(s: Settings) -> Iterator[str]:
    layers, stages = s.num_layers, s.pipeline_model_parallel_size
    first, last = s.decoder_first_pipeline_num_layers, s.decoder_last_pipeline_num_layers
    if not layers or stages == 1 or s.pipeline_model_parallel_layout:
        return
    if first is not None or last is not None:
        rest = layers - (first or 0) - (last or 0)
        middle = stages - (first is not None) - (last is not None)
        if rest < 0 or (rest % middle if middle > 0 else rest):
            yield (
                f"{s.say('num_layers')} less those of the first and last stage ({first or 0} and {last or 0}) leaves "
                f"{rest} "
                f"layers, which do not divide over the {middle} other stages of {s.say('pipeline_model_parallel_size')}"
            )
        return
    counted = layers + s.account_for_embedding_in_pipeline_split + s.account_for_loss_in_pipeline_split
    if counted % stages:
        extra = f" (with embedding and loss counted: {counted})" if counted != layers else ""
        yield (
            f"{s.say('num_layers')}{extra} does not divide over {s.say('pipeline_model_parallel_size')}; "
            f"use {multiples_near(layers, stages)} layers, or {divisors_near(counted, stages)} stages, or say the "
            "uneven "
            "stages with --decoder-first-pipeline-num-layers"
        )


def stages_are_laid_out(s: Settings) -> Iterator[str]:
    layout, stages = s.pipeline_model_parallel_layout, s.pipeline_model_parallel_size
    if not layout:
        return
    parts = layout_stages(layout)
    problem = layout_problem(parts)
    if problem is not None and "m" not in layout:
        yield f"{s.say('pipeline_model_parallel_layout')} {problem}"
        return
    if len(parts) % stages:
        yield (
            f"{s.say('pipeline_model_parallel_layout')} has {len(parts)} stages, which is not a multiple of "
            f"{s.say('pipeline_model_parallel_size')}; use {multiples_near(len(parts), stages)} stages"
        )
    layers = sum(part.count("t") for part in parts)
    if s.num_layers and layers != s.num_layers:
        yield f"{s.say('pipeline_model_parallel_layout')} has {layers} layers (t), but {s.say('num_layers')}"
    others = (
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    )
    for dest in others:
        if getattr(s, dest):
            yield (
                f"{s.say(dest)} contradicts {s.name('pipeline_model_parallel_layout')}, which says all about stages; "
                "keep one"
            )


def chunks_fit_the_stages(s: Settings) -> Iterator[str]:
    """The interleaved schedule (Narayanan et al., 2021)."""
    per_chunk, chunks = s.num_layers_per_virtual_pipeline_stage, s.num_virtual_stages_per_pipeline_rank
    stages = s.pipeline_model_parallel_size
    if per_chunk is None and chunks is None:
        return
    spelled = s.say(
        "num_layers_per_virtual_pipeline_stage" if chunks is None else "num_virtual_stages_per_pipeline_rank"
    )
    if per_chunk is not None and chunks is not None:
        yield (
            f"{s.say('num_layers_per_virtual_pipeline_stage')} and {s.say('num_virtual_stages_per_pipeline_rank')} "
            "say the same "
            "thing in two ways; keep one"
        )
    smallest = 2 if s.overlap_p2p_comm else 3
    if stages < smallest:
        without = "" if s.overlap_p2p_comm else " with --no-overlap-p2p-communication"
        yield f"{spelled}{without} needs --pipeline-model-parallel-size of at least {smallest}, not {stages}"
    uneven = s.decoder_first_pipeline_num_layers is not None or s.decoder_last_pipeline_num_layers is not None
    if uneven and per_chunk is not None:
        yield f"{spelled} contradicts uneven first or last stages; use --num-virtual-stages-per-pipeline-rank"
        return
    layers_per_stage = (s.num_layers or 0) // stages
    parts = per_chunk if per_chunk is not None else chunks
    if parts <= 0 or (not uneven and not _counts_ends(s) and layers_per_stage and layers_per_stage % parts):
        yield (
            f"{spelled} does not divide the {layers_per_stage} layers of a stage ({s.say('num_layers')} / "
            f"{s.say('pipeline_model_parallel_size')}); use {divisors_near(layers_per_stage or 1, max(parts, 1))}"
        )


def _counts_ends(s: Settings) -> bool:
    return bool(s.account_for_embedding_in_pipeline_split or s.account_for_loss_in_pipeline_split)


def microbatches_fill_the_pipeline(s: Settings) -> Iterator[str]:
    dp, stages, batch = s.data_parallel_size, s.pipeline_model_parallel_size, s.global_batch_size
    if s.virtual_pipeline_model_parallel_size is None or dp is None or batch is None:
        return
    if s.pipeline_schedule == "zb-v":
        return  # runs with any number
    microbatches = batch // (s.micro_batch_size * dp)
    if microbatches < stages:
        yield (
            f"the interleaved schedule needs as many microbatches as stages, but {s.say('global_batch_size')} / "
            f"({s.say('micro_batch_size')} x data-parallel size {dp}) = {microbatches} and "
            f"{s.say('pipeline_model_parallel_size')}; use --global-batch-size {stages * s.micro_batch_size * dp} or "
            "more"
        )


def sequences_are_divisible(s: Settings) -> Iterator[str]:
    cp, tp, length = s.context_parallel_size, s.tensor_model_parallel_size, s.seq_length
    if length and cp > 1 and length % (2 * cp):
        yield (
            f"{s.say('seq_length')} is not divisible by 2 x {s.say('context_parallel_size')} (each rank holds two "
            "pieces, one "
            f"from either end); use {multiples_near(length, 2 * cp)} tokens"
        )
    if length and s.sequence_parallel and length % (tp * cp):
        yield (
            f"{s.say('seq_length')} is not divisible by {s.say('tensor_model_parallel_size')} x "
            f"{s.say('context_parallel_size')}, as --sequence-parallel needs; use {multiples_near(length, tp * cp)} "
            "tokens"
        )


def context_exchange_is_complete(s: Settings) -> Iterator[str]:
    kinds, sizes, cp = s.cp_comm_type or [], s.hierarchical_context_parallel_sizes, s.context_parallel_size
    unknown = [kind for kind in kinds if kind not in ("p2p", "all_gather", "a2a", "a2a+p2p")]
    for kind in unknown:
        yield f"--cp-comm-type {kind} is unknown; use p2p, all_gather, a2a or a2a+p2p"
    if len(kinds) > 1 and s.num_layers and len(kinds) != s.num_layers:
        yield (
            f"{s.say('cp_comm_type')} names {len(kinds)} kinds for {s.say('num_layers')}; give one, or one for each "
            "layer"
        )
    if sizes is not None and prod(sizes) != cp:
        yield (
            f"{s.say('hierarchical_context_parallel_sizes')} multiply to {prod(sizes)}, not to "
            f"{s.say('context_parallel_size')}"
        )
    if cp > 1 and "a2a+p2p" in kinds and sizes is None:
        yield (
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes, two numbers whose product is the CP "
            "size"
        )


def documents_are_bounded_in_one_way(s: Settings) -> Iterator[str]:
    """Document bounds replace masks; microbatches of several sequences become one, which stages do not expect."""
    if not s.dataloader_inter_document_masking:
        return
    if s.reset_attention_mask:
        yield "--dataloader-inter-document-masking and --reset-attention-mask say the same in two ways; keep one"
    if s.pipeline_model_parallel_size > 1 and s.micro_batch_size and s.micro_batch_size > 1:
        yield (
            f"--dataloader-inter-document-masking with {s.say('pipeline_model_parallel_size')} cannot have "
            f"{s.say('micro_batch_size')}; use --micro-batch-size 1"
        )


def heads_can_be_exchanged(s: Settings) -> Iterator[str]:
    """Ranks that exchange tokens for heads need a share of every tensor-parallel rank's query heads."""
    heads, tp, cp = s.num_attention_heads, s.tensor_model_parallel_size, s.context_parallel_size
    levels, kinds = s.hierarchical_context_parallel_sizes, s.cp_comm_type or []
    if cp == 1 or not heads or heads % tp:
        return
    exchanging = {"a2a": cp, "a2a+p2p": levels[0] if levels else 1}
    for kind, ranks in exchanging.items():
        if kind in kinds and heads // tp % ranks:
            written = s.say("context_parallel_size" if kind == "a2a" else "hierarchical_context_parallel_sizes")
            yield (
                f"--cp-comm-type {kind} with {written} needs a multiple of {ranks} query heads on each "
                f"tensor-parallel rank, and {s.say('num_attention_heads')} / {s.say('tensor_model_parallel_size')} "
                f"is {heads // tp}; use {multiples_near(heads, tp * ranks)} heads, or --cp-comm-type p2p"
            )


def overlap_has_its_needs(s: Settings) -> Iterator[str]:
    is_sharded = s.use_distributed_optimizer or s.use_megatron_fsdp or s.use_torch_fsdp2 or s.optimizer == "muon"
    if s.overlap_param_gather and not (s.overlap_grad_reduce and is_sharded):
        yield (
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; add them or leave "
            "it out"
        )
    if s.overlap_param_gather_with_optimizer_step and not s.overlap_param_gather:
        yield "--overlap-param-gather-with-optimizer-step needs --overlap-param-gather"
    if s.tp_comm_overlap and not s.sequence_parallel:
        yield (
            "--tp-comm-overlap needs --sequence-parallel and a tensor-parallel size above 1 "
            f"(now {s.say('tensor_model_parallel_size')})"
        )
    if s.tp_comm_overlap and s.compile:
        yield "--tp-comm-overlap cannot be combined with --compile; leave one out"
    if s.num_buckets is not None and s.bucket_size is not None:
        yield f"{s.say('num_buckets')} and {s.say('bucket_size')} both say how gradients are divided; keep one"
    instances = s.num_distributed_optimizer_instances
    if (
        instances > 1
        and s.data_parallel_size is not None
        and s.data_parallel_size * s.context_parallel_size % instances
    ):
        replicas = s.data_parallel_size * s.context_parallel_size
        yield (
            f"{s.say('num_distributed_optimizer_instances')} does not divide the {replicas} model copies; "
            f"use {divisors_near(replicas, instances)}"
        )
    if s.reduce_scatter_with_fp32_accumulation and not s.use_distributed_optimizer:
        yield "--ddp-reduce-scatter-with-fp32-accumulation needs --use-distributed-optimizer; add it or leave it out"
    if s.reduce_scatter_with_fp32_accumulation and instances > 1:
        yield (
            f"--ddp-reduce-scatter-with-fp32-accumulation cannot be combined with "
            f"{s.say('num_distributed_optimizer_instances')}, whose second sum rounds; use 1"
        )
    if s.wgrad_deferral_limit and not s.defer_embedding_wgrad_compute:
        yield f"{s.say('wgrad_deferral_limit')} needs --defer-embedding-wgrad-compute"


CHECKS = (
    world_is_divisible, experts_fit_the_processes, heads_are_divisible, norms_over_heads_have_whole_heads,
    layers_fill_the_stages, stages_are_laid_out, chunks_fit_the_stages,
    microbatches_fill_the_pipeline, sequences_are_divisible, context_exchange_is_complete, heads_can_be_exchanged,
    documents_are_bounded_in_one_way, overlap_has_its_needs,
)  # fmt: skip
