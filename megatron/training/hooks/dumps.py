# SPDX-License-Identifier: Apache-2.0
"""Tensors of a run for looking at: every so many iterations parameters, gradients, activations, or how many tokens each
expert was given, in separate directories below --save.

    save/wgrads/iter_0000010/      as a checkpoint's tensors (torch_dist.py): whole under any layout, with checksums

A dump is a checkpoint of a few tensors: complete or invisible, read by `open_checkpoint`, and shown and compared by
tools/checkpoint/inspect_checkpoint.py. Where the disk does not take one, training goes on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core.auxiliary_loss import is_recomputing
from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.directory import settle_leftovers
from megatron.core.dist_checkpointing.durable import storage_errors
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, model_state
from megatron.core.errors import StorageError, report_error
from megatron.core.flat_ranges import intersect_ranges
from megatron.core.placement import Piece, Placement, get_placement
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.checkpoint.run_tensors import build_sharded_model_state
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.container import RunConfig
from megatron.training.hooks.activations import ActivationRecorder, PointRecord
from megatron.training.run import Hook, HookContext, Phase, Run, StepResult


class DumpHook(Hook):
    """One kind of tensors, every so many iterations."""

    # Saving is collective: all ranks learn alike that it failed.
    phase = Phase.SAVE
    name: str
    """Of the directory, and of the flag: --save-<name>-interval."""

    def __init__(self, settings: CheckpointConfig, interval: int) -> None:
        assert settings.save is not None
        self._root = Path(settings.save) / self.name
        self._interval = interval
        self._lost = 0

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> DumpHook | None:
        """Return the hook for --save-<name>-interval with --save."""
        interval = getattr(config.checkpoint, f"save_{cls.name}_interval")
        is_wanted = interval is not None and config.checkpoint.save is not None and cls.has_any(config)
        return cls(config.checkpoint, interval) if is_wanted else None

    @classmethod
    def has_any(cls, config: RunConfig) -> bool:
        """Return whether a run with these settings has such tensors."""
        return True

    def on_train_start(self, run: Run) -> None:
        """Make the directory; what hinders it is told with the first dump."""

        def make() -> None:
            with storage_errors(f"making {self._root}"):
                self._root.mkdir(exist_ok=True)
                settle_leftovers(self._root)

        try:
            on_first_rank(run.groups.world, make)
        except StorageError as error:
            if run.is_first_rank:
                report_error(StorageError(f"{error}; training goes on"))

    def on_close(self, run: Run) -> None:
        """Say how many dumps are missing."""
        if self._lost and run.is_first_rank:
            report_error(StorageError(f"{self._root}: {self._lost} dumps were not written"))

    def is_due(self, run: Run, *, is_counted: bool) -> bool:
        """Return whether this step's tensors are dumped. is_counted: the step is among the iterations done."""
        # Hooks before the update see the number of iterations done, which lacks this one.
        return (run.progress.iteration + (not is_counted)) % self._interval == 0

    def dump(self, run: Run, tensors: ShardedStateDict, *, is_counted: bool) -> None:
        """Write what this process has of them; every rank calls this."""
        iteration = run.progress.iteration + (not is_counted)
        # Below --save a dump, like a checkpoint, is written only while this run still holds the lock.
        lock = next((lock for lock in run.save_locks if lock.covers(self._root)), None)
        try:
            serialization.save(tensors, self._root, iteration, documents={}, group=run.groups.world, lock=lock)
        except StorageError as error:
            self._lost += 1
            if run.is_first_rank and self._lost & (self._lost - 1) == 0:  # the first, second, fourth, ... time
                report_error(StorageError(f"{self.name} of iteration {iteration}: {error}; training goes on"))


class ParamsDumpHook(DumpHook):
    """--save-params-interval: the parameters after the update, as the network computes with them."""

    name = "params"

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """After the update."""
        if self.is_due(run, is_counted=True):
            self.dump(run, build_sharded_model_state(run), is_counted=True)


class WeightGradsDumpHook(DumpHook):
    """--save-wgrads-interval: the gradients of the parameters, of the mean loss, complete and before clipping."""

    name = "wgrads"

    def on_gradients(self, run: Run) -> None:
        """Between backward and update."""
        if self.is_due(run, is_counted=False):
            self.dump(run, build_sharded_grads(run), is_counted=False)


