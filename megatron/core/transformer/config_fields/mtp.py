# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2): in addition to the next token, some of the tokens after
it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.plan.read import follow_letters
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.architecture import ArchitectureFields

_PREDICTION = Needs("--mtp-num-layers", lambda run: run.mtp_num_layers is not None)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class MTPFields(ArchitectureFields):
    """Multi-token prediction."""

    mtp_num_layers: int | None = flag(None, minimum=0, maximum=1024, kind="shape")
    """Tokens that are predicted beyond the next one, each by one more layer after the decoder, whose losses train the
    model as well (DeepSeek-V3, section 2.2); none when not given or 0. Positions must be rotary, or none."""
    mtp_loss_scaling_factor: float = flag(0.1, minimum=0, kind="numerics", needs=_PREDICTION)
    """Weight of the mean of these losses relative to the language-model loss."""
    mtp_use_repeated_layer: bool = flag(False, kind="shape", needs=_PREDICTION)
    """One layer, used again for each further token, instead of a layer for each."""
    mtp_detach_heads: bool = flag(False, kind="numerics", needs=_PREDICTION)
    """MTP losses train only the MTP layers: embedding, decoder and output layer, which they use, get no gradient from
    them. --clip-grad is applied to both by separate norms of their gradients, and the norm of the model without these
    layers is reported."""
    mtp_hsm: bool = flag(
        False,
        kind="numerics",
        needs=Needs("--mtp-num-layers of at least 2", lambda run: (run.mtp_num_layers or 0) > 1),
    )
    """In training each token continues at every depth from a state that is drawn: the newest, or an earlier depth's of
    the later token that has read as much. So layers learn to continue from the decoder's states, not only from
    drafts."""
    freeze_base_for_mtp: bool = flag(False, kind="numerics", needs=_PREDICTION)
    """Train only the MTP layers: embedding, decoder and output layer stay as they were loaded, and have neither
    gradients nor optimizer state."""
    mtp_standalone: bool = flag(False, kind="layout", needs=_PREDICTION)
    """These layers lie on another pipeline stage than the loss. Follows from --pipeline-model-parallel-layout, with an
    m for each of them, such as Ettt|m|L; given without such a layout it is refused."""

    mtp_hybrid_override_pattern: str | None = flag(
        None,
        kind="shorthand",
        needs=Needs("--hybrid-layer-pattern without /", lambda run: "/" not in (run.hybrid_layer_pattern or "/")),
    )
    """Earlier spelling of what comes after / in --hybrid-layer-pattern, once for each of --mtp-num-layers."""

    def normalize(self) -> None:
        super().normalize()
        # As for experts: scripts write 0 for a model without.
        self.mtp_num_layers = self.mtp_num_layers or None
        follow_letters(self)

    def rules(self) -> Iterator[str]:
        if self.hybrid_override_pattern is not None and self.hybrid_layer_pattern is not None:
            yield f"{self.say('hybrid_override_pattern')} is an earlier name of --hybrid-layer-pattern; keep one"
        is_alone = self.hybrid_layer_pattern is None and self.mtp_num_layers is not None
        if self.mtp_hybrid_override_pattern is not None and is_alone:
            yield (
                f"{self.say('mtp_hybrid_override_pattern')} describes layers behind a decoder of letters; give "
                "--hybrid-layer-pattern, or --mtp-num-layers alone, whose layers are like the decoder's last one"
            )

    @property
    def detaches_prediction(self) -> bool:
        """True if MTP losses train only the MTP layers."""
        return self.mtp_detach_heads or (self.freeze_base_for_mtp and self.mtp_num_layers is not None)

    def prediction_problems(self, positions: str) -> Iterator[str]:
        """Yield what stands against multi-token prediction with positions of this kind: the run's, or those that a
        model is built with."""
        # A token that is read one position early would need another learned position than in the decoder.
        if self.mtp_num_layers is not None and positions not in ("rope", "yarn", "none"):
            yield (
                f"{self.say('mtp_num_layers')} works with --position-embedding-type rope, yarn or none, not {positions}"
            )
