# SPDX-License-Identifier: Apache-2.0
"""An MLP in addition to the experts that works on every token (DeepSeekMoE, 2024), optionally gated (Qwen 1.5 MoE,
2024).

y = mlp(x)        gated    y = sigmoid(x w^T) mlp(x)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.parameters import declare_parameter, parameter_dtype
from megatron.core.transformer.initialisers import few_outputs_initialiser
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(MLP):
    """The shared expert, an MLP that every token goes through: [s, b, h] -> [s, b, h], tensor-parallel as any MLP."""

    recomputable: ClassVar[Mapping[str, tuple[str, ...]]] = {"mlp_act": ("moe", "shared_experts")}

    @take_arguments("* name=...")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """gate: whether a gate scales the output; the config's when None or False."""
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        super().__init__(
            config,
            submodules,
            pg_collection=groups,
            ffn_hidden_size=config.moe_shared_expert_intermediate_size,
            interleave_size=config.moe_shared_expert_glu_interleave_size,
        )
        self.gate_weight = None
        if config.moe_shared_expert_gate or gate:
            assert config.hidden_size is not None
            # With sequence parallelism each rank gates its tokens: its gradient of the gate is a partial sum.
            splits_tokens = config.sequence_parallel and groups.tp.size() > 1
            self.gate_weight = declare_parameter(
                (1, config.hidden_size),
                init=few_outputs_initialiser(config),
                dtype=parameter_dtype(config),
                partial_grad_axes=("tp",) if splits_tokens else (),
            )

    def compute_output(self, hidden_states: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], with its bias added."""
        output, bias = self(hidden_states)
        output = output if bias is None else output + bias
        if self.gate_weight is not None:
            # The bias is added before: the gate scales the expert's whole output.
            output = output * F.linear(hidden_states, self.gate_weight).sigmoid()
        return output
