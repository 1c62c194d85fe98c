# SPDX-License-Identifier: Apache-2.0
"""Kinds of branches and their costs, a row for each.

| kind             | letter | module         | the branch                                          |
|------------------|--------|----------------|-----------------------------------------------------|
| attention        | *      | self_attention | attention with packed heads                         |
| latent_attention | +      | self_attention | attention whose keys and values are latent vectors  |
| mlp              | -      | mlp            | two products around an activation                   |
| experts          | E      | mlp            | a router and many MLPs of which few work on a token |

A program of a user's own adds a row by `register_kind`, before it makes a config with the kind's letter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron.core.errors import ConfigError
from megatron.core.plan.model_plan import Branch

Config = Any
"""A TransformerConfig, which reads plans itself."""


class Tokens(NamedTuple):
    """Tokens of a microbatch on one process; share of one where they do not divide evenly."""

    all: float
    """In products and in attention, over all tensor-parallel ranks."""
    own: float
    """In hidden states outside of products: a part of them with sequence parallelism."""


class Counts(NamedTuple):
    """Elements of the parameters of one branch with its norm, or of several; biases do not count."""

    matrices: int = 0
    """Matrices of attention, dense MLPs and shared experts, which tensor parallelism divides."""
    expert_matrices: int = 0
    """Matrices of all experts but shared ones."""
    active_expert_matrices: int = 0
    """Matrices of the experts that work on one token."""
    projections: int = 0
    """Matrices that each rank has as a whole, to latent vectors and back: a part of `replicated`."""
    replicated: int = 0
    """Norms, routers and projections to latent vectors, which tensor parallelism does not divide."""

    @property
    def sum_of_all(self) -> int:
        """Elements of all kinds."""
        return self.matrices + self.expert_matrices + self.replicated

    @property
    def idle(self) -> int:
        """Elements that do not work on a given token."""
        return self.expert_matrices - self.active_expert_matrices

    @classmethod
    def sum(cls, counts: Sequence[Counts]) -> Counts:
        """Add up field by field."""
        return cls(*map(sum, zip(*counts, strict=True)))


class Kept(NamedTuple):
    """A tensor, or several of one kind, that a branch keeps of one microbatch for backward."""

    name: str
    bytes: float
    part: str | None = None
    """The entry of --recompute-modules that leaves it out."""
    place: str | None = None
    """The entry of --offload-modules that lets it wait on the host."""
    is_factor: bool = False
    """A product's input, or as large as its output: there until the weight has its gradient, where that is deferred."""
    has_gradient: bool = False
    """A gradient of its size lives in backward of the branch."""


def _nothing_beyond_matrices(config: Config, branch: Branch, seq_length: int) -> int:
    return 0


@dataclass(frozen=True)
class BranchKind:
    """A row of the table."""

    name: str
    letter: str
    """In the pattern of a hybrid; one character."""
    attribute: str
    """The module in a layer, and in names of checkpoints: self_attention, mixer or mlp."""
    count: Callable[[Config, Branch], Counts]
    """Its parameters."""
    kept: Callable[[Config, Branch, Tokens], Iterator[Kept]]
    """Tensors for backward when nothing is recomputed or offloaded: its input, its norm's output, the rest."""
    work: Callable[[Config, Branch, int], int] = _nothing_beyond_matrices
    """Products in forward, for an average token of a sequence of so many, beyond those with its matrices."""
    state: Literal["per token", "per sequence"] | None = None
    """Memory of a sequence in generation: something of each token, such as keys and values, or a state that stays as
    large however long the sequence is."""
    spec: Any = None
    """A ModuleSpec or a class. None: the layer's spec has a part for this kind."""


def find_kind(name: str) -> BranchKind:
    """Return the row of a kind. Raises ConfigError where there is none."""
    if name not in _KINDS:
        raise ConfigError(f"there is no kind of layer {name!r}; register_kind adds one to {', '.join(_KINDS)}")
    return _KINDS[name]


def list_letters() -> dict[str, str]:
    """Return letter -> name of all kinds."""
    return {kind.letter: kind.name for kind in _KINDS.values()}


def register_kind(kind: BranchKind) -> None:
    """Add a kind of layers, whose letter --hybrid-layer-pattern may then have. Raises ConfigError where its name or
    letter is another kind's, or its letter none."""
    if len(kind.letter) != 1 or kind.letter in "|/ ":
        raise ConfigError(f"{kind.letter!r} cannot stand for {kind.name}; use one character that is not | or /")
    taken = list_letters().get(kind.letter, kind.name)
    if taken != kind.name or _KINDS.get(kind.name, kind) != kind:
        raise ConfigError(f"the kind {kind.name} with the letter {kind.letter} meets {taken}; use other ones")
    _KINDS[kind.name] = kind


# ---- what all have: a norm, and an input


def count_norm(config: Config) -> int:
    """Elements of a norm over the hidden size: LayerNorm has a bias beside the weight, RMSNorm has none."""
    elements: int = (2 if config.normalization == "LayerNorm" else 1) * config.hidden_size
    return elements


def count_bytes(config: Config) -> int:
    """Bytes of a value in the format that the model computes in."""
    return 2 if config.bf16 or config.fp16 else 4


