# SPDX-License-Identifier: Apache-2.0
"""Groups of parameters that share learning rate, weight decay and update rule."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from megatron.core.distributed.model_chunk import FlatBuffer, ModelChunk
from megatron.core.flat_ranges import Range, intersect_ranges, merge_ranges
from megatron.core.optimizer.group_state import GroupState, Member
from megatron.core.optimizer.offloaded_state import OffloadedState, StateHome, divide_members
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.rule_table import RULES
from megatron.core.optimizer.update_rules import UpdateRule
from megatron.core.placement import Placement, get_placement

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class GroupKey(NamedTuple):
    """Key that tells groups apart; groups are ordered by their keys."""

    is_undecayed: bool
    is_decoupled_lr: bool
    """--decoupled-lr is its learning rate."""
    rule: str
    """Name of its update rule."""
    is_hidden_matrix: bool = False
    """A matrix of attention or MLP whose learning rate muP divides by the width."""
    is_clipped_apart: bool = False
    """True if its gradients are clipped by a separate norm, as in detached multi-token prediction."""
    options: tuple[tuple[str, float], ...] = ()
    """Options that a program gives its parameters in place of the config's (param_overrides.py)."""


class ParamGroup:
    """The parameters of one key.

    options: what the scheduler and checkpoints see, with upstream's keys; the scheduler sets `lr` and `weight_decay`
    before each step. Where the group has separate rates, `max_lr` and `min_lr` are the ends of its schedule.
    """

    def __init__(self, key: GroupKey, rule: UpdateRule, states: Sequence[GroupState], config: OptimizerConfig) -> None:
        self.key = key
        self.rule = rule
        self.states = list(states)
        wd_mult = 0.0 if key.is_undecayed else 1.0
        self.options: dict[str, Any] = {
            "params": [member.param for state in self.states for member in state.members],
            "wd_mult": wd_mult,
            # Upstream's checkpoints have it; separate rates of a group are max_lr and min_lr below.
            "lr_mult": 1.0,
            "is_expert_parallel": all(state.buffer.is_expert for state in self.states),
            "is_decoupled_lr": key.is_decoupled_lr,
            "lr": config.lr or 0.0,
            "weight_decay": config.weight_decay * wd_mult,
            **rule.options,
        }
        if key.is_decoupled_lr:
            lowest = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
            self.options |= {"lr": config.decoupled_lr, "max_lr": config.decoupled_lr, "min_lr": lowest}
        # muP with Adam: the rate of a hidden matrix goes with 1 / width (Yang et al., 2022, Tensor Programs V).
        elif key.is_hidden_matrix:
            highest, lowest = (lr / config.width_multiplier for lr in (config.lr or 0.0, config.min_lr))
            self.options |= {"lr": highest, "max_lr": highest, "min_lr": lowest}
        self.options |= dict(key.options)
        self.options["weight_decay"] = config.weight_decay * self.options["wd_mult"]
        self.options["lr"] = dict(key.options).get("max_lr", self.options["lr"])

    def part(self, buffers: Sequence[FlatBuffer]) -> ParamGroup:
        """The same group, sharing its options, with only the state that lies in these buffers."""
        # Shallow: the options stay one dictionary, in which the scheduler sets the rates of all parts at once.
        part = copy.copy(self)
        part.states = [state for state in self.states if any(state.buffer is buffer for buffer in buffers)]
        return part

    def split_by_place(self) -> tuple[ParamGroup, ParamGroup]:
        """The same group with only the state on the device, and with only what is offloaded."""
        parts = copy.copy(self), copy.copy(self)
        for part, is_offloaded in zip(parts, (False, True), strict=True):
            part.states = [state for state in self.states if isinstance(state, OffloadedState) == is_offloaded]
        return parts


def has_weight_decay(placement: Placement, config: OptimizerConfig) -> bool:
    """Biases, norms and other vectors get none, but the norms of queries and keys do, if asked for."""
    return not placement.is_vector or (placement.kind == "qk_norm" and config.apply_wd_to_qk_layernorm)


def choose_rule(placement: Placement, config: OptimizerConfig) -> str:
    """Name of a parameter's update rule.

    Muon and SOAP are for the matrices inside the network, the stacked ones of experts included; tables, the output
    layer and vectors take another one.
    """
    entry = RULES.get(config.optimizer)
    if entry is None or entry.rest is None or (placement.is_hidden_matrix and len(placement.full_shape) in (2, 3)):
        return config.optimizer
    return entry.rest(config)


def make_param_key(placement: Placement, config: OptimizerConfig) -> GroupKey:
    """Return what decides the group of a parameter: weight decay, separate learning rates, update rule."""
    return GroupKey(
        is_undecayed=not has_weight_decay(placement, config),
        is_decoupled_lr=config.decoupled_lr is not None and placement.is_vocabulary,
        rule=choose_rule(placement, config),
        is_hidden_matrix=config.width_multiplier != 1.0 and placement.is_hidden_matrix,
        is_clipped_apart=config.clips_prediction_apart and placement.name.startswith("mtp."),
    )


