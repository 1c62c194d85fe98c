# SPDX-License-Identifier: Apache-2.0
"""Inputs of layers beside hidden states: without gradients, and the same for all layers but for the rotation."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron.core.inference_context import InferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.rotary import Rotation


class LayerInputs(NamedTuple):
    """Inputs of one layer, and of attention; in upstream's order, so that `layer(hidden_states, *inputs)` calls a layer
    of a user's own as well. attention_mask and packed_seq_params as in DotProductAttention, causal when None."""

    attention_mask: Tensor | None = None
    rotation: Rotation | None = None
    inference_context: InferenceContext | None = None
    packed_seq_params: PackedSeqParams | None = None


class StageInputs(NamedTuple):
    """Inputs of all layers of a stage. local_rotation: for layers with a sliding window, where these have angles of
    their own. unrotated: for layers without rotary positions, where these have a factor on queries."""

    attention_mask: Tensor | None = None
    rotation: Rotation | None = None
    inference_context: InferenceContext | None = None
    local_rotation: Rotation | None = None
    packed_seq_params: PackedSeqParams | None = None
    unrotated: Rotation | None = None
