# SPDX-License-Identifier: Apache-2.0
"""Measurements of each step, recorded in `run.metrics`: its numbers, and what flags add to them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.device_memory import has_expandable_segments
from megatron.core.distributed.model_chunk import FlatBuffer
from megatron.core.optimizer.grad_statistics import compute_layer_norms, count_zeros
from megatron.core.plan.read import read_plan
from megatron.core.ssm.state_mixer import StateMixer
from megatron.core.ssm.state_norms import StateNorm, compute_state_norms, list_state_mixers
from megatron.core.traffic import Traffic
from megatron.core.transformer.moe.router import LOSS_NAMES, TopKRouter, read_loss_coefficients
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLoss
from megatron.core.transformer.sparse_attention import IndexLossCore
from megatron.planner.throughput import build_yardstick
from megatron.training.config.container import RunConfig
from megatron.training.data.planned_batches import StepPlan
from megatron.training.metrics import MetricsRow
from megatron.training.recipes.attention_logits import AttentionLogits
from megatron.training.run import Hook, HookContext, Phase, Run, StepResult


def list_flat_buffers(run: Run) -> list[FlatBuffer]:
    """Return the flat buffers of all chunks of this process."""
    return [buffer for chunk in run.model for buffer in chunk.flat_buffers]


class StepHook(Hook):
    """The numbers of every step.

    | name                                        | what                                                            |
    |---------------------------------------------|-----------------------------------------------------------------|
    | consumed_samples, global_batch_size, lr     | of the run so far; of this step; of the next one                |
    | "lm loss" and other losses                  | means over the tokens of the global batch                       |
    | grad_norm                                   | before clipping                                                 |
    | skipped, loss_scale                         | the update was left out; 1 without --fp16                       |
    | iteration_time_seconds                      | of the step itself, without evaluation and saving               |
    | tokens_per_second                           | over all devices                                                |
    | tflops                                      | 10^12 floating-point operations per second and device           |
    | mfu                                         | share of the device's peak, 0 to 1; None where that is unknown  |
    | memory_bytes, peak_memory_bytes             | in use by this process: on its device, or resident on the host  |
    """

    phase = Phase.MEASURE
    is_collective = True

    def __init__(self) -> None:
        self._began: device.Mark | None = None

    def on_train_start(self, run: Run) -> None:
        """Measure the yardstick for MFU where the reports are written."""
        if run.is_first_rank:
            run.yardstick = build_yardstick(run.device, next(run.model[0].parameters()).dtype)

    def on_step_start(self, run: Run) -> None:
        """Mark the moment on the device."""
        self._began = device.mark()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Record everything. How long the step took is known only when the device has done it."""
        metrics, memory, tokens = run.metrics, device.read_memory_stats(), result.samples * run.seq_length
        # Per device, as hardware peaks are given.
        devices = run.groups.world.size() * run.config.sites.diloco_replicas
        flops = None if run.flops_per_token is None else run.flops_per_token * tokens / devices

        assert self._began is not None, "a step ends that has not begun"
        # A function, called when values are read: asking now would make the host wait for the step.
        seconds = partial(device.measure_seconds_between, self._began, device.mark())
        metrics.record("consumed_samples", run.progress.consumed_train_samples, reduce="last")
        metrics.record_losses(result.losses)
        metrics.record("grad_norm", result.grad_norm, reduce="last")
        if run.config.logger.log_params_norm:
            metrics.record("params_norm", run.optimizer.params_norm(), reduce="last")
        metrics.record("lr", result.learning_rate, reduce="last")
        metrics.record("global_batch_size", result.samples, reduce="last")
        metrics.record("skipped", result.skipped, reduce="sum")
        metrics.record("loss_scale", result.loss_scale, reduce="last")
        metrics.record("iteration_time_seconds", seconds)
        metrics.record("tokens_per_second", lambda: tokens / seconds())
        metrics.record("tflops", None if flops is None else lambda: flops / seconds() / 1e12)
        if flops is None or run.yardstick is None:
            metrics.record("mfu", None)
        else:
            utilisation = run.yardstick.utilisation
            metrics.record("mfu", lambda: utilisation(flops / seconds()))
        metrics.record("memory_bytes", memory["allocated_bytes"], reduce="last")
        metrics.record("peak_memory_bytes", memory["peak_bytes"], reduce="last")
        if run.config.logger.log_device_memory_used:
            metrics.record(
                "device-memory-used-bytes", device.read_used_memory_bytes(), reduce="last",
                text=lambda used: f"device memory used (MB): {used / 2**20:.0f}",
            )  # fmt: skip

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        """Count iterations whose loss was not a number."""
        run.progress.nan_iterations += sum(row.has_nan for row in rows)


