# SPDX-License-Identifier: Apache-2.0
"""Run one rank's program: where a schedule meets the model, the data and the loss.

A program is this rank's cut of a plan (programs.py): forward, backward and weight-gradient actions, with the sends and
receives between them. The executor walks through it once for each step:

    Executor.run            what belongs to a step: losses, auxiliary losses, when gradients are reduced
      _run_whole_model      one process, one chunk: a loop over microbatches, in which only losses live on
      _StageStep            a part of a pipeline: hidden states come and go, and wait between forward and backward
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.auxiliary_loss import find_auxiliary_loss_scales
from megatron.core.collectives import all_reduce
from megatron.core.device import current_device
from megatron.core.exchange_gap import find_exchange_gaps
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.action_clock import ActionClock, TimedAction
from megatron.core.pipeline_parallel.p2p_communication import P2PTransfers, TensorKey, connect_neighbours
from megatron.core.pipeline_parallel.programs import Pipeline, Transfer, find_end_of_transfers
from megatron.core.pipeline_parallel.schedules import Action, find_end_beside
from megatron.core.pipeline_parallel.side_by_side import SideBySide
from megatron.core.pipeline_parallel.weight_grad_queue import (
    WeightGradQueue,
    attach_queue,
    collect_in,
    list_delayable,
    list_output_weights,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters

LossFunction = Callable[..., Any]
"""loss_func(output) -> (loss, dict) with a mean loss, or (loss sum, number of tokens, dict)."""
ForwardStep = Callable[[Any, nn.Module], tuple[Tensor, LossFunction]]
"""forward_step(data_iterator, model) -> (output, loss_func): the user's half of a step, with upstream's contract."""
ForwardChunk = Callable[[int, bool], tuple[Tensor | None, Tensor | None]]
"""(number of a chunk, whether it holds the loss) -> its output [s, b, h], or None and the microbatch's loss."""
Signals = Mapping[int, Sequence[Callable[[], None]]]
"""Position in a program -> what to call before the action there."""


@dataclass
class RunOutputs:
    """Outputs that the rank with the last layers collected in a step: one loss dict for each microbatch, detached."""

    loss_dicts: list[Any] = field(default_factory=list)
    num_tokens: int | Tensor = 0
    """Tokens that counted in the loss, over this rank's microbatches; 0 when the loss function does not tell."""


