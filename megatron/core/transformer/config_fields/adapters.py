# SPDX-License-Identifier: Apache-2.0
"""Settings of low-rank adapters (LoRA): small matrices that are trained in place of the model's weights."""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from megatron.core.config_base import flag, get_settings
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.moe import MoEFields

_LORA = Needs("--lora-rank", lambda run: run.lora_rank is not None)

PROJECTIONS = {
    "q_proj": ("linear_qkv", "linear_q_proj"),
    "k_proj": ("linear_qkv",),
    "v_proj": ("linear_qkv",),
    "o_proj": ("linear_proj",),
    "gate_proj": ("linear_fc1",),
    "up_proj": ("linear_fc1",),
    "down_proj": ("linear_fc2",),
    "q_a_proj": ("linear_q_down_proj",),
    "q_b_proj": ("linear_q_up_proj",),
    "kv_a_proj_with_mqa": ("linear_kv_down_proj",),
    "kv_b_proj": ("linear_kv_up_proj",),
    "in_proj": ("in_proj",),
    "out_proj": ("out_proj",),
}
"""Projection as Hugging Face's Llama-like models name it -> our layers that may compute it."""
_USUAL = {layer for layers in PROJECTIONS.values() for layer in layers} - {"in_proj", "out_proj"}


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class AdapterFields(MoEFields):
    """Rank, scale and places of adapters."""

    lora_rank: int | None = flag(None, minimum=1, maximum=65536, kind="shape")
    """Train adapters instead of the model's weights, which stay as they were loaded: y = x (W + s B A)^T with A [rank,
    in] and B [out, rank], which starts at zero (Hu et al., 2021). Each projection has one, as in peft: queries, keys
    and values one each."""
    lora_alpha: float | None = flag(None, minimum=0, maximum=1e6, kind="function", needs=_LORA)
    """Numerator of the scale s = alpha / rank of adapters, the rank itself when not given."""
    lora_type: str = flag("lora", choices=("lora", "rslora", "dora"), kind="function", needs=_LORA)
    """lora: the scale of adapters is alpha / rank; rslora: alpha / sqrt(rank) (Kalajdzievski, 2023). dora: the lengths
    of the weight's rows are trained as well, apart from their directions (Liu et al., 2024)."""
    lora_dropout: float = flag(0.0, minimum=0, maximum=0.99, kind="numerics", needs=_LORA)
    """Fraction of an adapter's input channels that is dropped in training; the layer itself sees all of them."""
    lora_target_modules: list[str] | None = flag(None, nargs="+", metavar="NAME", kind="shape", needs=_LORA)
    """Layers with adapters: names of ours (linear_qkv), of Hugging Face (q_proj), or patterns of paths
    (*.layers.0.*.linear_proj). All linear layers of attention and MLPs when not given."""
    lora_exclude: list[str] | None = flag(None, nargs="+", metavar="NAME", kind="shape", needs=_LORA)
    """Layers without adapters, of those that --lora-target-modules chooses; names and patterns as there."""

    @property
    def lora_scale(self) -> float:
        """The factor s of adapters."""
        assert self.lora_rank is not None
        alpha = self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return alpha / (math.sqrt(self.lora_rank) if self.lora_type == "rslora" else self.lora_rank)

    def without_adapters(self) -> Self:
        """The settings of the model that the adapters are added to."""
        base = copy.copy(self)
        for name, setting in get_settings(AdapterFields).items():
            if name.startswith("lora_"):
                setattr(base, name, setting.default)
        return base

    def list_adapted(self, path: str, projections: tuple[str, ...]) -> list[str]:
        """List the projections of a layer that get an adapter.

        path: the layer's in the whole model. projections: what its rows compute, in Hugging Face's names.
        """
        layer = path.rpartition(".")[2]

        def is_named(projection: str, names: list[str]) -> bool:
            return any(
                name == layer or fnmatch.fnmatchcase(path, name)
                or (name == projection and layer in PROJECTIONS[projection])
                for name in names
            )  # fmt: skip

        chosen = self.lora_target_modules
        return [
            projection
            for projection in projections
            if (layer in _USUAL if chosen is None else is_named(projection, chosen))
            and not is_named(projection, self.lora_exclude or [])
        ]

    def rules(self) -> Iterator[str]:
        if self.lora_rank is None:
            return
        known = {*PROJECTIONS, *(layer for layers in PROJECTIONS.values() for layer in layers)}
        for flag_name, names in (
            ("lora_target_modules", self.lora_target_modules or []),
            ("lora_exclude", self.lora_exclude or []),
        ):
            for name in names:
                if name not in known and "*" not in name:
                    yield (
                        f"{self.flag(flag_name)} {name} is no linear layer; give one of {', '.join(sorted(known))}, "
                        "or a pattern with *"
                    )
