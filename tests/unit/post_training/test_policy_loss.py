# SPDX-License-Identifier: Apache-2.0
"""The policy gradient's losses, each form against its formula in float64, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.post_training.policy_loss import PolicyLoss, PolicyTokens, estimate_kl
from megatron.core.post_training.segments import find_answers
from megatron.core.process_groups_config import SingleRankGroup


def reference_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, segments: list[int], references: Tensor, entropies: Tensor,
    weights: Tensor, form: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The mean loss, sequence by sequence and token by token; advantages and weights are each sequence's."""
    form = {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": None, "ratio_of": "token", "mean_over": "token"} | form
    kl_coefficient, entropy_coefficient = form.get("kl_coefficient", 0.0), form.get("entropy_coefficient", 0.0)
    of_sequences, tokens = [], 0
    for number in sorted(set(segments) - {-1}):
        own = [place for place, segment in enumerate(segments) if segment == number]
        tokens += len(own)
        whole = torch.stack([log_probs[t] - old[t] for t in own]).mean().exp()
        losses = []
        for t in own:
            ratio = whole if form["ratio_of"] == "sequence" else (log_probs[t] - old[t]).exp()
            advantage = advantages[number]
            gain = min(ratio * advantage, ratio.clamp(1 - form["clip_low"], 1 + form["clip_high"]) * advantage)
            if form["clip_dual"] is not None and advantage < 0:
                gain = max(gain, form["clip_dual"] * advantage)
            d = references[t] - log_probs[t]
            kl = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - 1 - d}[form.get("kl_estimator", "k3")]
            losses.append(-weights[number] * gain + kl_coefficient * kl - entropy_coefficient * entropies[t])
        of_sequences.append(torch.stack(losses).sum() / (len(own) if form["mean_over"] == "sequence" else 1))
    return torch.stack(of_sequences).sum() / (len(of_sequences) if form["mean_over"] == "sequence" else tokens)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"clip_high": 0.28, "mean_over": "sequence", "kl_coefficient": 0.1, "kl_estimator": "k3"},
        {"clip_dual": 2.0, "kl_coefficient": 0.1, "kl_estimator": "k2", "entropy_coefficient": 0.3},
        {"ratio_of": "sequence", "mean_over": "sequence", "kl_coefficient": 0.1, "kl_estimator": "k1"},
        {"clip_high": 0.3, "ratio_of": "sequence", "entropy_coefficient": 0.2},
    ],
)  # fmt: skip
def test_each_form_of_the_loss(form: dict[str, Any]) -> None:
    draws = torch.Generator().manual_seed(0)
    segments = [-1, 0, 0, 0, -1, 1, 1, 3, 3, 3, 3, -1]  # sequence 2 has no token that counts
    old, references, entropies, start = (
        torch.randn(len(segments), generator=draws, dtype=torch.float64) for _ in range(4)
    )
    advantages, weights = torch.tensor([1.5, -1.0, 2.0, -0.4]).double(), torch.tensor([0.5, 1.0, 1.0, 0.8]).double()
    gradients = []
    for ours in (True, False):
        log_probs = start.clone().requires_grad_()
        if ours:
            places = torch.tensor(segments)
            spread = form.get("ratio_of") != "sequence"
            of_unit = (values[places.clamp(min=0)] if spread else values for values in (advantages, weights))
            own_advantages, own_weights = of_unit
            tokens = PolicyTokens(
                log_probs, old, own_advantages, places, torch.tensor([3.0, 2.0, 0.0, 4.0]).double(), references,
                entropies, own_weights,
            )  # fmt: skip
            loss, number, logged = PolicyLoss(**form)(tokens, SingleRankGroup())
            assert float(number) == (3 if form.get("mean_over") == "sequence" else 9)
            assert float(logged["policy loss"][0]) == float(loss.detach()) and 0 < float(logged["clipped"][0]) < float(
                number
            )
            found = loss / number
        else:
            found = reference_loss(log_probs, old, advantages, segments, references, entropies, weights, form)
        found.backward()
        gradients.append((found.detach(), log_probs.grad))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)


def test_estimators_of_the_divergence() -> None:
    """Over all tokens of a distribution the means of k1 and k3 are the divergence, and k2's is near it."""
    p, t = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    exact = float((p * (p / t).log()).sum())
    for kind, tolerance in (("k1", 1e-6), ("k3", 1e-6), ("k2", 0.1)):
        assert float((p * estimate_kl(p.log(), t.log(), kind)).sum()) == pytest.approx(exact, rel=tolerance)  # type: ignore


def test_a_value_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_low"):
        PolicyLoss(clip_low=1.5)


def test_answers_of_packed_sequences() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9, 0]])  # two sequences and padding
    found = find_answers(tokens, torch.tensor([0, 3, 5]), torch.tensor([[0, 1, 1, 1, 1, 1]]).bool())
    assert found.targets.tolist() == [[6, 7, 0, 9, 0, 0]]
    assert found.segments.tolist() == [[0, 0, -1, 1, -1, -1]] and found.lengths.tolist() == [2, 1]
