# SPDX-License-Identifier: Apache-2.0
"""Kinds of branches and their costs, a row for each.

| kind             | letter | module         | the branch                                          |
|------------------|--------|----------------|-----------------------------------------------------|
| attention        | *      | self_attention | attention with packed heads                         |
| latent_attention | +      | self_attention | attention whose keys and values are latent vectors  |
| sparse_attention | D      | self_attention | latent attention to tokens that an indexer chooses  |
| sliding_attention  | W    | self_attention | one key of a token, in a window (compressed_kinds.py, as the two below) |
| compressed_sparse  | C    | self_attention | beside these some entries of several tokens each    |
| compressed_heavy   | H    | self_attention | beside these all entries, of many tokens each       |
| mlp              | -      | mlp            | two products around an activation                   |
| experts          | E      | mlp            | a router and many MLPs of which few work on a token |
| mamba            | M      | mixer          | Mamba-2 (state_kinds.py, as the two below)          |
| gated_delta_net  | G      | self_attention | a gated delta net; gated_delta_net_2 of second form |
| kimi_delta       | K      | self_attention | Kimi delta attention                                |
| short_...        | L      | self_attention | a short convolution between two gates (LFM 2)       |
| linear_for_...   |        | both           | a matrix in place of attention, or of an MLP        |
| parallel         |        | self_attention | attention and Mamba-2 side by side on one input     |

A user's program adds a row by `register_kind`, before it makes a config with the kind's letter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megatron.core.errors import ConfigError
from megatron.core.plan.branch_kind import (
    BranchKind,
    Config,
    Counts,
    Kept,
    Tokens,
    count_bytes,
    count_norm,
    keep_input,
    share_of_rounded,
)
from megatron.core.plan.compressed_kinds import COMPRESSED_KINDS
from megatron.core.plan.indexer_memory import need_for_loss, need_to_choose
from megatron.core.plan.model_plan import Branch
from megatron.core.plan.state_kinds import MAMBA, STATE_KINDS


def find_kind(name: str) -> BranchKind:
    """Return the row of a kind. Raises ConfigError where there is none."""
    if name not in _KINDS:
        raise ConfigError(f"there is no kind of layer {name!r}; register_kind adds one to {', '.join(_KINDS)}")
    return _KINDS[name]


def list_letters() -> dict[str, str]:
    """Return letter -> name of all kinds."""
    return {kind.letter: kind.name for kind in _KINDS.values() if kind.letter}


def register_kind(kind: BranchKind) -> None:
    """Add a kind of layers, whose letter --hybrid-layer-pattern may then have. Raises ConfigError where its name or
    letter is another kind's, or its letter none."""
    if len(kind.letter) != 1 or kind.letter in "|/ ":
        raise ConfigError(f"{kind.letter!r} cannot stand for {kind.name}; use one character that is not | or /")
    taken = list_letters().get(kind.letter, kind.name)
    if taken != kind.name or _KINDS.get(kind.name, kind) != kind:
        raise ConfigError(f"the kind {kind.name} with the letter {kind.letter} meets {taken}; use other ones")
    _KINDS[kind.name] = kind


# ---- attention


def _count_attention(config: Config, branch: Branch) -> Counts:
    hidden, heads = config.hidden_size, config.num_attention_heads
    queries, output = heads * config.query_width, heads * config.value_width * hidden
    gates = queries if config.attention_output_gate else 0
    packed = hidden * (queries + gates + 2 * _count_groups(config, branch) * config.query_width)
    return Counts(packed + output, replicated=count_norm(config))


def _count_groups(config: Config, branch: Branch) -> int:
    """Key-value heads of a branch."""
    groups: int = branch.options.query_groups or config.num_query_groups
    return groups


def _count_latent_attention(config: Config, branch: Branch) -> Counts:
    hidden, heads = config.hidden_size, config.num_attention_heads
    to_heads = config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim)
    output = heads * config.value_width * hidden + to_heads
    # As the reference system counts, with a norm of each latent vector.
    to_latents = config.kv_lora_rank * (hidden + 1) + hidden * config.qk_pos_emb_head_dim
    if config.q_lora_rank is not None:
        to_latents += config.q_lora_rank * (hidden + 1)
    queries = (hidden if config.q_lora_rank is None else config.q_lora_rank) * heads * config.query_width
    return Counts(queries + output, projections=to_latents, replicated=count_norm(config) + to_latents)


