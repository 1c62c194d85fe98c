# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: the delta rule with a decay for each channel of the key, which comes from the token.

    g = -exp(A_log) softplus(f + dt_bias)
    S' = diag(exp(g)) S;   S = S' + k (beta (v - S'^T k))^T;   out = norm(S^T q) * sigmoid(z)

Source: Kimi Team, "Kimi Linear", 2025, section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.plan.state_kinds import list_kimi_sections
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, HeadNorm
from megatron.core.ssm.state_mixer import log_uniform_decay, step_sizes
from megatron.core.tensor_parallel.parameters import ones
from megatron.core.tensor_parallel.products import at_least_float32


class KimiDeltaAttention(GatedDeltaNet):
    """[s, b, h] -> [s, b, h]; as many key heads as value heads, of the same width."""

    title = "Kimi delta attention"
    decay_section = "g"

    def list_sections(self) -> dict[str, int]:
        """See StateMixer."""
        return list_kimi_sections(self.config)

    def build_parameters(self) -> None:
        """See StateMixer."""
        config = self.config
        self.dt_bias = self.declare(self.sections["g"], step_sizes)
        self.A_log = self.declare(config.linear_num_value_heads, log_uniform_decay)
        self.out_norm = HeadNorm(
            self.declare(config.linear_value_head_dim, ones, is_divided=False), config.head_norm_epsilon
        )

    def _find_gates(self, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        steps = (at_least_float32(g) + self.dt_bias).unflatten(-1, (-1, self.config.linear_value_head_dim))
        return -at_least_float32(self.A_log).exp()[:, None] * F.softplus(steps), torch.sigmoid(beta)

    def open_gate(self, z: Tensor) -> Tensor:
        """See GatedDeltaNet."""
        return torch.sigmoid(z)
