# SPDX-License-Identifier: Apache-2.0
"""Upstream's ways from what a data loader gives to what a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from megatron.core.collectives import broadcast_object
from megatron.core.context_parallel.sharding import get_batch_on_this_cp_rank as _cut
from megatron.core.num_microbatches_calculator import NumMicrobatchesCalculator, build_num_microbatches_calculator
from megatron.core.packed_seq_params import PackedSeqParams, pack_batch
from megatron.core.process_groups_config import Group, ProcessGroupCollection, group_ranks
from megatron.core.taken_arguments import take_arguments


@take_arguments(
    "batch is_hybrid_cp cp_group hybrid_cp_group_func=None use_per_sequence_balancing=False",
    "--hybrid-context-parallel plans batches for their ranks",
)
def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any], is_hybrid_cp: bool = False, cp_group: Group | None = None
) -> dict[str, Any]:
    """This rank's tokens of a batch [b, s, ...] that all ranks of the context-parallel group have loaded alike.

    cp_group: the current one when None. is_hybrid_cp: the batch was planned for its ranks by --hybrid-context-parallel
    already; it is returned as it is.
    """
    if is_hybrid_cp:
        return dict(batch)
    return _cut(batch, cp_group if cp_group is not None else ProcessGroupCollection.current().cp)


@take_arguments(
    "batch has_cu_seqlens=... is_hybrid_cp=... create_attention_mask_in_dataloader=... broadcast_src_rank "
    "broadcast_group cp_size=... tp_rank=... micro_batch_size=... seq_length=... mtp_on_this_rank=... "
    "pipeline_model_parallel_size=... is_pipeline_first_stage=... is_pipeline_last_stage=..."
)  # they say what is in a batch, which comes as it is
def get_batch_on_this_tp_rank(
    batch: Mapping[str, Any] | None, broadcast_src_rank: int | None = None, broadcast_group: Group | None = None
) -> dict[str, Any]:
    """The batch of the first tensor-parallel rank on all of them.

    batch: needed there only. broadcast_src_rank: global rank, the group's first when None. broadcast_group: the current
    tensor-parallel group when None. Training here needs no such call: every rank reads its samples.
    """
    group = broadcast_group if broadcast_group is not None else ProcessGroupCollection.current().tp
    if group.size() == 1:
        assert batch is not None, "the only rank of a group needs the batch"
        return dict(batch)
    source = 0 if broadcast_src_rank is None else group_ranks(group).index(broadcast_src_rank)
    return broadcast_object(dict(batch or {}) if group.rank() == source else None, group, source)


def flatten_batch_for_packed_sequences(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], PackedSeqParams | None]:
    """Samples [b, s] that carry the bounds of their documents (cu_seqlens) as one packed sequence [1, b * s], with its
    PackedSeqParams; None for a batch without bounds, which is returned as it is."""
    return pack_batch(batch)


# ---- the number of microbatches


class CurrentBatchSize:
    """State behind the functions below: upstream keeps one calculator per process, and so do these facades. Our
    programs pass a NumMicrobatchesCalculator to what needs it."""

    calculator: ClassVar[NumMicrobatchesCalculator | None] = None
    consumed_samples: ClassVar[int] = 0


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Set the sizes for the functions below. rank: of upstream's signature, for its log. Raises RuntimeError where they
    were set before; see destroy_num_microbatches_calculator, reconfigure_num_microbatches_calculator."""
    if CurrentBatchSize.calculator is not None:
        raise RuntimeError("the microbatches are set already; call destroy_num_microbatches_calculator() first")
    reconfigure_num_microbatches_calculator(
        rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size,
        decrease_batch_size_if_needed, step_batch_size_schedule, seq_length,
    )  # fmt: skip


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """The same, whatever was set before."""
    CurrentBatchSize.consumed_samples = 0
    CurrentBatchSize.calculator = build_num_microbatches_calculator(
        global_batch_size=None if step_batch_size_schedule else global_batch_size,
        micro_batch_size=micro_batch_size,
        data_parallel_size=data_parallel_size,
        rampup_batch_size=rampup_batch_size,
        step_batch_size_schedule=step_batch_size_schedule,
        seq_length=seq_length,
        decrease_batch_size_if_needed=decrease_batch_size_if_needed,
    )
    update_num_microbatches(0)


def destroy_num_microbatches_calculator() -> None:
    """Forget the sizes."""
    CurrentBatchSize.calculator, CurrentBatchSize.consumed_samples = None, 0


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Tell how many samples were trained on. consistency_check: raise ConfigError where the ranks cannot share the
    global batch size that is in force then; verbose: of upstream's signature."""
    if consistency_check:
        _calculator().check_sizes(consumed_samples, iterations=1)
    CurrentBatchSize.consumed_samples = consumed_samples


def get_num_microbatches() -> int:
    """Microbatches of each rank in the next step."""
    return _calculator().num_microbatches(CurrentBatchSize.consumed_samples)


def get_current_global_batch_size() -> int:
    """Samples of the next step."""
    return _calculator().global_batch_size(CurrentBatchSize.consumed_samples)


def get_current_running_global_batch_size() -> int:
    """Samples of the next step that the ranks really share."""
    return _calculator().running_global_batch_size(CurrentBatchSize.consumed_samples)


def get_micro_batch_size() -> int:
    """Samples of one microbatch on one rank."""
    return _calculator().micro_batch_size


def _calculator() -> NumMicrobatchesCalculator:
    if CurrentBatchSize.calculator is None:
        raise RuntimeError("the microbatches are not set; call init_num_microbatches_calculator() first")
    return CurrentBatchSize.calculator