def _count_scores(config: Config, branch: Branch, seq_length: int) -> int:
    """A query with each key that it sees, and its share of each value: on average over a causal sequence."""
    per_pair: int = config.num_attention_heads * (config.query_width + config.value_width)
    return per_pair * _count_seen_twice(branch, seq_length) // 2


def _count_sparse_attention(config: Config, branch: Branch) -> Counts:
    counts = _count_latent_attention(config, branch)
    if branch.options.chooser is not None:
        return counts
    heads, width = config.dsa_indexer_n_heads or 0, config.dsa_indexer_head_dim or 0
    matrices = (config.q_lora_rank or config.hidden_size) * heads * width + config.hidden_size * (width + heads)
    return counts._replace(
        projections=counts.projections + matrices, replicated=counts.replicated + matrices + 2 * width,
        frozen=0 if config.dsa_indexer_loss_coeff else matrices + 2 * width,
    )  # fmt: skip


def _count_chosen_scores(config: Config, branch: Branch, seq_length: int) -> int:
    """The indexer's products with all keys before a query, where they are more than it chooses, and attention to those
    chosen."""
    per_pair: int = config.num_attention_heads * (config.query_width + config.value_width)
    count = min(config.dsa_indexer_topk or seq_length, seq_length)
    seen_twice = 2 * count - count**2 // seq_length
    indexed = 0 if branch.options.chooser is not None or count == seq_length else seq_length
    heads, width = config.dsa_indexer_n_heads or 0, config.dsa_indexer_head_dim or 0
    return (per_pair * seen_twice + heads * (width + 1) * indexed) // 2


def _count_seen_twice(branch: Branch, seq_length: int) -> int:
    """Twice the tokens that an average one sees: half of the full square of a causal sequence, of each of its chunks,
    or of what a window leaves of it."""
    chunk = min(branch.options.chunk or seq_length, seq_length)
    # Whole chunks, and what is left of the sequence.
    pairs = seq_length // chunk * chunk**2 + (seq_length % chunk) ** 2
    if branch.options.window is not None:
        pairs -= max(0, seq_length - branch.options.window - 1) ** 2
    return pairs // seq_length


class _Sharing(NamedTuple):
    """Context-parallel ranks of a layer by how they share attention; one way or, of a hierarchy, the first two."""

    exchangers: int = 1
    """That exchange tokens for heads."""
    ring: int = 1
    """That pass keys and values around."""
    gatherers: int = 1
    """That gather all keys and values."""

    @property
    def is_around(self) -> bool:
        """True where attention has operands, or an output, in addition to the layer's."""
        return self.exchangers > 1 or self.gatherers > 1


def _find_sharing(config: Config, branch: Branch) -> _Sharing:
    ranks, kind = config.context_parallel_size, branch.options.context_exchange
    if kind == "a2a+p2p" and ranks > 1:
        return _Sharing(*config.hierarchical_context_parallel_sizes)
    return {"all_gather": _Sharing(gatherers=ranks), "a2a": _Sharing(exchangers=ranks)}.get(kind, _Sharing(ring=ranks))


def _recomputes_core(config: Config) -> bool:
    return config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())