class Executor:
    """Runs programs on this rank's model chunks.

    chunks: the pipeline chunks of this rank, wrapped or bare. A step leaves gradients where the model puts them.
    activation_shape: of the hidden states that stages exchange (`compute_activation_shape`); one process needs none.
    grad_scale_func: applied to each microbatch's loss before backward (loss scaling); what is collected is not scaled.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        pg_collection: ProcessGroupCollection,
        config: ModelParallelConfig | None = None,
        *,
        activation_shape: Sequence[int] | None = None,
        grad_scale_func: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.groups = pg_collection
        self.config = config
        self.activation_shape = activation_shape
        self.grad_scale_func = grad_scale_func
        self.pipeline = Pipeline.from_config(config, pg_collection, len(self.chunks))
        self.stages = self.pipeline.shape
        self._clock: ActionClock | None = None
        # Virtual stages, not processes: one process with two chunks already passes hidden states on.
        self._has_whole_model = self.stages.count == 1
        self._queue = WeightGradQueue() if self.pipeline.defers_weight_gradients else None
        # Of the output layer, where its weight gradients wait longer than the layers'.
        self._head_queue = WeightGradQueue() if self.pipeline.defers_head(pg_collection.pp.rank()) else None
        if self._queue is not None:
            for chunk in self.chunks:
                attach_queue(self._list_deferrable(chunk), self._queue)
        if self._head_queue is not None:
            attach_queue(list_output_weights(self.chunks[-1]), self._head_queue)
        self._auxiliary_losses = find_auxiliary_loss_scales(self.chunks)
        has_gaps = self.pipeline.side_by_side or self.pipeline.delays_weights
        self._turns = SideBySide(find_exchange_gaps(self.chunks)) if has_gaps else None
        connect_neighbours(pg_collection.pp_directions, self.stages, current_device())

    def _list_deferrable(self, chunk: nn.Module) -> list[nn.Parameter]:
        if self.pipeline.delays_weights:
            return list_delayable(chunk, of_experts=self.pipeline.delays_experts_only)
        return [param for _, param in list_parameters(chunk)]

    def start_clock(self) -> None:
        """Time the actions of the steps that follow, until `read_clock`."""
        # A new clock each time: it keeps two marks per action until they are read.
        self._clock = ActionClock()

    def read_clock(self) -> list[TimedAction] | None:
        """The actions since `start_clock`, in their order, and stop timing; None where no clock was started.

        Waits for the device, which is what timing at this level costs.
        """
        clock, self._clock = self._clock, None
        return None if clock is None else clock.read()

    def run(
        self,
        actions: Sequence[Action | Transfer],
        forward_step: ForwardStep,
        data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        activation_shape: Sequence[int] | None = None,
    ) -> RunOutputs:
        """Forward and backward of every microbatch in the given order.

        actions: this rank's part of a plan, with its transfers where there are other ranks. data_iterator: handed to
        forward_step; one for each chunk, or one whose microbatches every chunk gets to see. forward_only: no graph is
        kept and no backward runs. collect_non_loss_data: call loss_func(output, non_loss_data=True) and collect what it
        returns. activation_shape: of what stages exchange in this step, where it is another one than usual. Losses are
        collected where the last layers are. Raises ValueError for actions that do not fit.
        """
        outputs = RunOutputs()
        computed = [action for action in actions if isinstance(action, Action)]
        # Each chunk runs every microbatch once, so that the forwards of one chunk count them.
        num_microbatches = sum(action.kind == "F" and action.chunk == 0 for action in computed)
        iterators = build_chunk_iterators(data_iterator, len(self.chunks))
        if self._auxiliary_losses and not forward_only:
            self._scale_auxiliary_losses(num_microbatches)

        def forward(chunk: int, holds_loss: bool) -> tuple[Tensor | None, Tensor | None]:
            with torch.set_grad_enabled(not forward_only):
                output, loss_func = forward_step(iterators[chunk], self.chunks[chunk])
                if not holds_loss:
                    return output, None
                if collect_non_loss_data:
                    outputs.loss_dicts.append(loss_func(output, non_loss_data=True))
                    return output, None
                # The output (logits or losses) is not passed on: only the loss keeps what backward needs of it.
                return None, self._collect_loss(loss_func(output), num_microbatches, outputs)

        signals = {} if forward_only else plan_grad_sync(actions, self.chunks, self.groups.pp.rank())
        clock = None if forward_only else self._clock
        # Read from the program, not from the config: the programs of evaluation have no W actions.
        deferred = {(action.microbatch, action.chunk) for action in computed if action.kind == "W"}
        if self._has_whole_model and not deferred and not any(action.is_beside for action in computed):
            _run_whole_model(computed, forward, signals, forward_only, clock)
        else:
            transfers = self._transfers(activation_shape or self.activation_shape)
            # State of one step only: an error in it cannot leave hidden states for the next one.
            step = _StageStep(self, forward, forward_only, transfers, clock, deferred)
            step.run(actions, signals)
        return outputs

    def _scale_auxiliary_losses(self, num_microbatches: int) -> None:
        """Losses that arise inside the chunks get the weight of the microbatch's main loss (`_collect_loss`)."""
        per_token = getattr(self.config, "calculate_per_token_loss", False)
        scale = 1.0 if per_token else self.groups.cp.size() / num_microbatches
        value: Tensor | float = scale
        if self.grad_scale_func is not None:
            # The loss scale must reach gradients that begin inside the chunks too, or they vanish when it is divided
            # out.
            value = self.grad_scale_func(torch.tensor(scale, device=current_device()))
        for losses in self._auxiliary_losses:
            losses.begin_step(value)

    def _transfers(self, shape: Sequence[int] | None) -> P2PTransfers | None:
        """Return what carries out this step's sends and receives; None where one process has all stages."""
        if self.stages.stages == 1:
            return None
        config = self.config
        assert config is not None
        varies = getattr(config, "variable_seq_lengths", False)
        if shape is None and not varies:
            raise ValueError(f"a pipeline of {self.stages.stages} stages needs to know the shape of what they exchange")
        # The receiver allocates first, so both sides derive the dtype from the same settings.
        dtype = config.pipeline_dtype or config.params_dtype or getattr(torch, config.compute_dtype_name)
        dtype = torch.float32 if getattr(config, "fp32_residual_connection", False) else dtype
        count_states = getattr(config, "count_states_between_stages", None)
        states = [1] * (self.stages.count - 1) if count_states is None else count_states(self.stages)

        def shape_of(transfer: Transfer) -> tuple[int, ...]:
            """Return the shape of what is sent or received: the shape of the forward transfer over the same border."""
            stage = self.stages.index(self.groups.pp.rank(), transfer.chunk)
            leaves = (transfer.what == "F") == (transfer.kind == "send")
            assert shape is not None
            return (shape[0] * states[stage if leaves else stage - 1], *shape[1:])

        told, blocking = None if varies else shape_of, not self.pipeline.overlap
        return P2PTransfers(self.groups.pp_directions, told, dtype, current_device(), blocking=blocking)

    def _collect_loss(self, result: tuple[Any, ...], num_microbatches: int, outputs: RunOutputs) -> Tensor:
        """File the microbatch's loss dict and return its share of the step's loss.

        The context-parallel ranks each have some tokens of the microbatch, possibly none that count. The mean is over
        the tokens of all of them: their gradients, which are averaged later, must add up to the full microbatch's.
        Where the loss function made the mean itself, it is this rank's part of it. With calculate_per_token_loss the
        share is the sum: all gradients are divided by all tokens at the end.
        """
        sequence = self.groups.cp
        per_token = getattr(self.config, "calculate_per_token_loss", False)
        if len(result) == 3:
            loss, num_tokens, loss_dict = result
            num_tokens = torch.as_tensor(num_tokens, device=loss.device).detach()
            outputs.num_tokens = outputs.num_tokens + num_tokens
            if sequence.size() > 1 and not per_token:
                # The collective writes in place, and the loss function's tensor may be used elsewhere, as in
                # outputs.num_tokens.
                num_tokens = num_tokens.clone()
                all_reduce(num_tokens, sequence)
            # A microbatch in which no token counts has the loss 0, not 0 / 0.
            loss = loss if per_token else loss / torch.clamp(num_tokens, min=1)
        elif len(result) == 2 and not per_token:
            loss, loss_dict = result
        else:
            expected = "(loss sum, tokens, dict)" + ("" if per_token else " or (loss, dict)")
            raise ValueError(f"loss_func must return {expected}; found {len(result)} values")
        outputs.loss_dicts.append({name: _detached(value) for name, value in loss_dict.items()})
        # Times the context-parallel ranks, because gradients are averaged over them, and this loss is a part of a sum.
        share: Tensor = loss if per_token else loss * sequence.size() / num_microbatches
        return share if self.grad_scale_func is None else self.grad_scale_func(share)


