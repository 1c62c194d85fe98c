# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that wait: zero-bubble schedules compute them later than the gradients of inputs.

The executor gives a queue to every parameter (`parameter.weight_grad_queue`) and opens it during a backward pass; a
linear layer then leaves the product that makes its weight gradient there instead of computing it
(finish_weight_grad in tensor_parallel/products.py). The executor runs the work of one micro-batch and chunk when the
schedule says so: after the backward pass, or piece by piece while its gradients travel between ranks. Source: Qi et
al., "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from torch import nn

from megatron.core.placement import get_placement
from megatron.core.stacked_parameters import list_parameters


class WeightGradQueue:
    """Weight gradients that wait to be computed, filed by the backward pass they belong to: (microbatch, chunk)."""

    def __init__(self) -> None:
        self._work: dict[Hashable, list[Callable[[], object]]] = defaultdict(list)
        self._open_for: Hashable | None = None

    def __len__(self) -> int:
        """Number of backward passes whose weight gradients still wait."""
        return len(self._work)

    @contextlib.contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Open the queue for one backward pass: inside the block `defer` takes work and files it under the key."""
        self._open_for = key
        # Also where nothing is deferred: `run` then finds that this pass has been.
        self._work[key] = []
        try:
            yield
        finally:
            self._open_for = None

    @property
    def is_open(self) -> bool:
        """True if a backward pass is being collected, so that `defer` would take work now."""
        return self._open_for is not None

    def defer(self, compute: Callable[[], object]) -> bool:
        """Take the work; False where no backward pass is being collected, so that the caller does it at once."""
        if not self.is_open:
            return False
        # The closure holds the layer's input and output gradient: memory grows until `run`.
        self._work[self._open_for].append(compute)
        return True

    def run_waiting(self, key: Hashable) -> None:
        """Compute what the backward pass that is being collected has deferred so far."""
        work, self._work[key] = self._work[key], []
        # Closed meanwhile: a product computed now must not be deferred once more.
        collected, self._open_for = self._open_for, None
        try:
            for compute in work:
                compute()
        finally:
            self._open_for = collected

    def run(self, key: Hashable) -> None:
        """Compute the weight gradients of one backward pass, in the order in which they were deferred.

        Raises KeyError where that pass has not run.
        """
        # Taken out before: each piece of work holds activations, which are freed as soon as all has run.
        for compute in self._work.pop(key):
            compute()


def collect_in(queues: Iterable[WeightGradQueue | None], key: Hashable) -> contextlib.ExitStack[bool | None]:
    """Open several queues for one backward pass; each takes the work of the weights that it is attached to."""
    stack = contextlib.ExitStack()
    for queue in queues:
        if queue is not None:
            stack.enter_context(queue.collect(key))
    return stack


def attach_queue(parameters: Iterable[Any], queue: WeightGradQueue) -> None:
    """Attach the queue to these parameters, where the products of their layers find it."""
    for parameter in parameters:
        parameter.weight_grad_queue = queue


def list_delayable(chunk: nn.Module, *, of_experts: bool) -> list[nn.Parameter]:
    """The weights of a chunk whose gradients, computed later, still are the same sums in the same order; of_experts:
    only experts' weights."""
    # A tied weight gets its gradients as output layer and as embedding, in the order of backward.
    ends = ("embedding", "head")
    found = [(param, get_placement(param, name)) for name, param in list_parameters(chunk)]
    return [param for param, place in found if (place.is_expert if of_experts else place.kind not in ends)]


def list_output_weights(chunk: nn.Module) -> list[nn.Parameter]:
    """The weight of the output layer, where this chunk has a separate one."""
    return [param for name, param in list_parameters(chunk) if get_placement(param, name).kind == "head"]
