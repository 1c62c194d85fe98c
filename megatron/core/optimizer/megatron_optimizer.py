# SPDX-License-Identifier: Apache-2.0
"""MegatronOptimizer: clip, update, and refuse to update with gradients that are not numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_object
from megatron.core.distributed.model_chunk import FlatBuffer, ModelChunk
from megatron.core.errors import CheckpointError, ConfigError, NonFiniteError
from megatron.core.flat_ranges import intersect_ranges
from megatron.core.optimizer.clip_grads import (
    ModelSum,
    compute_clip_divisor,
    compute_global_norm,
    find_counted_ranges,
    view_counted,
)
from megatron.core.optimizer.grad_scaler import make_grad_scaler
from megatron.core.optimizer.group_state import GroupState, StateSlice
from megatron.core.optimizer.offloaded_state import build_home
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupKey, UpdateUnit, make_param_groups, make_update_units
from megatron.core.optimizer.param_overrides import ParamGroupOverride, ParamKey, find_overrides
from megatron.core.optimizer.rule_table import RULES
from megatron.core.optimizer.update_rules import UpdateRule, load_rule
from megatron.core.optimizer.upstream_methods import UpstreamMethods
from megatron.core.optimizer.whole_matrices import locate_member
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.core.taken_arguments import take_arguments
from megatron.core.timers import Timers


class UpdateResult(NamedTuple):
    """Result of one step; unpacks like upstream's tuple."""

    update_successful: bool
    """False: gradients were not finite, so neither parameters nor optimizer state changed. True also where that is not
    looked at yet (MegatronOptimizer.defers_check)."""
    grad_norm: Tensor
    """Global L2 norm of the gradients before clipping; a float32 scalar."""
    num_zeros_in_grad: int | None = None
    """Zeros among the elements of the gradient; None, because an update does not count them (`count_zeros` does)."""

    @property
    def skipped(self) -> bool:
        """True if the update was left out."""
        return not self.update_successful


class _Measured(NamedTuple):
    """Measurements of the gradients before an update."""

    grad_norm: Tensor
    divisors: list[Tensor | None]
    """Of the gradients, and of those that are clipped by themselves: clipping and the loss scale."""
    found_inf: Tensor