def compute_activation_shape(
    config: Any, groups: ProcessGroupCollection, seq_length: int, micro_batch_size: int
) -> tuple[int, int, int]:
    """Compute the shape of the hidden states between stages: [s / cp, b, h], with sequence parallelism [s / cp / tp, b,
    h]; h is the width of all residual streams."""
    parts = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    return seq_length // parts, micro_batch_size, getattr(config, "stream_width", config.hidden_size)


def build_chunk_iterators(data_iterator: Any, chunks: int) -> list[Iterator[Any] | None]:
    """Build one iterator for each chunk: a given list as it is, or views of one iterator that all see every
    microbatch."""
    if isinstance(data_iterator, list | tuple):
        return list(data_iterator)
    if data_iterator is None or chunks == 1:
        return [data_iterator] * chunks
    # The tee keeps a microbatch only until the slowest chunk has read it.
    return list(itertools.tee(data_iterator, chunks))


def plan_grad_sync(program: Sequence[Action | Transfer], chunks: Sequence[Any], stage: int) -> Signals:
    """When, in a program, the gradients of each chunk may start to be summed over the replicas of the model.

    | the chunk's last gradients come from | without alignment            | --align-grad-reduce, stage r > 0 |
    |--------------------------------------|------------------------------|----------------------------------|
    | a whole backward (B)                 | bucket by bucket, during it  | r actions after it, all buckets  |
    | a deferred weight backward (W)       | after it, all buckets        | r actions after it, all buckets  |

    chunks: those with an `enable_grad_sync` are told (model_chunk.py); others, which have nothing to sum, are left
    alone. Alignment concerns nobody who sums after every microbatch. What would come after the last action is left to
    `finish_grad_sync`.
    """
    signals: dict[int, list[Callable[[], None]]] = defaultdict(list)
    positions = [p for p, step in enumerate(program) if isinstance(step, Action)]
    actions = [step for step in program if isinstance(step, Action)]
    for index, chunk in enumerate(chunks):
        gradients = [turn for turn, action in enumerate(actions) if action.chunk == index and action.kind != "F"]
        if not gradients or not hasattr(chunk, "enable_grad_sync"):
            continue
        # Stage r ends its last backward r actions before the first stage does. Waiting r actions lets all stages reduce
        # at the same time, instead of disturbing neighbours that still compute and exchange hidden states.
        is_aligned = chunk.ddp_config.align_grad_reduce and stage > 0 and not chunk.reduces_every_microbatch
        if not is_aligned and all(actions[turn].kind == "B" for turn in gradients):
            # Earlier microbatches still add to the same buckets, so only the last backward may send them away.
            signals[positions[gradients[-1]]].append(chunk.enable_grad_sync)
            continue
        # The signal is given before the action at its position: the one after the last gradient, at the earliest.
        turn = gradients[-1] + 1 + (stage if is_aligned else 0)
        if turn < len(actions):
            signals[positions[turn]].append(chunk.start_grad_sync)
    return signals


