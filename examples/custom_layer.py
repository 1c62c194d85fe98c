# SPDX-License-Identifier: Apache-2.0
"""A layer of your own: an MLP whose output is multiplied by a learned vector (LayerScale, Touvron et al., 2021).

    python pretrain_gpt.py --spec examples.custom_layer layer_spec <other flags>

See docs/models.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.parameters import declare_parameter, parameter_dtype
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec

INITIAL_SCALE = 0.1


def small(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill the tensor with INITIAL_SCALE; the generator is not needed."""
    tensor.fill_(INITIAL_SCALE)


class ScaledMLP(MLP):
    """mlp(x) * scale, one factor for each channel."""

    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(config, **parts)
        # Declared rather than an nn.Parameter: it then has a name and a first value that no layout changes, and a
        # gradient that is summed over the ranks which share the sequence.
        self.scale = declare_parameter(
            (config.hidden_size,),
            init=small,
            dtype=parameter_dtype(config),
            partial_grad_axes=("tp",) if config.sequence_parallel else (),
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """[s, b, h] -> [s, b, h], and no bias that would still have to be added."""
        output, bias = super().forward(hidden_states)
        return (output if bias is None else output + bias) * self.scale, None


def layer_spec() -> ModuleSpec:
    """The usual layer with another MLP; its norms, attention and residual stay as they are."""
    layer = get_gpt_layer_local_spec()
    mlp = dataclasses.replace(layer.submodules.mlp, module=ScaledMLP)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, mlp=mlp))
