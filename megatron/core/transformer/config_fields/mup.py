# SPDX-License-Identifier: Apache-2.0
"""Maximal update parametrisation (muP): hyper-parameters found on a narrow model serve a wide one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import flag
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.initialization import InitializationFields

_MUP = Needs("--use-mup", lambda run: run.use_mup)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class MuPFields(InitializationFields):
    """Maximal update parametrisation.

    With m = hidden size / hidden size of the base model, as Yang and Hu have it for Adam (2022, tables 3 and 8):

    | weights                               | initial standard deviation | learning rate | multiplier              |
    |---------------------------------------|----------------------------|---------------|-------------------------|
    | embeddings                            | as without                 | as without    | mup_embedding_mult      |
    | matrices of attention, MLP, experts   | / sqrt(m)                  | / m           |                         |
    | router, gate of the shared expert     | / m                        | / m           |                         |
    | output layer                          | as without                 | as without    | mup_output_mult / m     |
    | biases, norms                         | as without                 | as without    |                         |

    Width is the number of channels, of hidden states and inside MLPs and experts, taken to grow alike. The number of
    experts and of those that a token goes to is none: a router's outputs stay as many, which makes it an output layer
    (table 3; Malasnicki et al., 2025, mu-Parametrization for Mixture of Experts, treat it so, too).
    """

    use_mup: bool = flag(False, kind="function")
    """Scale initial weights, learning rates, attention scores and logits with the width, so that the learning rate that
    is best for the base model is best for this one."""
    mup_base_hidden_size: int | None = flag(None, minimum=1, kind="function", needs=_MUP)
    """Hidden size of the base model, on which the learning rate was found; this model's when not given."""
    mup_width_mult: float = flag(1.0, above=0, kind="function", needs=_MUP)
    """Hidden size / the base model's hidden size, in place of --mup-base-hidden-size."""
    mup_embedding_mult: float = flag(1.0, above=0, kind="function", needs=_MUP)
    """With --use-mup, factor on the output of the embedding."""
    mup_output_mult: float = flag(1.0, above=0, kind="function", needs=_MUP)
    """With --use-mup, factor on the logits in addition to 1 / m."""
    mup_base_head_dim: float | None = flag(None, above=0, kind="function", needs=_MUP)
    """With --use-mup, width of a head of the base model, whose attention scores keep their usual factor; 1 when not
    given, so that the factor is 1 / width of a head."""
    mup_attn_scale_power: float = flag(1.0, minimum=0, kind="function", needs=_MUP)
    """With --use-mup, attention scores have the factor (width of a base head)^(p - 1/2) / (width of a head)^p."""

    def rules(self) -> Iterator[str]:
        # Two words for one number: with both, a later change of one would silently lose against the other.
        if self.use_mup and self.mup_base_hidden_size is not None and self.mup_width_mult != 1.0:
            yield (
                f"{self.say('mup_width_mult')} and {self.say('mup_base_hidden_size')} both say the width; keep the "
                "latter"
            )
        # Xavier's deviation follows a matrix's shape, and cannot be divided by the root of m as well.
        if self.use_mup and self.init_method_xavier_uniform:
            yield "--init-method-xavier-uniform and --use-mup both say how weights scale with the width; keep one"

    @property
    def width_multiplier(self) -> float:
        """m: how many times as wide as the base model this one is; 1 without --use-mup."""
        return width_multiplier(self)

    def mup_attention_scale(self, head_width: int) -> float:
        """Factor on attention scores with --use-mup."""
        # With p = 1/2 this is 1 / sqrt(width), whatever the base; with p = 1 it falls with the width itself.
        power = self.mup_attn_scale_power
        return float((self.mup_base_head_dim or 1.0) ** (power - 0.5) / head_width**power)


def width_multiplier(settings: Any) -> float:
    """m of a config, or of settings that have the same names."""
    if not settings.use_mup:
        return 1.0
    base = settings.mup_base_hidden_size
    return float(settings.hidden_size / base if base and settings.hidden_size else settings.mup_width_mult)
