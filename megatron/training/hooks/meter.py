"""Measures each step once, as plain numbers, for all hooks that report it: console, metrics file, TensorBoard."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core import device
from megatron.core.distributed.model_chunk import FlatBuffer
from megatron.core.optimizer.grad_statistics import count_zeros
from megatron.planner.throughput import Yardstick, build_yardstick
from megatron.training.run import Hook, Run, StepResult


@dataclass(frozen=True)
class StepMetrics:
    """One step in numbers. Times are wall-clock seconds of the step itself, without evaluation and saving."""

    iteration: int
    consumed_samples: int
    losses: dict[str, float]
    grad_norm: float | None
    params_norm: float | None
    learning_rate: float
    global_batch_size: int
    skipped: bool
    elapsed_seconds: float
    tokens_per_second: float
    """Over all devices."""
    tflops: float | None
    """10^12 floating-point operations per second and device; None for a model whose operations nobody has counted."""
    mfu: float | None
    """Model FLOPs utilisation: share of the device's peak, 0 to 1; None where either is unknown."""
    memory_bytes: int
    """In use by this process: allocated on the device, or resident on the host."""
    peak_memory_bytes: int
    loss_scale: float = 1.0
    num_zeros_in_grad: int | None = None
    further: dict[str, float] = field(default_factory=dict)
    """Curves of other hooks, by name; those before the reports in the list of hooks put them here."""
    texts: list[str] = field(default_factory=list)
    """What they add to the progress line."""

    @property
    def has_nan(self) -> bool:
        """True when a loss is not a finite number."""
        return not all(map(math.isfinite, self.losses.values()))

    def row(self) -> dict[str, Any]:
        """As a row of metrics.jsonl."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            **self.losses,
            "grad_norm": self.grad_norm,
            **({} if self.params_norm is None else {"params_norm": self.params_norm}),
            **({} if self.num_zeros_in_grad is None else {"num_zeros_in_grad": self.num_zeros_in_grad}),
            "lr": self.learning_rate,
            "global_batch_size": self.global_batch_size,
            "skipped": self.skipped,
            "loss_scale": self.loss_scale,
            "iteration_time_seconds": self.elapsed_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tflops": self.tflops,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            **self.further,
        }


def flat_buffers(run: Run) -> list[FlatBuffer]:
    """The buffers of all chunks of this process."""
    return [buffer for chunk in run.model for buffer in chunk.flat_buffers]


class MeterHook(Hook):
    """First of the hooks: `step` holds the metrics of the step that has just ended."""

    step: StepMetrics

    def __init__(self) -> None:
        self.yardstick = Yardstick("not measured")
        self._started_at = 0.0
        self._zeros: torch.Tensor | None = None

    def on_train_start(self, run: Run) -> None:
        """Measure the yardstick for MFU where the reports are written."""
        if run.is_first_rank:
            self.yardstick = build_yardstick(run.device, next(run.model[0].parameters()).dtype)

    def on_step_start(self, run: Run) -> None:
        """Start the clock."""
        self._started_at = time.perf_counter()

    def on_gradients(self, run: Run) -> None:
        """Count zeros if asked to."""
        if run.config.logger.log_num_zeros_in_grad:
            self._zeros = count_zeros(flat_buffers(run), run.optimizer.model_sum)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Read the step's tensors, which waits for the device, and stop the clock."""
        losses = {name: float(value) for name, value in result.losses.items()}
        grad_norm = None if result.grad_norm is None else float(result.grad_norm)
        elapsed = time.perf_counter() - self._started_at
        tokens_per_second = result.samples * run.seq_length / elapsed
        flops_per_device = None
        if run.flops_per_token is not None:
            flops_per_device = run.flops_per_token * tokens_per_second / run.groups.world.size()
        memory = device.memory_stats()
        self.step = StepMetrics(
            iteration=run.progress.iteration,
            consumed_samples=run.progress.consumed_train_samples,
            losses=losses,
            grad_norm=grad_norm,
            params_norm=float(run.optimizer.params_norm()) if run.config.logger.log_params_norm else None,
            learning_rate=result.learning_rate,
            global_batch_size=result.samples,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            elapsed_seconds=elapsed,
            tokens_per_second=tokens_per_second,
            tflops=None if flops_per_device is None else flops_per_device / 1e12,
            mfu=None if flops_per_device is None else self.yardstick.utilisation(flops_per_device),
            memory_bytes=memory["allocated_bytes"],
            peak_memory_bytes=memory["peak_bytes"],
            num_zeros_in_grad=None if self._zeros is None else int(self._zeros),
        )
        run.progress.nan_iterations += self.step.has_nan
        if run.config.logger.log_device_memory_used:
            used = device.device_memory_used()
            self.step.further["device-memory-used-bytes"] = used
            self.step.texts.append(f"device memory used (MB): {used / 2**20:.0f}")