class ZerosHook(Hook):
    """--log-num-zeros-in-grad: num_zeros_in_grad, how many elements of the step's gradients are exactly zero."""

    phase = Phase.MEASURE
    is_collective = True

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> ZerosHook | None:
        """Build the hook where the flag asks for it."""
        return cls() if config.logger.log_num_zeros_in_grad else None

    def on_gradients(self, run: Run) -> None:
        """Count between backward and update: the buffers are cleared before the next step."""
        zeros = count_zeros(list_flat_buffers(run), run.optimizer.model_sum)
        run.metrics.record("num_zeros_in_grad", zeros.long(), reduce="last")


class ExpertsHook(Hook):
    """Mixture of experts: the routers' auxiliary losses. Every rank takes part.

    per_layer: also each layer's, and how evenly its experts were chosen in the step:

    | name             | what                                                                            | even |
    |------------------|---------------------------------------------------------------------------------|------|
    | expert_load      | choices of the most chosen expert / mean over experts                           | 1    |
    | expert_rank_load | the same of the expert-parallel ranks, where there are several                  | 1    |
    | expert_entropy   | of the choices' distribution over experts / its largest value, log(experts)     | 1    |
    | tokens_dropped   | share of the choices that did not fit into the capacity of experts or ranks     | 0    |
    | expert_bias      | largest - smallest bias, where the router has them                              | 0    |
    """

    phase = Phase.MEASURE
    is_collective = True

    def __init__(self, *, per_layer: bool) -> None:
        self.per_layer = per_layer

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> ExpertsHook | None:
        """Return the hook for --num-experts and --moe-per-layer-logging; None where it is not asked for."""
        return None if config.model.num_moe_experts is None else cls(per_layer=config.model.moe_per_layer_logging)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Record means over microbatches, replicas and layers. Values stay on the device; the host waits for none."""
        model = run.config.model
        # Layers of multi-token prediction, the last ones, count as others.
        layers = [layer.number for layer in read_plan(model).layers if layer.has("experts")]
        # A coefficient of 0 switches a loss off.
        names = [LOSS_NAMES[kind] for kind, coefficient in read_loss_coefficients(model).items() if coefficient]
        if names:
            means = self._reduce_losses(run, layers, names, result.samples)
            over_layers = means.cumsum(0)[-1] / len(layers)
            for place, name in enumerate(names):
                run.metrics.record(name, over_layers[place], reduce="last", text=partial("{}: {:.6E}".format, name))
            if self.per_layer:
                _record_layers(run, layers, dict(zip(names, means.unbind(1), strict=True)))
        if self.per_layer:
            found = self._reduce_load(run, layers)
            _record_layers(run, layers, found)
            busiest = found["expert_load"].max()
            run.metrics.record("expert_load", busiest, reduce="max", text="expert load: {:.2f}".format)

    def _reduce_losses(self, run: Run, layers: list[int], names: list[str], samples: int) -> Tensor:
        """[layers, names], of the last step, which had so many samples."""
        # One tensor for all layers, so that one all-reduce brings everything together.
        own = torch.zeros(len(layers), len(names), dtype=torch.float64, device=run.device)
        for router in list_routers(run):
            for name, summed in router.take_losses().items():
                own[layers.index(router.layer_number), names.index(name)] += summed
        all_reduce(own, run.groups.world)  # each process has what its tokens add to its layers' losses
        return own * run.batch_size.micro_batch_size / samples

    def _reduce_load(self, run: Run, layers: list[int]) -> dict[str, Tensor]:
        """Name, as in the docstring of the class -> [layers], of the last step."""
        model = run.config.model
        experts = model.num_moe_experts or 1
        # A row for each layer: choices of each expert, those dropped, biases, and how many processes hold them.
        own = torch.zeros(len(layers), 2 * experts + 2, dtype=torch.float64, device=run.device)
        for router in list_routers(run):
            row = own[layers.index(router.layer_number)]
            load = router.take_load()
            if load is not None:
                row[: experts + 1] += load
            if router.expert_bias is not None:
                row[experts + 1 : -1] += router.expert_bias.detach()
                row[-1] += 1
        all_reduce(own, run.groups.world)
        choices, dropped = own[:, :experts], own[:, experts]
        total = choices.sum(1).clamp(min=1)
        shares = choices / total.unsqueeze(1)
        found = {"expert_load": shares.amax(1) * experts}
        ranks = model.expert_model_parallel_size
        if ranks > 1:
            found["expert_rank_load"] = shares.unflatten(1, (ranks, -1)).sum(2).amax(1) * ranks
        found["expert_entropy"] = torch.special.entr(shares).sum(1) / math.log(max(experts, 2))
        if model.drops_tokens:
            found["tokens_dropped"] = dropped / total
        if model.has_expert_bias:
            biases = own[:, experts + 1 : -1] / own[:, -1:].clamp(min=1)
            found["expert_bias"] = biases.amax(1) - biases.amin(1)
        return found


def _record_layers(run: Run, layers: list[int], values: Mapping[str, Tensor]) -> None:
    """Record values [layers] by name, each layer's under a separate name."""
    for name, of_layers in values.items():
        for layer, value in zip(layers, of_layers.unbind(), strict=True):
            run.metrics.record(f"{name} layer {layer}", value, reduce="last")


