# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs of answers, each form against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.post_training.preference_loss import PreferenceLoss


@pytest.mark.flags("--dpo-loss", "--dpo-margin", "--dpo-label-smoothing", "--dpo-length-normalized")
def test_each_form_of_the_loss() -> None:
    log_probs, references = torch.tensor([[-3.0, -5.0]]), torch.tensor([[-4.0, -5.5]])
    lengths = torch.tensor([[2.0, 5.0]])
    ahead = 0.1 * ((-3 + 4) - (-5 + 5.5))

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    for options, known, expected in (
        ({}, references, -math.log(sigmoid(ahead))),
        ({"label_smoothing": 0.2}, references, -0.8 * math.log(sigmoid(ahead)) - 0.2 * math.log(sigmoid(-ahead))),
        ({"kind": "ipo"}, references, (ahead / 0.1 - 1 / (2 * 0.1)) ** 2),
        ({"margin": 0.5}, references, -math.log(sigmoid(ahead - 0.5))),
        ({"margin": 0.5, "is_length_normalized": True}, None, -math.log(sigmoid(0.1 * (-3 / 2 + 5 / 5) - 0.5))),
    ):
        found = PreferenceLoss(beta=0.1, **options)(log_probs, known, lengths)
        assert float(found.loss) == pytest.approx(expected, rel=1e-6), options
