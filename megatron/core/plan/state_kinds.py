# SPDX-License-Identifier: Apache-2.0
"""Kinds of branches whose state has a constant size: Mamba-2, gated delta nets, Kimi delta attention, and short
convolutions (core/ssm).

Their two projections and the convolution are divided over tensor-parallel ranks by heads. Beyond its matrices a token
costs products with a state of K x V numbers for each head: it is read and written, with the delta rule read once more.
Within a chunk of tokens they are made from pairs of tokens instead; that work is the computation's, not the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.core.plan.branch_kind import BranchKind, Config, Counts, Kept, Tokens, count_bytes, count_norm, keep_input
from megatron.core.plan.model_plan import Branch
from megatron.core.plan.state_exchange import Exchange, StateInput

CHUNK = 64
"""Tokens of a chunk."""
PAIRS_AT_ONCE = 2**27
"""Pairs of tokens of all heads that a GPU computes side by side."""
_OF_MAMBA, _OF_DELTA = ("x", "B", "C"), ("query", "key", "value")
"""Sections that pass the convolution."""


def find_mamba_width(config: Config) -> int:
    """Channels of all heads of a Mamba-2 layer."""
    heads, width = config.mamba_num_heads, config.mamba_head_dim
    channels: int = 2 * config.hidden_size if heads is None else heads * width
    return channels


def list_mamba_sections(config: Config) -> dict[str, int]:
    """The outputs of a Mamba-2 layer's first projection, section by section."""
    inner, states = find_mamba_width(config), config.mamba_num_groups * config.mamba_state_dim
    return {"z": inner, "x": inner, "B": states, "C": states, "dt": inner // config.mamba_head_dim}


def list_delta_sections(config: Config) -> dict[str, int]:
    """The outputs of a gated delta net's first projection, section by section."""
    keys, heads = config.linear_num_key_heads * config.linear_key_head_dim, config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}


def list_delta_2_sections(config: Config) -> dict[str, int]:
    """The outputs of the first projection of a gated delta net of the second form, section by section."""
    sizes = list_delta_sections(config)
    keys, values = sizes["key"], sizes["value"]
    return {"query": keys, "key": keys, "value": values, "z": values, "f": keys, "b": keys, "w": values}


KIMI_GATES = ("g", "z")
"""Sections of Kimi delta attention that --linear-gate-rank computes from separate narrow vectors."""


def list_kimi_sections(config: Config) -> dict[str, int]:
    """List what Kimi delta attention projects a token to, section by section."""
    heads = config.linear_num_value_heads
    width = heads * config.linear_value_head_dim
    convolved, gates = dict.fromkeys(("query", "key", "value"), width), dict.fromkeys(KIMI_GATES, width)
    return convolved | ({"beta": heads} | gates if config.linear_gate_rank is not None else gates | {"beta": heads})


def _count(config: Config, sections: dict[str, int], filters: int) -> Counts:
    """filters: elements of the convolution."""
    projections = config.hidden_size * (sum(sections.values()) + sections["z"])
    return Counts(projections + filters, replicated=count_norm(config))


def _count_mamba(config: Config, branch: Branch) -> Counts:
    sections = list_mamba_sections(config)
    return _count(config, sections, 4 * sum(sections[name] for name in _OF_MAMBA))


def _count_delta(config: Config, branch: Branch) -> Counts:
    return _count_convolved(config, list_delta_sections(config))


def _count_delta_2(config: Config, branch: Branch) -> Counts:
    return _count_convolved(config, list_delta_2_sections(config))


def _count_kimi(config: Config, branch: Branch) -> Counts:
    sections, rank = list_kimi_sections(config), config.linear_gate_rank
    counts = _count_convolved(config, sections)
    if rank is None:
        return counts
    gates, hidden = sum(sections[name] for name in KIMI_GATES), config.hidden_size
    down = len(KIMI_GATES) * hidden * rank
    return counts._replace(
        matrices=counts.matrices + (rank - hidden) * gates, projections=down, replicated=counts.replicated + down
    )


def _count_convolved(config: Config, sections: dict[str, int]) -> Counts:
    channels = sum(sections[name] for name in _OF_DELTA)
    return _count(config, sections, config.linear_conv_kernel_dim * channels)


def _work_with_sums(config: Config, branch: Branch, seq_length: int) -> int:
    # Written and read once; D multiplies each channel.
    work: int = find_mamba_width(config) * (2 * config.mamba_state_dim + 1)
    return work


def _work_with_corrections(config: Config, branch: Branch, seq_length: int) -> int:
    work: int = 3 * config.linear_num_value_heads * config.linear_value_head_dim * config.linear_key_head_dim
    return work


def _list_mamba_inputs(config: Config) -> list[StateInput]:
    width, heads = count_bytes(config), list_mamba_sections(config)["dt"]
    shared, of_head = StateInput(config.mamba_num_groups, config.mamba_state_dim, width), StateInput(heads, 1, 4)
    return [shared, shared, StateInput(heads, config.mamba_head_dim, width), of_head, of_head]


