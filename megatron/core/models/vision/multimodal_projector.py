# SPDX-License-Identifier: Apache-2.0
"""MultimodalProjector: features of images to vectors as wide as the text model's, by an MLP or one matrix.

Source: Liu et al., "Visual Instruction Tuning", 2023 (affine), and "Improved Baselines", 2023 (mlp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.device import current_device
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.parameters import initialise_parameters
from megatron.core.transformer.initialisers import input_initialiser
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


class MultimodalProjector(MegatronModule):
    """[..., input_size] -> [..., h]; the same on all tensor-parallel ranks, which share the work."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        projector_type: str,
        input_size: int,
        tp_group: Group | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Upstream's signature. config: hidden_size is the text model's, ffn_hidden_size and activation_func the MLP's.
        projector_type: mlp, or affine, which is linear_fc1 alone; ConfigError for another. tp_group: pg_collection's
        when None."""
        super().__init__(config)
        if tp_group is None:
            tp_group = (pg_collection if pg_collection is not None else ProcessGroupCollection.current()).tp
        with torch.device("meta" if config.init_model_with_meta_device else current_device()):
            if projector_type == "mlp":
                self.encoder = MLP(config, submodules, input_size=input_size, tp_group=tp_group)
            elif projector_type == "affine":
                self.encoder = build_module(
                    submodules.linear_fc1, input_size, config.hidden_size, config=config,
                    init_method=input_initialiser(config), bias=config.add_bias_linear, gather_output=True,
                    tp_group=tp_group,
                )  # fmt: skip
            else:
                raise ConfigError(f"projector_type {projector_type} is not known; use mlp or affine")
        initialise_parameters(
            self, seed=config.seed, draw_on_cpu=config.use_cpu_initialization, draw=config.perform_initialization
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Features [s, b, input_size] -> [s, b, h]."""
        projected, bias = self.encoder(hidden_states)
        result: Tensor = projected if bias is None else projected + bias
        return result
