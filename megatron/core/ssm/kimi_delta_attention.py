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
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, HeadNorm, normalise
from megatron.core.ssm.state_mixer import Attended, log_uniform_decay, step_sizes
from megatron.core.tensor_parallel.parameters import ones


class KimiDeltaAttention(GatedDeltaNet):
    """[s, b, h] -> [s, b, h]; as many key heads as value heads, of the same width."""

    title = "Kimi delta attention"

    def list_sections(self) -> dict[str, int]:
        """See StateMixer."""
        return list_kimi_sections(self.config)

    def build_parameters(self) -> None:
        """See StateMixer."""
        config = self.config
        self.dt_bias = self.declare(self.sections["g"], step_sizes)
        self.A_log = self.declare(config.linear_num_value_heads, log_uniform_decay)
        self.out_norm = HeadNorm(
            self.declare(config.linear_value_head_dim, ones, is_divided=False), config.layernorm_epsilon
        )

    def prepare(self, section: dict[str, Tensor]) -> Attended:
        """See StateMixer."""
        width = (-1, self.config.linear_value_head_dim)
        query, key = (normalise(section[name].unflatten(-1, width)) for name in ("query", "key"))
        speed = self.A_log.float().exp()[:, None]
        steps = (section["g"].float() + self.dt_bias.float()).unflatten(-1, width)
        log_decay = -speed * F.softplus(steps)
        beta = torch.sigmoid(section["beta"])[..., None]
        value = section["value"].unflatten(-1, width)
        return Attended(query * width[1] ** -0.5, key, value * beta, log_decay, key * beta)

    def finish(self, output: Tensor, section: dict[str, Tensor]) -> Tensor:
        """See StateMixer."""
        gate = section["z"].unflatten(-1, (-1, self.config.linear_value_head_dim))
        return (self.out_norm(output) * torch.sigmoid(gate.float())).to(output.dtype).flatten(-2)
