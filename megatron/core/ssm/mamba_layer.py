# SPDX-License-Identifier: Apache-2.0
"""A layer of one branch, by upstream's names: x + dropout(mixer(norm(x)))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.plan.model_plan import Branch
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.execution.execution import Execution
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.weight_names import WeightNames


@dataclass
class MambaLayerSubmodules:
    """The parts of a layer: specs or classes. mamba_bda says nothing: bias, dropout and sum are the layer's."""

    norm: Any = build_norm
    mixer: Any = None
    mamba_bda: Any = None
    weight_names: WeightNames = "own"


class MambaLayer(TransformerLayer):
    """A mixer with its norm, added to the residual stream: [s, b, h] -> [s, b, h]."""

    mixer: Any

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaLayerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int = 0,
        name: str | None = None,
        execution_type: type[Execution] = Execution,
    ) -> None:
        """layer_number: counted from 1 after the pp_layer_offset layers of earlier stages. name: part of upstream's
        signature; parameters are named by where the layer is."""
        number = layer_number + pp_layer_offset
        plan = read_plan(config).layer(number)
        if not plan.has("mamba"):  # a layer that a program builds by itself
            plan = plan._replace(branches=(Branch("mamba", plan.options),))
        parts = TransformerLayerSubmodules(
            input_layernorm=submodules.norm,
            other_kinds={"mamba": submodules.mixer},
            weight_names=submodules.weight_names,
        )
        super().__init__(config, parts, number, pg_collection=pg_collection, execution_type=execution_type, plan=plan)
