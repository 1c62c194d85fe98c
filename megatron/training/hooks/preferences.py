# SPDX-License-Identifier: Apache-2.0
"""--dpo: the reference model's log-probabilities in checkpoints."""

from __future__ import annotations

from typing import Any

from megatron.training.config.container import RunConfig
from megatron.training.recipes.preference import PreferenceStep
from megatron.training.run import Hook, HookContext


class PreferencesHook(Hook):
    """Keeps what the reference model makes of each pair, so that a run that goes on has its beginning's."""

    def __init__(self, step: PreferenceStep) -> None:
        self._step = step

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> PreferencesHook | None:
        """Return the hook of a run on pairs of answers that has a reference model."""
        step = context.recipe.forward_step
        return cls(step) if isinstance(step, PreferenceStep) and step.needs_references else None

    def state_dict(self) -> dict[str, Any]:
        """Return the log-probabilities by the pairs' numbers."""
        return {str(number): list(pair) for number, pair in self._step.references.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a checkpoint's; what is missing is measured when everything is loaded."""
        self._step.references = {int(number): (pair[0], pair[1]) for number, pair in state.items()}
