"""Pipeline schedules: which need chunks, and what they need of the run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config_base import multiples_near
from megatron.core.pipeline_parallel.schedules import DEFERS_WEIGHT_GRADIENTS, interleaved_problem
from megatron.training.flags.settings import Settings


def schedule_fits_the_stages(s: Settings) -> Iterator[str]:
    schedule, stages = s.pipeline_schedule, s.pipeline_model_parallel_size
    chunks = s.virtual_pipeline_model_parallel_size
    if schedule is None:
        return
    if stages == 1:
        yield f"{s.say('pipeline_schedule')} needs --pipeline-model-parallel-size of at least 2, not 1"
    elif schedule == "interleaved" and chunks is None:
        yield f"{s.say('pipeline_schedule')} needs several chunks per stage; add --num-virtual-stages-per-pipeline-rank"
    elif schedule == "zb-v" and chunks != 2:
        yield f"{s.say('pipeline_schedule')} lays 2 chunks on each stage, not {chunks}; leave the number out"
    elif schedule not in ("interleaved", "zb-v") and chunks is not None:
        yield (
            f"{s.say('pipeline_schedule')} has one chunk per stage, but the settings ask for {chunks}; "
            "use --pipeline-schedule interleaved, or leave the chunks out"
        )
    written = s.pipeline_model_parallel_layout or s.account_for_embedding_in_pipeline_split
    uneven = s.decoder_first_pipeline_num_layers is not None or s.decoder_last_pipeline_num_layers is not None
    counts_ends = written or uneven or s.account_for_loss_in_pipeline_split
    if schedule == "zb-v" and stages > 1 and s.num_layers and not counts_ends and s.num_layers % (2 * stages):
        yield (
            f"{s.say('num_layers')} cannot be divided over the {stages} stages x 2 chunks of --pipeline-schedule zb-v; "
            f"use {multiples_near(s.num_layers, 2 * stages)} layers"
        )


def weight_gradients_can_wait(s: Settings) -> Iterator[str]:
    """Only the layers' own products can be split into two halves."""
    if s.pipeline_schedule not in DEFERS_WEIGHT_GRADIENTS:
        return
    whole = {"--compile": s.compile, "--no-gradient-accumulation-fusion": not s.gradient_accumulation_fusion}
    for flag, is_given in whole.items():
        if is_given:
            yield f"{s.say('pipeline_schedule')} computes weight gradients later, which {flag} rules out; keep one"


def output_layer_can_wait(s: Settings) -> Iterator[str]:
    if not s.defer_embedding_wgrad_compute:
        return
    flag = "--defer-embedding-wgrad-compute"
    if s.pipeline_model_parallel_size == 1:
        yield f"{flag} needs --pipeline-model-parallel-size of at least 2, not 1"
    if s.pipeline_schedule in DEFERS_WEIGHT_GRADIENTS:
        yield f"{s.say('pipeline_schedule')} defers all weight gradients; leave out {flag}"
    whole = {"--compile": s.compile, "--no-gradient-accumulation-fusion": not s.gradient_accumulation_fusion}
    for other, is_given in whole.items():
        if is_given:
            yield f"{flag} computes weight gradients later, which {other} rules out; keep one"


def transfers_overlap_or_not(s: Settings) -> Iterator[str]:
    if s.overlap_p2p_comm_warmup_flush and not s.overlap_p2p_comm:
        yield "--overlap-p2p-communication-warmup-flush contradicts --no-overlap-p2p-communication; keep one"


def microbatches_fill_groups(s: Settings) -> Iterator[str]:
    """Every step of the run, and the evaluations; a batch size that grows is looked at when the run is set up."""
    stages, chunks, batch = s.pipeline_model_parallel_size, s.virtual_pipeline_model_parallel_size, s.global_batch_size
    size = s.microbatch_group_size_per_vp_stage
    if chunks is None or stages == 1 or s.pipeline_schedule == "zb-v":
        return
    if size is not None and size < stages:
        yield (
            f"{s.say('microbatch_group_size_per_vp_stage')} is below {s.say('pipeline_model_parallel_size')}; "
            f"use {stages} or more"
        )
        return
    per_microbatch = s.micro_batch_size * (s.data_parallel_size or 1)
    if s.data_parallel_size is None or batch is None or batch % per_microbatch or batch // per_microbatch < stages:
        return  # said elsewhere
    problem = interleaved_problem(stages, batch // per_microbatch, size or stages)
    if problem is not None:
        yield f"{s.say('global_batch_size')}: {problem}"


CHECKS = (
    schedule_fits_the_stages,
    weight_gradients_can_wait,
    output_layer_can_wait,
    transfers_overlap_or_not,
    microbatches_fill_groups,
)
