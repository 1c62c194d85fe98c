"""What TensorBoard and Weights & Biases are given: points by name, under upstream's names."""

from __future__ import annotations

import math

from megatron.training.config.logging import LoggerConfig
from megatron.training.hooks.meter import StepMetrics
from megatron.training.run import Evaluation

_LARGEST_EXPONENT = 20
"""As upstream, so that an untrained model has a finite perplexity."""


def step_points(step: StepMetrics, config: LoggerConfig, world_size: int) -> dict[str, float]:
    """The points of one iteration."""
    points = {"learning-rate": step.learning_rate, "batch-size": step.global_batch_size, **step.losses}
    if config.log_loss_scale_to_tensorboard:
        points["loss-scale"] = step.loss_scale
    if step.grad_norm is not None:
        points["grad-norm"] = step.grad_norm
    if step.params_norm is not None:
        points["params-norm"] = step.params_norm
    if step.num_zeros_in_grad is not None:
        points["num-zeros"] = step.num_zeros_in_grad
    if config.log_timers_to_tensorboard:
        points["iteration-time"] = step.elapsed_seconds
    if config.log_memory_to_tensorboard:
        points |= {"mem-allocated-bytes": step.memory_bytes, "mem-max-allocated-bytes": step.peak_memory_bytes}
    if config.log_world_size_to_tensorboard:
        points["world-size"] = world_size
    if config.log_throughput:
        points["tokens-per-second"] = step.tokens_per_second
        points |= {} if step.tflops is None else {"throughput": step.tflops}
        points |= {} if step.mfu is None else {"mfu": step.mfu}
    return points


def evaluation_points(evaluation: Evaluation, config: LoggerConfig) -> dict[str, float]:
    """The points of one evaluation."""
    points = {f"{name} {evaluation.name}": loss for name, loss in evaluation.losses.items()}
    if config.log_validation_ppl_to_tensorboard:
        points |= {f"{name} ppl": math.exp(min(_LARGEST_EXPONENT, loss)) for name, loss in points.items()}
    return points
