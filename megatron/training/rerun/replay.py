# SPDX-License-Identifier: Apache-2.0
"""Computing a step again from where it began, and the first value in it that is no number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.collectives import all_gather_object
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.training.checkpoint.rng_state import RandomState
from megatron.training.run import Run
from megatron.training.step import compute_gradients


@dataclass(frozen=True)
class StepStart:
    """State that a step changes before its update: counts, generators, and buffers such as expert biases."""

    progress: dict[str, int]
    random: RandomState
    buffers: list[tuple[Tensor, Tensor]]
    """Each with its content then."""

    @classmethod
    def take(cls, run: Run) -> StepStart:
        """Return the state before the step under way. The hooks that need it share it: generators take 0.1 ms to
        copy."""
        if run.step_start is None or run.step_start.progress != run.progress.state_dict():
            copies = [(buffer, buffer.detach().clone()) for buffer in run.buffers]
            run.step_start = cls(run.progress.state_dict(), RandomState.take(), copies)
        start: StepStart = run.step_start
        return start

    def put_back(self, run: Run) -> None:
        """Take the run back to the moment before the step. Its weights must be unchanged since."""
        run.progress.load_state_dict(self.progress)
        self.random.put_back()
        with torch.no_grad():
            for buffer, content in self.buffers:
                buffer.copy_(content)


def replay(run: Run) -> None:
    """Compute the gradients of the next iteration again, from its data. Every rank calls this."""
    batches = run.data.open("train", run.progress.consumed_train_samples)
    try:
        compute_gradients(run, batches)
    finally:
        with contextlib.suppress(AttributeError):  # a user's iterator
            batches.close()  # type: ignore[attr-defined]


@dataclass(order=True)
class BadValue:
    """A value that is no number, in order of computation: forward passes before gradients."""

    is_gradient: bool
    microbatch: int
    stage: int
    place: int
    """Among the values of the rank and micro-batch."""
    rank: int
    sentence: str


def find_first_bad(run: Run) -> str | None:
    """Compute the next iteration again, and look at the output of every module on the way: the first value, over all
    ranks, that is no number, in words; None where all are. Every rank calls this."""
    watch = _Watch(run)
    with watch.attached():
        replay(run)
    found = watch.found or _find_bad_gradient(run)
    first = min((value for value in all_gather_object(found, run.groups.world) if value is not None), default=None)
    return None if first is None else first.sentence


class _Watch:
    """Looks at what modules give, while it is attached."""

    def __init__(self, run: Run) -> None:
        self.found: BadValue | None = None
        self._run = run
        self._passes: dict[int, int] = {}
        self._seen = 0

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        handles = []
        for chunk in self._run.model:
            handles.append(chunk.module.register_forward_pre_hook(self._begin_pass))
            for path, module in chunk.module.named_modules():
                name = find_global_name(chunk.module, path) if path else "the model"
                handles.append(module.register_forward_hook(self._look(chunk.module, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin_pass(self, module: nn.Module, _: Any) -> None:
        self._passes[id(module)] = self._passes.get(id(module), -1) + 1

    def _look(self, chunk: nn.Module, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            self._seen += 1
            if self.found is not None:
                return
            bad = _count_bad(output)
            if bad is not None:
                # A weight that is no number spoils what is computed with it.
                weight = next((n for n, p in module.named_parameters(recurse=False) if _count_bad(p)), None)
                what = f"the output of {name}" if weight is None else f"the parameter {name}.{weight}"
                self.found = self._describe(what, bad, self._passes.get(id(chunk), 0))

        return look

    def _describe(self, what: str, bad: str, microbatch: int) -> BadValue:
        run = self._run
        rank = run.groups.world.rank()
        where = f"on rank {rank}, micro-batch {microbatch} ({describe_samples(run, microbatch)})"
        sentence = f"{what} {where}: {bad} are not finite"
        return BadValue(False, microbatch, run.groups.pp.rank(), self._seen, rank, sentence)


def describe_samples(run: Run, microbatch: int) -> str:
    """The samples of one of this rank's micro-batches in the next iteration, by their number in the order of
    training."""
    progress, sizes = run.progress, run.batch_size
    first = progress.consumed_train_samples
    if run.plans is not None:
        return f"of samples {first} to {first + sizes.running_global_batch_size(first) - 1}"
    first += microbatch * sizes.micro_batch_size * sizes.data_parallel_size
    first += run.groups.dp.rank() * sizes.micro_batch_size
    return f"samples {first} to {first + sizes.micro_batch_size - 1}"


def _count_bad(value: Any) -> str | None:
    """`3 of 64 elements`; None where all are finite."""
    parts = value if isinstance(value, tuple | list) else (value,)
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point():
            bad = int((~part.detach().isfinite()).sum())
            if bad:
                return f"{bad} of {part.numel()} elements"
    return None


def _find_bad_gradient(run: Run) -> BadValue | None:
    """Backward passes go from the last layer to the first."""
    rank, place = run.groups.world.rank(), 0
    for chunk in reversed(run.model):
        for path, parameter in reversed(list(chunk.module.named_parameters())):
            bad = _count_bad(getattr(parameter, "main_grad", None))
            if bad is not None:
                name = find_global_name(chunk.module, path)
                sentence = f"the gradient of {name} on rank {rank}: {bad} are not finite"
                return BadValue(True, 0, -run.groups.pp.rank(), place, rank, sentence)
            place += 1
    return None
