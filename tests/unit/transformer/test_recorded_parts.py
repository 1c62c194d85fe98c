# SPDX-License-Identifier: Apache-2.0
"""Recorded parts by themselves: small functions instead of a model's layers, by a stand-in for a GPU's graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron.core.transformer.execution.cuda_graphs import Passes, Region
from tests.support.graph_stand_in import StandInRecorder

WIDTH = 4


class Parts:
    """Two parts, each a product with a weight of its own; the second reads what the first returns, and a table."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.weights = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        self.recorder = StandInRecorder()
        self.passes = Passes(self.recorder, 1)
        self.parts: list[Region] = [self.passes.add(weight) for weight in self.weights]

    def run(self, x: Tensor, table: Tensor, between: Callable[[Tensor], Tensor] = lambda y: y) -> tuple[Tensor, Tensor]:
        """A pass: both outputs of the second part."""
        with self.passes.open(x, (table,)) as (table,):
            y = between(self.parts[0](self.weights[0], (x,)))
            result: tuple[Tensor, Tensor] = self.parts[1](self._multiply, (y,), (table,))
        return result

    def _multiply(self, y: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        z = self.weights[1](y)
        return z * table, z.sin()

    def expect(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """The same without recordings."""
        return self._multiply(self.weights[0](x), table)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """In which every pass replays both parts, forward and backward."""
        before = self.recorder.replays
        yield
        assert self.recorder.replays == before + 4


def draw(seed: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.fixture
def recorded() -> Parts:
    """Parts behind their warm-up."""
    parts = Parts()
    sum(y.sum() for y in parts.run(draw(0), torch.ones(WIDTH))).backward()  # type: ignore[union-attr]
    parts.passes.finish_step()
    assert parts.passes.slots == 1
    return parts


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1), (0,)])
def test_outputs_that_nobody_uses_have_no_gradient(recorded: Parts, used: tuple[int, ...]) -> None:
    """Of one pass; what another pass left at the address of its gradient does not count."""
    table = torch.ones(WIDTH)
    sum(y.sum() for y in recorded.run(draw(1), table)).backward()  # type: ignore[union-attr]
    for seed in (2, 3):
        x, wanted = draw(seed), [weight.weight for weight in recorded.weights]
        expected = torch.autograd.grad(sum(recorded.expect(x, table)[i].sum() for i in used), [x, *wanted])
        with recorded.replaying():
            found = torch.autograd.grad(sum(recorded.run(x, table)[i].sum() for i in used), [x, *wanted])
        assert all(map(torch.equal, found, expected))


def test_gradients_that_leave_are_the_callers_own(recorded: Parts) -> None:
    """A pipeline may still be sending that of the hidden states when the next micro-batch computes its own."""
    x, table = draw(1), torch.ones(WIDTH)
    kept = torch.autograd.grad(recorded.run(x, table)[0].sum(), [x, *(weight.weight for weight in recorded.weights)])
    before = [grad.clone() for grad in kept]
    with recorded.replaying():
        recorded.run(draw(2), table)[1].sum().backward()
    assert all(map(torch.equal, kept, before))


def test_outputs_have_gradients_where_they_had_some() -> None:
    passes, weight = Passes(StandInRecorder(), 1), nn.Linear(WIDTH, WIDTH)
    part = passes.add(weight)

    def compute(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = weight(x)
        return y, y.detach().sum(), y.argmax()

    for _ in range(2):
        with passes.open(draw(1), ()):
            outputs = part(compute, (draw(1),))
        assert [y.requires_grad for y in outputs] == [True, False, False]
        outputs[0].sum().backward()
        passes.finish_step()
    assert passes.slots == 1


@pytest.mark.parametrize(
    "watch",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
     "register_full_backward_pre_hook"],
)  # fmt: skip
def test_passes_that_a_hook_looks_into_go_without(recorded: Parts, watch: str) -> None:
    seen: list[object] = []
    handle = getattr(recorded.weights[1], watch)(lambda module, *_: seen.append(module))
    recorded.run(draw(1), torch.ones(WIDTH))[0].sum().backward()
    assert len(seen) == 1 and recorded.recorder.replays == 0
    handle.remove()
    with recorded.replaying():
        recorded.run(draw(1), torch.ones(WIDTH))[0].sum().backward()


