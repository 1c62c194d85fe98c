# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies against torch's softmax, with gradients; blocks, other temperatures, padded rows."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical

from megatron.core.post_training import log_probs
from megatron.core.process_groups_config import SingleRankGroup


def test_log_probs_and_entropies_are_those_of_a_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "BLOCK_ELEMENTS", 33)  # three rows at a time, then a rest
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=draws, dtype=torch.float64)
    logits[..., -1] = -torch.inf  # a row that only pads the vocabulary
    tokens = torch.randint(10, (2, 5, 3), generator=draws)
    of_tokens, of_entropy = (torch.randn(shape, generator=draws, dtype=torch.float64) for shape in ((2, 5, 3), (2, 5)))
    found = []
    for ours in (True, False):
        given = logits.clone().requires_grad_()
        if ours:
            values, entropy = log_probs.compute_log_probs(given, tokens, SingleRankGroup(), temperature=0.7)
        else:
            scaled = given[..., :-1] / 0.7
            values, entropy = scaled.log_softmax(-1).gather(-1, tokens), Categorical(logits=scaled).entropy()
        ((values * of_tokens).sum() + (entropy * of_entropy).sum()).backward()
        found.append((values.detach(), entropy.detach(), given.grad))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
