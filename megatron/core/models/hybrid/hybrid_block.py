# SPDX-License-Identifier: Apache-2.0
"""HybridStack: the block of a GPT (transformer/transformer_block.py), whose layers have a spec for each letter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import LayerPlan
from megatron.core.plan.read import read_plan
from megatron.core.plan.stages import find_content_of_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.layer_inputs import StageInputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class HybridStackSubmodules:
    """The specs of layers, by upstream's names; specs of letters that a pattern does not have may be missing."""

    mamba_layer: Any = None
    gdn_layer: Any = None
    attention_layer: Any = None
    dsa_layer: Any = None
    mla_layer: Any = None
    mlp_layer: Any = None
    moe_layer: Any = None
    kda_layer: Any = None
    mtp_block_spec: Any = None
    """Of multi-token prediction; its depths have the layers above."""
    other_layer: Any = None
    """Of short convolutions, and of kinds that a program has registered itself (core/plan/kinds.py)."""


_PARTS = {
    "mamba": "mamba_layer",
    "gated_delta_net": "gdn_layer",
    "gated_delta_net_2": "gdn_layer",
    "attention": "attention_layer",
    "sparse_attention": "dsa_layer",
    "latent_attention": "mla_layer",
    "mlp": "mlp_layer",
    "experts": "moe_layer",
    "kimi_delta": "kda_layer",
}
"""Kind of a layer -> the part that builds it."""


class HybridStack(TransformerBlock):
    """The layers of one pipeline stage, or of one depth of multi-token prediction: [s, b, h] -> [s, b, h]."""

    final_norm_name = "final_norm"

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        pre_process: bool = True,
        layer_type_list: Sequence[str] | None = None,
        pp_layer_offset: int = 0,
        post_layer_norm: bool = True,
        post_process: bool = True,
        device: Any = None,
        dtype: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        vp_stage: int | None = None,
        layer_number: int | None = None,
    ) -> None:
        """Upstream's signature, of which pre_process, device, dtype and name say nothing here.

        layer_type_list: the letters of this stage, after pp_layer_offset others; those that the config's pattern has
        for this stage, or its chunk vp_stage, when None. is_mtp_layer: the layers of the depth of multi-token
        prediction whose first layer has layer_number. Raises ConfigError where they contradict the config.
        """
        if layer_type_list is not None and config.hybrid_layer_pattern is None:
            # A stack that a program builds by itself.
            config = replace(config, hybrid_layer_pattern="".join(layer_type_list), num_layers=len(layer_type_list))
        MegatronModule.__init__(self, config)
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        plan = read_plan(config)
        if is_mtp_layer:
            layers = next(depth for depth in plan.list_depths() if depth[0].number == layer_number)
            begins = ends_decoder = False
        else:
            content = find_content_of_stage(config, groups.pp, vp_stage)
            layers, begins = plan.decoder[content.layers.start : content.layers.stop], content.has_embedding
            ends_decoder = post_process if config.mtp_num_layers is None else content.ends_decoder
        if layer_type_list is not None:
            self._check_letters(layers, layer_type_list, pp_layer_offset)

        def find_spec(layer: LayerPlan) -> Any:
            (kind,) = layer.kinds
            part = _PARTS.get(kind, "other_layer")
            spec = getattr(submodules, part)
            if spec is None:
                raise ConfigError(
                    f"the pattern has the letter {find_kind(kind).letter or 'G'}, and the stack's spec no {part}"
                )
            return spec

        has_norm = post_layer_norm and ends_decoder
        self._assemble(layers, list(map(find_spec, layers)), groups, build_norm if has_norm else None)
        self._build_ends(begins=begins, ends=ends_decoder)
        self.is_mtp_layer = is_mtp_layer
        if is_mtp_layer:
            self.first_layer, self.offloader = 0, None

    @staticmethod
    def _check_letters(layers: Sequence[LayerPlan], letters: Sequence[str], offset: int) -> None:
        ours = [find_kind(layer.kinds[0]).letter or "G" for layer in layers]
        start = layers[0].number - 1 if layers else offset
        if ours != list(letters) or (start != offset and offset):
            raise ConfigError(
                f"this stage has the layers {''.join(ours)} behind {start} others by the config's pattern, not "
                f"{''.join(letters)} behind {offset}; leave layer_type_list out"
            )

    def forward(self, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
        """[s, b, h] -> [s, b, h]; inputs: the fields of StageInputs."""
        if self.is_mtp_layer:
            # Streams, recomputation and offloading are those around the depth.
            return self.run_layers(range(len(self.layers)), StageInputs(*inputs, **named), hidden_states)
        return super().forward(hidden_states, *inputs, **named)
