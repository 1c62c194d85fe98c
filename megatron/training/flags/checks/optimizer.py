"""What an update rule needs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.optimizer.rule_table import needs_whole_matrices, reads_constants
from megatron.training.flags.settings import Settings, sharding_flag


def muon_finds_its_matrices(s: Settings) -> Iterator[str]:
    """Muon needs whole matrices; processes that hold the same keys and values must update them alike."""
    if needs_whole_matrices(s.optimizer) and s.use_torch_fsdp2:
        yield (
            f"{s.say('optimizer')} needs whole matrices, which {sharding_flag(s)} divides; "
            "use --use-distributed-optimizer"
        )
    if s.optimizer != "muon":
        return
    groups, tp = s.num_query_groups, s.tensor_model_parallel_size
    if s.muon_tp_mode == "blockwise" and not s.muon_split_qkv and groups and groups < tp:
        yield (
            "--muon-tp-mode blockwise with --muon-no-split-qkv needs as many query groups as "
            f"{s.say('tensor_model_parallel_size')}, not {groups}; use --muon-tp-mode duplicated"
        )


def means_forget(s: Settings) -> Iterator[str]:
    """Adam divides by 1 - beta."""
    for dest in ("adam_beta1", "adam_beta2"):
        if reads_constants(s, "adam") and getattr(s, dest) == 1:
            yield f"{s.say(dest)} takes nothing of a gradient into the mean; give a number below 1, such as 0.95"


CHECKS = (muon_finds_its_matrices, means_forget)
