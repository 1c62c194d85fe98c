# SPDX-License-Identifier: Apache-2.0
"""Record of the experts that each token got: written after every step (--moe-routing-trace-path), or taken from there
in place of the routers' choice (--moe-enable-routing-replay).

    DIR/iter_0000010/      decoder.layers.1.mlp.router.experts, int64 [tokens of the global batch, experts of a token]

Tokens are numbered as in activation dumps: sample * s + position. So a run in another layout can replay them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.errors import CheckpointError
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.core.transformer.moe.route_log import RouteLog
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.config.container import RunConfig
from megatron.training.config.logging import LoggerConfig
from megatron.training.hooks.activations import PointRecord, find_tokens
from megatron.training.hooks.dumps import DumpHook, place_records, place_slice
from megatron.training.run import Hook, HookContext, Phase, Run, StepResult


class RoutingTraceHook(DumpHook):
    """--moe-routing-trace-path without --moe-enable-routing-replay: write what routers did."""

    name = "routes"

    def __init__(self, settings: LoggerConfig) -> None:
        assert settings.moe_routing_trace_path is not None
        self._settings = settings
        self._root = Path(settings.moe_routing_trace_path)
        self._lost = 0

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> RoutingTraceHook | None:
        """Return the hook of a run with experts that names a directory and takes nothing from it."""
        settings, model = config.logger, config.model
        is_wanted = settings.moe_routing_trace_path is not None and model.num_moe_experts is not None
        return cls(settings) if is_wanted and not model.moe_enable_routing_replay else None

    def on_train_start(self, run: Run) -> None:
        """Make the directory, and those above it."""
        if run.is_first_rank:
            with contextlib.suppress(OSError):  # which is told when the last one cannot be made
                self._root.parent.mkdir(parents=True, exist_ok=True)
        super().on_train_start(run)

    def is_due(self, run: Run, *, is_counted: bool) -> bool:
        """Return whether this step is among the first that are to be written."""
        limit = self._settings.moe_routing_trace_max_training_iters
        return limit is None or run.progress.iteration + (not is_counted) <= limit

    def on_step_start(self, run: Run) -> None:
        """Begin to note."""
        if self.is_due(run, is_counted=False):
            for _, router in _list_routers(run):
                router.route_log = RouteLog()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Write what was noted."""
        if not self.is_due(run, is_counted=True):
            return
        records: list[PointRecord] = []
        weights: ShardedStateDict = {}
        for name, router in _list_routers(run):
            log, router.route_log = router.route_log, None
            if log is None or not log.shapes:
                continue
            tokens = find_tokens(run, *log.shapes[0], len(log.shapes))
            if tokens is None:
                continue
            parts = {"experts": log.experts}
            if self._settings.moe_routing_trace_capture_logits:
                parts["logits"] = log.logits
            if self._settings.moe_routing_trace_capture_hidden_states:
                parts["hidden_states"] = log.hidden_states
            for part, found in parts.items():
                values = torch.cat(found).cpu()
                channels = torch.arange(values.shape[1])
                records.append(PointRecord(name, part, "", tokens, channels, values, None, False, run.seq_length))
            if self._settings.moe_routing_trace_dump_weights:
                key = f"{name}.weight"
                weights[key] = ShardedTensor.whole(key, router.weight.detach().clone())
        self.dump(run, place_records(run, records, "values") | weights, is_counted=True)

    def on_close(self, run: Run) -> None:
        """Let go of the routers."""
        _forget(run)
        super().on_close(run)


class RoutingReplayHook(Hook):
    """--moe-enable-routing-replay: give the routers what an earlier run noted in the same iteration."""

    # Reading is collective, as saving is.
    phase = Phase.SAVE

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> RoutingReplayHook | None:
        """Return the hook of a run with experts that names the directory of an earlier run's choices."""
        root, model = config.logger.moe_routing_trace_path, config.model
        is_wanted = root is not None and model.moe_enable_routing_replay and model.num_moe_experts is not None
        return cls(Path(root)) if is_wanted and root is not None else None

    def on_step_start(self, run: Run) -> None:
        """Read this step's choices. Raises CheckpointError on every rank where there are none, or of another batch."""
        iteration, world = run.progress.iteration + 1, run.groups.world
        directory = self._root / f"iter_{iteration:07d}"
        found = None
        if on_first_rank(world, directory.is_dir):
            found = serialization.find(self._root, iteration, world)
        if found is None:
            raise CheckpointError(
                f"--moe-routing-trace-path {self._root} has no choices of iteration {iteration}; record so many "
                "iterations, or leave out --moe-enable-routing-replay"
            )
        model, count = run.config.model, run.num_microbatches
        length = run.seq_length // (model.context_parallel_size * model.tensor_model_parallel_size)
        sequences = run.batch_size.micro_batch_size
        tokens = find_tokens(run, length, sequences, count)
        total = run.seq_length * sequences * count * run.groups.dp.size()
        assert tokens is not None, "every rank routes its part of the tokens"
        placed: dict[str, ShardedTensor] = {}
        for name, router in _list_routers(run):
            own = torch.zeros(len(tokens), router.topk, dtype=torch.int64)
            choices = torch.arange(router.topk)
            placed[name] = place_slice(f"{name}.experts", own, tokens, choices, (total, router.topk))
        serialization.load({tensor.key: tensor for tensor in placed.values()}, found, world, may_have_more=True)
        # A slice is placed with its tokens in ascending order, which is not the router's with context parallelism.
        rows = tokens.argsort()
        for name, router in _list_routers(run):
            experts = torch.empty_like(placed[name].data)
            experts[rows] = placed[name].data
            router.route_log = RouteLog(self._check(experts, router).to(run.device).chunk(count))

    def _check(self, experts: Tensor, router: TopKRouter) -> Tensor:
        if len(experts) and not 0 <= int(experts.min()) <= int(experts.max()) < router.num_experts:
            raise CheckpointError(
                f"--moe-routing-trace-path {self._root} names expert {int(experts.max())}, where --num-experts is "
                f"{router.num_experts}; replay the choices of a model with as many experts"
            )
        return experts

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Let the routers choose again, in evaluation."""
        _forget(run)

    def on_close(self, run: Run) -> None:
        """Let go of the routers."""
        _forget(run)


def _list_routers(run: Run) -> Iterator[tuple[str, TopKRouter]]:
    """Yield this process's routers with their names in the whole model."""
    for chunk in run.model:
        for path, module in chunk.module.named_modules():
            if isinstance(module, TopKRouter):
                yield find_global_name(chunk.module, path), module


def _forget(run: Run) -> None:
    for _, router in _list_routers(run):
        router.route_log = None
