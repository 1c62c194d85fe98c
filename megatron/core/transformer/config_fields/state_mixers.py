# SPDX-License-Identifier: Apache-2.0
"""Mixers whose state has a constant size: Mamba-2 and gated delta nets (megatron/core/ssm)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import flag, name_multiples
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.positions import PositionFields


def _needs_letter(letters: str) -> Needs:
    return Needs(
        f"--hybrid-layer-pattern with the letter {' or '.join(letters)}",
        lambda run: bool(set(letters) & set(run.hybrid_layer_pattern or "")),
    )


_MAMBA, _DELTA = _needs_letter("M"), _needs_letter("GK")


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class StateMixerFields(PositionFields):
    """Heads and widths of states."""

    mamba_state_dim: int = flag(128, minimum=1, maximum=65536, kind="shape", needs=_MAMBA)
    """Numbers that a Mamba-2 layer keeps for each channel of a head (N)."""
    mamba_head_dim: int = flag(64, minimum=1, maximum=65536, kind="shape", needs=_MAMBA)
    """Channels of a Mamba-2 head (P)."""
    mamba_num_groups: int = flag(8, minimum=1, maximum=65536, kind="shape", needs=_MAMBA)
    """Groups of Mamba-2 heads; those of a group read and write their states in the same way (B and C)."""
    mamba_num_heads: int | None = flag(None, minimum=1, maximum=2**20, kind="shape", needs=_MAMBA)
    """Mamba-2 heads; twice the hidden size over the channels of a head when not given."""
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
        if self.mamba_num_heads is not None:
            return self.mamba_num_heads * self.mamba_head_dim
        assert self.hidden_size is not None
        return 2 * self.hidden_size

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        letters, ranks = set(self.hybrid_layer_pattern or ""), self.tensor_model_parallel_size
        if "M" in letters:
            yield from self._mamba_problems(ranks)
        if letters & {"G", "K"}:
            yield from self._delta_problems(ranks)
        if "K" in letters:
            yield from self._kimi_problems()

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
