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

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.plan.state_kinds import list_delta_sections
from megatron.core.ssm.state_mixer import Attended, StateMixer, log_uniform_decay, step_sizes
from megatron.core.tensor_parallel.parameters import ones
from megatron.core.transformer.norms import rms_norm

_LENGTH_EPSILON = 1e-6


class GatedDeltaNet(StateMixer):
    """[s, b, h] -> [s, b, h]; value heads share query and key heads in groups."""

    title = "a gated delta net"
    convolved = ("query", "key", "value")

    def list_sections(self) -> dict[str, int]:
        """See StateMixer."""
        return list_delta_sections(self.config)

    def convolution_form(self) -> tuple[int, bool]:
        """See StateMixer."""
        return self.config.linear_conv_kernel_dim, False

    def build_parameters(self) -> None:
        """See StateMixer."""
        config = self.config
        self.dt_bias = self.declare(config.linear_num_value_heads, ones)
        self.A_log = self.declare(config.linear_num_value_heads, log_uniform_decay)
        self.out_norm = HeadNorm(
            self.declare(config.linear_value_head_dim, ones, is_divided=False), config.layernorm_epsilon
        )

    @property
    def state_shape(self) -> tuple[int, tuple[int, int]]:
        """See StateMixer."""
        config = self.config
        heads = config.linear_num_value_heads // self.groups.tp.size()
        return heads, (config.linear_key_head_dim, config.linear_value_head_dim)

    def prepare(self, section: dict[str, Tensor]) -> Attended:
        """See StateMixer."""
        width = self.config.linear_key_head_dim
        query, key = (normalise(section[name].unflatten(-1, (-1, width))) for name in ("query", "key"))
        value = section["value"].unflatten(-1, (-1, self.config.linear_value_head_dim))
        steps = F.softplus(section["alpha"].float() + self.dt_bias.float())
        beta = torch.sigmoid(section["beta"])[..., None]  # [b, s, value heads, 1]
        shared = value.shape[2] // key.shape[2]
        return Attended(
            query * width**-0.5,
            key,
            value * beta,
            -self.A_log.float().exp() * steps,
            key.repeat_interleave(shared, dim=2) * beta,
        )

    def finish(self, output: Tensor, section: dict[str, Tensor]) -> Tensor:
        """See StateMixer."""
        gate = section["z"].unflatten(-1, (-1, self.config.linear_value_head_dim))
        return (self.out_norm(output) * F.silu(gate.float())).to(output.dtype).flatten(-2)


class GatedDeltaNet2(GatedDeltaNet):
    """The second form: decay, erasing and writing differ by channel."""

    title = "a gated delta net of the second form"

    def list_sections(self) -> dict[str, int]:
        """See StateMixer."""
        sizes = super().list_sections()
        keys, values = sizes["key"], sizes["value"]
        return {"query": keys, "key": keys, "value": values, "z": values, "f": keys, "b": keys, "w": values}

    def build_parameters(self) -> None:
        """See StateMixer."""
        config = self.config
        self.dt_bias = self.declare(self.sections["key"], step_sizes)
        self.A_log = self.declare(config.linear_num_key_heads, log_uniform_decay)
        self.out_norm = HeadNorm(
            self.declare(config.linear_value_head_dim, ones, is_divided=False), config.layernorm_epsilon
        )

    def prepare(self, section: dict[str, Tensor]) -> Attended:
        """See StateMixer."""
        by_key, by_value = self.config.linear_key_head_dim, self.config.linear_value_head_dim
        query, key = (normalise(section[name].unflatten(-1, (-1, by_key))) for name in ("query", "key"))
        steps = F.softplus(section["f"].float() + self.dt_bias.float()).unflatten(-1, (-1, by_key))
        value = section["value"] * torch.sigmoid(section["w"])
        return Attended(
            query * by_key**-0.5,
            key,
            value.unflatten(-1, (-1, by_value)),
            -self.A_log.float().exp()[:, None] * steps,
            key * torch.sigmoid(section["b"]).unflatten(-1, (-1, by_key)),
        )


class HeadNorm(torch.nn.Module):
    """RMSNorm of every head, all with the same weight."""

    def __init__(self, weight: torch.nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self._epsilon = weight, epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels of a head] -> the same."""
        return rms_norm(x, self.weight, self._epsilon)


def normalise(x: Tensor) -> Tensor:
    """Vectors of length one along the last dimension, in float32 inside."""
    wide = x.float() if x.dtype != torch.float64 else x
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _LENGTH_EPSILON)).to(x.dtype)
