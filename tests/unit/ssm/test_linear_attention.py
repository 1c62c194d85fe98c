# SPDX-License-Identifier: Apache-2.0
"""Linear attention by chunks against the recurrence, token by token, in float64; gradients against differences."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron.core.ssm.chunks import Inputs, invert
from megatron.core.ssm.linear_attention import attend, attend_step

FORMS = list(itertools.product([False, True], ["sum", "by head", "by channel"]))
"""Whether decay differs by channel, and what erases."""
UNIT = (1e-6, 0.3)


def draw(tokens: int, by_channel: bool, rule: str, *, speed: float = 1.0, dtype: torch.dtype = torch.float64) -> Inputs:
    """Two sequences, 3 groups of 2 heads, K 8, V 5."""
    groups, heads, channels, width = 3, 6, 8, 5
    query = torch.randn(2, tokens, groups, channels, dtype=dtype)
    key = torch.nn.functional.normalize(torch.randn_like(query), dim=-1)
    value = torch.randn(2, tokens, heads, width, dtype=dtype)
    log_decay = -speed * torch.rand(2, tokens, heads, *([channels] if by_channel else []), dtype=dtype)
    strength = torch.rand(2, tokens, heads, dtype=dtype)
    erase = {"sum": None, "by head": strength, "by channel": torch.rand_like(key)}[rule]
    return Inputs(query, key, value, log_decay, strength if rule != "by channel" else None, erase)


def list_leaves(inputs: Inputs) -> list[Tensor]:
    """Its tensors, each once, that ask for gradients."""
    return [x.requires_grad_() for x in {id(x): x for x in inputs if x is not None}.values()]


def recur(
    inputs: Inputs, state: Tensor | None, documents: Tensor | None, unit: tuple[float, float] | None = None
) -> tuple[Tensor, Tensor]:
    """`attend`, one token after the other."""
    value = inputs.value
    now = value.new_zeros(2, value.shape[2], inputs.key.shape[3], value.shape[3]) if state is None else state
    outputs = []
    for token in range(value.shape[1]):
        if documents is not None and token and documents[token] != documents[token - 1]:
            now = torch.zeros_like(now)
        output, now = attend_step(Inputs(*(x if x is None else x[:, token] for x in inputs)), now, unit)
        outputs.append(output)
    return torch.stack(outputs, dim=1), now


@pytest.mark.parametrize(("by_channel", "rule"), FORMS)
@pytest.mark.parametrize("tokens", [1, 3, 40, 64, 65, 150])
def test_chunks_equal_the_recurrence(by_channel: bool, rule: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(tokens)
    inputs = draw(tokens, by_channel, rule, speed=3.0)
    state = torch.randn(2, 6, 8, 5, dtype=torch.float64)
    # 150 tokens in three stretches.
    monkeypatch.setattr("megatron.core.ssm.linear_attention.count_chunks_at_once", lambda *_: 1)
    for documents, unit in ((None, None), (torch.cumsum(torch.rand(tokens) < 0.1, 0), UNIT)):
        leaves = [*list_leaves(inputs), state.requires_grad_()]
        found = attend(inputs, state=state, documents=None if documents is None else documents[None], unit=unit)
        expected = recur(inputs, state, documents, unit)
        weights = [torch.randn_like(x) for x in expected]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
        gradients = [
            torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)), leaves)
            for outputs in (found, expected)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("by_channel", "rule"), FORMS)
def test_gradients_equal_differences(by_channel: bool, rule: str) -> None:
    torch.manual_seed(0)
    inputs = draw(19, by_channel, rule)
    leaves = [x.detach().clone().requires_grad_() for x in inputs if x is not None]
    present = [x is not None for x in inputs]

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        remaining = iter(given)
        return attend(Inputs(*(next(remaining) if there else None for there in present)), unit=UNIT, chunk_size=16)

    assert torch.autograd.gradcheck(run, leaves, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize(("by_channel", "rule"), FORMS)
@pytest.mark.parametrize("decay", [0.0, -1e30, -200.0, -torch.inf])
def test_decays_of_one_and_of_nothing(by_channel: bool, rule: str, decay: float) -> None:
    """A decay of 1 sums all tokens, one of 0 forgets them: right values, finite gradients. Alone and amid others."""
    torch.manual_seed(1)
    for some in (False, True):
        inputs = draw(80, by_channel, rule, dtype=torch.float32)
        chosen = torch.rand_like(inputs.log_decay) < 0.2 if some else torch.ones_like(inputs.log_decay, dtype=bool)
        inputs = inputs._replace(log_decay=inputs.log_decay.masked_fill(chosen, decay))
        leaves = list_leaves(inputs)
        output, state = attend(inputs)
        torch.testing.assert_close((output, state), recur(inputs, None, None), rtol=1e-4, atol=1e-4)
        for gradient in torch.autograd.grad(output.square().sum() + state.sum(), leaves):
            assert gradient.isfinite().all()


def test_float32_keeps_its_digits() -> None:
    """Differences of long sums of decays have float32's accuracy, not that of the sums; gradients, too."""
    for by_channel, rule in FORMS:
        torch.manual_seed(2)
        exact = draw(200, by_channel, rule, speed=3.0)
        expected, _ = recur(exact, None, None)
        given = Inputs(*(None if x is None else x.detach().float() for x in exact))
        if exact.erase is exact.strength:
            given = given._replace(erase=given.strength)
        found, _ = attend(given)
        assert (found - expected).abs().max() < 5e-7 * expected.abs().max()
        leaves = [list_leaves(x) for x in (given, exact)]
        grads = [torch.autograd.grad(attend(x)[0].sum(), of) for x, of in zip((given, exact), leaves, strict=True)]
        for one, other in zip(*grads, strict=True):
            assert (one - other).abs().max() < 2e-6 * other.abs().max(), (by_channel, rule)


def test_keys_that_repeat_are_told_apart() -> None:
    """A system of ones has a small inverse, which powers of the system are far from."""
    for size in (16, 64):
        system = torch.ones(2, size, size)
        torch.testing.assert_close(invert(system), torch.linalg.inv(system.double().tril()).float(), rtol=0, atol=1e-6)


def test_a_sequence_may_be_cut_anywhere() -> None:
    torch.manual_seed(3)
    for by_channel, rule in FORMS:
        inputs = draw(90, by_channel, rule)
        whole, _ = attend(inputs)
        first, state = attend(Inputs(*(None if x is None else x[:, :37] for x in inputs)))
        second, _ = attend(Inputs(*(None if x is None else x[:, 37:] for x in inputs)), state=state)
        torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0, atol=1e-10)
