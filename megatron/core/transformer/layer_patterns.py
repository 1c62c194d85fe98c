# SPDX-License-Identifier: Apache-2.0
"""Which layers have a sliding window or chunks, rotary positions, experts: arithmetic on layer numbers, counted from 1.
Layers of multi-token prediction, whose numbers follow those of the decoder, are as its last layer is.

| setting                       | value      | meaning                                                        |
|-------------------------------|------------|----------------------------------------------------------------|
| --window-size                 | 127,0      | a token sees itself and 127 tokens before it                   |
| --attention-chunk-size        | 8192       | a token sees earlier tokens of its own chunk of 8192           |
| --window-attn-skip-freq       | not given  | every layer has the window, or the chunks                      |
|                               | 4          | every fourth layer sees everything: 3 windows, 1 full, ...     |
|                               | [1,1,0]    | one entry per layer, 1 for a window                            |
| --no-rope-freq                | 4          | every fourth layer has no rotary positions                     |
|                               | [0,0,1]    | one entry per layer, 1 for none                                |
| --moe-layer-freq              | 2          | every second layer, the first of them too, has experts         |
|                               | [0,1,1]    | one entry per layer, 1 for experts                             |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

LayerPattern = int | Sequence[int]
"""Every n-th layer, or one 0 or 1 per layer."""


class HasPatterns(Protocol):
    """What a TransformerConfig says about windows, rotary positions and experts of its layers."""

    num_layers: int
    window_size: tuple[int, int] | None
    attention_chunk_size: int | None
    window_attn_skip_freq: int | list[int] | None
    no_rope_freq: int | list[int] | None
    rotary_base_local: int | None
    num_moe_experts: int | None

    @property
    def moe_layer_freq(self) -> LayerPattern: ...


def find_pattern_place(config: HasPatterns, layer_number: int) -> int:
    """The decoder's layer that this one is like: itself, or the last one for layers of multi-token prediction."""
    return min(layer_number, config.num_layers) if config.num_layers else layer_number


def find_window_of_layer(config: HasPatterns, layer_number: int) -> int | None:
    """Return how many tokens before itself a token sees in this layer; None where it sees all."""
    # -1 is upstream's word for a window without an end.
    if config.window_size is None or config.window_size[0] < 0:
        return None
    return None if _sees_everything(config, layer_number) else config.window_size[0]


def find_chunk_of_layer(config: HasPatterns, layer_number: int) -> int | None:
    """Return how many tokens a chunk of this layer has, of which a token sees only its own; None where it sees all."""
    if config.attention_chunk_size is None or _sees_everything(config, layer_number):
        return None
    return config.attention_chunk_size


def _sees_everything(config: HasPatterns, layer_number: int) -> bool:
    """Whether a layer has neither window nor chunks, whatever the others have."""
    full, layer_number = config.window_attn_skip_freq, find_pattern_place(config, layer_number)
    # Every n-th layer is full; a list, the other way round, has 1 for a window and 0 for a full layer.
    if isinstance(full, int):
        return layer_number % full == 0
    return full is not None and not full[layer_number - 1]


def has_windows(config: HasPatterns) -> bool:
    """Whether any layer has a sliding window."""
    assert config.num_layers is not None
    return any(find_window_of_layer(config, index + 1) is not None for index in range(config.num_layers))


def choose_rotary_kind(config: HasPatterns, layer_number: int) -> Literal["global", "local", "none"]:
    """Choose a layer's rotary positions: the model's (global), those of layers with a window (local), or none."""
    skipped, layer_number = config.no_rope_freq, find_pattern_place(config, layer_number)
    # Here a list has the sense of the number: the n-th layer, and a 1, have no rotary positions.
    if isinstance(skipped, int) and layer_number % skipped == 0:
        return "none"
    if isinstance(skipped, Sequence) and skipped[layer_number - 1]:
        return "none"
    is_local = config.rotary_base_local is not None and find_window_of_layer(config, layer_number) is not None
    return "local" if is_local else "global"


def has_experts(config: HasPatterns, layer_number: int) -> bool:
    """Whether this layer has a mixture of experts in place of a dense MLP."""
    if config.num_moe_experts is None:
        return False
    every, layer_number = config.moe_layer_freq, find_pattern_place(config, layer_number)
    # Unlike the patterns above, counting begins with the first layer, as upstream has it.
    return (layer_number - 1) % every == 0 if isinstance(every, int) else bool(every[layer_number - 1])


def has_dense_layers(config: HasPatterns) -> bool:
    """Whether any layer has an MLP without experts."""
    every = config.moe_layer_freq
    return config.num_moe_experts is None or (every > 1 if isinstance(every, int) else 0 in every)


def pattern_problems(config: HasPatterns) -> Iterator[str]:
    """What is wrong with the windows and patterns of a config."""
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
        ("--moe-layer-freq", config.moe_layer_freq),
    ):
        if isinstance(pattern, int) and pattern < 1:
            yield f"{flag} {pattern} is not every n-th layer; use 1 or more, or one 0 or 1 per layer"
        if isinstance(pattern, Sequence):
            yield from _list_problems(flag, pattern, config.num_layers)
    # Upstream has this rule for rotary positions only; windows and experts may end in an incomplete period.
    every = config.no_rope_freq
    if isinstance(every, int) and every > 0 and config.num_layers and config.num_layers % every:
        yield f"--no-rope-freq {every} does not divide --num-layers {config.num_layers}; use a divisor, or a list"


def _list_problems(flag: str, pattern: Sequence[int], num_layers: int) -> Iterator[str]:
    if num_layers and len(pattern) != num_layers:
        yield f"{flag} lists {len(pattern)} layers, and --num-layers is {num_layers}; give one entry per layer"
    if set(pattern) - {0, 1}:
        yield f"{flag} lists {next(x for x in pattern if x not in (0, 1))}; use only 0 and 1"
