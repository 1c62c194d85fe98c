# SPDX-License-Identifier: Apache-2.0
"""All hooks of a run as one: each moment is passed on to all of them, phase by phase (run.Phase)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.errors import MegatronError
from megatron.training.hooks.outages import Outages
from megatron.training.metrics import MetricsRow
from megatron.training.run import Evaluation, Hook, Phase, Run, Step, StepResult


class Hooks(Hook):
    """Passes each moment of a run on to several hooks, phase by phase."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = list(hooks)
        self._outages = Outages()

    def wrap_step(self, step: Step) -> Step:
        """The hooks of the first phase are next to the step."""
        for hook in self._in_order():
            step = hook.wrap_step(step)
        return step

    def on_train_start(self, run: Run) -> None:
        """A file or service that a flag names and that cannot be opened (MegatronError) ends the run here, before
        anything is computed, also where its later errors are forgiven."""
        for hook in self._in_order():
            self._start(hook, run)

    def on_step_start(self, run: Run) -> None:
        self._each("on_step_start", run, reverse=True)

    def on_gradients(self, run: Run) -> None:
        self._each("on_gradients", run)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Read what is measured of the step, where that is due, before the other phases have their turn."""
        iteration = run.progress.iteration
        self._each("on_step_end", run, result, only=lambda phase: phase is Phase.MEASURE)
        # Closes the row of this iteration: what later phases record belongs to the next one.
        run.metrics.end_step(iteration)
        if run.metrics.is_due(iteration):
            run.read_metrics()
        self._each("on_step_end", run, result, only=lambda phase: phase is not Phase.MEASURE)

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        self._each("on_metrics", run, rows, rows=len(rows))

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        self._each("on_evaluate", run, evaluation, rows=1)

    def on_save(self, run: Run) -> None:
        self._each("on_save", run)

    def on_train_end(self, run: Run) -> None:
        run.read_metrics()
        self._each("on_train_end", run, reverse=True)

    def on_error(self, run: Run, error: Exception) -> None:
        """Write what was measured until then, and tell everyone; a further error does not take the place of `error`."""
        self._outages.call(self, "on_error", lambda: self._write_the_rest(run))
        for hook in self._in_order():
            self._forgiving(hook, "on_error", run, error)

    def on_close(self, run: Run) -> None:
        """No error of one hook keeps another from being closed, or takes the place of the error that ended the run."""
        for hook in self._in_order(reverse=True):
            self._forgiving(hook, "on_close", run)
            self._outages.end(hook)

    def state_dict(self) -> dict[str, Any]:
        """The state of each hook that has one, by the name of its class, and its number among several of that class."""
        return {name: state for name, hook in self._by_name().items() if (state := hook.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hooks that the checkpoint does not know keep their initial state; states of hooks that this run does not have
        are left."""
        for name, hook in self._by_name().items():
            if name in state:
                hook.load_state_dict(state[name])

    def _in_order(self, reverse: bool = False) -> list[Hook]:
        """By phase; within a phase as they were given. reverse: the last one first."""
        # sorted() is stable: hooks of one phase keep the order in which they were given.
        ordered = sorted(self.hooks, key=lambda hook: hook.phase)
        return ordered[::-1] if reverse else ordered

    def _start(self, hook: Hook, run: Run) -> None:
        if not _only_observes(hook):
            hook.on_train_start(run)
            return
        problems: list[MegatronError] = []

        def start() -> None:
            try:
                hook.on_train_start(run)
            except MegatronError as error:
                problems.append(error)

        self._outages.call(hook, "on_train_start", start)
        if problems:
            raise problems[0]

    def _each(
        self,
        moment: str,
        *arguments: Any,
        rows: int = 0,
        reverse: bool = False,
        only: Callable[[Phase], bool] = lambda _: True,
    ) -> None:
        """Call a moment of all hooks. rows: how many rows or points it gives to writers."""
        for hook in self._in_order(reverse):
            if not only(hook.phase):
                continue
            # A full disk or a lost log service must not end hours of training; errors of control and saving do.
            if _only_observes(hook):
                self._forgiving(hook, moment, *arguments, rows=rows)
            else:
                getattr(hook, moment)(*arguments)

    def _forgiving(self, hook: Hook, moment: str, *arguments: Any, rows: int = 0) -> None:
        # A moment that the hook has no use for neither fails nor shows that it works again.
        if getattr(type(hook), moment) is not getattr(Hook, moment):
            self._outages.call(hook, moment, lambda: getattr(hook, moment)(*arguments), rows)

    def _write_the_rest(self, run: Run) -> None:
        # Not Run.read_metrics, which would pass the rows to the guards as well: their error must not hide the first.
        rows = run.metrics.read()
        if rows:
            self._each("on_metrics", run, rows, rows=len(rows), only=lambda phase: phase is Phase.WRITE)

    def _by_name(self) -> dict[str, Hook]:
        return dict(_named(self.hooks))


def _only_observes(hook: Hook) -> bool:
    """Return whether the run can do without it: a rank on which it fails is still in step with the others."""
    return hook.phase <= Phase.WRITE and not hook.is_collective


def _named(hooks: Sequence[Hook]) -> Iterator[tuple[str, Hook]]:
    counts: dict[str, int] = {}
    for hook in hooks:
        name = type(hook).__name__
        counts[name] = counts.get(name, 0) + 1
        yield name if counts[name] == 1 else f"{name} {counts[name]}", hook
