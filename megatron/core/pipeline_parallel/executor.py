"""Run one rank's part of a plan: where a schedule meets the model, the data and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.auxiliary_loss import auxiliary_loss_scales
from megatron.core.collectives import all_reduce
from megatron.core.device import current_device
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.action_clock import ActionClock
from megatron.core.pipeline_parallel.communication import Transfer
from megatron.core.pipeline_parallel.grad_sync_moments import Signals, grad_sync_moments
from megatron.core.pipeline_parallel.p2p_communication import Mail, connect_neighbours
from megatron.core.pipeline_parallel.pipeline import Pipeline
from megatron.core.pipeline_parallel.schedules import Action
from megatron.core.pipeline_parallel.stage_run import StageRun, iterators_of_chunks
from megatron.core.pipeline_parallel.weight_grad_queue import WeightGradQueue, attach_queue
from megatron.core.placement import placement_of
from megatron.core.process_groups_config import ProcessGroupCollection

LossFunction = Callable[..., Any]
"""loss_func(output) -> (loss, dict) with a mean loss, or (loss sum, number of tokens, dict)."""
ForwardStep = Callable[[Any, nn.Module], tuple[Tensor, LossFunction]]
"""forward_step(data_iterator, model) -> (output, loss_func): the user's half of a step, with upstream's contract."""


@dataclass
class RunOutputs:
    """What the last stage collected: one entry for each microbatch, detached."""

    loss_dicts: list[Any] = field(default_factory=list)
    num_tokens: int | Tensor = 0
    """Tokens that counted in the loss, over this rank's microbatches; 0 when the loss function does not tell."""


