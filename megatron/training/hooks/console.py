# SPDX-License-Identifier: Apache-2.0
"""Standard output: the progress line every --log-interval iterations, a bar on a terminal, evaluations, and the first
and last words of a run."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Sequence

from megatron.core.collectives import all_gather_object
from megatron.core.optional_deps import require
from megatron.core.placement import get_placement
from megatron.core.stacked_parameters import list_parameters
from megatron.planner.parameters import count_whole
from megatron.training.config.container import RunConfig
from megatron.training.data.samples import count_samples_of_iterations
from megatron.training.hooks.exits import PROGRAM_STARTED_AT
from megatron.training.hooks.progress_bar import ProgressBar
from megatron.training.hooks.progress_lines import (
    MOST_COLUMNS,
    Clock,
    Interval,
    Pace,
    format_evaluation_line,
    format_generated,
    format_progress_line,
    format_short_evaluation,
    format_short_line,
)
from megatron.training.hooks.terminal_view import NEEDED_BY, RichView
from megatron.training.metrics import MetricsRow
from megatron.training.run import Evaluation, Hook, HookContext, Phase, Run, StepResult


class ConsoleHook(Hook):
    """Writes to standard output on the first rank."""

    phase = Phase.WRITE

    def __init__(self, log_interval: int, progress_line: str) -> None:
        """progress_line: `short`, `full`, or `auto`, which is short on a terminal; `bar` and `rich`, which replace the
        lines on a terminal and are short elsewhere."""
        self.log_interval = log_interval
        self.is_short = progress_line in ("short", "bar", "rich") or (progress_line == "auto" and sys.stdout.isatty())
        self._view = RichView if progress_line == "rich" else ProgressBar
        self._has_lines = progress_line not in ("bar", "rich") or not sys.stdout.isatty()
        self.interval = Interval()
        self.pace = Pace()
        self.bar: ProgressBar | None = None
        self._step_began_at = 0.0

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> ConsoleHook:
        """Every run has this hook. Raises ConfigError for a view whose package is not installed."""
        if config.logger.progress_line == "rich":
            require("rich", needed_by=NEEDED_BY)
        return cls(config.logger.log_interval, config.logger.progress_line)

    def on_train_start(self, run: Run) -> None:
        """Print what is about to be trained and on which devices. Every rank takes part in counting."""
        # Counting gathers from all stages, so it comes before the other ranks leave.
        parameters, active = count_parameters(run)
        own = sum(p.numel() for chunk in run.model for p in chunk.parameters())
        if not run.is_first_rank:
            return
        # Escape sequences would be noise in a log file.
        if sys.stdout.isatty():
            self.bar = self._view(
                run.progress.iteration, run.progress.target_iterations, lambda: self._predict(run, None)
            )
            self.bar.make_room()
        used = "" if active == parameters else f", {active:,} of them active for each token,"
        share = "" if own == parameters else f" ({own:,} on this rank)"
        chunks = [chunk.module for chunk in run.model]
        for operation, how in run.recipe.describe_operations(chunks, run.groups, run.device).items():
            _print(f"{operation}: {how}")
        mfu = "MFU is not known"
        if run.yardstick is not None and run.yardstick.flops is not None:
            mfu = f"MFU counts {run.yardstick.flops / 1e12:.3g} TFLOP/s ({run.yardstick.source}) as 100 %"
        done, target = run.progress.iteration, run.progress.target_iterations
        what = "no iteration is left" if run.progress.finished else f"iterations {done + 1} to {target}"
        _print(
            f"training {parameters:,} parameters{share}{used} on {run.groups.world.size()} x {run.device.type}, "
            f"{what}; {mfu}"
        )
        self.pace = Pace()

    def on_step_start(self, run: Run) -> None:
        """For the bar, which shows how fast the host goes ahead."""
        self._step_began_at = time.perf_counter()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Move the progress bar by one step."""
        self.pace.step_ended()
        if self.bar is not None:
            self.bar.advance(run.progress.iteration, time.perf_counter() - self._step_began_at)

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        """Add rows to the interval; print a progress line every --log-interval iterations."""
        if not run.is_first_rank:
            return
        for row in rows:
            self.interval.add(row)
            self.pace.add(row)
            if row.iteration % self.log_interval == 0:
                # Begun before the line is printed: if that fails, the next line still covers its own iterations only.
                interval, self.interval = self.interval, Interval()
                if self._has_lines:
                    _print(self._format_line(run, row, interval))
            for table in row.tables:
                _print(table)
        if self.bar is not None:
            self.bar.show_row(rows[-1])

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Print loss and perplexity; with full lines in a box, as upstream does."""
        if not run.is_first_rank:
            return
        if self.is_short:
            _print(format_short_evaluation(run.progress.iteration, evaluation, read_columns()))
        else:
            line = format_evaluation_line(run.progress.iteration, evaluation)
            _print("\n".join(("-" * len(line), line, "-" * len(line))))
        if evaluation.scores:
            values = ", ".join(f"{name} {value:.4f}" for name, value in evaluation.scores.items())
            _print(f"tasks at iteration {run.progress.iteration}: {values}")
        if evaluation.generated:
            _print(format_generated(run.progress.iteration, evaluation.generated))

    def on_close(self, run: Run) -> None:
        """Leave the terminal with an empty line to write on, and say why the run ended early."""
        if self.bar is not None:
            self.bar.leave()
        if run.is_first_rank and run.stop_reason:
            _print(run.stop_reason)

    def _format_line(self, run: Run, row: MetricsRow, interval: Interval) -> str:
        clock = Clock(self.pace.elapsed_seconds, self._predict(run, None) or 0.0)
        until_stop = self._predict_stop(run)
        if until_stop is not None and until_stop < clock.left:
            clock = clock._replace(until_stop=until_stop)
        texts = [*interval.describe(run.metrics.shown), *row.texts]
        target = run.progress.target_iterations
        if not self.is_short:
            return format_progress_line(row, interval, target, clock, texts)
        if len(run.batch_size.steps) > 1:
            texts.insert(0, f"batch size {row['global_batch_size']}")
        return format_short_line(row, interval, target, clock, texts, read_columns())

    def _predict(self, run: Run, iterations: int | None) -> float | None:
        """Seconds that the next iterations will take, those that are left where None; None as long as nobody knows."""
        if iterations is None:
            iterations = run.progress.target_iterations - run.progress.iteration
        samples = count_samples_of_iterations(run.batch_size, run.progress.consumed_train_samples, iterations)
        pace = self.pace.seconds_per_sample
        return None if pace is None else pace * samples

    def _predict_stop(self, run: Run) -> float | None:
        """Seconds until --exit-interval, --phase-transition-iterations or --exit-duration-in-mins ends the run; None
        without them."""
        training, done, stops = run.config.training, run.progress.iteration, []
        transitions = [number - done for number in training.phase_transitions if number >= done]
        if training.exit_interval is not None:
            transitions.append(-done % training.exit_interval)
        if transitions:
            stops.append(self._predict(run, min(transitions)) or 0.0)
        if training.exit_duration_in_mins is not None:
            elapsed = time.monotonic() - PROGRAM_STARTED_AT
            stops.append(max(0.0, 60.0 * training.exit_duration_in_mins - elapsed))
        return min(stops, default=None)


def read_columns() -> int:
    """Columns for a line: the terminal's, at most as many as a short line has at its longest."""
    # A terminal that does not know its width is taken for a narrow one.
    return min(MOST_COLUMNS, shutil.get_terminal_size((80 if sys.stdout.isatty() else MOST_COLUMNS, 24)).columns)


def _print(text: str) -> None:
    # Flushed, so that a killed run has its last lines in the log.
    print(text, flush=True)


def count_parameters(run: Run) -> tuple[int, int]:
    """Count parameters of the full model, each once, and the ones that a token uses: of experts only as many as the
    router chooses. Every rank calls this."""
    # Placements instead of sizes: a part that several ranks hold must be counted once.
    placements = [get_placement(p, name) for chunk in run.model for name, p in list_parameters(chunk.module)]
    counts = count_whole(itertools.chain.from_iterable(all_gather_object(placements, run.groups.pp)))
    model = run.config.model
    if not counts.of_experts:
        return counts.total, counts.total
    assert model.num_moe_experts is not None
    return counts.total, counts.count_active(model.moe_router_topk, model.num_moe_experts)
