# SPDX-License-Identifier: Apache-2.0
"""Inputs of layers other than hidden states: without gradients, and the same for all layers except for the rotation."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.inference_context import InferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.rotary import Rotation


class LayerInputs(NamedTuple):
    """Inputs of one layer, and of attention; in upstream's order, so that `layer(hidden_states, *inputs)` calls a
    user's own layer as well. attention_mask and packed_seq_params as in DotProductAttention, causal when None."""

    attention_mask: Tensor | None = None
    rotation: Rotation | None = None
    inference_context: InferenceContext | None = None
    packed_seq_params: PackedSeqParams | None = None


class StageInputs(NamedTuple):
    """Inputs of all layers of a stage. local_rotation: for layers with a sliding window, where these have other angles.
    unrotated: for layers without rotary positions, where these have a factor on queries."""

    attention_mask: Tensor | None = None
    rotation: Rotation | None = None
    inference_context: InferenceContext | None = None
    local_rotation: Rotation | None = None
    packed_seq_params: PackedSeqParams | None = None
    unrotated: Rotation | None = None


def read_stage_inputs(
    rotary_pos_emb: StageInputs | Rotation | Tensor | None,
    interleaved: bool,
    *,
    rotary_pos_cos: None = None,
    rotary_pos_sin: None = None,
    rotary_pos_cos_sin: None = None,
    sequence_len_offset: None = None,
    padding_mask: None = None,
    **inputs: Any,
) -> StageInputs:
    """The inputs of layers from the keywords of upstream's blocks. rotary_pos_emb: what GPTModel._preprocess() gives,
    or upstream's angles [s, 1, 1, channels], of pairs that `interleaved` says. The next five: None here. inputs: fields
    of StageInputs, in place of those that are None. Raises ConfigError for one of the five."""
    five = {"rotary_pos_cos": rotary_pos_cos, "rotary_pos_sin": rotary_pos_sin, "padding_mask": padding_mask,
            "rotary_pos_cos_sin": rotary_pos_cos_sin, "sequence_len_offset": sequence_len_offset}  # fmt: skip
    if given := [name for name, value in five.items() if value is not None]:
        raise ConfigError(f"layers take no {given[0]}: rotary_pos_emb says all of it; leave it out")
    if isinstance(rotary_pos_emb, StageInputs):
        return rotary_pos_emb._replace(**{name: value for name, value in inputs.items() if value is not None})
    if isinstance(rotary_pos_emb, Tensor):
        angles = rotary_pos_emb[:, 0, 0]
        half = angles[:, ::2] if interleaved else angles.chunk(2, dim=-1)[0]
        rotary_pos_emb = Rotation(half.cos(), half.sin(), interleaved)
    return StageInputs(rotation=rotary_pos_emb, **inputs)
