# SPDX-License-Identifier: Apache-2.0
"""The loss of one step as a function of only the weights: the function whose derivatives the gradients claim to be.

It is computed from what a run reports, not from what it runs backward through: a wrong scale is in only one of them.
Everything but the weights is constant:

    tokens              the same microbatches in every evaluation
    random numbers      dropout and jitter draw from the same states
    detached inputs     have the values of the first evaluation, wherever the weights are meanwhile
    choice of experts   is told with the value; where it is another one, the loss has jumped
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.core.auxiliary_loss import find_auxiliary_loss_scales
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.route_log import RouteLog
from megatron.core.transformer.moe.router import LOSS_NAMES, TopKRouter, read_loss_coefficients
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLoss
from megatron.core.transformer.sparse_attention import IndexLossCore
from megatron.training.run import Run


class LossEvaluation(NamedTuple):
    """The loss at one place."""

    value: float
    choices: list[list[Tensor]]
    """For each router the experts [T, k] of each microbatch."""

    def chooses_as(self, other: LossEvaluation) -> bool:
        """Return True where every token goes to the same experts."""
        pairs = zip(itertools.chain(*self.choices), itertools.chain(*other.choices), strict=True)
        return all(torch.equal(*pair) for pair in pairs)


class LossFunction:
    """The loss of the step on some microbatches, of the weights that the run's model has at the moment."""

    def __init__(self, run: Run, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self.run, self.batches = run, batches
        self._states = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
        self._held: list[Tensor] | None = None
        modules = [module for chunk in run.model for module in chunk.modules()]
        self.routers = [module for module in modules if isinstance(module, TopKRouter)]
        self._indexers = [module for module in modules if isinstance(module, IndexLossCore)]
        self._further = [module for module in modules if isinstance(module, MultiTokenPredictionLoss)]

    def rewind(self) -> None:
        """Let random numbers be drawn as in every evaluation."""
        torch.set_rng_state(self._states[0])
        get_cuda_rng_tracker().set_states(self._states[1])

    def __call__(self) -> LossEvaluation:
        """Evaluate it."""
        self.rewind()
        for scale in find_auxiliary_loss_scales(chunk.module for chunk in self.run.model):
            scale.begin_step(1.0)  # some losses count over the microbatches of a step
        # What a step before this has summed up for the log is not of this evaluation.
        list(self._list_further(0, per_token=False))
        logs = [RouteLog() for _ in self.routers]
        for router, log in zip(self.routers, logs, strict=True):
            router.route_log = log
        held = _HeldInputs(self._held)
        # With a graph, because without one auxiliary losses are left out.
        with torch.enable_grad(), held:
            shares = [self._evaluate_microbatch(batch) for batch in self.batches]
        self._held = held.values
        for router in self.routers:
            router.route_log = None
        total, tokens = (sum(column) for column in zip(*shares, strict=True))
        per_token = self.run.config.model.calculate_per_token_loss
        return LossEvaluation(total / (tokens if per_token else len(shares)), [log.experts for log in logs])

    def _evaluate_microbatch(self, batch: Mapping[str, Tensor]) -> tuple[float, float]:
        """The loss of a microbatch with all that is added to it, and its tokens; a sum over them with a loss per token,
        otherwise a mean."""
        per_token = self.run.config.model.calculate_per_token_loss
        (chunk,) = self.run.model
        output, reduce_loss = self.run.recipe.forward_step(iter([batch]), chunk)
        loss, *more = reduce_loss(output)
        tokens = more[0].item() if len(more) == 2 else 1.0
        main = loss.item() / (1.0 if per_token or len(more) == 1 else max(tokens, 1.0))
        # The tokens of the microbatch, those included that do not count in the main loss.
        weight = batch["tokens"].numel() if per_token else 1
        return main + sum(self._list_further(weight, per_token)), tokens

    def _list_further(self, weight: int, per_token: bool) -> Iterator[float]:
        """Add up a microbatch's losses in addition to its main one: router and indexer losses, which are means, times
        `weight`, and MTP losses."""
        model = self.run.config.model
        for core in self._indexers:
            yield weight * float(core.take_loss() or 0.0)
        for router in self.routers:
            taken = router.take_losses()
            for kind, coefficient in read_loss_coefficients(model).items():
                yield coefficient * weight * float(taken.get(LOSS_NAMES[kind], 0.0))
        for further in self._further:
            sums = further.take_sums()
            for loss_sum, tokens, _ in () if sums is None else sums.tolist():
                share = loss_sum if per_token else loss_sum / max(tokens, 1.0)
                yield share * model.mtp_loss_scaling_factor / len(sums)  # type: ignore[arg-type]


class _HeldInputs(TorchFunctionMode):
    """Gives what a forward pass detaches the values of the first one: gradients are not to know that it moves.

    Scalars are unchanged: they are losses on their way into the log.
    """

    def __init__(self, values: list[Tensor] | None) -> None:
        super().__init__()
        self.values: list[Tensor] = [] if values is None else values
        self._given = None if values is None else iter(values)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is not torch.Tensor.detach or not torch.is_grad_enabled():
            return result
        if not args[0].requires_grad or not args[0].dim():
            return result
        if self._given is not None:
            return next(self._given).clone()
        self.values.append(result.clone())
        return result