class PredictionHook(Hook):
    """Multi-token prediction: `mtp_1 loss`, ..., the mean loss of each further token, and `mtp_1_acceptance_rate`, ...,
    percentages of tokens that were the likeliest ones, with `cumulative` since the start. Every rank takes part."""

    phase = Phase.MEASURE
    is_collective = True

    def __init__(self, depths: int) -> None:
        self.depths = depths
        self._counts = torch.zeros(())
        """Of this process's steps, as a step's below."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> PredictionHook | None:
        """Return the hook for --mtp-num-layers; None where it is not asked for."""
        return None if config.model.mtp_num_layers is None else cls(config.model.mtp_num_layers)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Record means over the tokens of the global batch that count."""
        sums = torch.zeros(self.depths, 3, device=run.device)
        for part in (part for chunk in run.model for part in chunk.module.modules()):
            taken = part.take_sums() if isinstance(part, MultiTokenPredictionLoss) else None
            if taken is not None:
                sums += taken
        # Tensor-parallel ranks have equal sums, which their tokens make up for; other stages add nothing.
        all_reduce(sums, run.groups.world)
        means = sums[:, 0] / sums[:, 1].clamp(min=1)
        run.metrics.record_losses({f"mtp_{depth} loss": mean for depth, mean in enumerate(means.unbind(), start=1)})
        # In float32 a run's tokens would soon count no more.
        counts = sums[:, 1:].double()
        self._counts = self._counts.to(counts) + counts
        for name, (tokens, right) in (("", counts.unbind(1)), ("cumulative_", self._counts.unbind(1))):
            for depth, rate in enumerate((100 * right / tokens.clamp(min=1)).unbind(), start=1):
                run.metrics.record(f"mtp_{depth}_{name}acceptance_rate", rate, reduce="last" if name else "mean")


class IndexerHook(Hook):
    """Sparse attention: `indexer loss`, the mean over layers, microbatches and replicas. Every rank takes part."""

    phase = Phase.MEASURE
    is_collective = True

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> IndexerHook | None:
        """Return the hook for --dsa-indexer-loss-coeff; None where it is not asked for."""
        has_indexer = config.model.has_kind("sparse_attention") or config.model.has_kind("compressed_sparse")
        return cls() if config.model.dsa_indexer_loss_coeff and has_indexer else None

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Record the loss of the step, with its coefficient, over all layers of the model."""
        model, total = run.config.model, torch.zeros((), dtype=torch.float64, device=run.device)
        for part in (part for chunk in run.model for part in chunk.module.modules()):
            taken = part.take_loss() if isinstance(part, IndexLossCore) else None
            if taken is not None:
                total += taken
        # Tensor-parallel ranks have equal sums; context-parallel ones the parts of their tokens.
        all_reduce(total, run.groups.world)
        microbatches = result.samples / run.batch_size.micro_batch_size
        mean = total / (run.groups.tp.size() * microbatches * model.num_layers)
        run.metrics.record("indexer loss", mean, reduce="last", text="indexer loss: {:.6E}".format)


def list_routers(run: Run) -> Iterator[TopKRouter]:
    """Yield the routers of this process's layers."""
    for chunk in run.model:
        yield from (module for module in chunk.module.modules() if isinstance(module, TopKRouter))


