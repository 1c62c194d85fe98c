# SPDX-License-Identifier: Apache-2.0
"""Sliding windows or chunks, rotary positions, experts, low precision of a layer: arithmetic on its number, from 1.
Layers of multi-token prediction, whose numbers follow the decoder's, are as its last layer is.

| setting                       | value      | meaning                                                        |
|-------------------------------|------------|----------------------------------------------------------------|
| --window-size                 | 127,0      | a token sees itself and 127 tokens before it                   |
| --attention-chunk-size        | 8192       | a token sees earlier tokens of its chunk of 8192               |
| --window-attn-skip-freq       | not given  | every layer has the window, or the chunks                      |
|                               | 4          | every fourth layer sees everything: 3 windows, 1 full, ...     |
|                               | [1,1,0]    | one entry per layer, 1 for a window                            |
| --no-rope-freq                | 4          | every fourth layer has no rotary positions                     |
|                               | [0,0,1]    | one entry per layer, 1 for none                                |
| --output-norm-freq            | 4          | every fourth layer has its norms on the output                 |
|                               | [0,0,1]    | one entry per layer, 1 for these                               |
| --linear-attention-freq       | 4          | every fourth layer has softmax attention, the others linear    |
|                               | [1,1,0]    | one entry per layer, 1 for linear attention                    |
| --moe-layer-freq              | 2          | every second layer, the first of them too, has experts         |
|                               | [0,1,1]    | one entry per layer, 1 for experts                             |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron.core.plan.model_plan import BranchOptions, RotaryKind

LayerPattern = int | Sequence[int]
"""Every n-th layer, or one 0 or 1 per layer."""


class PlanSettings(NamedTuple):
    """Fields and properties of a config that say something about single layers; lists as tuples."""

    num_layers: int
    window_size: tuple[int, int] | None
    attention_chunk_size: int | None
    window_attn_skip_freq: LayerPattern | None
    no_rope_freq: LayerPattern | None
    norm_placement: str
    output_norm_freq: LayerPattern | None
    rotary_base_local: int | None
    cp_comm_type: tuple[str, ...] | None
    num_moe_experts: int | None
    moe_layer_freq: LayerPattern
    multi_latent_attention: bool
    parallel_residual: bool
    parallel_residual_shares_norm: bool
    mtp_num_layers: int | None
    mtp_use_repeated_layer: bool
    few_bits_recipe: str | None
    first_last_layers_bf16: bool
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    hybrid_layer_pattern: str | None
    experimental_attention_variant: str | None
    linear_attention_freq: LayerPattern | None
    mamba_beside_attention: bool
    heterogeneous_layers_config_encoded_json: str | None
    hidden_size: int
    num_attention_heads: int
    mlp_output_multiplier: float
    dsa_indexer_topk_freq: int
    dsa_indexer_skip_topk_offset: int
    csa_compress_ratios: LayerPattern | None
    csa_window_size: int

    @classmethod
    def read(cls, config: Any) -> PlanSettings:
        """Read them from a TransformerConfig, whose fields may change at any time."""
        values = (getattr(config, name) for name in cls._fields)
        return cls._make(tuple(value) if isinstance(value, list) else value for value in values)

    def read_options(self, number: int) -> BranchOptions:
        """Read what attention in layer `number`, counted from 1, sees and has for positions."""
        place = min(number, self.num_layers)
        is_full = self._sees_everything(place)
        # -1 is upstream's word for a window without an end.
        bounded = self.window_size is not None and self.window_size[0] >= 0 and not is_full
        window = self.window_size[0] if self.window_size is not None and bounded else None
        rotary: RotaryKind = "global" if window is None or self.rotary_base_local is None else "local"
        types = self.cp_comm_type or ("p2p",)
        return BranchOptions(
            window=window,
            chunk=None if is_full else self.attention_chunk_size,
            # Here a list has the sense of the number: the n-th layer, and a 1, have no rotary positions.
            rotary="none" if _is_nth(self.no_rope_freq, place, place) else rotary,
            norm="output" if _is_nth(self.output_norm_freq, place, place) else self.norm_placement,
            context_exchange=types[min(place, len(types)) - 1],
        )

    def _sees_everything(self, place: int) -> bool:
        """Return True if a layer has neither window nor chunks, whatever the others have."""
        full = self.window_attn_skip_freq
        # Every n-th layer is full; a list, the other way round, has 1 for a window and 0 for a full layer.
        return full is not None and _is_nth(full, place, place) == isinstance(full, int)

    def find_chooser(self, number: int) -> int | None:
        """Find the layer whose choice of keys layer `number`, counted from 1, takes; None where it chooses."""
        behind = max(number - max(self.dsa_indexer_skip_topk_offset, 1), 0) % max(1, self.dsa_indexer_topk_freq)
        return number - behind if behind and number <= self.num_layers else None

    def read_ratio(self, number: int) -> int:
        """Read the compression ratio of layer `number`, counted from 1; 0 where the list is too short, which is
        complained about elsewhere."""
        ratios = self.csa_compress_ratios
        return ratios[number - 1] if isinstance(ratios, tuple) and number <= len(ratios) else 0

    def has_experts(self, number: int) -> bool:
        """Return True if layer `number`, counted from 1, has a mixture of experts in place of a dense MLP."""
        place = min(number, self.num_layers)
        # Unlike the patterns above, counting begins with the first layer: every third are 1, 4, 7 ...
        return self.num_moe_experts is not None and _is_nth(self.moe_layer_freq, place, place - 1)

    def is_linear(self, number: int) -> bool:
        """Return True if layer `number`, counted from 1, has linear attention in place of the softmax's."""
        place, full = min(number, self.num_layers), self.linear_attention_freq
        # As with windows: every n-th layer has the softmax; a list has 1 for linear attention.
        return full is not None and _is_nth(full, place, place) != isinstance(full, int)

    def is_low_precision(self, number: int) -> bool:
        """Return True if layer `number`, counted from 1, multiplies in FP8 or FP4; layers of multi-token prediction
        count as inner ones."""
        if self.few_bits_recipe is None or not self.first_last_layers_bf16:
            return self.few_bits_recipe is not None
        first, last = self.num_layers_at_start_in_bf16, self.num_layers - self.num_layers_at_end_in_bf16
        return first < number <= last or number > self.num_layers


