# SPDX-License-Identifier: Apache-2.0
"""Kinds of compressed attention and their costs (transformer/compressed_attention.py): one key of a token for all
heads, in a window, and entries of compressed windows.

Latent vectors, keys, compressors and the indexer are whole on every tensor-parallel rank; queries and the output's
groups are divided.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.plan.branch_kind import BranchKind, Config, Counts, Kept, Tokens, count_bytes, count_norm, keep_input
from megatron.core.plan.indexer_memory import need_for_loss, need_to_choose
from megatron.core.plan.model_plan import Branch


def _has_indexer(config: Config, branch: Branch) -> bool:
    return branch.options.chooses and not config.csa_dense_mode


def _count_compressor(config: Config, branch: Branch, width: int) -> tuple[int, int]:
    """Elements of matrices, and of positions and norm."""
    channels = width * (2 if branch.options.chooses else 1)
    return 2 * config.hidden_size * channels, branch.options.compress_ratio * channels + width


def _count(config: Config, branch: Branch) -> Counts:
    hidden, rank, width, heads = config.hidden_size, config.q_lora_rank, config.query_width, config.num_attention_heads
    outputs = config.o_groups * config.o_lora_rank
    matrices = rank * heads * width + outputs * (heads * width // config.o_groups + hidden)
    projections, vectors, frozen = hidden * (rank + width), rank + width + heads, 0
    if branch.options.compress_ratio:
        of_matrices, of_vectors = _count_compressor(config, branch, width)
        projections, vectors = projections + of_matrices, vectors + of_vectors
    if _has_indexer(config, branch):
        scorers, narrow, _ = config.indexer_sizes
        of_matrices, of_vectors = _count_compressor(config, branch, narrow)
        of_matrices += scorers * (rank * narrow + hidden)
        projections, vectors = projections + of_matrices, vectors + of_vectors
        frozen = 0 if config.dsa_indexer_loss_coeff else of_matrices + of_vectors
    replicated = count_norm(config) + projections + vectors
    return Counts(matrices, projections=projections, replicated=replicated, frozen=frozen)


def _count_scores(config: Config, branch: Branch, seq_length: int) -> int:
    """A query with the window's tokens and the entries that it sees, on average over a causal sequence, and the
    indexer's products with all entries before it."""
    ratio, window = branch.options.compress_ratio, min((branch.options.window or 0) + 1, seq_length)
    seen = window - window * (window - 1) // (2 * seq_length)
    indexed = 0
    if ratio:
        entries = seq_length // ratio
        if _has_indexer(config, branch):
            scorers, narrow, count = config.indexer_sizes
            chosen = min(count, entries)
            seen += chosen - chosen**2 // (2 * max(1, entries))
            indexed = scorers * (narrow + 1) * entries // 2 if entries > count else 0
        else:
            seen += entries // 2
    return 2 * config.num_attention_heads * int(config.query_width) * seen + indexed


def _keep(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    yield from keep_input(config, branch, tokens, "attn_norm", "qkv_linear")
    width, ranks, cp = count_bytes(config), config.tensor_model_parallel_size, config.context_parallel_size
    # Of what is normalised both sides are kept.
    narrow = tokens.own * 2 * (config.q_lora_rank + config.query_width) * width
    yield Kept("latent vectors, and keys before and behind their norm", narrow, place="qkv_linear", is_factor=True)
    of_heads = tokens.all * config.num_attention_heads * config.query_width / ranks
    yield Kept("queries before and behind their norm", 2 * of_heads * width, has_gradient=True)
    keys = tokens.all * cp
    yield Kept("rotated keys", keys * config.query_width * width, has_gradient=True)
    made = [config.query_width] if branch.options.compress_ratio else []
    if _has_indexer(config, branch) and config.dsa_indexer_loss_coeff:
        scorers, channels, _ = config.indexer_sizes
        made.append(channels)
        yield Kept("gradients of the indexer's vectors", tokens.all * scorers * (channels * width + 4))
    if _has_indexer(config, branch):
        _, _, count = config.indexer_sizes
        yield Kept("chosen entries", tokens.all * 4 * count * (keys / branch.options.compress_ratio > count))
    # Contents, and gates as they become weights in float32; where windows overlap, each token is in two.
    sides = 2 if branch.options.chooses else 1
    for channels in made:
        yield Kept("contents and weights of entries", keys * sides * channels * (2 * width + 8))
    output = of_heads * width
    yield Kept("attention's output, and turned back", 2 * output, place="attn_proj", has_gradient=True)
    yield Kept("its log-sum-exp", tokens.all * config.num_attention_heads / ranks * 4)
    groups = tokens.all * config.o_groups * config.o_lora_rank / ranks * width
    yield Kept("outputs of groups", groups, is_factor=True, has_gradient=True)


def _need_for_indexer(config: Config, branch: Branch, tokens: Tokens) -> float:
    if not _has_indexer(config, branch):
        return 0.0
    entries = tokens.all * config.context_parallel_size / tokens.sequences // branch.options.compress_ratio
    most = need_to_choose(config, tokens, entries) if entries > config.indexer_sizes[2] else 0.0
    if config.dsa_indexer_loss_coeff:
        most = max(most, need_for_loss(config, tokens, entries, config.query_width, softmaxes=False))
    return most


COMPRESSED_KINDS = tuple(
    BranchKind(name, letter, "self_attention", _count, _keep, _count_scores, "per token", under_way=_need_for_indexer)
    for name, letter in (("sliding_attention", "W"), ("compressed_sparse", "C"), ("compressed_heavy", "H"))
)