def build_sharded_grads(run: Run) -> ShardedStateDict:
    """The gradients under the parameters' names: whole shards, or the slices that this process has summed up."""
    # Buffers hold gradients of the scaled loss until the update divides them.
    scale = float(run.optimizer.loss_scale)
    held: list[tuple[Tensor, Placement]] = []
    starts: dict[str, int] = {}
    for placement, grad, start in _iterate_owned_grads(run):
        grad = grad if scale == 1.0 else grad / scale
        is_whole = grad.numel() == math.prod(placement.local_shape)
        held.append((grad.view(placement.local_shape) if is_whole else grad, placement))
        if not is_whole:
            starts[placement.name] = start
    return model_state(held, starts)


def _iterate_owned_grads(run: Run) -> Iterator[tuple[Placement, Tensor, int]]:
    """Yield for each parameter what this process has of its gradient, flat, and which element that begins at."""
    for buffer in (buffer for chunk in run.model for buffer in chunk.flat_buffers):
        slots = zip(buffer.names, buffer.params, buffer.layout.slots, buffer.starts, strict=True)
        for name, param, slot, first in slots:
            for start, stop in intersect_ranges([(slot.start, slot.start + slot.numel)], buffer.owned):
                yield get_placement(param, name), buffer.grad_data[start:stop], first + start - slot.start


class ActivationsDumpHook(DumpHook):
    """--save-activations-interval, and --save-dgrads-interval for the gradients of the same activations: of all
    microbatches of the step, float32 [tokens of the global batch, channels]."""

    name = "activations"
    part = "values"

    @classmethod
    def has_any(cls, config: RunConfig) -> bool:
        """ActivationRecorder sees nothing of packed conversations."""
        return not config.model.hybrid_context_parallel

    def __init__(self, settings: CheckpointConfig, interval: int) -> None:
        super().__init__(settings, interval)
        self._recorder: ActivationRecorder | None = None

    def on_step_start(self, run: Run) -> None:
        """Begin to record."""
        if self.is_due(run, is_counted=False):
            self._recorder = ActivationRecorder(run)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Write what was recorded."""
        if self._recorder is None:
            return
        recorder, self._recorder = self._recorder, None
        recorder.close()
        self.dump(run, place_records(run, recorder.list_records(), self.part), is_counted=True)

    def on_close(self, run: Run) -> None:
        """Let go of the model."""
        if self._recorder is not None:
            self._recorder.close()
        super().on_close(run)


class ActivationGradsDumpHook(ActivationsDumpHook):
    """--save-dgrads-interval."""

    name = "dgrads"
    part = "grads"


class _Extent(NamedTuple):
    """Part of a point that one process has: all channels listed of all tokens listed."""

    last_token: int
    num_tokens: int
    tokens: str
    """The same for processes that have the same tokens."""
    channels: tuple[tuple[int, int], ...]
    """(first, number) of those that follow each other."""
    is_empty: bool

    def list_channels(self) -> set[int]:
        """All of them."""
        return {channel for first, number in self.channels for channel in range(first, first + number)}


def place_records(run: Run, records: list[PointRecord], part: str) -> ShardedStateDict:
    """Records of all ranks as tensors of the whole model, `<module>.<output, input, query, ...>`.

    Every rank calls this. part: values or grads. A point is left out of which the ranks together do not have every
    element, as where layers see another number of tokens on each; so are gradients of what has none.
    """
    held: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    extents: dict[str, _Extent] = {}
    for record in records:
        key = f"{record.module}.{record.part}" if record.module else record.part
        tokens, channels = record.tokens, record.channels
        found = getattr(record, part)
        values = torch.zeros_like(record.values) if found is None else found
        if part == "grads" and record.sums_grads:
            values, channels = _sum_shares(run, record, values)
        held[key] = (values, tokens, channels)
        runs = tuple((first, number) for _, first, number in _find_runs(sorted(channels.tolist())))
        # Ranks compare which tokens they have, without sending the numbers of millions of them.
        which = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
        extents[key] = _Extent(int(tokens.max()), len(tokens), which, runs, found is None)
    everyone: list[dict[str, _Extent]] = all_gather_object(extents, run.groups.world)
    state: ShardedStateDict = {}
    for key, (values, tokens, channels) in held.items():
        of_all = [found[key] for found in everyone if key in found]
        claimed: dict[str, set[int]] = {}
        mine: set[int] = set()
        # Where ranks have some channels in common, as of a key and value that several share, the first one's count.
        for extent in dict.fromkeys(of_all):
            taken = claimed.setdefault(extent.tokens, set())
            if extent == extents[key]:
                mine = extent.list_channels() - taken
            taken |= extent.list_channels()
        num_tokens = {extent.tokens: extent.num_tokens for extent in of_all}
        shape = (1 + max(e.last_token for e in of_all), 1 + max(max(found) for found in claimed.values()))
        is_whole = sum(num_tokens[which] * len(found) for which, found in claimed.items()) == shape[0] * shape[1]
        if mine and is_whole and not all(extent.is_empty for extent in of_all):
            kept = torch.tensor([channel in mine for channel in channels.tolist()])
            state[key] = place_slice(key, values[:, kept], tokens, channels[kept], shape)
    return state


def _sum_shares(run: Run, record: PointRecord, values: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of which several tensor-parallel ranks have a part, summed: (values of all channels, these)."""
    group = run.groups.tp
    width = max(all_gather_object(int(record.channels.max()) + 1, group))
    whole = torch.zeros(values.shape[0], width)
    whole[:, record.channels] = values
    whole = whole.to(run.device)
    all_reduce(whole, group)
    return whole.cpu(), torch.arange(width)


