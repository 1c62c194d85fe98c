# SPDX-License-Identifier: Apache-2.0
"""Times at which the parts of a step ran: timers, the pipeline's actions, and names in profiles.

The trace of --pipeline-trace-dir is stage-N.jsonl: a first line about the pipeline, then a line for each action of each
traced iteration, with seconds since the epoch by the machine's clock. Stages on several machines are aligned as exactly
as their clocks agree. Only the pipeline of the first data- and tensor-parallel ranks is traced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn

from megatron.core.collectives import all_gather_object
from megatron.core.device import NamedRange
from megatron.core.errors import ConfigError
from megatron.core.line_files import append_lines
from megatron.core.pipeline_parallel.action_clock import TimedAction
from megatron.core.pipeline_parallel.schedules import Action, find_end_beside
from megatron.core.placement import get_placement
from megatron.core.stacked_parameters import list_parameters
from megatron.core.timers import TimingOption
from megatron.training.config.container import RunConfig
from megatron.training.config.logging import LoggerConfig
from megatron.training.config.profiling import ProfilingConfig
from megatron.training.run import Hook, HookContext, Phase, Run, StepResult

_TIMER_NAMES = {"F": "forward-compute", "B": "backward-compute", "W": "weight-grad-compute"}
# Names of submodules that every GPT layer has: enough to read a profile, few enough not to slow the forward down.
_PARTS = ("input_layernorm", "self_attention", "mixer", "pre_mlp_layernorm", "mlp", "word_embeddings", "output_layer")


class TimingHook(Hook):
    """--timing-log-level: `run.timers` below each progress line, as means over the iterations since the last one."""

    phase = Phase.MEASURE
    is_collective = True

    def __init__(self, config: LoggerConfig) -> None:
        self.config = config
        self._iterations = 0

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> TimingHook | None:
        """Return the hook for --timing-log-level; None where it is not asked for."""
        return cls(config.logger) if config.logger.timing_log_level > 0 else None

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Report the timers of all ranks every --log-interval iterations. Every rank takes part."""
        self._iterations += 1
        # Everything below is collective; all ranks leave here at the same iterations.
        if run.progress.iteration % self.config.log_interval:
            return
        of_all = all_gather_object(run.timers.names(), run.groups.world)
        # Stages have different timers, and all ranks must ask for the same ones in the same order.
        names = list(dict.fromkeys(name for own in of_all for name in own))
        if self.config.log_timers_to_tensorboard:
            # reset=False: the report below reads the same sums and clears them.
            slowest = run.timers.min_max(names, run.groups.world, reset=False)
            for name, (_, high) in slowest.items():
                run.metrics.record(f"{name}-time", high / self._iterations, reduce="last")
        option = cast(TimingOption, self.config.timing_log_option)
        run.metrics.add_table(run.timers.report(names, run.groups.world, per=self._iterations, option=option))
        self._iterations = 0


