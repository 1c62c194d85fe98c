# SPDX-License-Identifier: Apache-2.0
"""A kind of branch: the row that says its letter, its module, and what it costs; and what all kinds have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron.core.plan.model_plan import Branch
from megatron.core.plan.state_exchange import StateInput

Config = Any
"""A TransformerConfig, which reads plans itself."""


class Tokens(NamedTuple):
    """Tokens of a microbatch on one process; share of one where they do not divide evenly."""

    all: float
    """In products and in attention, over all tensor-parallel ranks."""
    own: float
    """In hidden states outside of products: a part of them with sequence parallelism."""
    sequences: float = 1.0
    """Of the microbatch, of which the process may have a part of each."""
    scored: float = 0.0
    """Keys of a token whose probabilities are kept, where attention is written out; a kernel keeps none."""


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
    frozen: int = 0
    """Of them those that nothing trains: of indexers without a loss."""

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


def _nothing_for_itself(config: Config, branch: Branch, tokens: Tokens) -> float:
    return 0.0


@dataclass(frozen=True)
class BranchKind:
    """A row of the table."""

    name: str
    letter: str
    """In the pattern of a hybrid; one character, or none for a kind that settings choose in place of another."""
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
    sections: Callable[[Config], dict[str, int]] | None = None
    """Of a mixer whose first projection has named sections: their outputs, in order."""
    convolved: tuple[str, ...] = ()
    """The sections that pass its convolution; neighbours."""
    inputs: Callable[[Config], list[StateInput]] | None = None
    """Of a mixer with linear attention: what that reads of each token, for all heads."""
    beside: Callable[[Config, Branch, Tokens], float] = _nothing_for_itself
    """Bytes that its backward needs in addition to the gradients of what is kept."""
    under_way: Callable[[Config, Branch, Tokens], float] = _nothing_for_itself
    """Bytes that its forward needs in addition to what is kept."""
    spec: Any = None
    """A ModuleSpec or a class. None: the layer's spec has a part for this kind."""
    missing: str | None = None
    """Of a kind whose layers are counted and numbered, but cannot be built: what to use instead."""


def count_norm(config: Config, branch: Branch | None = None) -> int:
    """Elements of a norm over the hidden size, a branch's or any: LayerNorm has a weight and a bias, RMSNorm only a
    weight."""
    if config.norm_parameters == "none" or (branch is not None and branch.options.norm == "shared"):
        return 0
    has_bias = config.normalization == "LayerNorm" and config.norm_parameters == "all"
    elements: int = (2 if has_bias else 1) * config.hidden_size
    return elements


def count_bytes(config: Config) -> int:
    """Bytes of a value in the format that the model computes in."""
    return 2 if config.bf16 or config.fp16 else 4


def share_of_rounded(config: Config, branch: Branch) -> float:
    """The size of a product's input as it is saved for backward, in FP8 with its scales, divided by its size in
    forward."""
    rounded: float | None = config.rounded_input_bytes
    return rounded / count_bytes(config) if rounded is not None and branch.low_precision else 1.0


def keep_input(config: Config, branch: Branch, tokens: Tokens, norm: str, product: str) -> Iterator[Kept]:
    """Yield what every branch keeps before its body: its input, and its norm's output. norm, product: names of both in
    --offload-modules."""
    hidden = tokens.own * config.hidden_size * count_bytes(config)
    stream = tokens.own * config.hidden_size * 4 if config.fp32_residual_connection else hidden
    if config.num_streams is not None:
        yield Kept("the residual streams", stream * config.num_streams)
        yield Kept("the branch's output", stream)
        rows, streams, width = count_mapped_rows(config), config.num_streams, count_bytes(config)
        yield Kept(
            "products and weights of the streams", tokens.own * (4 * (rows + 1) + width * streams * (streams + 1))
        )
    if branch.options.norm != "shared":
        yield Kept("the branch's input", stream, place=norm)
        yield Kept("its norm's output", hidden * share_of_rounded(config, branch), "layernorm", product, is_factor=True)
    if config.hidden_dropout:
        yield Kept("which elements are dropped", tokens.own * config.stream_width)


# ---- hyper-connections, which every branch of a model has


def count_mapped_rows(config: Config) -> int:
    """Outputs of the product that says how a branch reads and mixes the residual streams; 0 without streams."""
    streams: int = config.num_streams or 0
    return streams * (streams + 2)


def count_connection(config: Config) -> Counts:
    """Parameters with which a branch reads and mixes the residual streams."""
    elements = count_mapped_rows(config) * config.stream_width
    return Counts(projections=elements, replicated=elements)


def work_on_streams(config: Config) -> int:
    """Products in forward for a token and a branch: the sum of the streams that it reads, their mixture, and its output
    in each of them."""
    return count_mapped_rows(config) * config.hidden_size  # type: ignore[no-any-return]
