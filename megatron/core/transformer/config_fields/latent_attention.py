# SPDX-License-Identifier: Apache-2.0
"""Latent attention: queries, keys and values made of narrow latent vectors (DeepSeek-V2, 2024, section 2.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.positions import PositionFields

_LATENT = Needs("--multi-latent-attention", lambda run: run.multi_latent_attention)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class LatentAttentionFields(PositionFields):
    """Widths of latent vectors and heads; `multi_latent_attention` itself is with the other kinds of attention."""

    q_lora_rank: int | None = flag(None, minimum=1, maximum=2**24, kind="shape", needs=_LATENT)
    """Width of the latent vector that a token's queries are made of; made of the hidden state when not given
    (DeepSeek-V2-Lite)."""
    kv_lora_rank: int = flag(32, minimum=1, maximum=2**24, kind="shape", needs=_LATENT)
    """Width of the latent vector that a token's keys and values are made of, and that generation keeps of it."""
    qk_head_dim: int = flag(128, minimum=1, maximum=65536, kind="shape", needs=_LATENT)
    """Channels of a query or key head that no position concerns."""
    qk_pos_emb_head_dim: int = flag(64, minimum=2, maximum=65536, kind="shape", needs=_LATENT)
    """Channels of a query or key head that are rotated; all key heads have the same ones."""
    v_head_dim: int = flag(128, minimum=1, maximum=65536, kind="shape", needs=_LATENT)
    """Channels of a value head."""
    latent_norm_epsilon: float | None = flag(None, above=0, kind="function", needs=_LATENT)
    """Added to the mean square in the norms of latent vectors; --norm-epsilon when not given."""

    def derive(self) -> None:
        super().derive()
        # Upstream's default, which its command line has no other flag for.
        is_stretched = self.multi_latent_attention and self.uses_yarn()
        if is_stretched and self.yarn_original_max_position_embeddings is None:
            self.yarn_original_max_position_embeddings = 4096

    def rules(self) -> Iterator[str]:
        if self.multi_latent_attention:
            yield from self._latent_attention_stands_alone()
            yield from self._latent_attention_has_positions()

    def _latent_attention_stands_alone(self) -> Iterator[str]:
        """Yield what belongs to other kinds of attention."""
        asked = "--multi-latent-attention"
        if self.num_query_groups != self.num_attention_heads:
            yield (
                f"{asked} makes keys and values of every head, and {self.say('num_query_groups')} shares them among "
                "heads; leave it out"
            )
        others = {
            "qk_l2_norm": "use --qk-layernorm, which normalises the latent vectors",
            "attention_output_gate": "leave it out",
            "qk_norm_after_rotation": "leave it out",
        }
        for name, remedy in others.items():
            if getattr(self, name):
                yield f"{asked} has no {self.say(name)}; {remedy}"
        if self.qk_norm_scope != "head":
            yield f"{asked} normalises latent vectors, not heads; leave out {self.say('qk_norm_scope')}"
        if self.add_qkv_bias and not self.add_bias_linear:
            yield f"{asked} has no biases in the projections to queries, keys and values; leave out --add-qkv-bias"

    def _latent_attention_has_positions(self) -> Iterator[str]:
        asked = "--multi-latent-attention"
        if not self.rotates_heads:
            yield (
                f"{asked} rotates a part of each head, which {self.say('position_embedding_type')} does not give; "
                "use --position-embedding-type rope (with --no-rope-freq 1 no layer has positions)"
            )
        if self.rotary_interleaved:
            yield f"{asked} rotates neighbouring channels anyway; leave out --rotary-interleaved"
