"""Settings that are each available but not yet together: refused as planned, not as wrong."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.flags.fully_sharded import sharding_flag
from megatron.training.flags.settings import Settings


def experts_with(s: Settings) -> Iterator[str]:
    if s.num_moe_experts is None:
        return
    together = (
        (s.use_torch_fsdp2, sharding_flag(s), "--use-distributed-optimizer"),
        (s.hybrid_context_parallel, "--hybrid-context-parallel", "--context-parallel-size"),
        (s.optimizer in ("muon", "soap"), s.say("optimizer"), "--optimizer adam"),
        (s.num_distributed_optimizer_instances > 1, s.say("num_distributed_optimizer_instances"), "1"),
        (s.recompute_granularity == "full", "--recompute-granularity full", "--recompute-granularity selective"),
        (s.compile, "--compile", "layers that are not compiled"),
        (s.use_mup, "--use-mup", "learning rates and initial weights of your own"),
        (
            s.context_parallel_size > 1 and s.moe_expert_capacity_factor and s.moe_token_drop_policy == "position",
            f"{s.say('moe_token_drop_policy')} and {s.say('context_parallel_size')}",
            "--moe-token-drop-policy probs",
        ),
    )
    for is_given, what, instead in together:
        if is_given:
            yield f"{s.say('num_moe_experts')} cannot be combined with {what} yet; use {instead}"


def not_yet(s: Settings) -> Iterator[str]:
    """Every combination of this run that is not available yet, as a sentence."""
    yield from experts_with(s)
