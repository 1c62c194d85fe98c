# SPDX-License-Identifier: Apache-2.0
"""--phase-transition-iterations: phases of a run, each of which reads its data from their first sample on.

At a transition the run saves and ends, and may be started again with other data. Which phase a run is in follows
from the iterations that its checkpoint has done, as in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.errors import ConfigError


@dataclass(frozen=True)
class DataPhase:
    """Iterations that share their data."""

    first_sample: int
    """Samples that the phases before it have consumed."""
    samples: int
    """Samples that it consumes."""


def find_phase(transitions: Sequence[int], done: int, target: int, consumed: int, batch_size: int) -> DataPhase:
    """Return the phase of the next iteration, or of the last one when there is no next.

    transitions: iterations after which a phase ends, in order. done, target: iterations of the run so far, and in
    total. consumed: samples so far. batch_size: in samples. Raises ConfigError where the samples are not that many
    batches of that size.
    """
    if consumed != done * batch_size:
        raise ConfigError(
            f"--phase-transition-iterations counts samples in batches of --global-batch-size {batch_size}: the "
            f"checkpoint has consumed {consumed} in {done} iterations, not {done * batch_size}; keep the batch size "
            "of the phases before"
        )
    bounds = [0, *(number for number in transitions if number < target), target]
    begun = max(bound for bound in bounds[:-1] if bound <= done)
    ends = next((bound for bound in bounds if bound > begun), begun)
    return DataPhase(begun * batch_size, (ends - begun) * batch_size)
