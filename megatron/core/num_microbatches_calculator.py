"""How many microbatches make up the global batch, as a function of the samples consumed so far.

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
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megatron.core.errors import ConfigError

# ASCII, because \d alone matches the digits of all scripts.
_STEP = re.compile(r"(?P<count>\d+(\.\d+)?)(?P<suffix>[KMBT]?):(?P<size>\d+)", re.ASCII)
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BatchSizeStep(NamedTuple):
    """A step of the staircase: `global_batch_size` (samples) from `first_sample` consumed samples on."""

    first_sample: int
    global_batch_size: int


@dataclass(frozen=True)
class NumMicrobatchesCalculator:
    """Global batch size and number of microbatches over the run.

    micro_batch_size: samples per forward pass on one data-parallel rank.
    decrease_batch_size_if_needed: round a global batch size that the ranks cannot share evenly down, instead of
    refusing it. Raises ConfigError naming every size that cannot be used.
    """

    steps: tuple[BatchSizeStep, ...]
    micro_batch_size: int
    data_parallel_size: int
    decrease_batch_size_if_needed: bool = False

    def __post_init__(self) -> None:
        unit = self.samples_per_microbatch
        sizes = {step.global_batch_size for step in self.steps}
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
    return NumMicrobatchesCalculator(steps, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)


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
    """Staircase written as `THRESHOLD:SIZE`, separated by spaces or commas: "0:16 2.4B:320".

    THRESHOLD: tokens consumed, with K, M, B, T for 10^3 ... 10^12. A step starts with the first whole sample at which
    that many tokens have been consumed. Raises ConfigError for any other text.
    """
    steps = []
    for word in re.split(r"[\s,]+", text.strip()):
        match = _STEP.fullmatch(word)
        if match is None:
            raise ConfigError(f"--step-batch-size-schedule: {word!r} is not THRESHOLD:SIZE, such as 0:16 or 2.4B:320")
        # Exact: as a float 2.4B might begin a sample too late.
        tokens = Fraction(match["count"]) * _SUFFIXES[match["suffix"]]
        steps.append(BatchSizeStep(-(-tokens // tokens_per_sample), int(match["size"])))
    firsts = [step.first_sample for step in steps]
    if firsts[0] != 0 or any(later <= earlier for earlier, later in zip(firsts, firsts[1:], strict=False)):
        raise ConfigError(
            f"--step-batch-size-schedule {text!r}: thresholds must start at 0 and grow by at least one sample"
            + (f" ({tokens_per_sample} tokens)" if tokens_per_sample > 1 else "")
        )
    return tuple(steps)
