# SPDX-License-Identifier: Apache-2.0
"""The mixer of Mamba-2: a state space model whose decay is one number for each head and token.

With step sizes D_t = softplus(dt_t + dt_bias) and a = -exp(A_log), for every head

    S_t = exp(D_t a) S_{t-1} + B_t (D_t x_t)^T,    y_t = S_t^T C_t + D x_t,    out = norm(y * silu(z)) W_out

where x, B and C come through a convolution over four tokens. Other models bound D_t, or normalise y
before the gate, or not at all. Source: Dao and Gu, "Transformers are SSMs", 2024,
sections 6 and 7.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.plan.state_kinds import MAMBA, list_mamba_sections
from megatron.core.ssm.by_tokens import compute_by_tokens
from megatron.core.ssm.chunks import Inputs
from megatron.core.ssm.libraries import ScanLibrary
from megatron.core.ssm.state_mixer import StateMixer, StateMixerSubmodules, log_uniform_decay, step_sizes
from megatron.core.tensor_parallel.layers import tensor_parallel_split
from megatron.core.tensor_parallel.parameters import declare_parameter, ones
from megatron.core.tensor_parallel.products import at_least_float32
from megatron.core.transformer.norms import rms_norm

# Put here by a table of upstream's names; declared for type checkers.
ExtendedRMSNorm: Any
_split_tensor_factory: Any

_CONVOLUTION_WIDTH = 4


class GroupNorm(nn.Module):
    """RMSNorm of equal groups of channels, with a weight for each channel."""

    def __init__(self, weight: nn.Parameter, groups: int, epsilon: float) -> None:
        """groups: of this rank's channels."""
        super().__init__()
        self.weight, self._groups, self._epsilon = weight, groups, epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> the same."""
        divided = x.unflatten(-1, (self._groups, -1))
        return rms_norm(divided, torch.ones_like(divided[0, 0, 0]), self._epsilon).flatten(-2) * self.weight


class MambaMixer(StateMixer):
    """Mamba-2 between its two projections' ends: [s, b, h] -> [s, b, h]."""

    title = "a Mamba-2 layer"
    convolved = MAMBA.convolved
    library = ScanLibrary

    def list_sections(self) -> dict[str, int]:
        """See StateMixer."""
        return list_mamba_sections(self.config)

    def convolution_form(self) -> tuple[int, bool]:
        """See StateMixer."""
        return _CONVOLUTION_WIDTH, self.config.mamba_conv_bias

    @property
    def has_projection_bias(self) -> bool:
        """See StateMixer."""
        return self.config.mamba_proj_bias

    def build_parameters(self, submodules: StateMixerSubmodules) -> None:
        """See StateMixer."""
        heads, inner = self.sections["dt"], self.sections["z"]
        self.dt_bias = self.declare(heads, step_sizes)
        self.A_log = self.declare(heads, log_uniform_decay)
        self.D = self.declare(heads, ones)
        splits = tensor_parallel_split(0, self.groups.tp)
        self.norm: GroupNorm | None = None
        if self.config.mamba_gate_norm != "none":
            weight = declare_parameter((inner,), kind="norm", init=ones, dtype=self.parameter_dtype, splits=splits)
            groups = self.config.mamba_num_groups // self.groups.tp.size()
            self.norm = GroupNorm(weight, groups, self.config.mamba_norm_epsilon)

    @property
    def state_shape(self) -> tuple[int, tuple[int, int]]:
        """See StateMixer."""
        heads = self.sections["dt"] // self.groups.tp.size()
        return heads, (self.config.mamba_state_dim, self.config.mamba_head_dim)

    def project(self, hidden_states: Tensor) -> Tensor:
        """See StateMixer."""
        projected, factors = super().project(hidden_states), self.config.mamba_section_multipliers
        if factors is None:
            return projected
        sizes = [size // self.groups.tp.size() for size in self.sections.values()]
        parts = projected.split(sizes, dim=-1)
        return torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)], dim=-1)

    def prepare(self, section: dict[str, Tensor]) -> Inputs:
        """See StateMixer."""
        log_decay, steps = compute_by_tokens(self._find_steps, (section["dt"],), (self.A_log, self.dt_bias))
        value = section["x"].unflatten(-1, (-1, self.config.mamba_head_dim))
        key, query = (section[name].unflatten(-1, (-1, self.config.mamba_state_dim)) for name in ("B", "C"))
        return Inputs(query, key, value, log_decay, steps)

    def find_rate(self) -> Tensor:
        """See StateMixer."""
        return -at_least_float32(self.A_log).exp()

    def _find_steps(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        steps = F.softplus(at_least_float32(dt) + self.dt_bias)  # [s, b, heads]
        if self.config.mamba_dt_min > 0 or self.config.mamba_dt_max is not None:
            steps = steps.clamp(self.config.mamba_dt_min, self.config.mamba_dt_max)
        return self.find_rate() * steps, steps

    def finish(self, output: Tensor, section: dict[str, Tensor]) -> Tensor:
        """See StateMixer."""
        parameters = (self.D,) if self.norm is None else (self.D, self.norm.weight)
        (result,) = compute_by_tokens(self._gate, (output, section["x"], section["z"]), parameters)
        return result  # type: ignore[no-any-return]

    def _gate(self, output: Tensor, x: Tensor, z: Tensor) -> tuple[Tensor]:
        skipped = at_least_float32(self.D)[:, None] * x.unflatten(-1, output.shape[2:])
        summed = (at_least_float32(output) + skipped).flatten(-2)
        gate = F.silu(at_least_float32(z))
        if self.norm is None:
            return ((summed * gate).to(output.dtype),)
        is_ungated = self.config.mamba_gate_norm == "ungated"
        return ((self.norm(summed) * gate if is_ungated else self.norm(summed * gate)).to(output.dtype),)


MambaMixerSubmodules = StateMixerSubmodules  # upstream's name
