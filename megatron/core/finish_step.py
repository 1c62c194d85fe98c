# SPDX-License-Identifier: Apache-2.0
"""What a module does once per training step, beside the gradients: a general protocol, so that nobody else knows of it.

A module that gathers numbers during the forward passes of a step and acts on them before the next one (the router's
expert biases, scales of a number format, bounds of attention scores) has a method `finish_step`. `finalize_model_grads`
calls it for every module of the model chunks, after the step's last backward and before the optimizer's update.
"""

from __future__ import annotations

from typing import Protocol

from megatron.core.process_groups_config import ProcessGroupCollection


class FinishesStep(Protocol):
    """A module that acts once per step."""

    def finish_step(self, groups: ProcessGroupCollection) -> None:
        """The microbatches of a step are over. Every process that holds the module calls this at the same point, so
        that collectives over `groups` are allowed; it must not wait for the device."""