def _keep_attention(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    yield from keep_input(config, branch, tokens, "attn_norm", "qkv_linear")
    ranks, heads, sharing = config.tensor_model_parallel_size, config.num_attention_heads, _find_sharing(config, branch)
    groups = max(_count_groups(config, branch), ranks)  # with fewer groups than ranks, each has one whole
    per_head = tokens.all * config.query_width * count_bytes(config) / ranks
    normed, gated = config.qk_layernorm or config.qk_l2_norm, config.attention_output_gate
    packed, by_heads = per_head * (heads * (2 if gated else 1) + 2 * groups), heads > _count_groups(config, branch)
    # What attention reads instead of views of it leaves nothing to keep it for, but for a norm or a gate.
    is_apart = sharing.exchangers > 1 or (sharing.gatherers > 1 and by_heads)
    is_read = _recomputes_core(config) or normed or gated or not is_apart
    name = "packed queries, keys, values"
    yield Kept(name, packed * is_read, place="core_attn", is_factor=True, has_gradient=True)
    if sharing.exchangers > 1:
        # The ranks need equally many keys and values: copies, where they cannot share them evenly.
        own = groups // ranks
        copies = math.lcm(own, sharing.exchangers) // own
        exchanged = per_head * (heads + 2 * groups * copies)
        yield Kept("heads of all ranks' tokens", exchanged, "core_attn", is_factor=True, has_gradient=True)
    # Queries of several heads lie between the keys of their groups; kernels and norms want them without gaps.
    if by_heads and (sharing.exchangers == 1 or normed):
        yield Kept("queries by heads", per_head * heads, place="core_attn", has_gradient=not is_read)
    if sharing.exchangers == 1 and (normed or gated or not config.apply_rope_fusion):
        # Norms and gates read what else would be rotated in its place.
        turned = (heads if normed or not by_heads else 0) + (groups if sharing.gatherers == 1 else 0)
        yield Kept("rotated queries and keys", per_head * turned, place="core_attn")
    if sharing.gatherers > 1:
        gathered = per_head * 2 * groups * sharing.gatherers
        yield Kept("all ranks' keys and values", gathered, "core_attn", has_gradient=True)
    yield from _keep_scores(config, tokens)
    yield from _keep_output(config, tokens, sharing)
    if gated:
        width = count_bytes(config)
        of_heads = tokens.all * heads * config.value_width / ranks
        yield Kept("its gate in float32", of_heads * 4)
        yield Kept("the gate as it multiplies, and the product", of_heads * (2 * width if width < 4 else width))


def _keep_latent_attention(config: Config, branch: Branch, tokens: Tokens, *, hides: bool = False) -> Iterator[Kept]:
    """hides: keys are chosen, by a kernel that fills nothing up."""
    yield from keep_input(config, branch, tokens, "attn_norm", "qkv_linear")
    width = count_bytes(config)
    # Of a latent vector that is normalised both sides are kept.
    latents = (config.kv_lora_rank + (config.q_lora_rank or 0)) * (2 if config.qk_layernorm else 1)
    narrow = tokens.own * (latents + config.qk_pos_emb_head_dim) * width
    yield Kept("latent vectors", narrow, place="qkv_linear", is_factor=True)
    per_channel = tokens.all * width / config.tensor_model_parallel_size * config.num_attention_heads
    queries, values, positions = config.query_width, config.value_width, config.qk_pos_emb_head_dim
    # Of two widths the flash kernel gets the narrower one filled up, and keeps the copy and an output of that width;
    # what is passed around context-parallel ranks is left as it is.
    sharing = _find_sharing(config, branch)
    is_whole = sharing.ring == sharing.gatherers == 1
    fills_up = config.attention_backend in ("auto", "flash") and is_whole and not hides
    filled = max(queries, values) if fills_up else 0
    for name, channels, more, is_factor in (
        ("queries", queries, filled - queries, True), ("keys", queries - positions, 0, True),
        ("their positions", positions, filled - queries, False), ("values", values, filled - values, True),
    ):  # fmt: skip
        # A copy that is filled up is the kernel's, and is neither left out nor moved with its operand.
        part, place = (None, None) if more > 0 else ("mla_up_proj", "core_attn")
        yield Kept(name, per_channel * channels, part, place, is_factor=is_factor, has_gradient=True)
        yield Kept(f"what {name} are filled up with", per_channel * max(0, more), has_gradient=True)
    if sharing.gatherers > 1:
        others = per_channel * (queries + values) * (sharing.gatherers - 1)
        yield Kept("other ranks' keys and values", others, "core_attn", has_gradient=True)
    if fills_up and queries != values:
        yield Kept("the kernel's own output", per_channel * filled)
    yield from _keep_scores(config, tokens)
    yield from _keep_output(config, tokens, sharing)


def _keep_sparse_attention(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    heads, width, count = config.indexer_sizes
    keys, chooses = _count_keys(config, tokens), branch.options.chooser is None
    if keys > count and config.gathers_chosen_keys(keys):
        of_latent = _keep_latent_attention(config, branch, tokens, hides=True)
        yield from (row for row in of_latent if row.place != "core_attn")
        per_channel = tokens.all * count_bytes(config) / config.tensor_model_parallel_size * config.num_attention_heads
        wide = config.kv_lora_rank + config.qk_pos_emb_head_dim
        yield Kept("queries", per_channel * config.query_width, place="core_attn", is_factor=True, has_gradient=True)
        yield Kept("queries of latent vectors", per_channel * wide, place="core_attn", has_gradient=True)
        yield Kept("keys", keys * tokens.sequences * wide * count_bytes(config), place="core_attn", has_gradient=True)
        yield Kept("sums of latent vectors", per_channel * config.kv_lora_rank, place="core_attn", has_gradient=True)
    else:
        yield from _keep_latent_attention(config, branch, tokens, hides=keys > count)
    if keys > count and chooses:
        yield Kept("chosen keys", tokens.all * count * 4)
    if config.dsa_indexer_loss_coeff and chooses:
        # With the input of its keys' norm, and weights in float32.
        vectors = (heads * width + 2 * width) * count_bytes(config) + heads * 4
        yield Kept("gradients of the indexer's vectors", tokens.all * vectors)


def _count_keys(config: Config, tokens: Tokens) -> float:
    """Tokens of a sequence on all context-parallel ranks."""
    return tokens.all * config.context_parallel_size / tokens.sequences


def _need_for_indexer(config: Config, branch: Branch, tokens: Tokens) -> float:
    if branch.options.chooser is not None:
        return 0.0
    keys, wide = _count_keys(config, tokens), config.kv_lora_rank + config.qk_pos_emb_head_dim
    most = need_to_choose(config, tokens, keys) if keys > config.indexer_sizes[2] else 0.0
    if config.dsa_indexer_loss_coeff:
        # Heads as they multiply latent vectors, and these, are there already where they are gathered for attention.
        heads = tokens.all * config.num_attention_heads / config.tensor_model_parallel_size
        gathers = keys > config.indexer_sizes[2] and config.gathers_chosen_keys(keys)
        absorbed = 0.0 if gathers else (heads + keys * tokens.sequences) * wide * count_bytes(config)
        most = max(most, absorbed + need_for_loss(config, tokens, keys, wide, softmaxes=True))
    return most


def _take_for_ring(config: Config, branch: Branch, tokens: Tokens) -> float:
    """Gradients of queries, and of keys and values here and under way, in float32, with the next rank's keys and
    values."""
    if _find_sharing(config, branch).ring == 1:
        return 0.0
    ranks, groups = config.tensor_model_parallel_size, config.num_attention_heads
    if branch.kind == "attention":
        groups = max(_count_groups(config, branch), ranks)
    keys_and_values = groups * (config.query_width + config.value_width)
    of_token = 4 * config.num_attention_heads * config.query_width + (8 + count_bytes(config)) * keys_and_values
    return tokens.all / ranks * of_token


def _keep_scores(config: Config, tokens: Tokens) -> Iterator[Kept]:
    if tokens.scored:
        # Torch's operations work in float32.
        width = 4 if config.attention_backend == "unfused" else count_bytes(config)
        pairs = tokens.all * tokens.scored * config.num_attention_heads / config.tensor_model_parallel_size
        yield Kept("attention probabilities", pairs * width, "core_attn", "core_attn", has_gradient=True)


def _keep_output(config: Config, tokens: Tokens, sharing: _Sharing) -> Iterator[Kept]:
    per_rank = tokens.all * config.num_attention_heads / config.tensor_model_parallel_size
    output = per_rank * config.value_width * count_bytes(config)
    yield Kept("attention's output", output, place="attn_proj", is_factor=True, has_gradient=True)
    if sharing.is_around:
        yield Kept("the same as the kernel made it", output, "core_attn")
    yield Kept("its log-sum-exp", per_rank * 4)


# ---- attention and Mamba-2 side by side


def _count_parallel(config: Config, branch: Branch) -> Counts:
    attention, mamba = _count_attention(config, branch), MAMBA.count(config, branch)
    # One norm for both.
    return attention._replace(matrices=attention.matrices + mamba.matrices)


def _keep_parallel(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    # Backward of Mamba-2 takes more, at another time.
    yield from (row._replace(has_gradient=False) for row in _keep_attention(config, branch, tokens))
    of_input = len(list(keep_input(config, branch, tokens, "", "")))
    yield from list(MAMBA.kept(config, branch, tokens))[of_input:]


def _work_in_parallel(config: Config, branch: Branch, seq_length: int) -> int:
    return _count_scores(config, branch, seq_length) + MAMBA.work(config, branch, seq_length)


# ---- one matrix in place of either


def _count_matrix(config: Config, branch: Branch) -> Counts:
    return Counts(config.hidden_size**2, replicated=count_norm(config))


def _keep_for_attention(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    return keep_input(config, branch, tokens, "attn_norm", "qkv_linear")


def _keep_for_mlp(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    return keep_input(config, branch, tokens, "mlp_norm", "mlp_fc1")


# ---- MLP and experts


def _count_mlp(config: Config, branch: Branch) -> Counts:
    width = branch.options.ffn_hidden_size or config.ffn_hidden_size
    return Counts(_count_inner(config) * width * config.hidden_size, replicated=count_norm(config, branch))


def _count_inner(config: Config) -> int:
    """Matrices of an MLP."""
    return 3 if config.gated_linear_unit else 2


def _count_experts(config: Config, branch: Branch) -> Counts:
    hidden, experts = config.hidden_size, config.num_moe_experts
    projections = 2 * hidden * (config.moe_latent_size or 0)
    expert = _count_inner(config) * config.expert_channels * config.moe_ffn_hidden_size
    return Counts(
        _count_inner(config) * hidden * (config.moe_shared_expert_intermediate_size or 0),
        experts * expert,
        config.moe_router_topk * expert,
        projections,
        count_norm(config, branch) + hidden * experts + projections,
    )


def _keep_mlp(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    yield from keep_input(config, branch, tokens, "mlp_norm", "mlp_fc1")
    width = branch.options.ffn_hidden_size or config.ffn_hidden_size
    inner = tokens.all * width * count_bytes(config) / config.tensor_model_parallel_size
    yield Kept("the first product", inner * (_count_inner(config) - 1), "mlp", "mlp_act", is_factor=True)
    rounded = inner * share_of_rounded(config, branch)
    yield Kept("the activation", rounded, "mlp_act", "mlp_act", is_factor=True, has_gradient=True)


def _keep_experts(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    ranks, sharers = config.tensor_model_parallel_size, config.expert_tensor_parallel_size or 1
    for row in keep_input(config, branch, tokens, "mlp_norm", "mlp_fc1"):
        is_divided = row.part == "layernorm" and tokens.own == tokens.all and ranks > 1
        if not is_divided or config.moe_shared_expert_intermediate_size is not None:
            yield row
        if is_divided:
            # A copy of this rank's part.
            yield row._replace(name="its own tokens of that", bytes=row.bytes / ranks, part="moe")
    width, sides = count_bytes(config), _count_inner(config) - 1
    # Without sequence parallelism, too, tensor-parallel ranks divide the tokens for their experts.
    own = tokens.all / ranks
    # Even routing; ranks that share an expert have the rows of all of them.
    rows = own * config.moe_router_topk * sharers
    product = rows * config.moe_ffn_hidden_size / sharers * width
    by_expert = rows * config.expert_channels * width
    yield Kept("the router's scores", own * config.num_moe_experts * 4 * 4, "moe")
    yield Kept("tokens sorted by expert", by_expert, "moe", "expert_fc1", is_factor=True, has_gradient=True)
    yield Kept("the experts' first product", product * sides, "moe", "moe_act", is_factor=True)
    yield Kept("the activation, weighted", product, "moe_act", "moe_act", is_factor=True, has_gradient=True)
    shared = config.moe_shared_expert_intermediate_size
    if shared is not None:
        yield Kept("the shared expert", tokens.all * shared * width / ranks * (sides + 1), "shared_experts")
    if config.moe_shared_expert_gate:
        yield Kept("its output, which a gate multiplies", tokens.own * config.hidden_size * width, "shared_experts")


_KINDS: dict[str, BranchKind] = {
    kind.name: kind
    for kind in (
        BranchKind(
            "attention", "*", "self_attention", _count_attention, _keep_attention, _count_scores, "per token",
            beside=_take_for_ring,
        ),
        BranchKind(
            "latent_attention", "+", "self_attention", _count_latent_attention, _keep_latent_attention, _count_scores,
            "per token", beside=_take_for_ring,
        ),
        BranchKind(
            "sparse_attention", "D", "self_attention", _count_sparse_attention, _keep_sparse_attention,
            _count_chosen_scores, "per token", under_way=_need_for_indexer,
        ),
        BranchKind(
            "parallel", "", "self_attention", _count_parallel, _keep_parallel, _work_in_parallel, "per token",
            beside=MAMBA.beside,
        ),
        BranchKind("linear_for_attention", "", "self_attention", _count_matrix, _keep_for_attention),
        BranchKind("linear_for_mlp", "", "mlp", _count_matrix, _keep_for_mlp),
        BranchKind("mlp", "-", "mlp", _count_mlp, _keep_mlp),
        BranchKind("experts", "E", "mlp", _count_experts, _keep_experts),
        *COMPRESSED_KINDS,
        *STATE_KINDS,
    )
}  # fmt: skip