def place_slice(key: str, values: Tensor, tokens: Tensor, channels: Tensor, shape: tuple[int, int]) -> ShardedTensor:
    """Rows and columns brought into the order of the whole, where they are a few rectangles."""
    rows, columns = tokens.argsort(), channels.argsort()
    blocks = tuple(
        Piece(((token, height), (channel, width)), ((row, height), (column, width)), True)
        for row, token, height in _find_runs(tokens[rows].tolist())
        for column, channel, width in _find_runs(channels[columns].tolist())
    )
    return ShardedTensor(key, values[rows][:, columns].contiguous(), shape, blocks)


def _find_runs(numbers: list[int]) -> Iterator[tuple[int, int, int]]:
    """(index, first number, length) of the stretches of ascending numbers that follow each other."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield start, numbers[start], index - start
            start = index


class TokensPerExpertDumpHook(DumpHook):
    """--save-tokens-per-expert-interval: for each router [experts] int64, how many of the step's tokens chose each
    expert, before any is dropped."""

    name = "tokens_per_expert"

    @classmethod
    def has_any(cls, config: RunConfig) -> bool:
        """Routers belong to experts."""
        return config.model.num_moe_experts is not None

    def __init__(self, settings: CheckpointConfig, interval: int) -> None:
        super().__init__(settings, interval)
        self._counts: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def on_step_start(self, run: Run) -> None:
        """Begin to count."""
        if not self.is_due(run, is_counted=False):
            return
        for chunk in run.model:
            for path, module in chunk.module.named_modules():
                if isinstance(module, TopKRouter):
                    name = f"{find_global_name(chunk.module, path)}.tokens_per_expert"
                    self._counts[name] = torch.zeros(module.num_experts, dtype=torch.int64, device=run.device)
                    self._handles.append(module.register_forward_hook(self._count_into(self._counts[name])))

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Add up the counts of all ranks that route tokens of a layer, and write them."""
        if not self.is_due(run, is_counted=True):
            return
        self._stop()
        for counts in self._counts.values():
            # Over tensor-parallel ranks, too: experts divide tokens among them, also without --sequence-parallel.
            all_reduce(counts, run.groups.tp_dp_cp)
        self.dump(
            run, {name: ShardedTensor.whole(name, counts) for name, counts in self._counts.items()}, is_counted=True
        )
        self._counts.clear()

    def on_close(self, run: Run) -> None:
        """Let go of the model."""
        self._stop()
        super().on_close(run)

    def _stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    @staticmethod
    def _count_into(counts: Tensor) -> Any:
        def count(module: nn.Module, args: Any, output: Any) -> None:
            # A recomputed forward is not another microbatch.
            if not is_recomputing():
                chosen = output.experts.flatten()
                counts.scatter_add_(0, chosen, torch.ones_like(chosen))

        return count