class PipelineClockHook(Hook):
    """Gives the executor a clock where its times are wanted: for --timing-log-level 2, for --pipeline-trace-dir."""

    phase = Phase.MEASURE

    def __init__(self, config: ProfilingConfig, timing_log_level: int) -> None:
        self.config = config
        self.times_all = timing_log_level >= 2
        self._path: Path | None = None
        """Of the stage's trace, on the ranks that write one."""
        self._header: str | None = None
        """Its first line, until the first traced step: a restart beyond these leaves the trace that is there."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> PipelineClockHook | None:
        """Return the hook for --timing-log-level 2 and --pipeline-trace-dir; None where it is not asked for."""
        level, profiling = config.logger.timing_log_level, config.profiling
        return cls(profiling, level) if level >= 2 or profiling.pipeline_trace_dir is not None else None

    def on_train_start(self, run: Run) -> None:
        """Make room for the stage's file. Raises ConfigError where it cannot be written."""
        groups = run.groups
        # The other replicas and tensor-parallel ranks run the same schedule at nearly the same times.
        if self.config.pipeline_trace_dir is None or groups.tp.rank() or groups.dp_cp.rank():
            return
        path = Path(self.config.pipeline_trace_dir) / f"stage-{groups.pp.rank()}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise ConfigError(
                f"--pipeline-trace-dir {path.parent} cannot be written ({error.strerror}); give a writable directory"
            ) from error
        self._path = path
        pipeline = run.executor.pipeline
        first = {
            "schedule": pipeline.schedule,
            "stages": pipeline.shape.stages,
            "chunks": pipeline.shape.chunks,
            "folded": pipeline.shape.folded,
            "group_size": pipeline.group_size,
            "side_by_side": pipeline.side_by_side,
            "delays_weights": pipeline.delays_weights,
        }
        self._header = json.dumps(first)

    def on_step_start(self, run: Run) -> None:
        """Give the executor a clock for the step that begins."""
        if self.times_all or self._is_traced(run.progress.iteration):
            run.executor.start_clock()

    def on_gradients(self, run: Run) -> None:
        """Read it, after the last action, so that the timers are complete when the step ends."""
        times = run.executor.read_clock()
        if times is None:
            return
        for place, (action, start, end) in enumerate(times):
            if not action.is_beside:  # neighbours share one time
                run.timers(_name_timer([action for action, _, _ in times], place), 2).add(end - start)
        if self._path is not None and self._is_traced(run.progress.iteration):
            if self._header is not None:
                self._path.write_text(f"{self._header}\n", encoding="utf-8")
                self._header = None
            append_lines(self._path, _describe_actions(run.progress.iteration + 1, times))

    def _is_traced(self, iterations_done: int) -> bool:
        is_wanted = self.config.pipeline_trace_dir is not None
        return is_wanted and self.config.profile_step_start <= iterations_done < self.config.profile_step_end


def _describe_actions(iteration: int, times: list[TimedAction]) -> Iterator[str]:
    """Yield a line for each action of an iteration."""
    for (kind, microbatch, chunk, is_beside), start, end in times:
        row = {"iteration": iteration, "kind": kind, "microbatch": microbatch, "chunk": chunk,
               "start": round(start, 7), "end": round(end, 7)}  # fmt: skip
        yield json.dumps(row | ({"beside": True} if is_beside else {}))


def _name_timer(actions: Sequence[Action], place: int) -> str:
    """The timer of an action, or of a forward with the backward at its side."""
    has_backward = "B" in {action.kind for action in actions[place + 1 : find_end_beside(actions, place)]}
    return "forward-backward-compute" if has_backward else _TIMER_NAMES[actions[place].kind]


class NamedRangesHook(Hook):
    """--nvtx-ranges: names every step, and every forward of the modules in _PARTS by their names in the whole model."""

    phase = Phase.MEASURE

    def __init__(self) -> None:
        self._step: NamedRange | None = None
        self._handles: list[Any] = []

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> NamedRangesHook | None:
        """Return the hook for --nvtx-ranges; None where it is not asked for."""
        return cls() if config.profiling.nvtx_ranges else None

    def on_train_start(self, run: Run) -> None:
        """Register forward hooks that put a named range around each module in _PARTS."""
        for chunk in run.model:
            for name, module in chunk.module.named_modules():
                if name.rpartition(".")[2] in _PARTS:
                    before, after = _around(_global_name(name, module))
                    self._handles.append(module.register_forward_pre_hook(before))
                    # always_call: a forward that raises must still close its range, or all later ranges would be nested
                    # in it.
                    self._handles.append(module.register_forward_hook(after, always_call=True))

    def on_step_start(self, run: Run) -> None:
        """Begin the iteration's range."""
        self._step = NamedRange(f"iteration {run.progress.iteration + 1}")
        self._step.__enter__()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """End the iteration's range."""
        self._leave()

    def on_close(self, run: Run) -> None:
        """Close an open range and remove the forward hooks, also after an error."""
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _leave(self) -> None:
        if self._step is not None:
            self._step.__exit__()
            self._step = None


def _around(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return what to call before and after a forward; calls of one module may be nested in one another."""
    open_ranges: list[NamedRange] = []

    def before(*_: object) -> None:
        entered = NamedRange(name)
        entered.__enter__()
        open_ranges.append(entered)

    def after(*_: object) -> None:
        open_ranges.pop().__exit__()

    return before, after


def _global_name(name: str, module: nn.Module) -> str:
    """The module's name in the whole model, where a layer has the same number on every stage."""
    # Only parameters know their place in the full model; one of the module's is enough.
    for inner, param in list_parameters(module):
        return get_placement(param, f"{name}.{inner}").name.removesuffix(f".{inner}")
    return name
