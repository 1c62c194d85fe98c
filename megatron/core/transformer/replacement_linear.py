# SPDX-License-Identifier: Apache-2.0
"""One matrix in place of attention or of an MLP, in layers of different shapes (core/plan/heterogeneous.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, LayerOutput
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.initialisers import input_initialiser
from megatron.core.transformer.transformer_config import TransformerConfig


class ReplacementLinear(ColumnParallelLinear):
    """[s, b, h] -> ([s, b, h], None): x W^T + b, whose rows tensor-parallel ranks share."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """layer_number: counted from 1; all such layers are alike."""
        assert config.hidden_size is not None
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        super().__init__(
            config.hidden_size, config.hidden_size, config=config, init_method=input_initialiser(config),
            bias=config.add_bias_linear, gather_output=True, tp_group=groups.tp,
        )  # fmt: skip
        self.scatters = config.sequence_parallel

    def forward(self, hidden_states: Tensor, *inputs: Any) -> LayerOutput:  # type: ignore[override]
        """With sequence parallelism [s/tp, b, h] on both sides; inputs: what attention would read."""
        output, _ = super().forward(hidden_states)
        if self.scatters:
            output = scatter_to_sequence_parallel_region(output, self.tp_group)
        # The residual is added in the output's memory, which after a bias or a collective may be a view.
        return (output if self.bias is None and self.tp_group.size() == 1 else output.clone()), None
