# SPDX-License-Identifier: Apache-2.0
"""A short convolution between two gates, in place of attention (LFM 2; Liquid AI, 2025).

    B, C, x = split(W_in u);    y = W_out (C * convolution(B * x))

u, y: [s, b, h]; the convolution reads a few tokens of each channel and has no activation. Channels are divided over the
tensor-parallel group; context-parallel ranks hand the last tokens of a piece on (pieces.py). Generation keeps what the
convolution read last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.inference_context import InferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.placement import Part
from megatron.core.plan.state_kinds import list_short_sections
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.convolution import CausalConvolution
from megatron.core.ssm.pieces import describe_pieces
from megatron.core.ssm.state_mixer import StateMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, LayerOutput, RowParallelLinear
from megatron.core.transformer.initialisers import input_initialiser, output_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


class ShortConvolution(MegatronModule):
    """[s, b, h] -> ([s, b, h], bias [h] or None)."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: StateMixerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """layer_number: from 1."""
        super().__init__(config)
        self.groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.layer_number, tp_group = layer_number, self.groups.tp
        parts, width = [Part(size, name=name) for name, size in list_short_sections(config).items()], config.hidden_size
        self.in_proj = build_module(
            submodules.in_proj,
            width,
            sum(part.size for part in parts),
            config=config,
            init_method=input_initialiser(config),
            bias=config.short_conv_bias,
            parts=parts,
            tp_group=tp_group,
        )
        self.conv1d = CausalConvolution(
            width,
            config.short_conv_kernel_dim,
            config=config,
            parts=parts[-1:],
            bias=config.short_conv_bias,
            tp_group=tp_group,
            has_activation=False,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            width,
            width,
            config=config,
            init_method=output_initialiser(config),
            bias=config.short_conv_bias,
            skip_bias_add=True,
            tp_group=tp_group,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotation: object = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> LayerOutput:
        """[s, b, h] -> [s, b, h]; mask and rotation say nothing here: order is all that a convolution knows."""
        first, last, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        x = first * x
        if inference_context is not None:
            mixed = self._convolve_with_tails(x, inference_context)
        else:
            pieces = describe_pieces(self.groups.cp, x, packed_seq_params)
            mixed = pieces.join(self.conv1d(pieces.split(x), pieces))
        output: LayerOutput = self.out_proj(last * mixed)
        return output

    def _convolve_with_tails(self, x: Tensor, context: InferenceContext) -> Tensor:
        """[s, b, channels of this rank] -> the same in generation, where the last inputs of each sequence are kept."""
        (tails,) = context.read_recurrent(self.layer_number, x.new_zeros(self.conv1d.width - 1, x.shape[-1]))
        parts = []
        for rows, tokens in context.layout.group(x):  # [n, sequences of the run, channels]
            past = tails[rows].transpose(0, 1)  # [width - 1, sequences, channels]
            parts.append(self.conv1d.convolve(tokens, past))
            read = torch.cat([past, tokens])
            tails[rows] = read[len(read) - len(past) :].transpose(0, 1)
        context.write_recurrent(self.layer_number, tails)
        return context.layout.join(parts)


def get_short_convolution_spec() -> ModuleSpec:
    """Return the spec of a short convolution with parallel linear layers."""
    return ModuleSpec(ShortConvolution, submodules=StateMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
