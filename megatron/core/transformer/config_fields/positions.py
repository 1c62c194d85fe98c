# SPDX-License-Identifier: Apache-2.0
"""Options of rotary positions that the layers and the angles need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.flag_texts import layer_pattern
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.attention import AttentionFields

# YaRN is rotary, too: what rope needs is there with either.
ROTARY = Needs(
    "--position-embedding-type rope",
    lambda run: is_rotary(run.position_embedding_type, run.multi_latent_attention),
)
_YARN = Needs(
    "--position-embedding-type yarn",
    lambda run: is_yarn(run.position_embedding_type, run.rope_type, run.multi_latent_attention),
)
# The scores of latent attention have a factor of these two whatever its positions are, as upstream has it.
_STRETCHED = Needs("--position-embedding-type yarn", lambda run: _YARN.met(run) or run.multi_latent_attention)
_PLAIN_ROTARY = Needs("--position-embedding-type rope", lambda run: run.position_embedding_type == "rope")
_LONGROPE = Needs("--longrope-short-factors", lambda run: run.longrope_short_factors is not None)
_SCALED = Needs("--use-rope-scaling", lambda run: run.use_rope_scaling)
_SOME_WITHOUT = Needs(
    "--no-rope-freq or --attn-temperature-layers all",
    lambda run: run.no_rope_freq is not None or run.attn_temperature_layers == "all",
)
_HEAD_NORM = Needs("--qk-layernorm or --qk-l2-norm", lambda run: run.qk_layernorm or run.qk_l2_norm)
_TEMPERATURE = Needs("--attn-temperature-scale", lambda run: run.attn_temperature_scale is not None)
_WINDOW = Needs("--window-size", lambda run: run.window_size is not None)


def is_rotary(position_embedding_type: str, multi_latent_attention: bool) -> bool:
    """Return whether heads are rotated. Latent attention rotates a part of each also with learned positions, which are
    added to the embedding: upstream's model does both."""
    beside = multi_latent_attention and position_embedding_type == "learned_absolute"
    return beside or position_embedding_type in ("rope", "yarn")


def is_yarn(position_embedding_type: str, rope_type: str | None, multi_latent_attention: bool) -> bool:
    """Return whether positions are rotary with YaRN's frequencies. With latent attention rope means them, unless
    rope_type says otherwise, and so does its absence with learned positions; upstream keeps the word rope there, and so
    do we."""
    if position_embedding_type == "yarn" or not is_rotary(position_embedding_type, multi_latent_attention):
        return position_embedding_type == "yarn"
    return rope_type == "yarn" or (rope_type is None and multi_latent_attention)


