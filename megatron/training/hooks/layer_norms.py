"""--log-layer-norms: the norms of each layer's parameters and gradients, with each progress line."""

from __future__ import annotations

from megatron.core.optimizer.grad_statistics import layer_norms
from megatron.training.hooks.meter import MeterHook, flat_buffers
from megatron.training.run import Hook, Run, StepResult


class LayerNormsHook(Hook):
    """Measures every --log-interval iterations: parameters after the update, gradients before clipping."""

    def __init__(self, log_interval: int, meter: MeterHook) -> None:
        self.log_interval = log_interval
        self.meter = meter
        self._gradients: dict[str, float] = {}

    def on_gradients(self, run: Run) -> None:
        """Measure before clipping. Every rank takes part."""
        if (run.progress.iteration + 1) % self.log_interval == 0:
            scaled = layer_norms(flat_buffers(run), run.optimizer.model_sum, "gradients")
            self._gradients = {layer: norm / run.optimizer.loss_scale for layer, norm in scaled.items()}

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Measure parameters, print, and hand the curves on, at the interval. Every rank takes part."""
        if run.progress.iteration % self.log_interval:
            return
        parameters = layer_norms(flat_buffers(run), run.optimizer.model_sum, "parameters")
        for layer, norm in parameters.items():
            self.meter.step.further[f"params-norm {layer}"] = norm
            self.meter.step.further[f"grad-norm {layer}"] = self._gradients[layer]
        if run.is_first_rank:
            print(table(run.progress.iteration, parameters, self._gradients), flush=True)


def table(iteration: int, parameters: dict[str, float], gradients: dict[str, float]) -> str:
    """A line for each layer."""
    width = max(map(len, parameters))
    lines = [f" norms by layer at iteration {iteration} | {'parameters':>12s} | {'gradients':>12s} |"]
    for layer, norm in parameters.items():
        lines.append(f"   {layer:<{width}s} | {norm:12.6g} | {gradients[layer]:12.6g} |")
    return "\n".join(lines)
