"""One step on one process of a pipeline: computes its actions and exchanges hidden states and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.pipeline_parallel.action_clock import ActionClock
from megatron.core.pipeline_parallel.communication import Transfer, adjacent_transfers
from megatron.core.pipeline_parallel.grad_sync_moments import Signals
from megatron.core.pipeline_parallel.p2p_communication import Key, Mail
from megatron.core.pipeline_parallel.schedules import Action
from megatron.core.pipeline_parallel.weight_grad_queue import WeightGradQueue
from megatron.core.virtual_stages import VirtualStages


class Waiting(NamedTuple):
    """What a microbatch's backward needs, kept since its forward."""

    hidden_states_in: Tensor | None
    """None on the first virtual stage."""
    root: GradientEdge
    """Where backward begins: the output's place in the graph, or the loss's. The output itself need not stay."""
    loss: Tensor | None
    """On the last virtual stage."""


class StageRun:
    """Runs one program, once.

    chunks: of this rank, wrapped or bare. forward: (number of the chunk, whether it holds the loss) -> its output, or
    None and the microbatch's loss.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        rank: int,
        shape: VirtualStages,
        forward: Callable[[int, bool], tuple[Tensor | None, Tensor | None]],
        forward_only: bool,
    ) -> None:
        self.chunks, self.rank, self.shape = chunks, rank, shape
        self.forward, self.forward_only = forward, forward_only
        self.mail: Mail | None = None
        self.clock: ActionClock | None = None
        self.queue: WeightGradQueue | None = None
        self.deferred: set[tuple[int, ...]] = set()
        """(microbatch, chunk) of backwards whose weight gradients have actions of their own."""
        self.waiting: dict[tuple[int, int], Waiting] = {}
        self.outgoing: dict[Key, Tensor] = {}
        self.local: dict[Key, Tensor] = {}
        """Between two chunks of this rank, by the key under which the second takes it."""

    def run(
        self,
        program: Sequence[Action | Transfer],
        signals: Signals,
        mail: Mail | None,
        queue: WeightGradQueue | None,
    ) -> None:
        """Everything in order.

        signals: by position, what to call before an action. mail: None where nothing is exchanged. queue: for weight
        gradients that have their own actions. Raises ValueError for an action whose turn it cannot be.
        """
        self.mail, self.queue = mail, queue
        self.deferred = {(a.microbatch, a.chunk) for a in program if isinstance(a, Action) and a.kind == "W"}
        position = 0
        while position < len(program):
            step = program[position]
            if isinstance(step, Transfer):
                end = adjacent_transfers(program, position)
                assert mail is not None, "a program with transfers on a pipeline of one process"
                mail.post(program[position:end], self.outgoing)  # type: ignore[arg-type]
                position = end
                continue
            for signal in signals.get(position, ()):
                signal()
            if self.clock is not None:
                self.clock.begin(step)
            self._compute(step)
            if self.clock is not None:
                self.clock.end()
            position += 1
        if mail is not None:
            mail.finish()

    def _compute(self, action: Action) -> None:
        key = (action.microbatch, action.chunk)
        if action.kind == "F":
            self._run_forward(action)
        elif action.kind == "B" and key in self.waiting:
            self._run_backward(action)
        elif action.kind == "W" and self.queue is not None:
            self.queue.run(key)
        else:
            raise ValueError(f"{action} cannot run: its forward has not run, or weight gradients are not deferred")

    def _run_forward(self, action: Action) -> None:
        stage = self.shape.index(self.rank, action.chunk)
        hidden_states = self._take("F", action) if stage > 0 else None
        if hidden_states is not None and not self.forward_only:
            hidden_states.requires_grad_()
        receiver = _with_input(self.chunks[action.chunk])
        if receiver is not None:
            receiver.set_input_tensor(hidden_states)
        output, loss = self.forward(action.chunk, stage == self.shape.count - 1)
        if receiver is not None:
            receiver.set_input_tensor(None)
        if output is not None and stage < self.shape.count - 1:
            self._give("F", action, output.detach(), stage + 1)
        if not self.forward_only:
            result = output if loss is None else loss
            assert result is not None
            root = get_gradient_edge(result)
            self.waiting[action.microbatch, action.chunk] = Waiting(hidden_states, root, loss)

    def _run_backward(self, action: Action) -> None:
        stage = self.shape.index(self.rank, action.chunk)
        hidden_states, root, loss = self.waiting.pop((action.microbatch, action.chunk))
        with self._collecting(action.microbatch, action.chunk):
            if loss is not None:
                loss.backward()
            else:
                torch.autograd.backward((root,), (self._take("B", action),))
        if hidden_states is not None:
            assert hidden_states.grad is not None, f"stage {stage} does not use the hidden states it is given"
            self._give("B", action, hidden_states.grad, stage - 1)

    def _collecting(self, *key: int) -> AbstractContextManager[None]:
        return self.queue.collect(key) if self.queue is not None and key in self.deferred else nullcontext()

    def _take(self, what: str, action: Action) -> Tensor:
        key = (what, action.microbatch, action.chunk)
        if key in self.local:
            return self.local.pop(key)
        assert self.mail is not None
        tensor = self.mail.take(key)
        if self.clock is not None:
            self.clock.inputs_arrived()
        return tensor

    def _give(self, what: str, action: Action, tensor: Tensor, to_stage: int) -> None:
        rank, chunk = self.shape.holder(to_stage)
        if rank == self.rank:
            self.local[what, action.microbatch, chunk] = tensor
        else:
            self.outgoing[what, action.microbatch, action.chunk] = tensor


def _with_input(chunk: nn.Module) -> Any:
    """The module inside wrappers that takes hidden states from the previous stage; None where none does."""
    module: Any = chunk
    while module is not None and not hasattr(module, "set_input_tensor"):
        module = getattr(module, "module", None)
    return module


def iterators_of_chunks(data_iterator: Any, chunks: int) -> list[Iterator[Any] | None]:
    """One iterator for each chunk: a given list as it is, or views of one iterator that all see every microbatch."""
    if isinstance(data_iterator, list | tuple):
        return list(data_iterator)
    if data_iterator is None or chunks == 1:
        return [data_iterator] * chunks
    return list(itertools.tee(data_iterator, chunks))