def test_tables_are_copied_whenever_they_have_changed(recorded: Parts) -> None:
    """In place, or another part of the same memory; and the same one again."""
    tables = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    for change in (lambda: None, lambda: tables.mul_(2.0), lambda: None):
        change()
        for table in (tables[0], tables[1], tables[1], tables[0]):
            assert torch.equal(recorded.run(draw(1), table)[0], recorded.expect(draw(1), table)[0])


def test_parameters_that_have_moved_are_recorded_anew(recorded: Parts) -> None:
    """Graphs read them where they were."""
    table, weight = torch.ones(WIDTH), recorded.weights[0].weight
    for place in ("values", "gradients"):
        if place == "values":
            weight.data = 2.0 * weight.data
        else:
            weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        replays, found = recorded.recorder.replays, recorded.run(draw(1), table)
        assert all(map(torch.equal, found, recorded.expect(draw(1), table))) and recorded.recorder.replays == replays
        found[0].sum().backward()
        recorded.passes.finish_step()
        assert recorded.passes.slots == 1
        with recorded.replaying():
            found = recorded.run(draw(2), table)
            found[0].sum().backward()
        assert torch.equal(found[0], recorded.expect(draw(2), table)[0])
        recorded.passes.finish_step()
    assert weight.main_grad.any()  # type: ignore[attr-defined]


def test_a_pass_that_an_error_ended_is_not_recorded() -> None:
    parts = Parts()

    def fail(y: Tensor) -> Tensor:
        raise ValueError("out of luck")

    sum(y.sum() for y in parts.run(draw(0), torch.ones(WIDTH))).backward()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="out of luck"):
        parts.run(draw(0), torch.ones(WIDTH), fail)
    assert parts.passes.current is None
    parts.passes.finish_step()
    with parts.replaying():
        sum(y.sum() for y in parts.run(draw(1), torch.ones(WIDTH))).backward()  # type: ignore[union-attr]


def test_hidden_states_that_a_hook_replaces_are_refused(recorded: Parts) -> None:
    with pytest.raises(RuntimeError, match=r"a hook has replaced the hidden states \[3, 4\]"):
        recorded.run(draw(1), torch.ones(WIDTH), lambda y: y.clone())
    with recorded.replaying():
        sum(y.sum() for y in recorded.run(draw(1), torch.ones(WIDTH))).backward()  # type: ignore[union-attr]


def test_inputs_of_another_kind_go_without(recorded: Parts) -> None:
    table = torch.ones(WIDTH)
    for x in (draw(1).detach(), draw(1)[:2]):
        assert all(map(torch.equal, recorded.run(x, table), recorded.expect(x, table)))
    recorded.weights[0].double()
    recorded.weights[1].double()
    recorded.run(draw(1).double(), table.double())
    assert recorded.recorder.replays == 0


def test_recordings_share_no_node_with_graphs_that_are_alive() -> None:
    """Such a node runs on the stream of the forward pass that made it, which would have to wait for the recording."""
    parts, table = Parts(), torch.ones(WIDTH)
    losses = [sum(y.sum() for y in parts.run(draw(seed), table)) for seed in range(2)]
    parameters = [weight.weight for weight in parts.weights]
    addresses = [parameter.data_ptr() for parameter in parameters]
    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    losses[0].backward()  # type: ignore[union-attr]
    before = [parameter.grad.clone() for parameter in parameters]  # type: ignore[union-attr]
    parts.passes.finish_step()
    assert parts.passes.slots == 2
    assert all(get_gradient_edge(p).node is not node for p, node in zip(parameters, nodes, strict=True))
    assert [parameter.data_ptr() for parameter in parameters] == addresses
    # The graph that was alive meanwhile reaches its parameters all the same.
    losses[1].backward()  # type: ignore[union-attr]
    added = [p.grad - grad for p, grad in zip(parameters, before, strict=True)]  # type: ignore[operator]
    expected = torch.autograd.grad(sum(y.sum() for y in parts.expect(draw(1), table)), parameters)
    for one, other in zip(added, expected, strict=True):
        torch.testing.assert_close(one, other)
