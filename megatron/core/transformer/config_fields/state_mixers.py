# SPDX-License-Identifier: Apache-2.0
"""Mixers whose state has a constant size: Mamba-2 and gated delta nets (megatron/core/ssm)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import flag, name_multiples
from megatron.core.flag_texts import layer_pattern
from megatron.core.plan.read import read_plan
from megatron.core.plan.state_kinds import find_mamba_width
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.positions import PositionFields


def _needs_letter(letters: str) -> Needs:
    return Needs(
        f"--hybrid-layer-pattern with the letter {' or '.join(letters)}",
        lambda run: bool(set(letters) & set(run.hybrid_layer_pattern or "")),
    )


_BESIDE = Needs("--mamba-beside-attention", lambda run: run.mamba_beside_attention)
_MAMBA = Needs(
    "--hybrid-layer-pattern with the letter M, or --mamba-beside-attention",
    lambda run: "M" in (run.hybrid_layer_pattern or "") or run.mamba_beside_attention,
)
_DELTA = Needs(
    "a gated delta net, --linear-attention-freq with --experimental-attention-variant or the letter G or K in "
    "--hybrid-layer-pattern",
    lambda run: run.linear_attention_freq is not None or bool({"G", "K"} & set(run.hybrid_layer_pattern or "")),
)
_CENTRED = Needs("--apply-layernorm-1p", lambda run: run.layernorm_zero_centered_gamma and _DELTA.met(run))
_VARIANT = Needs("--experimental-attention-variant gdn or gdn2", lambda run: run.experimental_attention_variant)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class StateMixerFields(PositionFields):
    """Heads and widths of states."""

    experimental_attention_variant: str | None = flag(
        None, choices=("gdn", "gdn2", "dsa", "dsv4_hybrid", "gated_delta_net"), kind="shape"
    )
    """dsa: sparse attention, latent attention of all layers to tokens that an indexer chooses. dsv4_hybrid: attention
    to a window and to compressed entries (DeepSeek-V4), as --csa-compress-ratios lists. Else the mixer that
    --linear-attention-freq puts in place of softmax attention: gdn a gated delta net, gdn2 its second form, whose gates
    differ by channel. With --hybrid-layer-pattern, the form of the letter G. gated_delta_net is an earlier name of
    gdn."""
    linear_attention_freq: int | list[int] | None = flag(None, parse=layer_pattern, kind="shape", needs=_VARIANT)
    """Layers of a GPT with linear attention: a number means every n-th has softmax attention and the others have not, a
    list has one entry per layer, 1 for linear attention."""
    mamba_beside_attention: bool = flag(False, kind="shape")
    """Each layer has a Mamba-2 mixer beside attention, both on the same normalised input; their outputs are added
    (Falcon-H1). For decoders that letters describe, there is a layer for each instead."""
    attention_input_multiplier: float = flag(1.0, above=0, kind="function", needs=_BESIDE)
    """Factor on the input of attention that has Mamba-2 beside it."""
    attention_output_multiplier: float = flag(1.0, above=0, kind="function", needs=_BESIDE)
    """Factor on the output of attention that has Mamba-2 beside it."""
    mamba_input_multiplier: float = flag(1.0, above=0, kind="function", needs=_BESIDE)
    """Factor on the input of Mamba-2 beside attention."""
    mamba_output_multiplier: float = flag(1.0, above=0, kind="function", needs=_BESIDE)
    """Factor on the output of Mamba-2 beside attention."""
    mamba_section_multipliers: list[float] | None = flag(None, nargs=5, above=0, kind="function", needs=_MAMBA)
    """Factors on the five sections of a Mamba-2 layer's first product: z, x, B, C and dt; 1 when not given."""
    mamba_state_dim: int = flag(128, minimum=1, maximum=65536, kind="shape", needs=_MAMBA)
    """Numbers that a Mamba-2 layer keeps for each channel of a head (N)."""
    mamba_head_dim: int = flag(64, minimum=1, maximum=65536, kind="shape", needs=_MAMBA)
    """Channels of a Mamba-2 head (P)."""
    mamba_num_groups: int = flag(8, minimum=1, maximum=65536, kind="shape", needs=_MAMBA)
    """Groups of Mamba-2 heads; the heads of a group read and write their states in the same way (B and C)."""
    mamba_num_heads: int | None = flag(None, minimum=1, maximum=2**20, kind="shape", needs=_MAMBA)
    """Mamba-2 heads; twice the hidden size over the channels of a head when not given."""
    mamba_norm_epsilon: float = flag(1e-5, above=0, kind="function", needs=_MAMBA)
    """Added to the mean square in the norm of a Mamba-2 layer's gated output."""
    mamba_gate_norm: str = flag("gated", choices=("gated", "ungated", "none"), kind="shape", needs=_MAMBA)
    """Input of a Mamba-2 layer's norm before its output projection: gated, the output times silu(z); ungated, the
    output alone, which is gated afterwards; none, nothing (Falcon-H1)."""
    mamba_dt_min: float = flag(0.0, minimum=0, kind="function", needs=_MAMBA)
    """Smallest step of a Mamba-2 state; softplus(dt + dt_bias) is raised to it (Nemotron-H in transformers)."""
    mamba_dt_max: float | None = flag(None, above=0, kind="function", needs=_MAMBA)
    """Largest step of a Mamba-2 state; no limit when not given."""
    mamba_conv_bias: bool = flag(True, off_names=("--disable-mamba-conv-bias",), kind="shape", needs=_MAMBA)
    """A bias in the convolution of a Mamba-2 layer."""
    mamba_proj_bias: bool = flag(False, kind="shape", needs=_MAMBA)
    """Biases in both projections of a Mamba-2 layer."""
    linear_allow_neg_eigval: bool = flag(False, kind="function", needs=_DELTA)
    """The delta rule of a gated delta net, and of Kimi delta attention, writes with a strength between 0 and 2, twice
    the sigmoid (OLMo Hybrid): what it changes in the state may then have negative eigenvalues (Grazzi et al., 2025)."""
    linear_norm_epsilon: float | None = flag(None, above=0, kind="function", needs=_DELTA)
    """Added to the mean square in the norm of the heads of a gated delta net; --norm-epsilon when not given."""
    linear_norm_1p: bool = flag(True, off_names=("--no-linear-norm-1p",), kind="function", needs=_CENTRED)
    """With --apply-layernorm-1p the weight of the norm of a delta net's heads, too, is stored as (weight - 1); without
    this it is stored as it is (Qwen3-Next's files)."""
    linear_gate_rank: int | None = flag(None, minimum=1, maximum=65536, kind="shape", needs=_needs_letter("K"))
    """Kimi delta attention makes its decay and its output's gate of vectors of so many numbers, by two matrices each
    (Kimi Linear: as many as a head has channels); by one matrix each when not given."""
    short_conv_kernel_dim: int = flag(3, minimum=1, maximum=64, kind="shape", needs=_needs_letter("L"))
    """Tokens that a short convolution reads (LFM 2)."""
    short_conv_bias: bool = flag(False, kind="shape", needs=_needs_letter("L"))
    """Biases in a short convolution and in the two projections around it."""
    linear_conv_kernel_dim: int = flag(4, minimum=1, maximum=64, kind="shape", needs=_DELTA)
    """Tokens that the convolution of a gated delta net reads."""
    linear_key_head_dim: int = flag(128, minimum=1, maximum=65536, kind="shape", needs=_DELTA)
    """Channels of a query and of a key head of a gated delta net."""
    linear_value_head_dim: int = flag(128, minimum=1, maximum=65536, kind="shape", needs=_DELTA)
    """Channels of a value head of a gated delta net."""
    linear_num_key_heads: int = flag(16, minimum=1, maximum=2**20, kind="shape", needs=_DELTA)
    """Query and key heads of a gated delta net."""
    linear_num_value_heads: int = flag(32, minimum=1, maximum=2**20, kind="shape", needs=_DELTA)
    """Value heads of a gated delta net, a multiple of its key heads."""

    @property
    def mamba_inner_width(self) -> int:
        """Channels of all Mamba-2 heads."""
        assert self.hidden_size is not None
        return find_mamba_width(self)

    @property
    def head_norm_epsilon(self) -> float:
        """Added to the mean square in the norm of a delta net's heads."""
        return self.layernorm_epsilon if self.linear_norm_epsilon is None else self.linear_norm_epsilon

    @property
    def stores_head_norm_offset(self) -> bool:
        """True where the weight of the norm of a delta net's heads is stored as (weight - 1)."""
        return self.layernorm_zero_centered_gamma and self.linear_norm_1p

    def rules(self) -> Iterator[str]:
        kinds, ranks = {branch.kind for branch in read_plan(self).branches()}, self.tensor_model_parallel_size
        if kinds & {"mamba", "parallel"}:
            yield from self._mamba_problems(ranks)
        if kinds & {"gated_delta_net", "gated_delta_net_2", "kimi_delta"}:
            yield from self._delta_problems(ranks)
        if "gated_delta_net_2" in kinds and self.linear_allow_neg_eigval:
            yield (
                "--linear-allow-neg-eigval doubles the strength of a head, and gdn2 has one for each channel; leave "
                "one of them out"
            )
        if "kimi_delta" in kinds:
            yield from self._kimi_problems()
        if "short_convolution" in kinds and self.hidden_size and self.hidden_size % ranks:
            yield (
                f"{self.say('tensor_model_parallel_size')} cannot share the {self.hidden_size} channels of a short "
                f"convolution; use a divisor of {self.say('hidden_size')}"
            )
        if self.mamba_beside_attention and self.multi_latent_attention:
            yield (
                "--mamba-beside-attention stands beside packed heads, and --multi-latent-attention has none; leave one "
                "out"
            )
        is_named = self.linear_attention_freq is not None or self.hybrid_layer_pattern is not None
        if self.experimental_attention_variant not in (None, "dsa", "dsv4_hybrid") and not is_named:
            yield (
                f"{self.say('experimental_attention_variant')} does not say which layers have it; add "
                "--linear-attention-freq, or use --hybrid-layer-pattern with the letter G"
            )

    def _mamba_problems(self, ranks: int) -> Iterator[str]:
        inner, width, groups = self.mamba_inner_width, self.mamba_head_dim, self.mamba_num_groups
        if inner % width:
            yield (
                f"{self.say('mamba_head_dim')} does not divide the {inner} channels of a Mamba-2 layer, twice the "
                "hidden size; change it, or give --mamba-num-heads"
            )
        elif inner // width % groups:
            yield f"{self.say('mamba_num_groups')} does not divide the {inner // width} Mamba-2 heads; use a divisor"
        if groups % ranks:
            yield (
                f"{self.say('tensor_model_parallel_size')} cannot share {self.say('mamba_num_groups')}; use a divisor "
                f"of {groups}, or a multiple of {ranks} groups"
            )
        if self.mamba_dt_max is not None and self.mamba_dt_max <= self.mamba_dt_min:
            yield f"{self.say('mamba_dt_max')} is not above {self.say('mamba_dt_min')}; raise it, or leave one out"

    def _delta_problems(self, ranks: int) -> Iterator[str]:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            yield (
                f"{self.say('linear_num_value_heads')} must be a multiple of {self.say('linear_num_key_heads')}; "
                f"use {name_multiples(values, keys)} heads"
            )
        for name, heads in (("linear_num_key_heads", keys), ("linear_num_value_heads", values)):
            if heads % ranks:
                yield (
                    f"{self.say('tensor_model_parallel_size')} cannot share {self.say(name)}; use "
                    f"{name_multiples(heads, ranks)} heads, or other ranks"
                )

    def _kimi_problems(self) -> Iterator[str]:
        for key, value in (
            ("linear_num_key_heads", "linear_num_value_heads"),
            ("linear_key_head_dim", "linear_value_head_dim"),
        ):
            if getattr(self, key) != getattr(self, value):
                yield (
                    f"Kimi delta attention (letter K) has keys like its values, and {self.say(key)} is not "
                    f"{self.say(value)}; give both the same number"
                )
