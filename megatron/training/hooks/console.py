"""Standard output: the progress line every --log-interval iterations, a bar on a terminal, the evaluation box, and the
first and last words of a run."""

from __future__ import annotations

import itertools
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.core.collectives import all_gather_object
from megatron.core.placement import get_placement
from megatron.planner.parameters import count_whole
from megatron.training.config.container import RunConfig
from megatron.training.metrics import Row, Shown, reduce_values
from megatron.training.run import Evaluation, Hook, HookContext, Phase, Run, StepResult

# Rewriting the line costs a system call, which a step of a tiny model would feel.
_REDRAW_SECONDS = 0.1
_RATE_MEMORY = 0.9
"""Weight of the past in the running mean of the step time."""


@dataclass
class Interval:
    """Sums over the steps since the last progress line."""

    steps: int = 0
    elapsed_seconds: float = 0.0
    tokens: float = 0.0
    skipped: int = 0
    nan: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    values: dict[str, list[float | None]] = field(default_factory=dict)
    """Of all metrics, those of each step."""

    def add(self, row: Row) -> None:
        """Count one step. A skipped or NaN step has no part in the mean loss."""
        elapsed_seconds = row["iteration_time_seconds"]
        self.steps += 1
        self.elapsed_seconds += elapsed_seconds
        self.tokens += row["tokens_per_second"] * elapsed_seconds
        self.skipped += bool(row["skipped"])
        self.nan += row.has_nan
        # As upstream: the loss of such a step says nothing about the weights.
        if not row["skipped"] and not row.has_nan:
            for name, loss in row.losses.items():
                self.losses[name] = self.losses.get(name, 0.0) + loss
        for name, value in row.values.items():
            self.values.setdefault(name, []).append(value)

    @property
    def mean_losses(self) -> dict[str, float]:
        """Mean losses over the steps that were neither skipped nor NaN."""
        # At least 1: in an interval of skipped steps alone the mean is 0, not an error.
        counted = max(1, self.steps - self.skipped - self.nan)
        return {name: total / counted for name, total in self.losses.items()}

    def describe(self, shown: Mapping[str, Shown]) -> Iterator[str]:
        """Yield the words of each metric in `shown`, reduced over the interval."""
        for name, (reduce, text) in shown.items():
            value = reduce_values(self.values.get(name, []), reduce)
            if value is not None:
                yield text(value)


class ConsoleHook(Hook):
    """Writes to standard output on the first rank."""

    phase = Phase.WRITE

    def __init__(self, log_interval: int) -> None:
        self.log_interval = log_interval
        self.interval = Interval()
        self.bar: ProgressBar | None = None
        self._step_began_at = 0.0

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> ConsoleHook:
        """Every run has this hook."""
        return cls(config.logger.log_interval)

    def on_train_start(self, run: Run) -> None:
        """Print what is about to be trained and on which devices. Every rank takes part in counting."""
        # Counting gathers from all stages, so it stands before the other ranks leave.
        parameters, active = count_parameters(run)
        own = sum(p.numel() for chunk in run.model for p in chunk.parameters())
        if not run.is_first_rank:
            return
        # Escape sequences would be noise in a log file.
        if sys.stdout.isatty():
            self.bar = ProgressBar(run.progress.iteration, run.progress.target_iterations)
        used = "" if active == parameters else f", {active:,} of them active for each token,"
        share = "" if own == parameters else f" ({own:,} on this rank)"
        chunks = [chunk.module for chunk in run.model]
        for operation, how in run.recipe.describe_operations(chunks, run.groups, run.device).items():
            self._print(f"{operation}: {how}")
        mfu = "MFU is not known"
        if run.yardstick is not None and run.yardstick.flops is not None:
            mfu = f"MFU counts {run.yardstick.flops / 1e12:.3g} TFLOP/s ({run.yardstick.source}) as 100 %"
        self._print(
            f"training {parameters:,} parameters{used}{share} on {run.groups.world.size()} x {run.device.type}, "
            f"iterations {run.progress.iteration + 1} to {run.progress.target_iterations}; {mfu}"
        )

    def on_step_start(self, run: Run) -> None:
        """For the bar, which shows how fast the host goes ahead."""
        self._step_began_at = time.perf_counter()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Move the progress bar by one step."""
        if self.bar is not None:
            self.bar.advance(run.progress.iteration, time.perf_counter() - self._step_began_at)

    def on_metrics(self, run: Run, rows: Sequence[Row]) -> None:
        """Add rows to the interval; print a progress line every --log-interval iterations."""
        if not run.is_first_rank:
            return
        for row in rows:
            self.interval.add(row)
            if row.iteration % self.log_interval == 0:
                # Begun before the line is printed: after one that could not be, the next has its own iterations only.
                interval, self.interval = self.interval, Interval()
                texts = [*interval.describe(run.metrics.shown), *row.texts]
                self._print(format_progress_line(row, interval, run.progress.target_iterations, texts))
            for table in row.tables:
                self._print(table)
        if self.bar is not None:
            self.bar.show(rows[-1].losses)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Print loss and perplexity in a box."""
        if run.is_first_rank:
            line = format_evaluation_line(run.progress.iteration, evaluation)
            self._print("\n".join(("-" * len(line), line, "-" * len(line))))

    def on_save(self, run: Run) -> None:
        """Keep the bar below what CheckpointHook has printed."""
        if self.bar is not None:
            self.bar.redraw()

    def on_close(self, run: Run) -> None:
        """Leave the terminal with an empty line to write on, and say why the run ended early."""
        if self.bar is not None:
            self.bar.clear()
        if run.is_first_rank and run.stop_reason:
            self._print(run.stop_reason)

    def _print(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        # Flushed, so that a killed run has its last lines in the log.
        print(text, flush=True)
        if self.bar is not None:
            self.bar.redraw()


def count_parameters(run: Run) -> tuple[int, int]:
    """Parameters of the whole model, each once, and those of them that work on a token: of experts the share that the
    router chooses. Every rank calls this."""
    # Placements instead of sizes: a part that several ranks hold must be counted once.
    placements = [get_placement(p, name) for chunk in run.model for name, p in chunk.module.named_parameters()]
    counts = count_whole(itertools.chain.from_iterable(all_gather_object(placements, run.groups.pp)))
    model = run.config.model
    if not counts.of_experts:
        return counts.total, counts.total
    assert model.num_moe_experts is not None
    return counts.total, counts.count_active(model.moe_router_topk, model.num_moe_experts)


def format_progress_line(row: Row, interval: Interval, target_iterations: int, texts: Sequence[str] = ()) -> str:
    """One line in upstream's wording: means over the interval for loss and time, the last step for the rest."""
    seconds = interval.elapsed_seconds / interval.steps
    # The row's rates are those of its own step; this factor makes them the rates of the interval's mean step.
    speed = row["iteration_time_seconds"] / seconds
    fields = [
        f"iteration {row.iteration:8d}/{target_iterations:8d}",
        f"consumed samples: {row['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {_format_known(row.values.get('tflops'), '.3g', speed)}",
        f"MFU (%): {_format_known(row.values.get('mfu'), '.1f', speed * 100)}",
        f"tokens per second: {interval.tokens / interval.elapsed_seconds:.0f}",
        f"learning rate: {row['lr']:.6E}",
        f"global batch size: {row['global_batch_size']:5d}",
        *(f"{name}: {loss:.6E}" for name, loss in interval.mean_losses.items()),
        f"loss scale: {row['loss_scale']:.1f}",
    ]
    if row.values.get("grad_norm") is not None:
        fields.append(f"grad norm: {row['grad_norm']:.3f}")
    if "params_norm" in row.values:
        fields.append(f"params norm: {row['params_norm']:.3f}")
    if "num_zeros_in_grad" in row.values:
        fields.append(f"num zeros: {row['num_zeros_in_grad']}")
    fields += [
        *texts,
        f"number of skipped iterations: {interval.skipped:3d}",
        f"number of nan iterations: {interval.nan:3d}",
        f"memory (MB): {row['memory_bytes'] / 2**20:.0f} (peak {row['peak_memory_bytes'] / 2**20:.0f})",
    ]
    return f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] " + " | ".join(fields) + " |"


