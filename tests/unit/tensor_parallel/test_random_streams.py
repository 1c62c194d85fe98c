# SPDX-License-Identifier: Apache-2.0
"""Named random streams and their states."""

from __future__ import annotations

import pytest
import torch

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, model_parallel_cuda_manual_seed
from tests.support.pretend_groups import pretend


def seeded(seed: int, tp_rank: int) -> CudaRNGStatesTracker:
    tracker = CudaRNGStatesTracker()
    groups = pretend(tp_rank, tp=2)
    model_parallel_cuda_manual_seed(seed, pg_collection=groups, tracker=tracker)
    return tracker


def draw(tracker: CudaRNGStatesTracker) -> torch.Tensor:
    with tracker.fork():
        return torch.rand(4)


def test_streams_of_ranks_differ_and_the_default_one_agrees() -> None:
    first, second = seeded(5, 0), seeded(5, 1)
    assert not torch.equal(draw(first), draw(second))
    seeded(5, 0)
    default = torch.rand(4)
    seeded(5, 1)
    assert torch.equal(torch.rand(4), default)
    seeded(6, 0)
    assert not torch.equal(torch.rand(4), default)


def test_a_fork_leaves_the_default_stream_alone_and_goes_on_where_it_was() -> None:
    tracker = seeded(5, 0)
    expected = torch.rand(8)
    tracker = seeded(5, 0)
    before, first = torch.rand(4), draw(tracker)
    after, second = torch.rand(4), draw(tracker)
    assert torch.equal(torch.cat((before, after)), expected)
    assert not torch.equal(first, second)


def test_states_continue() -> None:
    tracker = seeded(5, 0)
    draw(tracker)
    states = tracker.get_states()
    expected = draw(tracker)
    for _ in range(2):  # the states themselves are not used up
        other = CudaRNGStatesTracker()
        other.set_states(states)
        assert torch.equal(draw(other), expected)


def test_mistakes() -> None:
    tracker = CudaRNGStatesTracker()
    assert not tracker.is_initialized()
    with pytest.raises(KeyError, match="model_parallel_cuda_manual_seed"), tracker.fork():
        pass
    tracker.add("mine", 1)
    with pytest.raises(ValueError, match="'mine' exists already"):
        tracker.add("mine", 2)
    assert tracker.is_initialized()
    tracker.reset()
    assert not tracker.is_initialized()
