# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: the delta rule with a decay for each channel of the key, which comes from the token.

    g = -exp(A_log) softplus(f + dt_bias)
    f = x W_f or, of a low rank, (x W_down) W_up;   z likewise
    S' = diag(exp(g)) S;   S = S' + k (beta (v - S'^T k))^T;   out = norm(S^T q) * sigmoid(z)

Source: Kimi Team, "Kimi Linear", 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.plan.state_kinds import KIMI_GATES, list_kimi_sections
from megatron.core.process_groups_config import Group
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.libraries import KimiDeltaLibrary
from megatron.core.ssm.state_mixer import StateMixerSubmodules, log_uniform_decay, step_sizes
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.products import at_least_float32
from megatron.core.transformer.initialisers import input_initialiser
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


class NarrowProjection(nn.Module):
    """(x W_down) W_up: [s, b, h] -> [s, b, channels of this rank]; W_down is whole on every rank."""

    def __init__(self, config: TransformerConfig, linear: Any, rank: int, channels: int, tp_group: Group) -> None:
        """linear: spec or class of the column-parallel layer. rank: width between the two."""
        super().__init__()
        common: dict[str, Any] = {
            "config": config, "init_method": input_initialiser(config), "bias": False, "tp_group": tp_group,
        }  # fmt: skip
        assert config.hidden_size is not None
        self.down = ReplicatedLinear(config.hidden_size, rank, **common)
        self.up = build_module(linear, rank, channels, **common)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """See the class."""
        projected: Tensor = self.up(self.down(hidden_states)[0])[0]
        return projected


class KimiDeltaAttention(GatedDeltaNet):
    """[s, b, h] -> [s, b, h]; as many key heads as value heads, of the same width."""

    title = "Kimi delta attention"
    library = KimiDeltaLibrary
    decay_section = "g"

    @property
    def further_sections(self) -> Sequence[str]:  # type: ignore[override]
        """See StateMixer."""
        return () if self.config.linear_gate_rank is None else KIMI_GATES

    def list_sections(self) -> dict[str, int]:
        """See StateMixer."""
        return list_kimi_sections(self.config)

    def build_parameters(self, submodules: StateMixerSubmodules) -> None:
        """See StateMixer."""
        config = self.config
        self.further_gates = nn.ModuleDict()
        for name in self.further_sections:
            self.further_gates[name] = NarrowProjection(
                config, submodules.in_proj, config.linear_gate_rank or 0, self.sections[name], self.groups.tp
            )
        # In bfloat16 a slow decay would have few values to learn.
        wide = torch.promote_types(self.parameter_dtype, torch.float32)
        self.dt_bias = self.declare(self.sections["g"], step_sizes, dtype=wide)
        self.A_log = self.declare(config.linear_num_value_heads, log_uniform_decay, dtype=wide)
        self.out_norm = self.build_head_norm()

    def project(self, hidden_states: Tensor) -> Tensor:
        """See StateMixer."""
        projected = super().project(hidden_states)
        if not self.further_sections:
            return projected
        # One tensor, as all sections are handed over and convolved; a copy, and nothing more to keep.
        further = [gate(hidden_states) for gate in self.further_gates.values()]
        return torch.cat([projected, *further], dim=-1)

    def _find_gates(self, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        steps = (at_least_float32(g) + self.dt_bias).unflatten(-1, (-1, self.config.linear_value_head_dim))
        return -at_least_float32(self.A_log).exp()[:, None] * F.softplus(steps), self.find_strength(beta)

    def open_gate(self, z: Tensor) -> Tensor:
        """See GatedDeltaNet."""
        return torch.sigmoid(z)