def _format_known(value: float | None, form: str, factor: float) -> str:
    return "n/a" if value is None else format(value * factor, form)


def format_evaluation_line(iteration: int, evaluation: Evaluation) -> str:
    """Loss and perplexity, exp(loss), capped as upstream caps it so that an untrained model prints a finite number."""
    where = f"iteration {iteration}" + (f" on {evaluation.split} set" if evaluation.final else "")
    fields = [
        f"{name} value: {loss:.6E} | {name} PPL: {math.exp(min(20, loss)):.6E}"
        for name, loss in evaluation.losses.items()
    ]
    return f" {evaluation.name} loss at {where} | " + " | ".join(fields) + " |"


class ProgressBar:
    """A bar with rate and remaining time on the last line of a terminal; log files never see it.

    `iteration 120/300 [########------------] 2.1 it/s, 1:26 left, lm loss 4.21`, rewritten in place.
    """

    def __init__(self, iteration: int, target_iterations: int) -> None:
        self.iteration, self.target = iteration, target_iterations
        self.seconds_per_step: float | None = None
        self._loss_text = ""
        self._drawn_at = 0.0

    def advance(self, iteration: int, elapsed_seconds: float) -> None:
        """Take in a step; redraw unless that was done a moment ago."""
        self.iteration = iteration
        before = elapsed_seconds if self.seconds_per_step is None else self.seconds_per_step
        self.seconds_per_step = _RATE_MEMORY * before + (1 - _RATE_MEMORY) * elapsed_seconds
        if time.monotonic() - self._drawn_at > _REDRAW_SECONDS or self.iteration == self.target:
            self.redraw()

    def show(self, losses: Mapping[str, float]) -> None:
        """Show these losses from now on."""
        self._loss_text = "".join(f", {name} {loss:.3f}" for name, loss in losses.items())
        if self.iteration == self.target:
            self.redraw()

    def text(self, columns: int) -> str:
        """Return the line, at most `columns - 1` characters wide."""
        share = self.iteration / self.target if self.target else 1.0
        filled = round(20 * share)
        line = f"iteration {self.iteration}/{self.target} [{'#' * filled}{'-' * (20 - filled)}]"
        if self.seconds_per_step:
            left = round((self.target - self.iteration) * self.seconds_per_step)
            line += f" {1 / self.seconds_per_step:.2f} it/s, {format_duration(left)} left{self._loss_text}"
        # A line as wide as the terminal would wrap, and the carriage return would no longer reach its start.
        return line[: columns - 1]

    def redraw(self) -> None:
        """Write the line over the one on the terminal."""
        self._drawn_at = time.monotonic()
        sys.stdout.write("\r\x1b[K" + self.text(shutil.get_terminal_size().columns))
        sys.stdout.flush()

    def clear(self) -> None:
        """Erase the line, so that text can be printed in its place."""
        sys.stdout.write("\r\x1b[K")
        sys.stdout.flush()


def format_duration(seconds: int) -> str:
    """Format whole seconds for people: 86 -> "1:26", 3700 -> "1:01:40"."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