class Executor:
    """Runs programs on this rank's model chunks.

    chunks: the pipeline chunks of this rank, wrapped or bare. A step leaves gradients where the model puts them.
    activation_shape: of the hidden states that stages exchange, as activation_shape() gives it; one process needs none.
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
        self.pipeline = Pipeline.of(config, pg_collection, len(self.chunks))
        self.stages = self.pipeline.shape
        self.clock: ActionClock | None = None
        """Where a step's actions are timed; whoever wants that sets one before the step."""
        self._queue: WeightGradQueue | None = None
        if self.pipeline.defers_weight_gradients:
            self._queue = WeightGradQueue()
            for chunk in self.chunks:
                attach_queue(chunk.parameters(), self._queue)
        elif self.pipeline.defers_head(pg_collection.pp.rank()):
            self._queue = WeightGradQueue()
            attach_queue(_output_weight(self.chunks[-1]), self._queue)
        self._auxiliary_losses = auxiliary_loss_scales(self.chunks)
        connect_neighbours(pg_collection.pp, self.stages, current_device())

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
        num_microbatches = sum(action.kind == "F" and action.chunk == 0 for action in computed)
        iterators = iterators_of_chunks(data_iterator, len(self.chunks))
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
                return None, self._collect_loss(loss_func(output), num_microbatches, outputs)

        signals = {} if forward_only else grad_sync_moments(actions, self.chunks, self.groups.pp.rank())
        deferred = any(action.kind == "W" for action in computed)
        if self.stages.count == 1 and not deferred:
            _run_alone(computed, forward, signals, forward_only, None if forward_only else self.clock)
        else:
            stage_run = StageRun(self.chunks, self.groups.pp.rank(), self.stages, forward, forward_only)
            stage_run.clock = None if forward_only else self.clock
            stage_run.run(
                actions,
                signals,
                self._mail(activation_shape or self.activation_shape),
                self._queue if deferred else None,
            )
        return outputs

    def _scale_auxiliary_losses(self, num_microbatches: int) -> None:
        """Losses that arise inside the chunks get the weight of the microbatch's main loss (`_collect_loss`)."""
        per_token = getattr(self.config, "calculate_per_token_loss", False)
        scale = 1.0 if per_token else self.groups.cp.size() / num_microbatches
        value: Tensor | float = scale
        if self.grad_scale_func is not None:
            value = self.grad_scale_func(torch.tensor(scale, device=current_device()))
        for losses in self._auxiliary_losses:
            losses.begin_step(value)

    def _mail(self, shape: Sequence[int] | None) -> Mail | None:
        if self.stages.stages == 1:
            return None
        if shape is None:
            raise ValueError(f"a pipeline of {self.stages.stages} stages needs to know the shape of what they exchange")
        assert self.config is not None
        dtype = self.config.pipeline_dtype or self.config.params_dtype or getattr(torch, self.config.compute_dtype_name)
        if getattr(self.config, "fp32_residual_connection", False):
            dtype = torch.float32
        blocking = not self.pipeline.overlap
        return Mail(self.groups.pp, shape, dtype, current_device(), blocking=blocking)

    def _collect_loss(self, result: tuple[Any, ...], num_microbatches: int, outputs: RunOutputs) -> Tensor:
        """File the microbatch's loss dict and return its share of the step's loss.

        The context-parallel ranks each have some tokens of the microbatch, possibly none that count. The mean is over
        the tokens of all of them: their gradients, which are averaged later, must add up to those of the whole
        microbatch. Where the loss function made the mean itself, it is this rank's part of it. With
        calculate_per_token_loss the share is the sum: all gradients are divided by all tokens at the end.
        """
        sequence = self.groups.cp
        per_token = getattr(self.config, "calculate_per_token_loss", False)
        if len(result) == 3:
            loss, num_tokens, loss_dict = result
            num_tokens = torch.as_tensor(num_tokens, device=loss.device).detach()
            outputs.num_tokens = outputs.num_tokens + num_tokens
            if sequence.size() > 1 and not per_token:
                num_tokens = num_tokens.clone()
                all_reduce(num_tokens, sequence)
            loss = loss if per_token else loss / torch.clamp(num_tokens, min=1)
        elif len(result) == 2 and not per_token:
            loss, loss_dict = result
        else:
            expected = "(loss sum, tokens, dict)" + ("" if per_token else " or (loss, dict)")
            raise ValueError(f"loss_func must return {expected}; found {len(result)} values")
        outputs.loss_dicts.append({name: _detached(value) for name, value in loss_dict.items()})
        share: Tensor = loss if per_token else loss * sequence.size() / num_microbatches
        return share if self.grad_scale_func is None else self.grad_scale_func(share)


def activation_shape(
    config: Any, groups: ProcessGroupCollection, seq_length: int, micro_batch_size: int
) -> tuple[int, int, int]:
    """Shape of the hidden states between stages: [s / cp, b, h], with sequence parallelism [s / cp / tp, b, h]."""
    parts = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    return seq_length // parts, micro_batch_size, config.hidden_size


def _output_weight(chunk: nn.Module) -> list[nn.Parameter]:
    """The weight of the output layer, where this chunk has one of its own."""
    return [param for name, param in chunk.named_parameters() if placement_of(param, name).kind == "head"]


def _run_alone(
    actions: Sequence[Action],
    forward: Callable[[int, bool], tuple[Tensor | None, Tensor | None]],
    signals: Signals,
    forward_only: bool,
    clock: ActionClock | None,
) -> None:
    """The plain loop of a process that has the whole model: only losses are kept."""
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
            del loss
        elif action.kind == "B" and action.microbatch in losses and not forward_only:
            # Popping frees the loss, and with it the microbatch's graph, as soon as backward is done.
            losses.pop(action.microbatch).backward()
        else:
            raise ValueError(f"{action} cannot run: its forward has not run, or weight gradients are not deferred")
        if clock is not None:
            clock.end()


def _detached(value: Any) -> Any:
    """Values without their graph, which would keep the microbatch's activations alive."""
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(map(_detached, value)) if isinstance(value, list | tuple) else value