def _list_delta_inputs(config: Config) -> list[StateInput]:
    width, heads = count_bytes(config), config.linear_num_value_heads
    shared = StateInput(config.linear_num_key_heads, config.linear_key_head_dim, width)
    strength = StateInput(heads, 1, width)
    # Strength is what erases, too, and is exchanged twice.
    value = StateInput(heads, config.linear_value_head_dim, width)
    return [shared, shared, value, StateInput(heads, 1, 4), strength, strength]


def _list_delta_2_inputs(config: Config) -> list[StateInput]:
    query, key, value, *_ = _list_delta_inputs(config)
    return [query, key, value, key._replace(width=4), key]


def _list_kimi_inputs(config: Config) -> list[StateInput]:
    heads, channels, width = config.linear_num_value_heads, config.linear_value_head_dim, count_bytes(config)
    own, strength = StateInput(heads, channels, width), StateInput(heads, 1, width)
    return [own, own, own, own._replace(width=4), strength, strength]


def weigh_exchange(config: Config, inputs: list[StateInput], tokens: Tokens) -> Exchange | None:
    """Return what context-parallel ranks could send for a layer; None without them. inputs: of all heads."""
    if config.context_parallel_size == 1:
        return None
    ranks = config.tensor_model_parallel_size
    own = [x._replace(heads=max(1, x.heads // ranks)) for x in inputs]
    return Exchange.weigh(own, tokens.all, 2 * tokens.sequences, config.context_parallel_size)


def _keep(
    config: Config,
    tokens: Tokens,
    sections: dict[str, int],
    inputs: list[StateInput],
    held: str = "",
) -> Iterator[Kept]:
    """held: the section of the convolution's output that is read next to linear attention, too."""
    yield from keep_input(config, Branch(""), tokens, "attn_norm", "qkv_linear")
    per_rank = tokens.all / config.tensor_model_parallel_size
    per_channel = per_rank * count_bytes(config)
    query, key, value, *gates = inputs
    of_convolution = per_rank * (query.token_bytes + key.token_bytes + value.token_bytes)
    of_gate, of_skipped = per_channel * sections["z"], per_channel * sections.get("x", 0)
    exchange = weigh_exchange(config, inputs, tokens)
    moves_heads = exchange is not None and exchange.moves_heads
    # What the gate reads has its gradients first, and they wait for the gradients of all sections.
    yield Kept("the gate's section of its first product", of_gate, is_factor=True, has_gradient=True)
    yield Kept("its other sections", per_channel * sum(sections.values()) - of_gate, is_factor=True)
    yield Kept("what of the convolution's output the gate reads, too", of_skipped, has_gradient=True)
    yield Kept("the rest of the convolution's output", of_convolution - of_skipped)
    if moves_heads and held:
        # Else they take the place of the convolution's output, of which a section is a view.
        yield Kept("queries, keys and values of own heads and all ranks' tokens", of_convolution)
    # Of strength that erases, too, there is one tensor, or one for each when they were exchanged.
    yield Kept("decay and strength", per_rank * sum(x.token_bytes for x in (gates if moves_heads else gates[:2])))
    if exchange is not None and not moves_heads:
        wide = 4 * per_rank * value.heads
        values = wide * (value.channels + key.channels)
        yield Kept("values in float32, beside channels for the state before", values)
        yield Kept("what the state before is multiplied by", wide * key.channels)
        pieces, ranks = 2 * config.context_parallel_size * tokens.sequences, config.tensor_model_parallel_size
        of_piece = 4 * value.heads / ranks * key.channels * (2 * value.channels + key.channels)
        yield Kept("states before pieces, and what pieces change", pieces * of_piece)
    # On a CPU, where few chunks are computed at a time, the states between them are kept, too: about 1 %.
    yield Kept("the state's output", of_gate)
    yield Kept("the same behind its gate", of_gate, is_factor=True)


def _keep_mamba(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    return _keep(config, tokens, list_mamba_sections(config), _list_mamba_inputs(config), "x")


def _keep_delta(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    return _keep(config, tokens, list_delta_sections(config), _list_delta_inputs(config))


def _keep_delta_2(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    inputs = _list_delta_2_inputs(config)
    yield from _keep(config, tokens, list_delta_2_sections(config), inputs, "value")
    yield Kept("weighed values", tokens.all / config.tensor_model_parallel_size * inputs[2].token_bytes)


def _keep_kimi(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    yield from _keep(config, tokens, list_kimi_sections(config), _list_kimi_inputs(config))
    if config.linear_gate_rank is not None:
        narrow = tokens.own * len(KIMI_GATES) * config.linear_gate_rank * count_bytes(config)
        yield Kept("the vectors that its gates are made of", narrow, is_factor=True)


def list_short_sections(config: Config) -> dict[str, int]:
    """The outputs of a short convolution's first projection, section by section: two gates, and what is convolved."""
    return dict.fromkeys(("B", "C", "x"), config.hidden_size)


def _count_short(config: Config, branch: Branch) -> Counts:
    hidden = config.hidden_size
    return Counts(4 * hidden**2 + config.short_conv_kernel_dim * hidden, replicated=count_norm(config))


def _keep_short(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    yield from keep_input(config, branch, tokens, "attn_norm", "qkv_linear")
    section = tokens.all / config.tensor_model_parallel_size * config.hidden_size * count_bytes(config)
    yield Kept("its three sections", 3 * section, is_factor=True, has_gradient=True)
    yield Kept("the convolution's input and output", 2 * section, has_gradient=True)
    yield Kept("its gated output", section, is_factor=True, has_gradient=True)


_WIDE_GRADIENT = 0.9
"""More copies of values whose gradient is in float32, too."""


class _Slab(NamedTuple):
    """Float32 copies that backward of the chunks that are computed at once holds at its fullest moment, as counted on a
    device that counts memory (tests/unit/planner/test_memory_of_states.py)."""

    by_head: float
    """Of queries or keys, once for each head of values."""
    pairs: float
    values: float
    keys: float
    """Of queries or keys, by heads of queries and keys."""
    states: float
    """One for each chunk."""

    def count_bytes(self, config: Config, tokens: Tokens, inputs: list[StateInput]) -> float:
        """inputs: of all heads on all ranks."""
        query, _, value, *_ = inputs
        ranks, count, width = config.tensor_model_parallel_size, tokens.all, value.channels
        exchange = weigh_exchange(config, inputs, tokens)
        if exchange is not None and exchange.moves_heads:
            ranks, count = ranks * config.context_parallel_size, count * config.context_parallel_size
        elif exchange is not None:
            width += query.channels  # for the state before each piece
        heads, groups, key = max(1, value.heads // ranks), max(1, query.heads // ranks), query.channels
        at_once = min(count, PAIRS_AT_ONCE / (heads * CHUNK))
        is_wider = exchange is not None and not exchange.moves_heads
        values = self.values + (_WIDE_GRADIENT if is_wider else 0.0)
        of_token = heads * (self.by_head * key + self.pairs * CHUNK + values * width) + self.keys * groups * key
        taken = 4 * at_once * (of_token + self.states * heads * key * width / CHUNK)
        # What is behind linear attention is freed before: its output, that behind its gate, what a state is added by.
        behind = 2 * value.channels * value.width + (4 * key if width > value.channels else 0)
        return taken - count * heads * behind


def _take_for_mamba(config: Config, branch: Branch, tokens: Tokens) -> float:
    return _Slab(3.3, 3.9, 5.6, 8.6, 2.7).count_bytes(config, tokens, _list_mamba_inputs(config))


def _take_for_delta(config: Config, branch: Branch, tokens: Tokens) -> float:
    return _Slab(8.7, 8.0, 6.7, 11.5, 2.1).count_bytes(config, tokens, _list_delta_inputs(config))


def _take_for_delta_2(config: Config, branch: Branch, tokens: Tokens) -> float:
    return _Slab(4.1, 0.0, 6.5, 41.2, 1.8).count_bytes(config, tokens, _list_delta_2_inputs(config))


def _take_for_kimi(config: Config, branch: Branch, tokens: Tokens) -> float:
    return _Slab(0.0, 6.1, 6.0, 42.3, 2.1).count_bytes(config, tokens, _list_kimi_inputs(config))


MAMBA = BranchKind(
    "mamba", "M", "mixer", _count_mamba, _keep_mamba, _work_with_sums, "per sequence",
    list_mamba_sections, _OF_MAMBA, _list_mamba_inputs, _take_for_mamba,
)  # fmt: skip
GATED_DELTA_NET = BranchKind(
    "gated_delta_net", "G", "self_attention", _count_delta, _keep_delta, _work_with_corrections, "per sequence",
    list_delta_sections, _OF_DELTA, _list_delta_inputs, _take_for_delta,
)  # fmt: skip
GATED_DELTA_NET_2 = BranchKind(
    "gated_delta_net_2", "", "self_attention", _count_delta_2, _keep_delta_2, _work_with_corrections, "per sequence",
    list_delta_2_sections, _OF_DELTA, _list_delta_2_inputs, _take_for_delta_2,
)  # fmt: skip
KIMI_DELTA = BranchKind(
    "kimi_delta", "K", "self_attention", _count_kimi, _keep_kimi, _work_with_corrections, "per sequence",
    list_kimi_sections, _OF_DELTA, _list_kimi_inputs, _take_for_kimi,
)  # fmt: skip
SHORT_CONVOLUTION = BranchKind(
    "short_convolution", "L", "self_attention", _count_short, _keep_short, state="per sequence",
    sections=list_short_sections, convolved=("x",),
)  # fmt: skip
STATE_KINDS = (MAMBA, GATED_DELTA_NET, GATED_DELTA_NET_2, KIMI_DELTA, SHORT_CONVOLUTION)