def _run_whole_model(
    actions: Sequence[Action],
    forward: ForwardChunk,
    signals: Signals,
    forward_only: bool,
    clock: ActionClock | None,
) -> None:
    """The plain loop of a process that has the whole model."""
    losses: dict[int, Tensor] = {}
    for position, action in enumerate(actions):
        for signal in signals.get(position, ()):
            signal()
        if clock is not None:
            clock.begin(action)
        if action.kind == "F":
            _, loss = forward(action.chunk, True)
            if loss is not None:
                losses[action.microbatch] = loss
            # A name left in this frame would keep the graph alive through the next microbatch's forward.
            del loss
        elif action.kind == "B" and action.microbatch in losses and not forward_only:
            # Popping frees the loss, and with it the microbatch's graph, as soon as backward is done.
            losses.pop(action.microbatch).backward()
        else:
            raise ValueError(f"{action} cannot run: its forward has not run, or weight gradients are not deferred")
        if clock is not None:
            clock.end()


class _KeptForBackward(NamedTuple):
    """Tensors that forward of a microbatch leaves for its backward."""

    hidden_states_in: Tensor | None
    """None on the first virtual stage."""
    root: GradientEdge
    """Node where backward begins: the output's place in the graph, or the loss's. The output itself need not stay."""
    loss: Tensor | None
    """On the last virtual stage."""