def compute_yarn_magnitude(scale: float = 1.0, mscale: float = 1.0) -> float:
    """YaRN's factor on queries and keys for sequences that are `scale` times as long: 0.1 x mscale x ln(scale) + 1,
    which keeps the softmax as sharp (Peng et al., 2023, section 3.4)."""
    # A sequence that is not stretched needs no correction.
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class PositionFields(AttentionFields):
    """Positions: learned or rotary, scaling, YaRN, and layers that differ."""

    rotary_interleaved: bool = flag(False, kind="function", needs=ROTARY)
    """Rotate neighbouring channel pairs (GPT-J) instead of the two halves of a head (GPT-NeoX, Llama)."""
    rope_type: str | None = flag(None, choices=("rope", "yarn"), kind="function", needs=ROTARY)
    """Kind of rotary positions, where --position-embedding-type rope asks for some; with --multi-latent-attention yarn
    when not given."""
    rotary_base_local: int | None = flag(None, minimum=1, kind="function", needs=(ROTARY, _WINDOW))
    """Base of the rotary frequencies in layers with a sliding window, where they are neither scaled nor interpolated
    (Gemma 3); those layers are like the others when not given."""
    rotary_scaling_factor: float = flag(1.0, minimum=1, kind="function", needs=_STRETCHED)
    """YaRN: how much longer than the original sequences are (Peng et al., 2023)."""
    yarn_original_max_position_embeddings: int | None = flag(
        None, minimum=1, unit="tokens", kind="function", needs=_YARN
    )
    """YaRN: longest sequence of the training before."""
    yarn_beta_fast: float | None = flag(None, above=0, kind="function", needs=_YARN)
    """YaRN: frequencies with more turns than this in the original length are kept; 32 when not given."""
    yarn_beta_slow: float | None = flag(None, above=0, kind="function", needs=_YARN)
    """YaRN: frequencies with fewer turns than this in the original length are divided by the factor; 1 when not
    given."""
    yarn_correction_range_round_to_int: bool = flag(True, kind="function", needs=_YARN)
    """YaRN: the blend between kept and divided frequencies begins and ends at whole channel pairs."""
    mscale: float = flag(1.0, minimum=0, kind="function", needs=_YARN)
    """YaRN: queries and keys are multiplied by (0.1 x this x ln(factor) + 1), divided by the same of
    --mscale-all-dim."""
    mscale_all_dim: float = flag(0.0, minimum=0, kind="function", needs=_STRETCHED)
    """YaRN: the divisor's share, see --mscale. With --multi-latent-attention, scores are multiplied by the square of
    (0.1 x this x ln(factor) + 1)."""
    longrope_short_factors: list[float] | None = flag(None, nargs="+", above=0, kind="function", needs=_PLAIN_ROTARY)
    """Divide rotary frequencies by these, one for each pair of channels, in sequences of up to
    --longrope-original-max-position-embeddings tokens (LongRoPE; Ding et al., 2024; Phi-3 and 4)."""
    longrope_long_factors: list[float] | None = flag(None, nargs="+", above=0, kind="function", needs=_LONGROPE)
    """The same for longer sequences: all their positions are divided by these."""
    longrope_original_max_position_embeddings: int | None = flag(
        None, minimum=1, unit="tokens", kind="function", needs=_LONGROPE
    )
    """Longest sequence that --longrope-short-factors are for."""
    longrope_magnitude: float = flag(1.0, above=0, kind="function", needs=_LONGROPE)
    """Factor on rotated queries and keys with LongRoPE; usually sqrt(1 + ln(factor) / ln(original length))."""
    no_rope_freq: int | list[int] | None = flag(None, parse=layer_pattern, kind="function", needs=ROTARY)
    """Layers without rotary positions: every n-th, or one entry per layer such as ([0]*3+[1])*2, 1 for none."""
    attn_temperature_scale: float | None = flag(None, above=0, kind="function", needs=(ROTARY, _SOME_WITHOUT))
    """In layers without rotary positions, multiply the query at position p, counted from 1, by 1 + this x
    ln(1 + floor(p / --attn-temperature-floor)), which keeps the softmax sharp over long sequences (Llama 4, where it is
    0.1; Nakanishi, 2025)."""
    attn_temperature_layers: str = flag(
        "unrotated", choices=("unrotated", "all"), kind="function", needs=(ROTARY, _TEMPERATURE)
    )
    """Layers with --attn-temperature-scale: those without rotary positions, or all, where positions are counted from 0
    (Ministral 3)."""
    attn_temperature_floor: int = flag(8192, minimum=1, unit="tokens", kind="function", needs=_TEMPERATURE)
    """With --attn-temperature-scale: tokens after which the factor grows for the first time, and then each time."""
    learned_position_offset: int = flag(
        0,
        minimum=0,
        maximum=2**20,
        kind="shape",
        needs=Needs("learned positions", lambda run: run.position_embedding_type == "learned_absolute"),
    )
    """Rows of the table of learned positions before the first token's, which nothing reads (OPT has 2)."""
    qk_norm_after_rotation: bool = flag(False, kind="function", needs=(ROTARY, _HEAD_NORM))
    """Rotate queries and keys before --qk-layernorm or --qk-l2-norm normalises them, not after (Hunyuan)."""
    rope_scaling_high_freq_factor: float = flag(4.0, minimum=1, kind="function", needs=_SCALED)
    """--use-rope-scaling keeps frequencies with more turns than this in the first 8192 tokens, stretches those with
    less than one turn, and blends in between; 4 in Llama 3.1, 1 in Llama 4."""
    position_embedding_type: str = flag(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        unsupported_choices=("mrope", "relative"),
        kind="function",
    )
    """Encoding of positions: a learned table, rotary (Su et al., 2021), rotary for sequences longer than
    before (YaRN; Peng et al., 2023), or not at all."""

    def derive(self) -> None:
        super().derive()
        if not self.rotates_heads:
            return
        # One word for one thing, so that runs which say it in either way are found to be the same: upstream's.
        if self.multi_latent_attention:
            self.rope_type = self.rope_type or "yarn"
            if self.rope_type == self.position_embedding_type:
                self.position_embedding_type = "rope"
        elif self.rope_type == "yarn" or self.rope_type == self.position_embedding_type:
            self.position_embedding_type, self.rope_type = self.rope_type, None

    @property
    def rotates_heads(self) -> bool:
        """True if layers have rotary positions, with or without learned ones."""
        return is_rotary(self.position_embedding_type, self.multi_latent_attention)

    def uses_yarn(self, kind: str | None = None) -> bool:
        """Return whether rotary positions are YaRN's. kind: the positions that a model is built with; the config's when
        None."""
        kind = self.position_embedding_type if kind is None else kind
        return is_yarn(kind, self.rope_type, self.multi_latent_attention)

    def get_longrope_options(self) -> tuple[list[float], list[float], int, float]:
        """Short and long factors, the original length and the magnitude of LongRoPE; `rules` say that they are
        there."""
        short, long = self.longrope_short_factors, self.longrope_long_factors
        original = self.longrope_original_max_position_embeddings
        assert short is not None and long is not None and original is not None, (short, long, original)
        return short, long, original, self.longrope_magnitude

    def rules(self) -> Iterator[str]:
        if self.longrope_short_factors is not None:
            for name in ("longrope_long_factors", "longrope_original_max_position_embeddings"):
                if getattr(self, name) is None:
                    yield f"--longrope-short-factors needs {self.flag(name)}; give both sets and the length"
        if self.rope_type == "rope" and self.position_embedding_type == "yarn":
            yield "--rope-type rope and --position-embedding-type yarn contradict each other; keep one"
        is_partial = self.attn_temperature_layers != "all" or self.no_rope_freq is not None
        if self.attn_temperature_scale is not None and self.multi_latent_attention and is_partial:
            yield (
                "--attn-temperature-scale with --multi-latent-attention is for all layers; add "
                "--attn-temperature-layers all, and leave out --no-rope-freq"
            )
        # With the kind as an argument, because a model may be built with other positions than its config names.
        yield from self.position_problems(self.position_embedding_type)

    def position_problems(self, kind: str) -> Iterator[str]:
        """Yield what is missing for positions of this kind: the config's, or those that a model is built with."""
        # No default would do: a wrong length still trains, with the wrong frequencies stretched.
        if self.uses_yarn(kind) and self.yarn_original_max_position_embeddings is None:
            yield (
                "--position-embedding-type yarn needs --yarn-original-max-position-embeddings, the longest sequence of "
                "the training before, such as 4096"
            )