def make_param_groups(
    buffers: Sequence[FlatBuffer],
    config: OptimizerConfig,
    rule_of: Callable[[str], UpdateRule],
    home: StateHome | None = None,
    overrides: Mapping[int, tuple[tuple[str, float], ...]] = MappingProxyType({}),
) -> list[ParamGroup]:
    """One group for each key that occurs, decayed parameters first. rule_of: the rule of a name. home: of the state
    that is offloaded. overrides: options of parameters by their id (param_overrides.py)."""
    divided = [_divide(buffer, config, overrides) for buffer in buffers]
    groups = []
    # Sorted, so that the order does not depend on which parameter a stage happens to hold first.
    for key in sorted({key for parts in divided for key in parts}):
        rule = rule_of(key.rule)
        kinds = {kind: _dtype(config, f"{kind}_dtype") for kind in rule.kinds}
        states = [
            state
            for buffer, parts in zip(buffers, divided, strict=True)
            if key in parts
            for state in _make_states(buffer, *parts[key], kinds, config, home)
        ]
        rule.begin(states)
        groups.append(ParamGroup(key, rule, states, config))
    return groups


def _make_states(
    buffer: FlatBuffer,
    members: list[Member],
    ranges: list[Range],
    kinds: dict[str, torch.dtype],
    config: OptimizerConfig,
    home: StateHome | None,
) -> Iterator[GroupState]:
    """State of a group in a buffer: on the device, offloaded, or a part of it here and a part there."""
    main_dtype = _dtype(config, "main_params_dtype")
    if home is None:
        yield GroupState(buffer, members, ranges, kinds, main_dtype)
        return

    def count_owned(found: Range) -> int:
        return sum(stop - start for start, stop in intersect_ranges([found], buffer.owned))

    offloaded, staying = divide_members(members, ranges, config.optimizer_offload_fraction, count_owned)
    if offloaded[0]:
        yield OffloadedState(buffer, *offloaded, kinds, main_dtype, home)
    if staying[0]:
        yield GroupState(buffer, *staying, kinds, main_dtype)


def _divide(
    buffer: FlatBuffer, config: OptimizerConfig, overrides: Mapping[int, tuple[tuple[str, float], ...]]
) -> dict[GroupKey, tuple[list[Member], list[Range]]]:
    """Parameters and ranges of each group of a buffer. A gap belongs to the group before it, so that parameters that
    follow each other are one range."""
    members = [
        Member(*entry) for entry in zip(buffer.names, buffer.params, buffer.layout.slots, buffer.starts, strict=True)
    ]
    # Vectors come after everything else in memory, whatever their place in the module.
    in_place = sorted(members, key=lambda member: member.slot.start)
    ends = [member.slot.start for member in in_place[1:]] + [buffer.layout.numel]
    keys = {member.name: make_param_key(get_placement(member.param, member.name), config) for member in members}
    for name, param, *_ in members:
        if id(param) in overrides:
            keys[name] = keys[name]._replace(options=overrides[id(param)])
    ranges: dict[GroupKey, list[Range]] = defaultdict(list)
    for member, end in zip(in_place, ends, strict=True):
        ranges[keys[member.name]].append((member.slot.start, end))
    by_key = {key: [member for member in members if keys[member.name] == key] for key in ranges}
    return {key: (by_key[key], merge_ranges(found)) for key, found in ranges.items()}


def _dtype(config: OptimizerConfig, field: str) -> torch.dtype:
    """Dtype of a kind of state; float32 where the config does not set it."""
    return _DTYPES[getattr(config, field, "fp32")]


class UpdateUnit(NamedTuple):
    """Chunks that are updated together."""

    chunks: Sequence[ModelChunk]
    groups: list[ParamGroup]
    """The parts of the parameter groups that lie in these chunks."""
    on_device: list[ParamGroup]
    """Of these groups, what the device updates."""
    offloaded: list[ParamGroup]
    """Groups that the host updates."""


def make_update_units(chunks: Sequence[ModelChunk], groups: Sequence[ParamGroup]) -> Iterator[UpdateUnit]:
    """All chunks together, or with overlap_param_gather_with_optimizer_step one after the other."""
    # One after the other, the gather of a chunk overlaps the update of the next.
    in_turn = any(chunk.ddp_config.overlap_param_gather_with_optimizer_step for chunk in chunks)
    for together in [[chunk] for chunk in chunks] if in_turn else [chunks]:
        buffers = [buffer for chunk in together for buffer in chunk.flat_buffers]
        parts = [group.part(buffers) for group in groups]
        places = [part.split_by_place() for part in parts]
        # A group of another place has no state here, and a frozen stage has no groups.
        kinds = (parts, [on_device for on_device, _ in places], [offloaded for _, offloaded in places])
        yield UpdateUnit(together, *([part for part in found if part.states] for found in kinds))