class AttentionLogitsHook(Hook):
    """--log-max-attention-logit: the largest attention score of the step, which the optimizer has found."""

    phase = Phase.MEASURE

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> AttentionLogitsHook | None:
        """Return the hook for --log-max-attention-logit; None where it is not asked for."""
        return cls() if config.logger.log_max_attention_logit else None

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Record the largest score of the step."""
        assert isinstance(run.optimizer.after_update, AttentionLogits), "setup puts it there"
        largest = run.optimizer.after_update.largest
        run.metrics.record("max-attention-logit", largest, "last", "max attention logit: {:.3f}".format)


class TrafficHook(Hook):
    """--log-comm-volume: the bytes that the last step of an interval sent, as a mean over the ranks."""

    phase = Phase.MEASURE
    is_collective = True

    def __init__(self, log_interval: int, traffic: Traffic) -> None:
        self.log_interval = log_interval
        self.traffic = traffic
        self.step: dict[tuple[str, str], int] = {}
        """Of this rank: (axis, kind) -> bytes."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> TrafficHook | None:
        """Return the hook for --log-comm-volume; None where it is not asked for."""
        return cls(config.logger.log_interval, context.traffic) if config.logger.log_comm_volume else None

    def on_step_start(self, run: Run) -> None:
        """Forget what evaluation, saving and reports have sent."""
        self.traffic.take()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Gather the numbers of all ranks at the interval. Every rank takes part."""
        self.step = self.traffic.take()
        if run.progress.iteration % self.log_interval:
            return
        total: Counter[tuple[str, str]] = Counter()
        for own in all_gather_object(self.step, run.groups.world):
            total.update(own)
        ranks = run.groups.world.size()
        # The progress line has one number per axis; kinds of collectives are apart in the files.
        by_axis: Counter[str] = Counter()
        for (axis, kind), sent_bytes in total.items():
            run.metrics.record(f"comm-bytes {axis} {kind}", sent_bytes / ranks, reduce="last")
            by_axis[axis] += sent_bytes
        parts = (f"{axis} {sent_bytes / ranks / 1e6:.6g}" for axis, sent_bytes in sorted(by_axis.items()))
        run.metrics.add_text(f"communication (MB sent per rank): {', '.join(parts) or 'none'}")


class BalanceHook(Hook):
    """--hybrid-context-parallel: how evenly the plan of an interval's last step divides the work, compared with the
    layout without plans."""

    phase = Phase.MEASURE

    def __init__(self, log_interval: int) -> None:
        self.log_interval = log_interval
        self._plan: StepPlan | None = None

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> BalanceHook | None:
        """Return the hook for --hybrid-context-parallel; None where it is not asked for."""
        return cls(config.logger.log_interval) if config.model.hybrid_context_parallel else None

    def on_step_start(self, run: Run) -> None:
        """Keep the plan of the step, which is forgotten afterwards."""
        # Kept here: plans are dropped as soon as a later step is asked about.
        self._plan = None if run.plans is None else run.plans.at(run.progress.consumed_train_samples)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Record how evenly the work was divided, at the interval, on the first rank."""
        if self._plan is None or not run.is_first_rank or run.progress.iteration % self.log_interval:
            return
        balance, static = self._plan.context.balance, self._plan.compute_static_balance
        run.metrics.record("work-balance", balance, reduce="last")
        run.metrics.record("work-balance static", static, reduce="last")
        shared = ", ".join(f"{count} on {size}" for size, count in self._plan.context.samples_by_size.items())
        run.metrics.add_text(f"conversations on ranks: {shared} | work balance: {balance:.3f} (static {static:.3f})")


