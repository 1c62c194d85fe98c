# SPDX-License-Identifier: Apache-2.0
"""Update rules: changes of parameters in a step, element by element, over flat memory.

A rule says which state it keeps for every element (`kinds`) and updates a group in place. Gradients are still to
be divided by `divisor` (clipping, loss scale): None, or a scalar on the device. A user's rule is a subclass; see
docs/optimizers.md.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatron.core.kernels import launching
from megatron.core.optimizer.group_state import CHUNK, FlatShard, GroupState
from megatron.core.optimizer.rule_table import RULES

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.process_groups_config import ProcessGroupCollection


class UpdatedGroup(Protocol):
    """View that a rule has of a ParamGroup."""

    options: dict[str, Any]
    """lr, weight_decay and the rule's options, as they are for this step."""
    states: list[GroupState]
    """States that this process updates, one for each buffer."""


class UpdateRule(ABC):
    """One way to update; `options` go into the parameter group, where a scheduler may change them."""

    kinds: tuple[str, ...] = ()
    """Names of the state tensors, as checkpoints have them."""
    options: dict[str, Any]
    keeps_still: bool = False
    """True: with `found_inf` set, `update` leaves everything as it is. False: it is not called then, which means that
    the host must wait for the device before every update."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    @classmethod
    def from_config(cls, config: OptimizerConfig, groups: ProcessGroupCollection) -> UpdateRule:
        """The rule with the settings' constants, for a rule of --optimizer (rule_table.py). groups: the process groups
        that may have cut the parameters."""
        raise NotImplementedError(f"{cls.__name__} is no rule of --optimizer: it has no row in rule_table.py")

    def begin(self, states: Sequence[GroupState]) -> None:  # noqa: B027
        """Called once before the first update, with the state of everything that the rule will update."""

    def whole_state(self) -> dict[str, dict[str, Tensor]]:
        """State that is not shaped like a parameter, whole on each process that has it: parameter's name -> kind ->
        tensor. Views, so that a loader writes into them. Of a parameter in `stack_starts`, [matrices, ...] with the
        state of some matrices of the stack."""
        return {}

    def writes_weights(self, state: GroupState) -> bool:
        """Return whether `update` also rounds the main parameters of this state into the network's, in the same
        pass."""
        return False

    def stack_starts(self) -> dict[str, int]:
        """Name of each stack of matrices with state of that kind -> number, in the whole stack, of the first matrix of
        which this process has state."""
        return {}

    @abstractmethod
    def update(self, group: UpdatedGroup, step: Tensor, divisor: Tensor | None, found_inf: Tensor) -> None:
        """Update what this process has of the group. step: number of this update, from 1, a scalar on the device."""


def batch_shards(states: Sequence[GroupState]) -> Iterator[list[FlatShard]]:
    """Everything that one fused call updates: all shards that lie in memory as float32 together, others one by one."""
    # One call for all: a launch for each parameter would take longer than its arithmetic.
    together = [shard for state in states if state.is_float32 for shard in state.shards()]
    if together:
        yield together
    for state in states:
        # These are temporary float32 copies, written back when the next is asked for, so that only one may be alive.
        if not state.is_float32:
            for shard in state.shards():
                yield [shard]


class AdamW(UpdateRule):
    """Adam with decoupled weight decay (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), one fused pass: on a GPU a
    kernel for all dtypes, elsewhere torch's, with temporary copies of states that are not float32."""

    kinds = ("exp_avg", "exp_avg_sq")
    keeps_still = True

    @classmethod
    def from_config(cls, config: OptimizerConfig, groups: ProcessGroupCollection) -> AdamW:
        return cls(betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)

    def update(self, group: UpdatedGroup, step: Tensor, divisor: Tensor | None, found_inf: Tensor) -> None:
        options = group.options
        beta1, beta2 = options["betas"]
        by_kernel = [state for state in group.states if self.writes_weights(state)]
        if by_kernel:
            _update_by_kernel(by_kernel, options, step, divisor, found_inf)
        for shards in batch_shards([state for state in group.states if state not in by_kernel]):
            torch._fused_adamw_(
                [shard.param for shard in shards],
                [shard.grad for shard in shards],
                [shard.state["exp_avg"] for shard in shards],
                [shard.state["exp_avg_sq"] for shard in shards],
                # No maxima of the second moment: they are AMSGrad's.
                [],
                [step] * len(shards),
                lr=options["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=options["weight_decay"],
                eps=options["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=found_inf,
            )

    def writes_weights(self, state: GroupState) -> bool:
        return all(
            launching.uses_kernels(memory.param, memory.grad, *memory.state.values(), memory.weight)
            for memory in state.memory()
        )


def _update_by_kernel(
    states: Sequence[GroupState], options: dict[str, Any], step: Tensor, divisor: Tensor | None, found_inf: Tensor
) -> None:
    """Adam's update of everything that this process has of these states, and of the network's weights."""
    from megatron.core.kernels.adam import compute_corrections, update_adam

    betas = options["betas"]
    corrections = compute_corrections(step, betas)
    for state in states:
        for param, grad, kept, weight in state.memory():
            update_adam(param, grad, kept, weight, options, betas, corrections, divisor, found_inf)


class SGD(UpdateRule):
    """Stochastic gradient descent with momentum (Polyak, 1964) in torch.optim.SGD's form: the weight decay is added to
    the gradient, m = momentum m + g, w -= lr m. One fused pass."""

    keeps_still = True

    def __init__(self, momentum: float) -> None:
        super().__init__(momentum=momentum)
        # Without momentum there is nothing to keep between steps, nor to save.
        self.kinds = ("momentum_buffer",) if momentum else ()

    @classmethod
    def from_config(cls, config: OptimizerConfig, groups: ProcessGroupCollection) -> SGD:
        return cls(config.sgd_momentum)

    def update(self, group: UpdatedGroup, step: Tensor, divisor: Tensor | None, found_inf: Tensor) -> None:
        options = group.options
        for shards in batch_shards(group.states):
            torch._fused_sgd_(
                [shard.param for shard in shards],
                [shard.grad for shard in shards],
                [tensor for shard in shards for tensor in shard.state.values()],
                lr=options["lr"],
                momentum=options["momentum"],
                weight_decay=options["weight_decay"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,  # the momentum starts at zero, which comes to the same
                grad_scale=divisor,
                found_inf=found_inf,
            )


class Lion(UpdateRule):
    """Evolved sign momentum (Chen et al., 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2):

    w -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay w),  m = beta2 m + (1 - beta2) g
    """

    kinds = ("exp_avg",)

    @classmethod
    def from_config(cls, config: OptimizerConfig, groups: ProcessGroupCollection) -> Lion:
        return cls(betas=(config.lion_beta1, config.lion_beta2))

    def update(self, group: UpdatedGroup, step: Tensor, divisor: Tensor | None, found_inf: Tensor) -> None:
        options = group.options
        beta1, beta2 = options["betas"]
        for state in group.states:
            # Not a fused kernel: in chunks, so that the temporary tensors below stay small.
            for param, grad, kept in state.shards(longest=CHUNK):
                if divisor is not None:
                    grad.div_(divisor)
                param.mul_(1.0 - options["lr"] * options["weight_decay"])
                # Before the mean moves: the sign mixes in the gradient with beta1, the mean that is kept with beta2.
                param.add_(torch.lerp(grad, kept["exp_avg"], beta1).sign_(), alpha=-options["lr"])
                kept["exp_avg"].lerp_(grad, 1.0 - beta2)


def load_rule(name: str) -> type[UpdateRule]:
    """Import the class of a rule of --optimizer."""
    module, _, class_name = RULES[name].path.rpartition(".")
    rule: type[UpdateRule] = getattr(importlib.import_module(f"megatron.core.optimizer.{module}"), class_name)
    return rule
