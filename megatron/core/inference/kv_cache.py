"""Keys and values of the tokens a model has seen, so that each new token costs one position instead of all of them."""

from __future__ import annotations

from torch import Tensor


class KVCache:
    """Implements megatron.core.inference_context.InferenceContext for a batch whose sequences grow in step.

    max_tokens: longest sequence; memory for it is taken at once when a layer first writes, in the layer's own number
    format: 2 * max_tokens * b * num_query_groups_per_rank * kv_channels elements for each layer.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.sequence_len_offset = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append this call's keys and values [s, b, g, d]; return views of all so far, [offset + s, b, g, d]."""
        start, end = self.sequence_len_offset, self.sequence_len_offset + key.shape[0]
        assert end <= self.max_tokens, f"{end} tokens do not fit into a cache of {self.max_tokens}"
        if layer_number not in self._layers:
            shape = (self.max_tokens, *key.shape[1:])
            self._layers[layer_number] = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self._layers[layer_number]
        keys[start:end] = key
        values[start:end] = value
        return keys[:end], values[:end]

    def advance(self, tokens: int) -> None:
        """The model has seen `tokens` more; call after each forward pass."""
        self.sequence_len_offset += tokens