def share_of_rounded(config: Config, branch: Branch) -> float:
    """The size of a product's input as it waits for backward, in FP8 with its scales, over what it is in forward."""
    rounded: float | None = config.rounded_input_bytes
    return rounded / count_bytes(config) if rounded is not None and branch.low_precision else 1.0


def keep_input(config: Config, branch: Branch, tokens: Tokens, norm: str, product: str) -> Iterator[Kept]:
    """Yield what every branch keeps before its body: its input, and its norm's output. norm, product: names of both in
    --offload-modules."""
    hidden = tokens.own * config.hidden_size * count_bytes(config)
    stream = tokens.own * config.hidden_size * 4 if config.fp32_residual_connection else hidden
    yield Kept("the branch's input", stream, place=norm)
    yield Kept("its norm's output", hidden * share_of_rounded(config, branch), "layernorm", product, is_factor=True)
    if config.hidden_dropout:
        yield Kept("which elements are dropped", tokens.own * config.hidden_size)


# ---- attention


def _count_attention(config: Config, branch: Branch) -> Counts:
    hidden, heads = config.hidden_size, config.num_attention_heads
    queries, output = heads * config.query_width, heads * config.value_width * hidden
    gates = queries if config.attention_output_gate else 0
    packed = hidden * (queries + gates + 2 * config.num_query_groups * config.query_width)
    return Counts(packed + output, replicated=count_norm(config))


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


def _count_seen_twice(branch: Branch, seq_length: int) -> int:
    """Twice the tokens that an average one sees: half of the full square of a causal sequence, of each of its chunks,
    or of what a window leaves of it."""
    chunk = min(branch.options.chunk or seq_length, seq_length)
    # Whole chunks, and what is left of the sequence.
    pairs = seq_length // chunk * chunk**2 + (seq_length % chunk) ** 2
    if branch.options.window is not None:
        pairs -= max(0, seq_length - branch.options.window - 1) ** 2
    return pairs // seq_length


def _keep_attention(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    yield from keep_input(config, branch, tokens, "attn_norm", "qkv_linear")
    ranks, heads = config.tensor_model_parallel_size, config.num_attention_heads
    groups = max(config.num_query_groups, ranks)  # with fewer groups than ranks, each has one whole
    per_head = tokens.all * config.query_width * count_bytes(config) / ranks
    packed = per_head * (heads + 2 * groups)
    yield Kept("packed queries, keys, values", packed, place="core_attn", is_factor=True, has_gradient=True)
    # Queries of several heads lie between the keys of their groups; kernels want them without gaps.
    if heads > config.num_query_groups:
        yield Kept("queries by heads", per_head * heads, place="core_attn")
    yield from _keep_output(config, tokens)


def _keep_latent_attention(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    yield from keep_input(config, branch, tokens, "attn_norm", "qkv_linear")
    width = count_bytes(config)
    # Of a latent vector that is normalised both sides are kept.
    latents = (config.kv_lora_rank + (config.q_lora_rank or 0)) * (2 if config.qk_layernorm else 1)
    yield Kept("latent vectors", tokens.own * (latents + config.qk_pos_emb_head_dim) * width, place="qkv_linear")
    per_head = tokens.all * width / config.tensor_model_parallel_size * config.num_attention_heads
    yield Kept("queries and keys", 2 * per_head * config.query_width, "mla_up_proj", "core_attn", has_gradient=True)
    yield Kept("values", per_head * config.value_width, "mla_up_proj", "core_attn", has_gradient=True)
    yield from _keep_output(config, tokens)


def _keep_output(config: Config, tokens: Tokens) -> Iterator[Kept]:
    per_rank = tokens.all * config.num_attention_heads / config.tensor_model_parallel_size
    output = per_rank * config.value_width * count_bytes(config)
    yield Kept("attention's output", output, place="attn_proj", is_factor=True, has_gradient=True)
    yield Kept("its log-sum-exp", per_rank * 4)


# ---- MLP and experts


def _count_mlp(config: Config, branch: Branch) -> Counts:
    return Counts(_count_inner(config) * config.ffn_hidden_size * config.hidden_size, replicated=count_norm(config))


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
        count_norm(config) + hidden * experts + projections,
    )


def _keep_mlp(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    yield from keep_input(config, branch, tokens, "mlp_norm", "mlp_fc1")
    inner = tokens.all * config.ffn_hidden_size * count_bytes(config) / config.tensor_model_parallel_size
    yield Kept("the first product", inner * (_count_inner(config) - 1), "mlp", "mlp_act", is_factor=True)
    rounded = inner * share_of_rounded(config, branch)
    yield Kept("the activation", rounded, "mlp_act", "mlp_act", is_factor=True, has_gradient=True)


def _keep_experts(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    yield from keep_input(config, branch, tokens, "mlp_norm", "mlp_fc1")
    ranks, sharers = config.tensor_model_parallel_size, config.expert_tensor_parallel_size or 1
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


_KINDS: dict[str, BranchKind] = {
    kind.name: kind
    for kind in (
        BranchKind("attention", "*", "self_attention", _count_attention, _keep_attention, _count_scores, "per token"),
        BranchKind(
            "latent_attention", "+", "self_attention", _count_latent_attention, _keep_latent_attention, _count_scores,
            "per token",
        ),
        BranchKind("mlp", "-", "mlp", _count_mlp, _keep_mlp),
        BranchKind("experts", "E", "mlp", _count_experts, _keep_experts),
    )
}  # fmt: skip
