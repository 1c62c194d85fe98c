"""--hybrid-context-parallel: what it needs, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config_base import multiples_near
from megatron.core.context_parallel.planning import ranks_of_sample
from megatron.training.flags.settings import Settings, sharding_flag


def plan_has_its_needs(s: Settings) -> Iterator[str]:
    if not s.hybrid_context_parallel:
        return
    if s.max_seqlen_per_dp_cp_rank is None:
        yield (
            "--hybrid-context-parallel needs --max-seqlen-per-dp-cp-rank, the most tokens of a microbatch on one "
            "process; start with --seq-length / --context-parallel-size"
        )
    if not s.sft:
        yield (
            "--hybrid-context-parallel divides conversations of different lengths, which need --sft; add it, or leave "
            "the flag out"
        )
    if not s.calculate_per_token_loss:
        yield (
            "--hybrid-context-parallel needs --calculate-per-token-loss, because its microbatches have different "
            "numbers of tokens; add it"
        )
    if s.dataloader_type == "external":
        yield (
            f"--hybrid-context-parallel cannot plan what {s.say('dataloader_type')} yields; use --dataloader-type "
            "single or cyclic"
        )


def nobody_waits_for_equal_microbatches(s: Settings) -> Iterator[str]:
    """Processes have different numbers of microbatches, of different lengths."""
    if not s.hybrid_context_parallel:
        return
    if s.pipeline_model_parallel_size > 1:
        yield (
            f"--hybrid-context-parallel cannot be combined with {s.say('pipeline_model_parallel_size')}, whose stages "
            "exchange microbatches of one length; use 1 stage"
        )
    if s.use_torch_fsdp2:
        yield (
            f"--hybrid-context-parallel cannot be combined with {sharding_flag(s)}, which gathers weights for every "
            "microbatch on all processes at once; use --use-distributed-optimizer"
        )
    if s.num_moe_experts:
        yield (
            f"--hybrid-context-parallel cannot be combined with {s.say('num_moe_experts')}, whose layers exchange "
            "tokens in every microbatch; use a dense model"
        )
    if s.compile:
        yield (
            "--hybrid-context-parallel cannot be combined with --compile, which would compile every length anew; leave "
            "one out"
        )


def sequences_fit_the_ranks(s: Settings) -> Iterator[str]:
    most, length = s.max_seqlen_per_dp_cp_rank, s.seq_length
    if not s.hybrid_context_parallel or most is None or s.data_parallel_size is None:
        return
    ranks = s.data_parallel_size * s.context_parallel_size
    if ranks & (ranks - 1):
        below = 1 << (ranks.bit_length() - 1)
        yield (
            f"--hybrid-context-parallel needs a power of two of data- and context-parallel processes, not {ranks}; "
            f"use {below} or {2 * below}"
        )
    elif length and length > most * ranks:
        yield (
            f"{s.say('seq_length')} is longer than {s.say('max_seqlen_per_dp_cp_rank')} x {ranks} data- and "
            f"context-parallel processes = {most * ranks}; use at least --max-seqlen-per-dp-cp-rank "
            f"{-(length // -ranks)}"
        )


def planned_ranks_can_exchange(s: Settings) -> Iterator[str]:
    """Every number of ranks up to that of the longest sequence exchanges as --cp-comm-type says."""
    most, length, kinds = s.max_seqlen_per_dp_cp_rank, s.seq_length, s.cp_comm_type or []
    if not s.hybrid_context_parallel or most is None or not length:
        return
    ranks, heads, tp = ranks_of_sample(length, most), s.num_attention_heads, s.tensor_model_parallel_size
    if "a2a+p2p" in kinds:
        yield (
            "--hybrid-context-parallel cannot be combined with --cp-comm-type a2a+p2p, whose levels are for one number "
            "of ranks; use p2p, all_gather or a2a"
        )
    if "a2a" in kinds and heads and heads % tp == 0 and heads // tp % ranks:
        yield (
            f"--cp-comm-type a2a with {s.say('seq_length')} and {s.say('max_seqlen_per_dp_cp_rank')} divides sequences "
            f"over up to {ranks} ranks, which {s.say('num_attention_heads')} / {s.say('tensor_model_parallel_size')} = "
            f"{heads // tp} heads are not a multiple of; use {multiples_near(heads, tp * ranks)} heads, or "
            "--cp-comm-type p2p"
        )


CHECKS = (
    plan_has_its_needs,
    nobody_waits_for_equal_microbatches,
    sequences_fit_the_ranks,
    planned_ranks_can_exchange,
)
