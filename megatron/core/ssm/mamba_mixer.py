# SPDX-License-Identifier: Apache-2.0
"""The mixer of Mamba-2: a state space model whose decay is one number for each head and token.

With step sizes D_t = softplus(dt_t + dt_bias) and a = -exp(A_log), for every head

    S_t = exp(D_t a) S_{t-1} + B_t (D_t x_t)^T,    y_t = S_t^T C_t + D x_t,    out = norm(y * silu(z)) W_out

where x, B and C come through a convolution over four tokens. Source: Dao and Gu, "Transformers are SSMs", 2024,
sections 6 and 7.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.plan.state_kinds import list_mamba_sections
from megatron.core.ssm.state_mixer import Attended, StateMixer, log_uniform_decay, step_sizes
from megatron.core.tensor_parallel.layers import tensor_parallel_split
from megatron.core.tensor_parallel.parameters import declare_parameter, ones
from megatron.core.transformer.norms import rms_norm

_CONVOLUTION_WIDTH = 4
_NORM_EPSILON = 1e-5


class GroupNorm(nn.Module):
    """RMSNorm of equal groups of channels, with a weight for each channel."""

    def __init__(self, weight: nn.Parameter, groups: int) -> None:
        """groups: of this rank's channels."""
        super().__init__()
        self.weight, self._groups = weight, groups

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> the same."""
        divided = x.unflatten(-1, (self._groups, -1))
        return rms_norm(divided, torch.ones_like(divided[0, 0, 0]), _NORM_EPSILON).flatten(-2) * self.weight


class MambaMixer(StateMixer):
    """Mamba-2 between its two projections' ends: [s, b, h] -> [s, b, h]."""

    title = "a Mamba-2 layer"
    convolved = ("x", "B", "C")

    def list_sections(self) -> dict[str, int]:
        """See StateMixer."""
        return list_mamba_sections(self.config)

    def convolution_form(self) -> tuple[int, bool]:
        """See StateMixer."""
        return _CONVOLUTION_WIDTH, True

    def build_parameters(self) -> None:
        """See StateMixer."""
        heads, inner = self.sections["dt"], self.sections["z"]
        self.dt_bias = self.declare(heads, step_sizes)
        self.A_log = self.declare(heads, log_uniform_decay)
        self.D = self.declare(heads, ones)
        splits = tensor_parallel_split(0, self.groups.tp)
        weight = declare_parameter((inner,), kind="norm", init=ones, dtype=self.parameter_dtype, splits=splits)
        self.norm = GroupNorm(weight, self.config.mamba_num_groups // self.groups.tp.size())

    @property
    def state_shape(self) -> tuple[int, tuple[int, int]]:
        """See StateMixer."""
        heads = self.sections["dt"] // self.groups.tp.size()
        return heads, (self.config.mamba_state_dim, self.config.mamba_head_dim)

    def prepare(self, section: dict[str, Tensor]) -> Attended:
        """See StateMixer."""
        x, key, query = (section[name] for name in ("x", "B", "C"))
        steps = F.softplus(section["dt"].float() + self.dt_bias.float())  # [b, s, heads]
        value = x.unflatten(-1, (-1, self.config.mamba_head_dim))
        groups = (-1, self.config.mamba_state_dim)
        return Attended(
            query.unflatten(-1, groups),
            key.unflatten(-1, groups),
            value * steps[..., None].to(value.dtype),
            -steps * self.A_log.float().exp(),
            None,
        )

    def finish(self, output: Tensor, section: dict[str, Tensor]) -> Tensor:
        """See StateMixer."""
        value = section["x"].unflatten(-1, (-1, self.config.mamba_head_dim))
        output = (output + self.D[:, None] * value).flatten(-2)
        return self.norm(output * F.silu(section["z"]))
