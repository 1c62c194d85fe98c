# SPDX-License-Identifier: Apache-2.0
"""Number of microbatches that make up the global batch, as a function of the samples consumed so far.

Every way of growing the batch is a staircase: from so many consumed samples on, this global batch size.

| flags                          | staircase                                                                   |
|--------------------------------|-----------------------------------------------------------------------------|
| --global-batch-size N          | one step: N from the first sample                                           |
| --rampup-batch-size S I R      | S, S + I, S + 2I, ... up to --global-batch-size, evenly over R samples      |
| --step-batch-size-schedule ... | the steps as written: "0:384 200B:768" (thresholds in tokens of the run)    |

Arithmetic only: the progress of the run is handed in, so a resumed run needs no state of this file.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from megatron.core.errors import ConfigError

# Put here by a table of upstream's names; declared for type checkers.
destroy_num_microbatches_calculator: Any
get_current_global_batch_size: Any
get_current_running_global_batch_size: Any
get_micro_batch_size: Any
get_num_microbatches: Any
init_num_microbatches_calculator: Any
reconfigure_num_microbatches_calculator: Any
unset_num_microbatches_calculator: Any
update_num_microbatches: Any

# ASCII, because \d alone matches the digits of all scripts.
_STEP = re.compile(r"(?P<count>\d+(\.\d+)?)(?P<suffix>[KMBT]?):(?P<size>\d+)", re.ASCII)
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BatchSizeStep(NamedTuple):
    """A step of the staircase: `global_batch_size` (samples) from `first_sample` consumed samples on."""

    first_sample: int
    global_batch_size: int


class BatchSizeSpan(NamedTuple):
    """Iterations in a row of one size: from `consumed_samples` on, `iterations` of them (None: without end)."""

    consumed_samples: int
    global_batch_size: int
    iterations: int | None


@dataclass(frozen=True)
class NumMicrobatchesCalculator:
    """Global batch size and number of microbatches over the run.

    micro_batch_size: samples per forward pass on one data-parallel rank.
    decrease_batch_size_if_needed: round a global batch size that the ranks cannot share evenly down, instead of
    refusing it. Which sizes a run uses depends on where it begins and ends: `check_sizes` looks at those.
    """

    steps: tuple[BatchSizeStep, ...]
    micro_batch_size: int
    data_parallel_size: int
    decrease_batch_size_if_needed: bool = False

    def check_sizes(self, consumed_samples: int = 0, iterations: int | None = None) -> None:
        """Raise ConfigError naming every batch size of the next `iterations` that the ranks cannot share equally.

        consumed_samples: trained on so far; a size that was passed by then counts no longer, so that a run may go on
        with another number of ranks. iterations: None for a run without end.
        """
        unit = self.samples_per_microbatch
        sizes = {stretch.global_batch_size for stretch in self.stretches(consumed_samples, iterations)}
        if self.decrease_batch_size_if_needed:
            # Rounded down, such a size would be 0.
            refused = sorted(size for size in sizes if size < unit)
        else:
            refused = sorted(size for size in sizes if size % unit or size < unit)
        if refused:
            raise ConfigError([self._describe_refusal(size) for size in refused])

    def _describe_refusal(self, size: int) -> str:
        unit = self.samples_per_microbatch
        below = size // unit * unit
        nearest = f"{below} or {below + unit}" if below else f"{unit}"
        return (
            f"global batch size {size} is not divisible by --micro-batch-size {self.micro_batch_size} "
            f"times data-parallel size {self.data_parallel_size} (= {unit}); use {nearest}"
        )

    def stretches(self, consumed_samples: int = 0, iterations: int | None = None) -> Iterator[BatchSizeSpan]:
        """The sizes that come into force from `consumed_samples` on, in their order, for so many iterations.

        A size that one iteration of the size before it steps over is not among them.
        """
        while iterations is None or iterations > 0:
            size = self.global_batch_size(consumed_samples)
            later = next((step.first_sample for step in self.steps if step.first_sample > consumed_samples), None)
            taken = self._samples_taken(consumed_samples)
            # Where nothing can be taken the run ends here, and check_sizes says why.
            length = None if later is None or taken == 0 else -(-(later - consumed_samples) // taken)
            if iterations is not None:
                length = iterations if length is None else min(length, iterations)
                iterations -= length
            yield BatchSizeSpan(consumed_samples, size, length)
            if length is None:
                return
            consumed_samples += length * taken

    def count_iterations(self, samples: int) -> int:
        """Iterations from the start of a run that `samples` samples are enough for."""
        iterations = 0
        for stretch in self.stretches():
            taken = self._samples_taken(stretch.consumed_samples)
            fitting = max(0, samples - stretch.consumed_samples) // max(1, taken)
            if stretch.iterations is None or fitting < stretch.iterations:
                return iterations + fitting
            iterations += stretch.iterations
        return iterations

    def count_samples(self, iterations: int) -> int:
        """Samples that the first `iterations` iterations of a run take."""
        stretches = self.stretches(0, iterations)
        return sum(self._samples_taken(stretch.consumed_samples) * (stretch.iterations or 0) for stretch in stretches)

    def _samples_taken(self, consumed_samples: int) -> int:
        """Samples of the next iteration. Not rounded unless asked for: a run that is past it may have had other
        ranks."""
        if self.decrease_batch_size_if_needed:
            return self.running_global_batch_size(consumed_samples)
        return self.global_batch_size(consumed_samples)

    @property
    def samples_per_microbatch(self) -> int:
        """Samples that one microbatch takes over all data-parallel ranks."""
        return self.micro_batch_size * self.data_parallel_size

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples per optimizer step asked for, when `consumed_samples` have been trained on."""
        # A step counts from its first sample on, hence the right side.
        at = bisect_right(self.steps, consumed_samples, key=lambda step: step.first_sample) - 1
        return self.steps[at].global_batch_size

    def num_microbatches(self, consumed_samples: int) -> int:
        """Forward passes per optimizer step on each data-parallel rank."""
        return self.global_batch_size(consumed_samples) // self.samples_per_microbatch

    def running_global_batch_size(self, consumed_samples: int) -> int:
        """Samples per optimizer step really used: less than asked for only with decrease_batch_size_if_needed."""
        return self.num_microbatches(consumed_samples) * self.samples_per_microbatch


