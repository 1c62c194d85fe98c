# SPDX-License-Identifier: Apache-2.0
"""Bytes that an indexer and its loss need while they run, beyond what they keep (core_attention/chosen_keys.py)."""

from __future__ import annotations

from megatron.core.plan.branch_kind import Config, Tokens, count_bytes

BLOCK_ELEMENTS = 2**22
"""Scores of a block of queries, or numbers gathered for it."""


def count_block_rows(queries: float, each: float) -> float:
    """Queries of a block. queries: that there are; each: numbers that one of them needs."""
    return min(queries, max(1, BLOCK_ELEMENTS // max(1, int(each))))


def count_gathered(width: int, count: int, keys: int) -> int:
    """Numbers of `count` gathered keys of `width` channels, for each of all the keys."""
    return -(-width * count // max(1, keys))


def need_to_choose(config: Config, tokens: Tokens, keys: float) -> float:
    """Bytes of vectors, and of the scores of a block with all keys. keys: that a sequence's queries choose among."""
    heads, width, _ = config.indexer_sizes
    vectors = tokens.all * (heads * (width * count_bytes(config) + 4) + width * count_bytes(config))
    rows = count_block_rows(tokens.all / tokens.sequences, tokens.sequences * heads * keys)
    # The products of all heads, the score, and marks and places of those that are best.
    return vectors + rows * tokens.sequences * keys * (4 * heads + 18)


def need_for_loss(config: Config, tokens: Tokens, keys: float, channels: int, *, softmaxes: bool) -> float:
    """Bytes of vectors and their gradients, and of a block in which the scores of all heads of attention become a
    target, and the indexer's scores gradients.

    channels: of the key that all heads of attention share. softmaxes: the target's denominators are not known before.
    """
    heads, width, count = config.indexer_sizes
    size, others = count_bytes(config), config.num_attention_heads // config.tensor_model_parallel_size
    # The vectors themselves are as large as what is kept in the end.
    gradients = tokens.all * 4 * (heads * (width + 1) + width)
    each = tokens.sequences * max(heads, others) * keys
    # Scores in float32; then products of the indexer's heads, their gradients, and which of them are above zero.
    first, then, always = others * (8 if softmaxes else 4), 9 * heads + 22, 2
    if config.dsa_indexer_use_sparse_loss and keys > count:
        each = max(each, tokens.sequences * count * (channels + width))
        # With the places of keys that are gathered, and these; at last the indexer's in float32, and their gradients.
        first, always, keys = first + channels * size, width * size + 10, count
        then = max(then, 8 * heads + 22 + 4 * width * (2 if size < 4 else 1))
    of_block = tokens.sequences * keys * (max(first, then) + always)
    return gradients + count_block_rows(tokens.all / tokens.sequences, each) * of_block
