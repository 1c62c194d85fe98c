# SPDX-License-Identifier: Apache-2.0
"""Losses of the policy gradient, from the tokens' log-probabilities: log p now, log q when the texts were drawn.

    ratio      r = p / q, of a token, or of a sequence: its tokens' geometric mean
    surrogate  min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 not below c A; A is the advantage
    loss       mean of  -w surrogate + beta kl - gamma entropy

    kl to the reference t, d = log t - log p:     k1  -d       k2  d^2 / 2       k3  exp(d) - 1 - d

w corrects for texts that another program drew with slightly other probabilities. The mean is over all tokens, or over
sequences of the mean of their tokens. PPO: token, token. GRPO: token, sequence, k3. DAPO: token, token, high above
low. GSPO: sequence, sequence.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7; Schulman, "Approximating KL
Divergence", 2020 (k1 to k3); Ye et al., "Mastering Complex Control in MOBA Games", 2020, equation 4 (c); Shao et al.,
"DeepSeekMath", 2024, equation 3 (GRPO); Yu et al., "DAPO", 2025; Zheng et al., "Group Sequence Policy Optimization",
2025, equations 5 to 7 (GSPO).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.post_training.segments import sum_segments
from megatron.core.process_groups_config import Group

Estimator = Literal["k1", "k2", "k3"]
POLICY_VALUES = ("policy loss", "kl", "entropy", "ratio", "clipped")


def estimate_kl(log_probs: Tensor, references: Tensor, kind: Estimator) -> Tensor:
    """Each drawn token's part of KL(p || t). log_probs, references: log p and log t, in the same shape, the result's.

    Means of k1 and k3 are the divergence, of k2 nearly; k2 has its gradient, k1 none on average (see the sources).
    """
    ahead = references - log_probs
    if kind == "k1":
        return -ahead
    return ahead.square() / 2 if kind == "k2" else ahead.expm1() - ahead


@dataclass(frozen=True)
class PolicyTokens:
    """One rank's tokens of some sequences, in one shape, here [t]; n: sequences, as whole as they are on all ranks."""

    log_probs: Tensor
    """float32 [t], log p with its gradient."""
    old: Tensor
    """float32 [t], log q."""
    advantages: Tensor
    """float32 [t]; with ratios of sequences [n]."""
    segments: Tensor
    """int64 [t]: the sequence that a token counts in, below 0 for none."""
    lengths: Tensor
    """float32 [n]: tokens that count in each sequence, on all ranks together."""
    references: Tensor | None = None
    """float32 [t], log t; needed for kl alone."""
    entropies: Tensor | None = None
    """float32 [t], with their gradients if they are in the loss."""
    weights: Tensor | None = None
    """float32 [t], with ratios of sequences [n]: w; 1 when None."""


@dataclass(kw_only=True)
class PolicyLoss(CheckedConfig):
    """The loss of drawn texts. Called on each context-parallel rank of the last stage with its tokens."""

    usual_kind = "numerics"

    clip_low: float = flag(0.2, minimum=0.0, maximum=1.0, hidden=True)
    """How far a ratio below 1 counts."""
    clip_high: float = flag(0.2, minimum=0.0, hidden=True)
    """How far a ratio above 1 counts."""
    clip_dual: float | None = flag(None, above=1.0, hidden=True)
    """c: with a negative advantage a ratio above it has no gradient, either."""
    ratio_of: Literal["token", "sequence"] = flag("token", hidden=True)
    """What has a ratio."""
    mean_over: Literal["token", "sequence"] = flag("token", hidden=True)
    """What counts the same: each token of a batch, or each sequence."""
    kl_coefficient: float = flag(0.0, minimum=0.0, hidden=True)
    """beta."""
    kl_estimator: Estimator = flag("k3", hidden=True)
    """How the divergence from the reference is estimated."""
    entropy_coefficient: float = flag(0.0, minimum=0.0, hidden=True)
    """gamma."""

    def __call__(self, tokens: PolicyTokens, sequence: Group) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of the losses, the number that it is to be divided by, and for the log name -> (sum, number).

        sequence: the context-parallel ranks. All are this rank's share: sums over ranks and microbatches are the
        batch's, gradients included, as a forward step's loss function returns them.
        """
        counts, lengths = tokens.segments >= 0, tokens.lengths
        is_there = lengths > 0
        of_token, of_sequence = counts.float(), lengths
        number = of_token.sum()
        if self.mean_over == "sequence":
            of_token, of_sequence = counts / lengths.clamp(min=1)[tokens.segments.clamp(min=0)], is_there.float()
            number = of_sequence.sum() / sequence.size()

        def add(values: Tensor) -> Tensor:
            return torch.where(counts, values * of_token, 0).sum()

        def add_sequences(values: Tensor) -> Tensor:
            return _divide(torch.where(is_there, values * of_sequence, 0).sum(), sequence.size())

        log_probs = torch.where(counts, tokens.log_probs, 0)
        gain, add_units = torch.where(counts, log_probs - tokens.old, 0), add
        if self.ratio_of == "sequence":
            gain = sum_segments(gain, tokens.segments, lengths.numel(), sequence) / lengths.clamp(min=1)
            add_units = add_sequences
        ratio = gain.exp()
        surrogate, is_clipped = self._clip(ratio, tokens.advantages)
        loss = -add_units(surrogate if tokens.weights is None else tokens.weights * surrogate)
        sums = {"ratio": add_units(ratio), "clipped": add_units(is_clipped)}
        if tokens.references is not None:
            references = torch.where(counts, tokens.references, 0)
            sums["kl"] = add(estimate_kl(log_probs, references, self.kl_estimator))
            loss = loss + self.kl_coefficient * sums["kl"]
        if tokens.entropies is not None:
            sums["entropy"] = add(tokens.entropies)
            loss = loss - self.entropy_coefficient * sums["entropy"]
        sums["policy loss"] = loss
        logged = {name: torch.stack([sums[name].detach(), number]) for name in POLICY_VALUES if name in sums}
        return loss, number, logged

    def _clip(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """The surrogate, and 1 where clipping took its gradient."""
        free = ratio * advantages
        bound = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        surrogate = torch.minimum(free, bound)
        if self.clip_dual is not None:
            surrogate = torch.where(advantages < 0, torch.maximum(surrogate, self.clip_dual * advantages), surrogate)
        return surrogate, (surrogate != free).float().detach()


def _divide(total: Tensor, ranks: int) -> Tensor:
    """A rank's share of what all ranks have: the value divided by their number, the gradient of its tokens whole."""
    return total - (1 - 1 / ranks) * total.detach()
