# SPDX-License-Identifier: Apache-2.0
"""Linear attention by chunks against the recurrence, token by token, in float64; gradients against differences."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron.core.ssm.linear_attention import attend, attend_step

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
FORMS = list(itertools.product([False, True], [False, True]))


def draw(
    tokens: int, by_channel: bool, is_delta: bool, *, speed: float = 1.0, dtype: torch.dtype = torch.float64
) -> Inputs:
    """Two sequences, 3 groups of 2 heads, K 8, V 5: query, key, value, log of the decay, what erases."""
    groups, heads, channels, width = 3, 6, 8, 5
    query = torch.randn(2, tokens, groups, channels, dtype=dtype)
    key = torch.nn.functional.normalize(torch.randn_like(query), dim=-1)
    value = torch.randn(2, tokens, heads, width, dtype=dtype)
    log_decay = -speed * torch.rand(2, tokens, heads, *([channels] if by_channel else []), dtype=dtype)
    erase = key.repeat_interleave(2, dim=2) * torch.rand(2, tokens, heads, 1, dtype=dtype) if is_delta else None
    return query, key, value, log_decay, erase


def recur(inputs: Inputs, state: Tensor | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """`attend`, one token after the other."""
    value = inputs[2]
    now = value.new_zeros(2, value.shape[2], inputs[1].shape[3], value.shape[3]) if state is None else state
    outputs = []
    for token in range(value.shape[1]):
        if documents is not None and token and documents[token] != documents[token - 1]:
            now = torch.zeros_like(now)
        query, key, of_token, log_decay = (x[:, token] for x in inputs[:4])
        erase = None if inputs[4] is None else inputs[4][:, token]
        output, now = attend_step(query, key, of_token, log_decay, erase, now)
        outputs.append(output)
    return torch.stack(outputs, dim=1), now


@pytest.mark.parametrize(("by_channel", "is_delta"), FORMS)
@pytest.mark.parametrize("tokens", [1, 3, 64, 65, 150])
def test_chunks_equal_the_recurrence(by_channel: bool, is_delta: bool, tokens: int) -> None:
    torch.manual_seed(tokens)
    inputs = draw(tokens, by_channel, is_delta, speed=3.0)
    state = torch.randn(2, 6, 8, 5, dtype=torch.float64)
    for documents in (None, torch.cumsum(torch.rand(tokens) < 0.1, 0)):
        leaves = [x.requires_grad_() for x in (*inputs, state) if x is not None]
        found = attend(*inputs, state=state, documents=None if documents is None else documents[None])
        expected = recur(inputs, state, documents)
        weights = [torch.randn_like(x) for x in expected]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
        gradients = [
            torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)), leaves)
            for outputs in (found, expected)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("by_channel", "is_delta"), FORMS)
def test_gradients_equal_differences(by_channel: bool, is_delta: bool) -> None:
    torch.manual_seed(0)
    inputs = [x[:, :, :, :3] if x is not None and x.dim() == 4 else x for x in draw(19, by_channel, is_delta)]
    leaves = [x.detach().requires_grad_() for x in inputs if x is not None]

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        return attend(*given[:4], *(given[4:] or (None,)), chunk_size=16)

    assert torch.autograd.gradcheck(run, leaves, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize(("by_channel", "is_delta"), FORMS)
@pytest.mark.parametrize("decay", [0.0, -1e30, -200.0])
def test_decays_of_one_and_of_nothing(by_channel: bool, is_delta: bool, decay: float) -> None:
    """A decay of 1 sums all tokens, one of 0 forgets them: right values, finite gradients."""
    torch.manual_seed(1)
    query, key, value, log_decay, erase = draw(80, by_channel, is_delta, dtype=torch.float32)
    inputs = (query, key, value, torch.full_like(log_decay, decay), erase)
    leaves = [x.requires_grad_() for x in inputs if x is not None]
    output, state = attend(*inputs)
    torch.testing.assert_close((output, state), recur(inputs, None, None), rtol=1e-4, atol=1e-4)
    for gradient in torch.autograd.grad(output.square().sum() + state.sum(), leaves):
        assert gradient.isfinite().all()


def test_float32_keeps_its_digits() -> None:
    """Differences of long sums of decays have float32's accuracy, not that of the sums."""
    for by_channel, is_delta in FORMS:
        torch.manual_seed(2)
        exact = draw(200, by_channel, is_delta, speed=3.0)
        expected, _ = recur(exact, None, None)
        found, _ = attend(*(None if x is None else x.float() for x in exact))
        assert (found - expected).abs().max() < 5e-7 * expected.abs().max()


def test_a_sequence_may_be_cut_anywhere() -> None:
    torch.manual_seed(3)
    for by_channel, is_delta in FORMS:
        inputs = draw(90, by_channel, is_delta)
        whole, _ = attend(*inputs)
        first, state = attend(*(None if x is None else x[:, :37] for x in inputs))
        second, _ = attend(*(None if x is None else x[:, 37:] for x in inputs), state=state)
        torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0, atol=1e-10)
