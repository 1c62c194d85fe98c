"""Learning rate and weight decay over the run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.flags.settings import Settings


def units_agree(s: Settings) -> Iterator[str]:
    """A run counted in iterations has a schedule in iterations, a run counted in samples one in samples."""
    if (s.train_iters is None) == (s.train_samples is None):
        return
    unit, other = ("iters", "samples") if s.train_iters is not None else ("samples", "iters")
    for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(s, f"{stem}_{other}"):
            right = s.name(f"{stem}_{unit}")
            yield f"{s.say(f'{stem}_{other}')} does not fit {s.say(f'train_{unit}')}; use {right}"


def there_is_a_step(s: Settings) -> Iterator[str]:
    if s.train_iters == 0 and not s.lr_decay_iters:
        yield "--train-iters 0 leaves the learning rate nothing to decay over; give at least 1, or --lr-decay-iters"
    grows = s.rampup_batch_size is not None or s.step_batch_size_schedule is not None
    if s.train_samples is not None and not grows and s.train_samples < (s.global_batch_size or 0):
        yield f"{s.say('train_samples')} are less than one step of {s.say('global_batch_size')}; give more"


def warmup_is_given_once(s: Settings) -> Iterator[str]:
    for dest in ("lr_warmup_iters", "lr_warmup_samples"):
        if s.lr_warmup_fraction is not None and getattr(s, dest):
            yield f"{s.say('lr_warmup_fraction')} and {s.say(dest)} both set the warm-up; keep one"


def warmup_ends_before_the_decay(s: Settings) -> Iterator[str]:
    for unit in ("iters", "samples"):
        length_dest = f"lr_decay_{unit}" if getattr(s, f"lr_decay_{unit}") else f"train_{unit}"
        length, warmup = getattr(s, length_dest), getattr(s, f"lr_warmup_{unit}")
        if length and warmup and warmup >= length:
            yield (
                f"{s.say(f'lr_warmup_{unit}')} leaves nothing of {s.say(length_dest)} for the decay; "
                f"use a warm-up of at most {length - 1}, or a longer decay"
            )
    if s.lr_warmup_fraction == 1:
        yield f"{s.say('lr_warmup_fraction')} leaves nothing for the decay; use a share below 1"


def rates_are_ordered(s: Settings) -> Iterator[str]:
    if s.lr is None:
        yield "--lr is missing; give the learning rate, for example --lr 3e-4"
        return
    if s.min_lr > s.lr:
        yield f"{s.say('min_lr')} is above {s.say('lr')}; use {s.lr} or less"
    if s.lr_warmup_init > s.lr:
        yield f"{s.say('lr_warmup_init')} is above {s.say('lr')}, which the warm-up ends at; use {s.lr} or less"


def decoupled_rates_are_ordered(s: Settings) -> Iterator[str]:
    if s.decoupled_min_lr is not None and s.decoupled_lr is None:
        yield f"{s.say('decoupled_min_lr')} needs --decoupled-lr"
    lowest = "min_lr" if s.decoupled_min_lr is None else "decoupled_min_lr"
    if s.decoupled_lr is not None and getattr(s, lowest) > s.decoupled_lr:
        yield f"{s.say(lowest)} is above {s.say('decoupled_lr')}; use a --decoupled-min-lr of {s.decoupled_lr} or less"


def stable_decay_has_its_length(s: Settings) -> Iterator[str]:
    """Warm-up, stable, decay (Hu et al., 2024)."""
    unit = "samples" if s.train_samples is not None else "iters"
    if s.lr_decay_style == "WSD" and not getattr(s, f"lr_wsd_decay_{unit}"):
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of its final decay"


def weight_decay_is_complete(s: Settings) -> Iterator[str]:
    style, start, end = s.weight_decay_incr_style, s.start_weight_decay, s.end_weight_decay
    if style == "constant":
        given = [dest for dest in ("start_weight_decay", "end_weight_decay") if dest in s.given]
        for dest in given:
            yield (
                f"{s.say(dest)} has no effect with --weight-decay-incr-style constant; use --weight-decay, or linear "
                "or cosine"
            )
    elif start is None or end is None:
        missing = "--start-weight-decay" if start is None else "--end-weight-decay"
        yield f"--weight-decay-incr-style {style} needs {missing}"
    elif start > end:
        yield f"{s.say('start_weight_decay')} is above {s.say('end_weight_decay')}; weight decay can only grow"


def checkpoint_or_command_line(s: Settings) -> Iterator[str]:
    if s.override_opt_param_scheduler and s.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other; keep one"


CHECKS = (
    units_agree, there_is_a_step, warmup_is_given_once, warmup_ends_before_the_decay, rates_are_ordered,
    decoupled_rates_are_ordered,
    stable_decay_has_its_length, weight_decay_is_complete, checkpoint_or_command_line,
)  # fmt: skip
