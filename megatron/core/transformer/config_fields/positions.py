"""Options of rotary positions that the layers and the angles need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.flag_texts import layer_pattern
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.attention import AttentionFields

# YaRN is rotary, too: what rope needs is there with either.
_ROTARY = Needs("--position-embedding-type rope", lambda run: run.position_embedding_type in ("rope", "yarn"))
_YARN = Needs("--position-embedding-type yarn", lambda run: run.position_embedding_type == "yarn")
_WINDOW = Needs("--window-size", lambda run: run.window_size is not None)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class PositionFields(AttentionFields):
    """Positions: learned or rotary, scaling, YaRN, and layers that differ."""

    rotary_interleaved: bool = flag(False, kind="function", needs=_ROTARY)
    """Rotate neighbouring channel pairs (GPT-J) instead of the two halves of a head (GPT-NeoX, Llama)."""
    rotary_base_local: int | None = flag(None, minimum=1, kind="function", needs=(_ROTARY, _WINDOW))
    """Base of the rotary frequencies in layers with a sliding window, where they are neither scaled nor interpolated
    (Gemma 3); those layers are like the others when not given."""
    rotary_scaling_factor: float = flag(1.0, minimum=1, kind="function", needs=_YARN)
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
    mscale_all_dim: float = flag(0.0, minimum=0, kind="function", needs=_YARN)
    """YaRN: the divisor's share, see --mscale."""
    no_rope_freq: int | list[int] | None = flag(None, parse=layer_pattern, kind="function", needs=_ROTARY)
    """Layers without rotary positions: every n-th, or one entry per layer such as ([0]*3+[1])*2, 1 for none."""
    position_embedding_type: str = flag(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        unsupported_choices=("mrope", "relative"),
        kind="function",
    )
    """How tokens know their position: a learned table, rotary (Su et al., 2021), rotary for sequences longer than
    before (YaRN; Peng et al., 2023), or not at all."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        # With the kind as an argument, because a model may be built with other positions than its config names.
        yield from self.position_problems(self.position_embedding_type)

    def position_problems(self, kind: str) -> Iterator[str]:
        """What is missing for positions of this kind: the config's, or those that a model is built with."""
        # No default would do: a wrong length still trains, with the wrong frequencies stretched.
        if kind == "yarn" and self.yarn_original_max_position_embeddings is None:
            yield (
                "--position-embedding-type yarn needs --yarn-original-max-position-embeddings, the longest sequence of "
                "the training before, such as 4096"
            )
