"""Several hooks as one: each moment is passed on to all of them.

Hooks are called in the order of the list, so that an iteration is logged before it is saved; `on_train_end` and
`on_close` are called in the reverse order, as nested contexts end: the final checkpoint comes before the final
evaluation, and the log is closed last.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.training.run import Evaluation, Hook, Run, StepResult


class Hooks(Hook):
    """Several hooks as one."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = list(hooks)

    def on_train_start(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_train_start(run)

    def on_step_start(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_step_start(run)

    def on_gradients(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_gradients(run)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        for hook in self.hooks:
            hook.on_step_end(run, result)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        for hook in self.hooks:
            hook.on_evaluate(run, evaluation)

    def on_save(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_save(run)

    def on_train_end(self, run: Run) -> None:
        for hook in reversed(self.hooks):
            hook.on_train_end(run)

    def on_close(self, run: Run) -> None:
        for hook in reversed(self.hooks):
            hook.on_close(run)