class _StageStep:
    """One step on one process of a pipeline: computes its actions, exchanges hidden states and their gradients.

    transfers: None where nothing is exchanged. deferred: (microbatch, chunk) of the backwards whose weight gradients
    have separate actions.
    """

    def __init__(
        self,
        executor: Executor,
        forward: ForwardChunk,
        forward_only: bool,
        transfers: P2PTransfers | None,
        clock: ActionClock | None,
        deferred: set[tuple[int, int]],
    ) -> None:
        self.chunks, self.rank, self.shape = executor.chunks, executor.groups.pp.rank(), executor.stages
        self.forward, self.forward_only = forward, forward_only
        self.transfers, self.clock = transfers, clock
        self.queue, self.head_queue = (executor._queue, executor._head_queue) if deferred else (None, None)
        self.deferred = deferred
        self.turns = executor._turns
        self.waiting: dict[tuple[int, int], _KeptForBackward] = {}
        self.outgoing: dict[TensorKey, Tensor] = {}
        """Computed, and not yet posted to be sent."""
        self.local: dict[TensorKey, Tensor] = {}
        """Tensors that have come for actions, by the key under which they are taken; also from this rank's chunks."""

    def run(self, program: Sequence[Action | Transfer], signals: Signals) -> None:
        """Everything in order. signals: by position, what to call before an action.

        Raises ValueError for an action whose turn it cannot be.
        """
        position = 0
        while position < len(program):
            step = program[position]
            if isinstance(step, Transfer):
                # Adjacent transfers are posted together, before any of them is waited for: two ranks that send to each
                # other would otherwise both wait for the other's receive.
                end = find_end_of_transfers(program, position)
                assert self.transfers is not None, "a program with transfers on a pipeline of one process"
                self.transfers.post(program[position:end], self.outgoing)  # type: ignore[arg-type]
                position = end
                continue
            end = find_end_beside(program, position)
            for signal in itertools.chain.from_iterable(signals.get(p, ()) for p in range(position, end)):
                signal()
            beside: list[Action] = program[position:end]  # type: ignore[assignment]
            if self.clock is not None:
                self.clock.begin(*beside)
            self._compute_beside(beside)
            if self.clock is not None:
                self.clock.end()
            position = end
        if self.transfers is not None:
            self.transfers.finish()

    def _compute_beside(self, actions: Sequence[Action]) -> None:
        """One action; or a forward and a backward in turns; either backward with its weight gradients."""
        for action in actions:
            self._await_input(action)
        if len(actions) == 1:
            self._compute(actions[0])
            return
        compute = {action.kind: functools.partial(self._compute, action) for action in actions}
        if self.turns is None or "B" not in compute:
            raise ValueError(f"{actions} cannot run side by side")
        weights: Callable[[], None] | None = None
        if self.queue is not None and "W" in compute:
            backward = next(action for action in actions if action.kind == "B")
            weights = functools.partial(self.queue.run_waiting, (backward.microbatch, backward.chunk))
        self.turns.run(compute.get("F"), compute["B"], weights)
        if "W" in compute:
            compute["W"]()  # what has not found a gap

    def _compute(self, action: Action) -> None:
        key = (action.microbatch, action.chunk)
        queue = self.queue if action.is_beside or self.head_queue is None else self.head_queue
        if action.kind == "F":
            self._run_forward(action)
        elif action.kind == "B" and key in self.waiting:
            self._run_backward(action)
        elif action.kind == "W" and queue is not None:
            queue.run(key)
        else:
            raise ValueError(f"{action} cannot run: its forward has not run, or weight gradients are not deferred")

    def _run_forward(self, action: Action) -> None:
        stage = self.shape.index(self.rank, action.chunk)
        # The first virtual stage begins with tokens, which its forward step reads by itself.
        hidden_states = self._take("F", action) if stage > 0 else None
        if hidden_states is not None and not self.forward_only:
            # A leaf of this stage's graph: its .grad is what the stage before waits for.
            hidden_states.requires_grad_()
        receiver = _module_with_input(self.chunks[action.chunk])
        if receiver is not None:
            receiver.set_input_tensor(hidden_states)
        output, loss = self.forward(action.chunk, stage == self.shape.count - 1)
        if receiver is not None:
            receiver.set_input_tensor(None)  # the module would keep them until its next microbatch
        if output is not None and stage < self.shape.count - 1:
            # Only values travel: the graph ends at the stage's border, and backward enters it there again.
            self._give("F", action, output.detach(), stage + 1)
        if not self.forward_only:
            result = output if loss is None else loss
            assert result is not None
            # Backward needs the place of the output in the graph, not its values. Without a reference of ours they are
            # freed as soon as they are sent, which saves [s, b, h] for each microbatch in flight.
            root = get_gradient_edge(result)
            self.waiting[action.microbatch, action.chunk] = _KeptForBackward(hidden_states, root, loss)

    def _run_backward(self, action: Action) -> None:
        stage = self.shape.index(self.rank, action.chunk)
        # Popped, not read: after this the microbatch's activations have no other owner than the running backward.
        hidden_states, root, loss = self.waiting.pop((action.microbatch, action.chunk))
        with self._deferring(action.microbatch, action.chunk):
            if loss is not None:
                loss.backward()
            else:
                torch.autograd.backward((root,), (self._take("B", action),))
        if hidden_states is not None:
            assert hidden_states.grad is not None, f"stage {stage} does not use the hidden states it is given"
            self._give("B", action, hidden_states.grad, stage - 1)

    def _deferring(self, *key: int) -> AbstractContextManager[object]:
        """While open, linear layers leave their weight gradients for the action W of this microbatch and chunk."""
        has_head = key[1] == len(self.chunks) - 1
        return collect_in([self.queue, self.head_queue if has_head else None] if key in self.deferred else [], key)

    def _await_input(self, action: Action) -> None:
        """Wait for what other ranks send for an action, where it needs anything."""
        key = (action.kind, action.microbatch, action.chunk)
        stage = self.shape.index(self.rank, action.chunk)
        first_of_its_way = 0 if action.kind == "F" else self.shape.count - 1
        if action.kind == "W" or stage == first_of_its_way or key in self.local:
            return
        assert self.transfers is not None
        self.local[key] = self.transfers.take(key)
        if self.clock is not None:
            self.clock.inputs_arrived()  # the time until now was waiting, not computing

    def _take(self, what: str, action: Action) -> Tensor:
        return self.local.pop((what, action.microbatch, action.chunk))

    def _give(self, what: str, action: Action, tensor: Tensor, to_stage: int) -> None:
        rank, chunk = self.shape.holder(to_stage)
        if rank == self.rank:
            # By the taker's chunk here, and by the giver's below: a transfer is named by the chunk of the rank that
            # posts it.
            self.local[what, action.microbatch, chunk] = tensor
        else:
            self.outgoing[what, action.microbatch, action.chunk] = tensor


def _module_with_input(chunk: nn.Module) -> Any:
    """The module inside wrappers that takes hidden states from the previous stage; None where none does."""
    module: Any = chunk
    while module is not None and not hasattr(module, "set_input_tensor"):
        module = getattr(module, "module", None)
    return module


def _detached(value: Any) -> Any:
    """Values without their graph, which would keep the microbatch's activations alive."""
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(map(_detached, value)) if isinstance(value, list | tuple) else value