def _is_nth(pattern: LayerPattern | None, place: int, counted: int) -> bool:
    """Return True where a pattern names the layer at this place, from 1. counted: what every n-th is counted by."""
    if isinstance(pattern, int):
        return counted % max(1, pattern) == 0
    # Lists that are too short are refused; the rules beside that one read them, too.
    return pattern is not None and bool(pattern[place - 1 : place] and pattern[place - 1])


def pattern_problems(config: Any) -> Iterator[str]:
    """Yield what is wrong with the windows and patterns of a config."""
    if config.window_size is not None:
        left, right = config.window_size
        if left < -1 or right not in (0, -1):
            yield (
                f"--window-size {left},{right} is not a window of a causal model; give the tokens that a token sees "
                "before itself and 0, such as 127,0"
            )
        if left >= 0 and config.attention_chunk_size is not None:
            yield (
                f"--window-size {left},{right} and --attention-chunk-size {config.attention_chunk_size} contradict "
                "each other; keep one"
            )
    for flag, pattern in (
        ("--window-attn-skip-freq", config.window_attn_skip_freq),
        ("--no-rope-freq", config.no_rope_freq),
        ("--output-norm-freq", config.output_norm_freq),
        ("--moe-layer-freq", config.moe_layer_freq),
        ("--linear-attention-freq", config.linear_attention_freq),
    ):
        if isinstance(pattern, int) and pattern < 1:
            yield f"{flag} {pattern} is not every n-th layer; use 1 or more, or one 0 or 1 per layer"
        if isinstance(pattern, Sequence):
            yield from _list_problems(flag, pattern, config.num_layers)
    # The rule is for rotary positions only; windows and experts may end in an incomplete period.
    every = config.no_rope_freq
    if isinstance(every, int) and every > 0 and config.num_layers and config.num_layers % every:
        yield f"--no-rope-freq {every} does not divide --num-layers {config.num_layers}; use a divisor, or a list"


def _list_problems(flag: str, pattern: Sequence[int], num_layers: int) -> Iterator[str]:
    if num_layers and len(pattern) != num_layers:
        yield f"{flag} lists {len(pattern)} layers, and --num-layers is {num_layers}; give one entry per layer"
    if set(pattern) - {0, 1}:
        yield f"{flag} lists {next(x for x in pattern if x not in (0, 1))}; use only 0 and 1"
