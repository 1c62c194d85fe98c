# SPDX-License-Identifier: Apache-2.0
"""Training on preferences: the flags of direct preference optimisation (docs/fine_tuning.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs, PathText

PREFERENCE_VALUES = ("dpo loss", "chosen reward", "rejected reward", "reward margin", "reward accuracy")
"""What the log says of a step on pairs of answers; none of them is a loss of tokens."""
_DPO = Needs("--dpo", lambda run: run.dpo)


@dataclass(kw_only=True)
class PreferenceConfig(CheckedConfig):
    """Pairs of answers, of which one is preferred."""

    usual_kind = "numerics"

    dpo: bool = False
    """Direct preference optimisation: --data-path names JSONL files whose lines have messages and two answers to them,
    chosen and rejected. A sample of the batch is a pair, both conversations in one sequence of --seq-length."""
    dpo_beta: float = flag(0.1, above=0.0, needs=_DPO)
    """Strength with which the model is held near the reference: the reward of an answer is beta times what its
    log-probability has gained over the reference model's."""
    dpo_reference: PathText | None = flag(None, metavar="DIR", needs=_DPO)
    """Checkpoint of the reference model; the weights that the run begins with when not given. Its log-probabilities are
    computed once, before the first step, and kept in the run's checkpoints."""
    dpo_reference_free: bool = flag(False, needs=_DPO)
    """No reference model: the reward is beta times the answer's log-probability."""
    dpo_length_normalized: bool = flag(False, needs=_DPO)
    """Log-probabilities are divided by the answer's number of tokens."""
    dpo_loss: Literal["sigmoid", "ipo"] = flag("sigmoid", needs=_DPO)
    """Loss of a pair's difference d of rewards: -log sigmoid(d), or IPO's square of d / beta - 1 / (2 beta)."""
    dpo_margin: float = flag(0.0, minimum=0.0, needs=_DPO)
    """How far the chosen answer's reward is to be above the rejected one's, taken from their difference."""
    dpo_label_smoothing: float = flag(0.0, minimum=0.0, maximum=0.5, needs=_DPO)
    """Share of the pairs that may be the wrong way round."""

    def rules(self) -> Iterator[str]:
        """Settings that exclude each other."""
        if self.dpo_reference is not None and self.dpo_reference_free:
            yield "--dpo-reference-free takes no reference model, --dpo-reference names one; keep one"
        if self.dpo_loss == "ipo":
            for name in ("dpo_margin", "dpo_label_smoothing"):
                if getattr(self, name):
                    yield f"{self.say(name)} says nothing about --dpo-loss ipo; leave it out"
