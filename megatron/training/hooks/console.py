"""The progress line every --log-interval iterations, the evaluation box, and the first and last words of a run."""

from __future__ import annotations

import itertools
import math
import sys
import time
from dataclasses import dataclass, field

from megatron.core.collectives import all_gather_object
from megatron.core.placement import placement_of
from megatron.planner.parameters import count_whole
from megatron.training.hooks.meter import MeterHook, StepMetrics
from megatron.training.hooks.progress_bar import ProgressBar
from megatron.training.run import Evaluation, Hook, Run, StepResult


@dataclass
class Interval:
    """Sums over the steps since the last line."""

    steps: int = 0
    elapsed_seconds: float = 0.0
    tokens: float = 0.0
    skipped: int = 0
    nan: int = 0
    losses: dict[str, float] = field(default_factory=dict)

    def add(self, step: StepMetrics) -> None:
        """Count one step. A skipped or NaN step has no part in the mean loss."""
        self.steps += 1
        self.elapsed_seconds += step.elapsed_seconds
        self.tokens += step.tokens_per_second * step.elapsed_seconds
        self.skipped += step.skipped
        self.nan += step.has_nan
        if not step.skipped and not step.has_nan:
            for name, loss in step.losses.items():
                self.losses[name] = self.losses.get(name, 0.0) + loss

    @property
    def mean_losses(self) -> dict[str, float]:
        """Mean over the steps that count."""
        counted = max(1, self.steps - self.skipped - self.nan)
        return {name: total / counted for name, total in self.losses.items()}


class ConsoleHook(Hook):
    """Writes to standard output on the first rank."""

    def __init__(self, log_interval: int, meter: MeterHook) -> None:
        self.log_interval = log_interval
        self.meter = meter
        self.interval = Interval()
        self.bar: ProgressBar | None = None

    def on_train_start(self, run: Run) -> None:
        """What is about to be trained, on what."""
        parameters, active = parameter_count(run)
        own = sum(p.numel() for chunk in run.model for p in chunk.parameters())
        if not run.is_first_rank:
            return
        if sys.stdout.isatty():
            self.bar = ProgressBar(run.progress.iteration, run.progress.target_iterations)
        used = "" if active == parameters else f", {active:,} of them active for each token,"
        share = "" if own == parameters else f" ({own:,} on this rank)"
        chunks = [chunk.module for chunk in run.model]
        for operation, how in run.recipe.describe_operations(chunks, run.groups, run.device).items():
            self._print(f"{operation}: {how}")
        yardstick = self.meter.yardstick
        mfu = "MFU is not known"
        if yardstick.flops is not None:
            mfu = f"MFU counts {yardstick.flops / 1e12:.3g} TFLOP/s ({yardstick.source}) as 100 %"
        self._print(
            f"training {parameters:,} parameters{used}{share} on {run.groups.world.size()} x {run.device.type}, "
            f"iterations {run.progress.iteration + 1} to {run.progress.target_iterations}; {mfu}"
        )

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Sum up; print at the interval."""
        self.interval.add(self.meter.step)
        if not run.is_first_rank:
            return
        if run.progress.iteration % self.log_interval == 0:
            self._print(progress_line(self.meter.step, self.interval, run.progress.target_iterations))
            self.interval = Interval()
        if self.bar is not None:
            self.bar.update(self.meter.step)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Loss and perplexity."""
        if run.is_first_rank:
            line = evaluation_line(run.progress.iteration, evaluation)
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
        print(text, flush=True)
        if self.bar is not None:
            self.bar.redraw()


def parameter_count(run: Run) -> tuple[int, int]:
    """Parameters of the whole model, each once, and those of them that work on a token: of experts the share that the
    router chooses. Every rank calls this."""
    placements = [placement_of(p, name) for chunk in run.model for name, p in chunk.module.named_parameters()]
    counts = count_whole(itertools.chain.from_iterable(all_gather_object(placements, run.groups.pp)))
    model = run.config.model
    if not counts.of_experts:
        return counts.total, counts.total
    assert model.num_moe_experts is not None
    return counts.total, counts.active(model.moe_router_topk, model.num_moe_experts)


def progress_line(step: StepMetrics, interval: Interval, target_iterations: int) -> str:
    """One line in upstream's wording: means over the interval for loss and time, the last step for the rest."""
    seconds = interval.elapsed_seconds / interval.steps
    speed = step.elapsed_seconds / seconds
    fields = [
        f"iteration {step.iteration:8d}/{target_iterations:8d}",
        f"consumed samples: {step.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {'n/a' if step.tflops is None else f'{step.tflops * speed:.3g}'}",
        f"MFU (%): {'n/a' if step.mfu is None else f'{step.mfu * speed * 100:.1f}'}",
        f"tokens per second: {interval.tokens / interval.elapsed_seconds:.0f}",
        f"learning rate: {step.learning_rate:.6E}",
        f"global batch size: {step.global_batch_size:5d}",
        *(f"{name}: {loss:.6E}" for name, loss in interval.mean_losses.items()),
    ]
    fields.append(f"loss scale: {step.loss_scale:.1f}")
    if step.grad_norm is not None:
        fields.append(f"grad norm: {step.grad_norm:.3f}")
    if step.params_norm is not None:
        fields.append(f"params norm: {step.params_norm:.3f}")
    if step.num_zeros_in_grad is not None:
        fields.append(f"num zeros: {step.num_zeros_in_grad}")
    fields += [
        *step.texts,
        f"number of skipped iterations: {interval.skipped:3d}",
        f"number of nan iterations: {interval.nan:3d}",
        f"memory (MB): {step.memory_bytes / 2**20:.0f} (peak {step.peak_memory_bytes / 2**20:.0f})",
    ]
    return f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] " + " | ".join(fields) + " |"


def evaluation_line(iteration: int, evaluation: Evaluation) -> str:
    """Loss and perplexity, exp(loss), capped as upstream caps it so that an untrained model prints a finite number."""
    where = f"iteration {iteration}" + (f" on {evaluation.split} set" if evaluation.final else "")
    fields = [
        f"{name} value: {loss:.6E} | {name} PPL: {math.exp(min(20, loss)):.6E}"
        for name, loss in evaluation.losses.items()
    ]
    return f" {evaluation.name} loss at {where} | " + " | ".join(fields) + " |"
