"""Batch sizes, length of the run, evaluation batches."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config_base import multiples_near
from megatron.core.errors import ConfigError
from megatron.core.num_microbatches_calculator import build_num_microbatches_calculator
from megatron.training.config.training import UNCATCHABLE_SIGNALS
from megatron.training.flags.settings import Settings


def batch_is_divisible(s: Settings) -> Iterator[str]:
    """Every optimizer step takes whole microbatches on every data-parallel rank."""
    dp = s.data_parallel_size
    is_constant = s.step_batch_size_schedule is None and s.rampup_batch_size is None
    if dp is None or s.global_batch_size is None or not is_constant or s.decrease_batch_size_if_needed:
        return
    unit = s.micro_batch_size * dp
    if s.global_batch_size % unit:
        yield (
            f"{s.say('global_batch_size')} is not divisible by {s.say('micro_batch_size')} x data-parallel size {dp} "
            f"= {unit}; use {multiples_near(s.global_batch_size, unit)}"
        )


def evaluation_batch_is_divisible(s: Settings) -> Iterator[str]:
    dp, batch = s.data_parallel_size, s.eval_global_batch_size
    given = "eval_global_batch_size" in s.given or "eval_micro_batch_size" in s.given
    if dp is None or batch is None or not given:
        return
    unit = s.eval_micro_batch_size * dp
    if batch % unit:
        yield (
            f"{s.say('eval_global_batch_size')} is not divisible by {s.say('eval_micro_batch_size')} x data-parallel "
            f"size {dp} "
            f"= {unit}; use {multiples_near(batch, unit)}"
        )


def growing_batch_is_possible(s: Settings) -> Iterator[str]:
    """--rampup-batch-size and --step-batch-size-schedule, by the rules of the calculator that will use them."""
    if s.step_batch_size_schedule is not None and "global_batch_size" in s.given:
        yield "--step-batch-size-schedule and --global-batch-size both set the global batch size; keep one"
        return
    scheduled = s.step_batch_size_schedule is not None
    if s.data_parallel_size is None or not (scheduled or s.rampup_batch_size is not None):
        return
    try:
        build_num_microbatches_calculator(
            global_batch_size=None if scheduled else s.global_batch_size,
            micro_batch_size=s.micro_batch_size,
            data_parallel_size=s.data_parallel_size,
            rampup_batch_size=s.rampup_batch_size,
            step_batch_size_schedule=s.step_batch_size_schedule,
            seq_length=s.seq_length,
            decrease_batch_size_if_needed=s.decrease_batch_size_if_needed,
        )
    except ConfigError as error:
        yield from error.problems


def length_is_given_once(s: Settings) -> Iterator[str]:
    if s.train_iters is not None and s.train_samples is not None:
        yield f"{s.say('train_iters')} and {s.say('train_samples')} both say how long to train; keep one"
    if s.train_iters is None and s.train_samples is None and not s.skip_train:
        yield "--train-iters is missing; say how long to train with --train-iters or --train-samples"


def exit_signal_can_be_caught(s: Settings) -> Iterator[str]:
    if s.exit_signal_handler and s.exit_signal in UNCATCHABLE_SIGNALS:
        yield f"{s.say('exit_signal')} ends a process without asking it; use SIGTERM, SIGINT or SIGUSR1"


CHECKS = (
    batch_is_divisible,
    evaluation_batch_is_divisible,
    growing_batch_is_possible,
    length_is_given_once,
    exit_signal_can_be_caught,
)
