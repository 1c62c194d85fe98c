# SPDX-License-Identifier: Apache-2.0
"""Hidden state mixing against its definition, token by token, and the model that has it."""

from __future__ import annotations

import pytest
import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.transformer.multi_token_prediction import TokenShift
from megatron.core.transformer.state_mixing import StateMixing
from tests.parallel.small_training import FURTHER, training
from tests.parallel.test_multi_token_prediction import share

BOUNDS = [0, 1, 3, 10, 16]


@pytest.fixture
def mixing() -> StateMixing:
    """Of two rows of 16 tokens, whose documents are alike."""
    sequence = ProcessGroupCollection.current().cp
    tokens = torch.randint(100, (2, BOUNDS[-1]), generator=torch.Generator().manual_seed(1))
    return StateMixing(tokens, sequence, TokenShift(sequence, TokenLayout.of_documents(BOUNDS)))


def test_each_token_continues_from_the_state_that_is_drawn(mixing: StateMixing) -> None:
    """h_u[i + k - u] if that token is of the same document, else h_k[i]."""
    states = [torch.randn(2, BOUNDS[-1], 5, requires_grad=True) for _ in range(4)]
    end_of = [next(bound for bound in BOUNDS if bound > token) for token in range(BOUNDS[-1])]
    for depth, newest in enumerate(states):
        drawn, mixed = mixing.draw(depth), mixing.mix(newest)
        for row in range(2):
            for token, end in enumerate(end_of):
                chosen = int(drawn[row, token])
                place = token + depth - chosen
                wanted = states[chosen][row, place] if place < end else newest[row, token]
                assert torch.equal(mixed[row, token], wanted)
    mixed[0, 4].sum().backward()
    of_states = [0.0 if x.grad is None else x.grad.abs().sum().item() for x in states]
    assert sorted(of_states) == [0, 0, 0, 5], "gradients go to the state that was drawn alone"


def test_draws_are_uniform_and_independent() -> None:
    sequence = ProcessGroupCollection.current().cp
    # Rows of equal tokens draw alike, others do not; nor do neighbours, or depths.
    tokens = torch.stack([torch.arange(2000), torch.zeros(2000, dtype=torch.int64), torch.arange(2000)])
    mixing = StateMixing(tokens, sequence, TokenShift(sequence))
    first, second = mixing.draw(2), mixing.draw(3)
    assert torch.equal(first[0], first[2]) and not torch.equal(first[0], first[1])
    pairs = {
        "rows": (first[0], first[1], 9), "neighbours": (first[0, 1:], first[0, :-1], 9), "depths": (first, second, 12)
    }  # fmt: skip
    for name, (one, other, count) in pairs.items():
        times = torch.bincount((3 * other + one).flatten(), minlength=count).double()
        statistic = ((times - times.mean()).square() / times.mean()).sum().item()
        # 99.9 of 100 values of chi-square with 11 degrees of freedom are below.
        assert len(times) == count and statistic < 31.3, name


@pytest.mark.flags("--mtp-hsm")
def test_newest_states_alone_are_the_model_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, mixed = share("tied", "1"), share("tied", "1,--mtp-hsm")
    assert plain.losses[0] == mixed.losses[0] and plain.grad_norms[0] != mixed.grad_norms[0]
    monkeypatch.setattr(StateMixing, "draw", lambda self, depth: torch.full_like(self._present, depth))
    newest = share("tied", "1,--mtp-hsm")
    assert (newest.losses, newest.grad_norms) == (plain.losses, plain.grad_norms)


@pytest.mark.flags("--mtp-hsm")
def test_one_depth_has_nothing_to_mix() -> None:
    config, _ = training(FURTHER["untied"], "1,--mtp-hsm")
    assert any("--mtp-hsm" in note and "at least 2" in note for note in config.notes)