class MegatronOptimizer(UpstreamMethods):
    """Updates the flat buffers of this process's model chunks, by the rule of each group of parameters.

    Parameters in bfloat16 or float16 are updated through float32 main parameters; in float16 the loss is scaled
    (grad_scaler.py). With use_distributed_optimizer the replicas divide the state: each updates its slice of every
    bucket, then the parameters are gathered. `param_groups` is what OptimizerParamScheduler sets. Where the rules are
    fused kernels, a non-finite gradient makes them leave everything as it is, so that the update need not wait for the
    host to look. update_rule: a user's rule for all parameters, in place of the config's.
    """

    @take_arguments(
        "optimizer=None config * chained_optimizers=None grad_scaler=None init_state_fn=None per_model_buffers=None "
        "data_parallel_group=None data_parallel_group_gloo=None data_parallel_group_idx=None "
        "distributed_optimizer_instance_id=None",
        "get_megatron_optimizer(config, model_chunks) makes optimizers",
    )
    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[ModelChunk],
        groups: ProcessGroupCollection,
        update_rule: UpdateRule | None = None,
        overrides: Mapping[ParamKey, ParamGroupOverride] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.groups = groups
        self.model_chunks = list(model_chunks)
        self.timers = Timers(log_level=0)
        self.check_for_nan_in_grad = any(chunk.ddp_config.check_for_nan_in_grad for chunk in model_chunks)
        buffers = [buffer for chunk in model_chunks for buffer in chunk.flat_buffers]
        # A stage may be frozen; it takes part in the others' norms and counts.
        if not any(all_gather_object(bool(buffers), groups.pp)):
            raise ConfigError(
                "no parameter of the model is trained; with --lora-rank, --lora-target-modules must name layers of it"
            )
        self._groups = make_param_groups(
            buffers,
            config,
            lambda name: update_rule or load_rule(name).from_config(config, groups),
            build_home(config, self.model_chunks[0].device),
            find_overrides(overrides, self.model_chunks),
        )
        self._states = [state for group in self._groups for state in group.states]
        self._units = list(make_update_units(self.model_chunks, self._groups))
        self.is_changing = False
        """Weights and state may be of two moments: from the first change of an update until its step is counted (the
        caller of `step` says that it is), and while a checkpoint is loaded in the middle of a run."""
        self.defers_check = False
        """True if `step` may leave it to its caller to find out from the gradient norm, later, that gradients were not
        finite. From such a step on nothing is updated any more, so that it makes no difference when that is; and the
        host need not wait for the device. It waits all the same where the loss scale or the learning rate of the next
        step depends on the answer (float16, check_for_nan_in_grad off), or a rule that cannot keep still."""
        # One rule that cannot keep still makes all wait: the groups share the step count, and either all are updated or
        # none.
        self._looks_first = not all(group.rule.keeps_still for group in self._groups)
        # Once for all steps: who counts what is fixed, and the views stay valid because buffers are only written in
        # place.
        self._counted = {id(buffer): find_counted_ranges(buffer, groups) for buffer in buffers}
        self._counted_grads = self._list_counted_grads(buffers)
        # A stage without experts must take part in the experts' sum all the same, or the other stages would wait for
        # it.
        has_experts = any(all_gather_object(any(buffer.is_expert for buffer in buffers), groups.pp))
        self.model_sum = ModelSum.build(self.model_chunks[0].reductions, groups, has_experts)
        self._device = self.model_chunks[0].device
        # On the device, because whether it advances depends on found_inf, which the host has not read.
        self._step = torch.zeros((), device=self._device)
        self._has_failed = torch.zeros((), device=self._device)
        """1 after a step whose check was deferred and whose gradients were not finite."""
        self.grad_scaler = make_grad_scaler(config, self._device)
        self.after_update: Callable[[Tensor], None] | None = None
        self._measured: _Measured | None = None
        """Of gradients that `prepare_grads` has looked at and no update has used."""
        self._is_overflow_noted = False
        self.around_update: Callable[[], AbstractContextManager[None]] = nullcontext
        """Opened around the computation of each update, in which no rank waits for others."""

    def use_timers(self, timers: Timers) -> None:
        """Measure the parts of an update with these stopwatches from now on."""
        self.timers = timers

    def call_after_update(self, action: Callable[[Tensor], None]) -> None:
        """Let `action(found_inf)` run in every step after the update and before the network gets its parameters, which
        it may change further (`scale_rows`). found_inf: 1 where gradients were not finite, else 0; a float32 scalar.
        One action at a time, and not with --overlap-param-gather-with-optimizer-step, which updates chunks in turn.
        """
        self.after_update = action

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of each group: lr, weight_decay, lr_mult, wd_mult, params, and the constants of its rule."""
        return [group.options for group in self._groups]

    def param_keys(self) -> dict[str, GroupKey]:
        """Name in the whole model of every parameter here -> its group's key."""
        return {member.name: group.key for group in self._groups for state in group.states for member in state.members}

    @property
    def step_count(self) -> int:
        """Updates made so far, over all runs; the bias correction depends on it."""
        return int(self._step.item())

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._step.fill_(count)

    @property
    def grad_scale_func(self) -> Callable[[Tensor], Tensor] | None:
        """Function that the loss goes through before backward; None where gradients are not scaled."""
        return None if self.grad_scaler is None else self.scale_loss

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale."""
        return loss if self.grad_scaler is None else loss * self.grad_scaler.scale

    @property
    def loss_scale(self) -> float:
        """Factor on the next step's loss."""
        return 1.0 if self.grad_scaler is None else self.grad_scaler.value

    def numbers(self) -> dict[str, Any]:
        """Return what a checkpoint keeps in addition to the tensors of `named_slices`: plain numbers."""
        state: dict[str, Any] = {"step_count": self.step_count, "optimizer": self.config.optimizer}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_numbers(self, state: Mapping[str, Any]) -> None:
        """The inverse of `numbers`, also from a run in another dtype."""
        self.check_state(state)
        self.step_count = state["step_count"]
        # A run that went back to a checkpoint has nothing to do with the failure after it.
        self._has_failed.zero_()
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(state.get("grad_scaler", {}))

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError where the state is another update rule's, which has other tensors."""
        saved = state.get("optimizer", "adam")
        if saved != self.config.optimizer:
            raise CheckpointError(
                f"the checkpoint has the optimizer state of --optimizer {saved}, this run has --optimizer "
                f"{self.config.optimizer}; use the same, or start with a fresh state: --no-load-optim"
            )

    def prepare_grads(self) -> bool:
        """Look at the gradients before `step`, which then does not do so again; returns True where one is not finite.
        A dynamic loss scale takes note of that, and the step that may follow does nothing."""
        self._measured = self._measure()
        found = bool(self._measured.found_inf.item())
        if found and self.grad_scaler is not None and not self._is_overflow_noted:
            self.grad_scaler.update(overflowed=True)
            self._is_overflow_noted = True
        return found

    def get_grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients, without the loss scale, before clipping; a float32 scalar."""
        return (self._measured or self._measure()).grad_norm

    def step_with_ready_grads(self) -> bool:
        """Update from gradients that `prepare_grads` has found finite; returns whether that was done."""
        return self.step().update_successful

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See UpstreamMethods."""
        super().zero_grad(set_to_none)
        self._measured, self._is_overflow_noted = None, False

    @torch.no_grad()
    def _measure(self) -> _Measured:
        # One number tells of every element on all ranks: where any gradient is inf or nan, so is the norm.
        norms = [compute_global_norm(views, self.model_sum, self._device) for views in self._counted_grads]
        found_inf = (~sum(norms[1:], norms[0]).isfinite()).float()
        scale = None if self.grad_scaler is None else self.grad_scaler.scale
        if scale is not None:
            # What is logged, and compared with --clip-grad, is the norm of the gradients without the loss scale.
            norms = [norm / scale for norm in norms]
        # Clipping and unscaling are one division, which the update rule does on its way: no pass over the gradients.
        divisors = [compute_clip_divisor(norm, self.config.clip_grad) for norm in norms]
        if scale is not None:
            divisors = [scale if divisor is None else divisor * scale for divisor in divisors]
        return _Measured(norms[0], divisors, found_inf)

    def _list_counted_grads(self, buffers: Sequence[FlatBuffer]) -> list[list[tuple[bool, Tensor]]]:
        """List the gradients that this process counts, each with whether it is of experts; after them, where there may
        be any, those that are clipped by themselves."""
        if not self.config.clips_prediction_apart:
            views = ((buffer, view_counted(buffer, buffer.grad_data, self.groups)) for buffer in buffers)
            return [[(buffer.is_expert, view) for buffer, of_buffer in views for view in of_buffer]]
        found: list[list[tuple[bool, Tensor]]] = [[], []]
        for group in self._groups:
            for state in group.states:
                counted = intersect_ranges(state.owned, self._counted[id(state.buffer)])
                found[group.key.is_clipped_apart] += [
                    (state.buffer.is_expert, state.buffer.grad_data[start:stop]) for start, stop in counted
                ]
        return found

    @torch.no_grad()
    def step(self) -> UpdateResult:
        """Update the parameters from the synchronised gradients.

        An update whose gradients are not finite is skipped where a dynamic loss scale may be the reason, or where
        check_for_nan_in_grad is off. Otherwise raises NonFiniteError, with nothing changed, unless `defers_check`.
        """
        if self._view is not None:
            self.collect()
        grad_norm, divisors, found_inf = self._measured or self._measure()
        self._measured = None
        if self._is_overflow_noted:
            self._is_overflow_noted = False
            return UpdateResult(False, grad_norm)
        is_deferred = self.defers_check and self.grad_scaler is None and self.check_for_nan_in_grad
        is_deferred = is_deferred and not self._looks_first
        found_inf = torch.maximum(found_inf, self._has_failed)
        if is_deferred:
            self._has_failed = found_inf
        self.is_changing = True
        # A skipped update does not count: the bias correction goes by the updates that were made.
        self._step += 1.0 - found_inf
        # A fused kernel reads found_inf on the device and does nothing; other rules need the host to look, and wait.
        is_left_out = self._looks_first and bool(found_inf.item())
        for unit in self._units:
            if not is_left_out:
                with self.around_update():
                    _update(unit, self._step, divisors, found_inf)
            # Before the write-back: it changes main parameters, of which the network then gets rounded copies.
            if self.after_update is not None:
                assert len(self._units) == 1, (
                    f"after_update is for all chunks at once, there are {len(self._units)} units"
                )
                self.after_update(found_inf)
            for group in unit.groups:
                # What a kernel has written already, and nothing has changed since, is not written again.
                is_written = self.after_update is None and not is_left_out
                _write_back([s for s in group.states if not (is_written and group.rule.writes_weights(s))])
            with self.timers("params-all-gather", 1):
                for chunk in unit.chunks:
                    chunk.start_param_sync()
        if is_deferred:
            return UpdateResult(True, grad_norm)
        # Read only now, when all of the update and the gathers have been queued, so that the device does not run dry.
        succeeded = not (is_left_out if self._looks_first else bool(found_inf.item()))
        used_scale = self.loss_scale
        may_skip = succeeded if self.grad_scaler is None else self.grad_scaler.update(overflowed=not succeeded)
        # A step before this one that has failed is not described by this one's gradients.
        if not may_skip and self.check_for_nan_in_grad and not self._has_failed.item():
            raise NonFiniteError(self._describe_non_finite(used_scale))
        return UpdateResult(succeeded, grad_norm)

    @property
    def has_failed(self) -> bool:
        """True where `defers_check` has let a step pass whose gradients were not finite. Waits for the device."""
        return bool(self._has_failed.item())

    def params_norm(self) -> Tensor:
        """Global L2 norm of the parameters (main parameters where there are any); a float32 scalar."""
        views = [
            (state.buffer.is_expert, state.values(piece, place))
            for state in self._states
            for piece, place in state.pieces(self._counted[id(state.buffer)])
        ]
        return compute_global_norm(views, self.model_sum, self._device)

    def scale_rows(self, name: str, factors: Tensor) -> None:
        """Multiply row i of a parameter here, by its name in the whole model, by factors[i]; as far as this process
        updates it."""
        for state in self._states:
            for member in state.members:
                if member.name != name:
                    continue
                of_all = factors.repeat_interleave(member.param.numel() // len(factors))
                for piece, place in state.pieces([locate_member(member)]):
                    values = state.values(piece, place)
                    first = member.start + piece[0] - member.slot.start
                    values.mul_(of_all[first : first + values.numel()].to(values.device))
                    state.note_change()

    @property
    def states(self) -> Sequence[GroupState]:
        """The state of this process, by group of parameters and buffer."""
        return self._states

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._device

    def take_changed_weights(self) -> None:
        """Let the network see main parameters that somebody has changed between two steps; every process calls this."""
        for state in self._states:
            state.note_change()
            state.copy_main_to_model()
        self._sync_params()

    def named_slices(self) -> dict[str, StateSlice]:
        """The state that this process keeps, by the parameter's name in the whole model."""
        return dict(entry for state in self._states for entry in state.named_slices())

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """State of every parameter by its name in the whole model: its rule's kinds and, where it is other memory than
        the parameter, main_param. Views in the shard's shape, so that a loader copies into them; where the replicas
        divide the state, only this process's slices, flat (`named_slices` tells their place)."""
        return {name: found.tensors for name, found in self.named_slices().items()}

    def whole_state(self) -> dict[str, dict[str, Tensor]]:
        """State that is not shaped like a parameter: parameter's name in the whole model -> kind -> tensor, unsharded
        on each process that has it; for the weights of experts, the state of the matrices from `stack_starts` on."""
        return {name: kinds for group in self._groups for name, kinds in group.rule.whole_state().items()}

    def stack_starts(self) -> dict[str, int]:
        """Name of each stack of matrices in `whole_state` -> number of the first matrix of which state is here."""
        return {name: start for group in self._groups for name, start in group.rule.stack_starts().items()}

    def after_load(self) -> None:
        """Refresh the model's parameters after a loader has written main parameters; every process calls this."""
        for state in self._states:
            state.take_loaded()
        self._sync_params()

    def _sync_params(self) -> None:
        for chunk in self.model_chunks:
            chunk.start_param_sync()
            chunk.finish_param_sync()

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Refresh the main parameters from the model's, after a loader has written only those. state_dict: of
        upstream's signature, None."""
        if state_dict is not None:
            raise ConfigError("reload_model_params() reads the model's own parameters; load them, then leave it out")
        self.collect()
        for chunk in self.model_chunks:
            for _ in list_parameters(chunk.module):
                pass  # what a program put in the place of an expert's values is collected
        for state in self._states:
            state.copy_model_to_main()

    def _describe_non_finite(self, loss_scale: float) -> str:
        """One sentence with the first parameter, in the model's order, whose gradient is not finite."""
        # All processes come here, because the norm is the same on all of them; the lowest rank that has found one
        # speaks.
        found = next((text for text in all_gather_object(self._first_non_finite(), self.groups.world) if text), None)
        what = found or "the gradients are finite but their norm is beyond the range of float32"
        if self.grad_scaler is None:
            where, instead = "", "look at the data of this step"
        elif self.config.loss_scale is not None:
            where, instead = f" with --loss-scale {loss_scale:g}", "leave out --loss-scale for a dynamic one"
        else:
            where, instead = f" with the smallest loss scale, {loss_scale:g}", "train with --bf16"
        return (
            f"{what}{where} after {self.step_count} updates; nothing was updated: lower --lr, {instead}, "
            "or pass --no-check-for-nan-in-loss-and-grad to skip such updates"
        )

    def _first_non_finite(self) -> str | None:
        for chunk in self.model_chunks:
            for name, param in list_parameters(chunk.module):
                bad = ~param.main_grad.isfinite() if param.requires_grad else None  # type: ignore[attr-defined]
                if bad is not None and bad.any():
                    found = f"{int(bad.sum())} of {bad.numel()} elements"
                    return f"the gradient of {get_placement(param, name).name} is not finite in {found}"
        return None


def _write_back(states: Sequence[GroupState]) -> None:
    for state in states:
        state.copy_main_to_model()


ChainedOptimizer = MegatronOptimizer


class DistributedOptimizer(MegatronOptimizer):
    """The same where replicas divide the state; for isinstance."""


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[ModelChunk],
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    update_rule: UpdateRule | None = None,
) -> MegatronOptimizer:
    """The optimizer of this process's model chunks.

    config_overrides: other rates of the parameters that a key matches. use_gloo_process_groups: of upstream's
    signature; no separate groups are needed. pg_collection: the process groups; the current ones when None.
    update_rule: a user's rule in place of the config's. Raises ConfigError for what does not exist, and where the
    config contradicts DistributedDataParallel's; TypeError for a model that is not wrapped in it.
    """
    if update_rule is None and config.optimizer not in RULES:
        *names, last = RULES
        raise ConfigError(f"--optimizer {config.optimizer} is not available yet; use {', '.join(names)} or {last}")
    for chunk in model_chunks:
        if not isinstance(chunk, ModelChunk):
            found = type(chunk).__name__
            raise TypeError(f"get_megatron_optimizer needs chunks wrapped in DistributedDataParallel; found {found}")
    if dump_param_to_param_group_map is not None:
        raise ConfigError(
            "dump_param_to_param_group_map is not supported; MegatronOptimizer.param_keys() has the group of each"
        )
    config.check_agreement(chunk.ddp_config for chunk in model_chunks)
    is_divided = any(chunk.ddp_config.use_distributed_optimizer for chunk in model_chunks)
    groups = pg_collection or ProcessGroupCollection.current()
    build = DistributedOptimizer if is_divided else MegatronOptimizer
    return build(
        config=config, model_chunks=model_chunks, groups=groups, update_rule=update_rule,
        overrides=config_overrides or {},
    )  # fmt: skip


def _update(unit: UpdateUnit, step: Tensor, divisors: Sequence[Tensor | None], found_inf: Tensor) -> None:
    """Update once, on the device and on the host. divisors: of the gradients, and of those that are clipped by
    themselves, if there are any."""
    # The device first: it works on its part while the host is busy with its own.
    for group in unit.on_device:
        group.rule.update(group, step, divisors[group.key.is_clipped_apart], found_inf)
    if not unit.offloaded:
        return
    # Read once for all groups: the host waits for the device here.
    scalars = [step, found_inf, *(each for each in divisors if each is not None)]
    step, found_inf, *own = torch.stack(scalars).cpu().unbind()
    for group in unit.offloaded:
        group.rule.update(group, step, own[group.key.is_clipped_apart] if own else None, found_inf)