def build_num_microbatches_calculator(
    *,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    rampup_batch_size: Sequence[int] | None = None,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
    decrease_batch_size_if_needed: bool = False,
) -> NumMicrobatchesCalculator:
    """The calculator that these settings ask for; see the table above.

    global_batch_size: samples per step; one microbatch when None. rampup_batch_size: (start, increment, samples).
    seq_length: tokens per sample, to turn the thresholds of a step schedule into samples; without it they are samples.
    Raises ConfigError for flags that describe no staircase, and for a size that is the only one and cannot be shared.
    """
    if step_batch_size_schedule is not None:
        if global_batch_size is not None or rampup_batch_size is not None:
            other = "--global-batch-size" if global_batch_size is not None else "--rampup-batch-size"
            raise ConfigError(f"--step-batch-size-schedule and {other} both set the global batch size; keep one")
        steps = parse_step_schedule(step_batch_size_schedule, tokens_per_sample=seq_length or 1)
    elif rampup_batch_size is not None:
        if global_batch_size is None:
            raise ConfigError("--rampup-batch-size needs --global-batch-size, the size it grows to")
        steps = compute_rampup_steps(rampup_batch_size, global_batch_size)
    else:
        steps = (BatchSizeStep(0, global_batch_size or micro_batch_size * data_parallel_size),)
    made = NumMicrobatchesCalculator(steps, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
    if len(steps) == 1:
        made.check_sizes()
    return made


def compute_rampup_steps(rampup_batch_size: Sequence[int], global_batch_size: int) -> tuple[BatchSizeStep, ...]:
    """Staircase of --rampup-batch-size START INCREMENT SAMPLES: equally long steps that end after SAMPLES."""
    text = f"--rampup-batch-size {' '.join(map(str, rampup_batch_size))}"
    if len(rampup_batch_size) != 3:
        raise ConfigError(f"{text} has {len(rampup_batch_size)} numbers; give three: START INCREMENT SAMPLES")
    start, increment, samples = rampup_batch_size
    if start < 1 or increment < 1 or samples < 0:
        raise ConfigError(f"{text}: START and INCREMENT must be at least 1 and SAMPLES at least 0")
    growth = global_batch_size - start
    if growth < 0 or growth % increment:
        raise ConfigError(
            f"{text} never meets --global-batch-size {global_batch_size}: "
            f"{global_batch_size} - {start} must be a multiple of {increment} and not negative"
        )
    # 0 where the ramp starts at its end: then there are no further steps, and nothing is divided below.
    increments = growth // increment
    # Step i starts with the first whole sample at or after i/increments of the ramp.
    starts = [-(-i * samples // increments) for i in range(1, increments + 1)]
    return (BatchSizeStep(0, start), *(BatchSizeStep(at, start + i * increment) for i, at in enumerate(starts, 1)))


def parse_step_schedule(text: str, tokens_per_sample: int = 1) -> tuple[BatchSizeStep, ...]:
    """Staircase written as `THRESHOLD:SIZE`, separated by spaces or commas, in any order: "0:16 2.4B:320".

    THRESHOLD: tokens consumed, with K, M, B, T for 10^3 ... 10^12. A step starts with the sample within which that many
    tokens are reached, that is, tokens // tokens_per_sample; of steps that start with the same sample the last counts.
    Raises ConfigError for any other text.
    """
    entries = sorted(_read_step(word) for word in _split_schedule(text))
    thresholds = [tokens for tokens, _ in entries]
    if thresholds[0] != 0 or len(set(thresholds)) < len(thresholds):
        raise ConfigError(
            f"--step-batch-size-schedule {text!r}: one threshold must be 0, and no two the same; "
            "give for example 0:16 2.4B:320"
        )
    return tuple(BatchSizeStep(int(tokens // tokens_per_sample), size) for tokens, size in entries)


def sort_step_schedule(text: str) -> str:
    """The same schedule with its entries in the order of their thresholds. Raises ConfigError for any other text."""
    return " ".join(sorted(_split_schedule(text), key=_read_step))


def _split_schedule(text: str) -> list[str]:
    return re.split(r"[\s,]+", text.strip())


def _read_step(word: str) -> tuple[Fraction, int]:
    """Tokens and size of one entry."""
    match = _STEP.fullmatch(word)
    if match is None:
        raise ConfigError(f"--step-batch-size-schedule: {word!r} is not THRESHOLD:SIZE, such as 0:16 or 2.4B:320")
    # Exact: as a float 2.4B might begin a sample too late.
    return Fraction(match["count"]) * _SUFFIXES[match["suffix"]], int(match["size"])
