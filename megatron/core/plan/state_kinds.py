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
"""Sections of Kimi delta attention that --linear-gate-rank makes of narrow vectors of their own."""


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


def _keep(
    config: Config,
    tokens: Tokens,
    sections: dict[str, int],
    convolved: tuple[str, ...],
    wide: int,
    narrow: int = 0,
) -> Iterator[Kept]:
    """wide, narrow: numbers of decay and strength for each token, in float32 and in the model's format."""
    yield from keep_input(config, Branch(""), tokens, "attn_norm", "qkv_linear")
    per_rank = tokens.all / config.tensor_model_parallel_size
    per_channel = per_rank * count_bytes(config)
    of_convolution = per_channel * sum(sections[name] for name in convolved)
    of_gate, of_skipped = per_channel * sections["z"], per_channel * sections.get("x", 0)
    # What the gate reads has its gradients first, and they wait for those of all sections.
    yield Kept("the gate's section of its first product", of_gate, is_factor=True, has_gradient=True)
    yield Kept("its other sections", per_channel * sum(sections.values()) - of_gate, is_factor=True)
    yield Kept("what of the convolution's output the gate reads, too", of_skipped, has_gradient=True)
    yield Kept("the rest of the convolution's output", of_convolution - of_skipped)
    yield Kept("decay and strength", per_rank * 4 * wide + per_channel * narrow)
    # On a CPU, where few chunks are computed at a time, the states between them are kept, too: about 1 %.
    yield Kept("the state's output", of_gate, has_gradient=True)
    yield Kept("the same behind its gate", of_gate, is_factor=True)


def _keep_mamba(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    sections = list_mamba_sections(config)
    return _keep(config, tokens, sections, _OF_MAMBA, 2 * sections["dt"])


def _keep_delta(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    sections = list_delta_sections(config)
    return _keep(config, tokens, sections, _OF_DELTA, sections["alpha"], sections["beta"])


def _keep_delta_2(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    sections = list_delta_2_sections(config)
    narrow = sections["b"] + sections["w"]
    return _keep(config, tokens, sections, _OF_DELTA, sections["f"], narrow)


def _keep_kimi(config: Config, branch: Branch, tokens: Tokens) -> Iterator[Kept]:
    sections = list_kimi_sections(config)
    yield from _keep(config, tokens, sections, _OF_DELTA, sections["g"], sections["beta"])
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


class _Slab(NamedTuple):
    """Float32 copies that backward of the chunks that are computed at once holds at its fullest moment, as counted on a
    device that counts memory (tests/unit/planner/test_memory_of_states.py)."""

    by_head: float
    """Of queries or keys, once for each head of values."""
    pairs: float
    values: float
    keys: float
    """Of queries or keys by their own heads."""
    states: float
    """One for each chunk."""

    def count_bytes(self, config: Config, tokens: Tokens, heads: int, groups: int, key: int, value: int) -> float:
        """heads, groups: of values, and of queries and keys, on all ranks. key, value: channels of one."""
        ranks = config.tensor_model_parallel_size
        heads, groups = max(1, heads // ranks), max(1, groups // ranks)
        at_once = min(tokens.all, PAIRS_AT_ONCE / (heads * CHUNK))
        of_token = heads * (self.by_head * key + self.pairs * CHUNK + self.values * value) + self.keys * groups * key
        return 4 * at_once * (of_token + self.states * heads * key * value / CHUNK)


def _take_for_mamba(config: Config, branch: Branch, tokens: Tokens) -> float:
    heads, width = list_mamba_sections(config)["dt"], config.mamba_head_dim
    slab = _Slab(4.0, 3.2, 5.0, 8.9, 2.1)
    return slab.count_bytes(config, tokens, heads, config.mamba_num_groups, config.mamba_state_dim, width)


def _take_for_delta(config: Config, branch: Branch, tokens: Tokens) -> float:
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    widths = (config.linear_key_head_dim, config.linear_value_head_dim)
    return _Slab(8.9, 8.8, 6.0, 10.5, 2.1).count_bytes(config, tokens, heads, groups, *widths)


def _take_for_kimi(config: Config, branch: Branch, tokens: Tokens) -> float:
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    return _Slab(11.9, 14.6, 11.9, 11.9, 6.3).count_bytes(config, tokens, heads, heads, width, width)


MAMBA = BranchKind(
    "mamba", "M", "mixer", _count_mamba, _keep_mamba, _work_with_sums, "per sequence",
    list_mamba_sections, _OF_MAMBA, _take_for_mamba,
)  # fmt: skip
GATED_DELTA_NET = BranchKind(
    "gated_delta_net", "G", "self_attention", _count_delta, _keep_delta, _work_with_corrections, "per sequence",
    list_delta_sections, _OF_DELTA, _take_for_delta,
)  # fmt: skip
GATED_DELTA_NET_2 = BranchKind(
    "gated_delta_net_2", "", "self_attention", _count_delta_2, _keep_delta_2, _work_with_corrections, "per sequence",
    list_delta_2_sections, _OF_DELTA, _take_for_delta,
)  # fmt: skip
KIMI_DELTA = BranchKind(
    "kimi_delta", "K", "self_attention", _count_kimi, _keep_kimi, _work_with_corrections, "per sequence",
    list_kimi_sections, _OF_DELTA, _take_for_kimi,
)  # fmt: skip
SHORT_CONVOLUTION = BranchKind(
    "short_convolution", "L", "self_attention", _count_short, _keep_short, state="per sequence",
    sections=list_short_sections, convolved=("x",),
)  # fmt: skip
STATE_KINDS = (MAMBA, GATED_DELTA_NET, GATED_DELTA_NET_2, KIMI_DELTA, SHORT_CONVOLUTION)
