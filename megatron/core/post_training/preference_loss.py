# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs of answers, of which one is preferred.

With log-probabilities of whole answers, log p of the model and log r of the reference, sums over their tokens,

    reward = beta (log p - log r),    d = reward of the chosen - reward of the rejected answer

    sigmoid    -(1 - e) log sigmoid(d - margin) - e log sigmoid(-(d - margin))
    ipo        (d / beta - 1 / (2 beta))^2

e is the label smoothing. Length-normalised, log p and log r are divided by the answer's tokens; reference-free, log r
is 0. Both together with a margin are SimPO.

Sources: Rafailov et al., "Direct Preference Optimization", 2023; Mitchell, "A note on DPO with noisy preferences",
2023 (smoothing); Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences", 2023
(IPO); Meng et al., "SimPO", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class PairLosses:
    """Losses and rewards of some pairs; each float32 [pairs]."""

    loss: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """The loss of pairs of answers."""

    beta: float = 0.1
    kind: str = "sigmoid"
    label_smoothing: float = 0.0
    margin: float = 0.0
    is_length_normalized: bool = False

    def __call__(self, log_probs: Tensor, references: Tensor | None, lengths: Tensor) -> PairLosses:
        """log_probs, references: float32 [pairs, 2], of the chosen and the rejected answers; references: None for 0.
        lengths: tokens of the answers, [pairs, 2]."""
        gains = log_probs if references is None else log_probs - references
        if self.is_length_normalized:
            gains = gains / lengths.clamp(min=1)
        chosen, rejected = (self.beta * gains).unbind(1)
        if self.kind == "ipo":
            loss = (gains[:, 0] - gains[:, 1] - 1 / (2 * self.beta)) ** 2
        else:
            ahead = chosen - rejected - self.margin
            loss = -(1 - self.label_smoothing) * logsigmoid(ahead) - self.label_smoothing * logsigmoid(-ahead)
        return PairLosses(loss, chosen, rejected)
