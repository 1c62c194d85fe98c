"""All hooks of a run as one: each moment is passed on to all of them, phase by phase (run.Phase)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.training.metrics import Row
from megatron.training.run import Evaluation, Hook, Phase, Run, Step, StepResult


class Hooks(Hook):
    """Passes each moment of a run on to several hooks, phase by phase."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = list(hooks)
        self._failed: set[int] = set()
        """Of the hooks that have failed where that does not end the run, their id."""

    def wrap_step(self, step: Step) -> Step:
        """The hooks of the first phase are next to the step."""
        for hook in self._in_order():
            step = hook.wrap_step(step)
        return step

    def on_train_start(self, run: Run) -> None:
        """What cannot be opened ends the run here, before anything is computed, also in the phase WRITE."""
        for hook in self._in_order():
            hook.on_train_start(run)

    def on_step_start(self, run: Run) -> None:
        self._each(lambda hook: hook.on_step_start(run), reverse=True)

    def on_gradients(self, run: Run) -> None:
        self._each(lambda hook: hook.on_gradients(run))

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """What is measured of the step is read, where that is due, before the other phases have their turn."""
        iteration = run.progress.iteration
        self._each(lambda hook: hook.on_step_end(run, result), only=lambda phase: phase is Phase.MEASURE)
        # Closes the row of this iteration: what later phases record belongs to the next one.
        run.metrics.end_step(iteration)
        if run.metrics.is_due(iteration):
            run.read_metrics()
        self._each(lambda hook: hook.on_step_end(run, result), only=lambda phase: phase is not Phase.MEASURE)

    def on_metrics(self, run: Run, rows: Sequence[Row]) -> None:
        self._each(lambda hook: hook.on_metrics(run, rows))

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        self._each(lambda hook: hook.on_evaluate(run, evaluation))

    def on_save(self, run: Run) -> None:
        self._each(lambda hook: hook.on_save(run))

    def on_train_end(self, run: Run) -> None:
        run.read_metrics()
        self._each(lambda hook: hook.on_train_end(run), reverse=True)

    def on_error(self, run: Run, error: Exception) -> None:
        """Write what was measured until then, and tell everyone; a further error does not take the place of `error`."""
        self._forgiving(self, lambda _: self._write_the_rest(run))
        for hook in self._in_order(reverse=True):
            self._forgiving(hook, lambda hook: hook.on_error(run, error))

    def on_close(self, run: Run) -> None:
        self._each(lambda hook: hook.on_close(run), reverse=True)

    def state_dict(self) -> dict[str, Any]:
        """The state of each hook that has one, by the name of its class, and its number among several of that class."""
        return {name: state for name, hook in self._by_name().items() if (state := hook.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hooks that the checkpoint does not know begin anew; states of hooks that this run does not have are left."""
        for name, hook in self._by_name().items():
            if name in state:
                hook.load_state_dict(state[name])

    def _in_order(self, reverse: bool = False) -> list[Hook]:
        """By phase; within a phase as they were given. reverse: the last one first."""
        # sorted() is stable: hooks of one phase keep the order in which they were given.
        ordered = sorted(self.hooks, key=lambda hook: hook.phase)
        return ordered[::-1] if reverse else ordered

    def _each(
        self, moment: Callable[[Hook], None], *, reverse: bool = False, only: Callable[[Phase], bool] = lambda _: True
    ) -> None:
        for hook in self._in_order(reverse):
            if not only(hook.phase):
                continue
            # A full disk or a lost log service must not end hours of training; errors of all other phases do.
            if hook.phase is Phase.WRITE:
                self._forgiving(hook, moment)
            else:
                moment(hook)

    def _forgiving(self, hook: Hook, moment: Callable[[Hook], None]) -> None:
        """Hours of training are worth more than a line of a log: print what failed, once for each hook, and go on."""
        try:
            moment(hook)
        except Exception as error:
            # A writer that fails usually fails in every step; one line about it is enough.
            if id(hook) not in self._failed:
                self._failed.add(id(hook))
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                name = type(hook).__name__
                print(f"warning: {name} failed, training goes on ({what})", file=sys.stderr, flush=True)

    def _write_the_rest(self, run: Run) -> None:
        # Not Run.read_metrics, which would hand the rows to the guards as well: their own error must not hide the
        # first.
        rows = run.metrics.read()
        if rows:
            self._each(lambda hook: hook.on_metrics(run, rows), only=lambda phase: phase is Phase.WRITE)

    def _by_name(self) -> dict[str, Hook]:
        return dict(_named(self.hooks))


def _named(hooks: Sequence[Hook]) -> Iterator[tuple[str, Hook]]:
    counts: dict[str, int] = {}
    for hook in hooks:
        name = type(hook).__name__
        counts[name] = counts.get(name, 0) + 1
        yield name if counts[name] == 1 else f"{name} {counts[name]}", hook
