# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the tokens a model has seen, so that each new token costs one position instead of all of them."""

from __future__ import annotations

from torch import Tensor


class KVCache:
    """Implements megatron.core.inference_context.InferenceContext for a batch whose sequences grow in step.

    max_tokens: longest sequence; memory for it is taken at once when a layer first writes, in the layer's own shapes
    and number format. Keys and values of one layer take 2 * max_tokens * b * num_query_groups_per_rank * kv_channels
    elements; latent attention keeps max_tokens * b * (kv_lora_rank + qk_pos_emb_head_dim) on each rank.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.sequence_len_offset = 0
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    def update(self, layer_number: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append what a layer keeps of this call's tokens, [s, b, ...] each, such as keys and values; return views of
        that of all tokens so far, [offset + s, b, ...]."""
        # The offset moves in `advance`, after all layers: until then every layer writes to the same positions.
        start, end = self.sequence_len_offset, self.sequence_len_offset + new[0].shape[0]
        assert end <= self.max_tokens, f"{end} tokens do not fit into a cache of {self.max_tokens}"
        # At once for the longest sequence: appending by concatenation would copy all tokens for each new one.
        if layer_number not in self._layers:
            self._layers[layer_number] = tuple(x.new_empty((self.max_tokens, *x.shape[1:])) for x in new)
        held = self._layers[layer_number]
        for memory, x in zip(held, new, strict=True):
            memory[start:end] = x
        return tuple(memory[:end] for memory in held)

    def advance(self, tokens: int) -> None:
        """Note that the model has seen `tokens` more; to be called after each forward pass."""
        self.sequence_len_offset += tokens

    def rewind(self, length: int) -> None:
        """Forget all tokens but the first `length`; what comes next is written over them."""
        assert length <= self.sequence_len_offset, f"the cache holds {self.sequence_len_offset} tokens, not {length}"
        self.sequence_len_offset = length
