# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets: linear attention that corrects what its state says of a key, and forgets.

| form | decay                               | correction                                                            |
|------|-------------------------------------|-----------------------------------------------------------------------|
| gdn  | one number for each value head      | S_t = S' + k (beta (v - S'^T k))^T                                    |
| gdn2 | one for each channel of a key head  | S_t = S' + k (w v - S'^T (e k))^T, w and e one number for each channel |

with S' = decay(S_{t-1}), keys and queries of length one after a short convolution, and the output normalised for each
head and gated. Sources: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, section 3; Qwen3-Next, 2025.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.plan.state_kinds import GATED_DELTA_NET, list_delta_2_sections, list_delta_sections
from megatron.core.ssm.by_tokens import compute_by_tokens
from megatron.core.ssm.chunks import Inputs
from megatron.core.ssm.libraries import DeltaRuleLibrary, StateLibrary
from megatron.core.ssm.state_mixer import StateMixer, StateMixerSubmodules, log_uniform_decay, step_sizes
from megatron.core.tensor_parallel.parameters import ones, zeros
from megatron.core.tensor_parallel.products import at_least_float32
from megatron.core.transformer.norms import rms_norm

# Put here by a table of upstream's names; declared for type checkers.
tensor_a2a_cp2hp: Any
tensor_a2a_hp2cp: Any
torch_chunk_gated_delta_rule: Any

_LENGTH_EPSILON = 1e-6


class GatedDeltaNet(StateMixer):
    """[s, b, h] -> [s, b, h]; value heads share query and key heads in groups."""

    title = "a gated delta net"
    convolved = GATED_DELTA_NET.convolved
    library: ClassVar[type[StateLibrary] | None] = DeltaRuleLibrary
    decay_section = "alpha"

    def list_sections(self) -> dict[str, int]:
        """See StateMixer."""
        return list_delta_sections(self.config)

    def convolution_form(self) -> tuple[int, bool]:
        """See StateMixer."""
        return self.config.linear_conv_kernel_dim, False

    def build_parameters(self, submodules: StateMixerSubmodules) -> None:
        """See StateMixer."""
        config = self.config
        self.dt_bias = self.declare(config.linear_num_value_heads, ones)
        self.A_log = self.declare(config.linear_num_value_heads, log_uniform_decay)
        self.out_norm = self.build_head_norm()

    def build_head_norm(self) -> HeadNorm:
        """Build the norm of the output's heads, which ranks share."""
        config, is_offset = self.config, self.config.stores_head_norm_offset
        weight = self.declare(config.linear_value_head_dim, zeros if is_offset else ones, is_divided=False)
        return HeadNorm(weight, config.head_norm_epsilon, is_offset)

    @property
    def state_shape(self) -> tuple[int, tuple[int, int]]:
        """See StateMixer."""
        config = self.config
        heads = config.linear_num_value_heads // self.groups.tp.size()
        return heads, (config.linear_key_head_dim, config.linear_value_head_dim)

    @property
    def unit(self) -> tuple[float, float]:  # type: ignore[override]
        """See StateMixer."""
        return _LENGTH_EPSILON, self.config.linear_key_head_dim**-0.5

    def prepare(self, section: dict[str, Tensor]) -> Inputs:
        """See StateMixer."""
        query, key, value = self.list_heads(section)
        log_decay, beta = compute_by_tokens(
            self._find_gates, (section[self.decay_section], section["beta"]), (self.A_log, self.dt_bias)
        )
        return Inputs(query, key, value, log_decay, beta, beta)

    def _find_gates(self, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        steps = F.softplus(at_least_float32(alpha) + self.dt_bias)
        return -at_least_float32(self.A_log).exp() * steps, self.find_strength(beta)

    def find_strength(self, beta: Tensor) -> Tensor:
        """[s, b, heads] as projected -> how strongly a token is written, up to 1 or 2."""
        strength = torch.sigmoid(beta)
        return 2 * strength if self.config.linear_allow_neg_eigval else strength

    def list_heads(self, section: dict[str, Tensor]) -> list[Tensor]:
        """Queries, keys and values, [s, b, heads, channels of one]."""
        config = self.config
        widths = {"query": config.linear_key_head_dim, "key": config.linear_key_head_dim,
                  "value": config.linear_value_head_dim}  # fmt: skip
        return [section[name].unflatten(-1, (-1, width)) for name, width in widths.items()]

    def finish(self, output: Tensor, section: dict[str, Tensor]) -> Tensor:
        """See StateMixer."""
        (result,) = compute_by_tokens(self._gate, (output, section["z"]), (self.out_norm.weight,))
        return result  # type: ignore[no-any-return]

    def _gate(self, output: Tensor, z: Tensor) -> tuple[Tensor]:
        gate = self.open_gate(at_least_float32(z.unflatten(-1, (-1, output.shape[-1]))))
        return ((self.out_norm(output) * gate).to(output.dtype).flatten(-2),)

    def open_gate(self, z: Tensor) -> Tensor:
        """Return what the normalised output is multiplied by."""
        return F.silu(z)


class GatedDeltaNet2(GatedDeltaNet):
    """The second form: decay, erasing and writing differ by channel."""

    title = "a gated delta net of the second form"
    library = None

    def list_sections(self) -> dict[str, int]:
        """See StateMixer."""
        return list_delta_2_sections(self.config)

    def build_parameters(self, submodules: StateMixerSubmodules) -> None:
        """See StateMixer."""
        config = self.config
        self.dt_bias = self.declare(self.sections["key"], step_sizes)
        self.A_log = self.declare(config.linear_num_key_heads, log_uniform_decay)
        self.out_norm = self.build_head_norm()

    def prepare(self, section: dict[str, Tensor]) -> Inputs:
        """See StateMixer."""
        query, key, value = self.list_heads(section)
        log_decay, erase = compute_by_tokens(self._find_gates, (section["f"], section["b"]), (self.A_log, self.dt_bias))
        (written,) = compute_by_tokens(_weigh, (value, section["w"].unflatten(-1, value.shape[2:])), ())
        return Inputs(query, key, written, log_decay, None, erase)

    def _find_gates(self, f: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        widths = (-1, self.config.linear_key_head_dim)
        steps = F.softplus(at_least_float32(f) + self.dt_bias).unflatten(-1, widths)
        return -at_least_float32(self.A_log).exp()[:, None] * steps, torch.sigmoid(b).unflatten(-1, widths)


def _weigh(value: Tensor, w: Tensor) -> tuple[Tensor]:
    return (value * torch.sigmoid(w),)


class HeadNorm(torch.nn.Module):
    """RMSNorm of every head, all with the same weight."""

    def __init__(self, weight: torch.nn.Parameter, epsilon: float, is_offset: bool) -> None:
        """is_offset: one is added to the weight in use."""
        super().__init__()
        self.weight, self._epsilon, self._is_offset = weight, epsilon, is_offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels of a head] -> the same."""
        return rms_norm(x, self.weight + 1 if self._is_offset else self.weight, self._epsilon)


GatedDeltaNetSubmodules = StateMixerSubmodules  # upstream's name