class LayerNormsHook(Hook):
    """--log-layer-norms: of each layer's parameters after the update and gradients before clipping, and of the states
    that sequences end with (letters M, G, K), at the interval."""

    phase = Phase.MEASURE
    is_collective = True

    def __init__(self, log_interval: int) -> None:
        self.log_interval = log_interval
        self._gradients: dict[str, float] = {}
        self._mixers: list[StateMixer] = []

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> LayerNormsHook | None:
        """Return the hook for --log-layer-norms; None where it is not asked for."""
        return cls(config.logger.log_interval) if config.logger.log_layer_norms else None

    def on_train_start(self, run: Run) -> None:
        """Find the mixers that have states."""
        self._mixers = [mixer for chunk in run.model for _, mixer in list_state_mixers(chunk.module)]

    def on_step_start(self, run: Run) -> None:
        """Let mixers keep the norms of states in a step that is logged."""
        for mixer in self._mixers:
            mixer.notes_states = (run.progress.iteration + 1) % self.log_interval == 0

    def on_gradients(self, run: Run) -> None:
        """Measure the gradients of each layer before clipping. Every rank takes part."""
        if (run.progress.iteration + 1) % self.log_interval == 0:
            # With --fp16 gradients include the loss scale until the update.
            scaled = compute_layer_norms(list_flat_buffers(run), run.optimizer.model_sum, "gradients")
            self._gradients = {layer: norm / run.optimizer.loss_scale for layer, norm in scaled.items()}

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Measure parameters and record, at the interval. Every rank takes part."""
        if run.progress.iteration % self.log_interval:
            return
        parameters = compute_layer_norms(list_flat_buffers(run), run.optimizer.model_sum, "parameters")
        for layer, norm in parameters.items():
            run.metrics.record(f"params-norm {layer}", norm, reduce="last")
            run.metrics.record(f"grad-norm {layer}", self._gradients[layer], reduce="last")
        states = compute_state_norms([chunk.module for chunk in run.model], run.groups)
        for mixer, of_states in states.items():
            run.metrics.record(f"state-norm {mixer}", of_states.mean, reduce="last")
            run.metrics.record(f"state-norm-max {mixer}", of_states.largest, reduce="last")
        table = format_layer_norms(run.progress.iteration, parameters, self._gradients)
        run.metrics.add_table("\n".join([table, *format_state_norms(states)]))


def format_state_norms(states: Mapping[str, StateNorm]) -> Iterator[str]:
    """Yield the lines of a table of states with a line for each mixer; none without mixers."""
    if states:
        title = "norms of states after sequences"
        width = max(len(title) - 2, *map(len, states))
        yield f" {title:<{width + 2}s} | {'mean':>12s} | {'largest':>12s} |"
        for mixer, norm in states.items():
            yield f"   {mixer:<{width}s} | {norm.mean:12.6g} | {norm.largest:12.6g} |"


def format_layer_norms(iteration: int, parameters: dict[str, float], gradients: dict[str, float]) -> str:
    """Format a table of norms with a line for each layer."""
    width = max(map(len, parameters))
    lines = [f" norms by layer at iteration {iteration} | {'parameters':>12s} | {'gradients':>12s} |"]
    for layer, norm in parameters.items():
        lines.append(f"   {layer:<{width}s} | {norm:12.6g} | {gradients[layer]:12.6g} |")
    return "\n".join(lines)


class MemoryHook(Hook):
    """--log-memory-interval: a line about each rank's memory."""

    phase = Phase.MEASURE
    is_collective = True

    def __init__(self, interval: int) -> None:
        self.interval = interval

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> MemoryHook | None:
        """Return the hook for --log-memory-interval; None where it is not asked for."""
        interval = config.logger.log_memory_interval
        return None if interval is None else cls(interval)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Gather the numbers of all ranks at the interval. Every rank takes part."""
        if run.progress.iteration % self.interval:
            return
        own = (device.read_memory_stats(), device.read_used_memory_bytes(), has_expandable_segments(run.device))
        # Gathered as an object over the host: a few numbers, at intervals that a user has asked for.
        of_all = all_gather_object(own, run.groups.world)
        lines = (format_memory_line(run.progress.iteration, rank, *found) for rank, found in enumerate(of_all))
        run.metrics.add_table("\n".join(lines))


def format_memory_line(
    iteration: int, rank: int, stats: dict[str, int], used: int, is_expandable: bool | None = None
) -> str:
    """Return what one process holds, and what all processes of its device or machine do. is_expandable: whether a GPU's
    blocks of memory grow where they are."""
    segments = "" if is_expandable is None else f" | expandable segments {'on' if is_expandable else 'off'}"
    return (
        f" [rank {rank}] memory (MB) after iteration {iteration}: allocated {stats['allocated_bytes'] / 2**20:.0f} | "
        f"peak {stats['peak_bytes'] / 2**20:.0f} | used on the device {used / 2**20:.0f}{segments}"
    )
