# SPDX-License-Identifier: Apache-2.0
"""Passes recorded as CUDA graphs, by their stand-in on the CPU: how many, of which forms, and the same texts."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.inference import recorded_passes
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.recorded_passes import RecordedPasses, choose_graph_sizes
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from tests.support.graph_stand_in import StandInRecorder
from tests.unit.inference.crossings import GREEDY, LONGEST, assert_as_alone, draw_requests
from tests.unit.inference.test_engine import model_of
from tests.unit.inference.test_unequal_prompts import KINDS


@pytest.mark.parametrize(
    ("most", "count", "distribution", "sizes"),
    [
        (64, 16, "exponential", (1, 2, 4, 8, 16, 32, 64)),
        (64, 3, "exponential", (16, 32, 64)),
        (6, -1, "exponential", (1, 2, 3, 6)),
        (64, 4, "linear", (16, 32, 48, 64)),
        (3, 16, "linear", (1, 2, 3)),
        (64, 0, "exponential", ()),
    ],
)
def test_the_table_of_sizes(most: int, count: int, distribution: str, sizes: tuple[int, ...]) -> None:
    assert choose_graph_sizes(most, count, distribution) == sizes


def recorded_engine(kind: str, **settings: int) -> tuple[Engine, RecordedPasses, StandInRecorder]:
    recorder = StandInRecorder()
    engine = Engine(model_of(KINDS[kind]), EngineSettings(graph_sizes=(2, 5), **settings), recorder=recorder)  # type: ignore[arg-type]
    assert engine.runner.recorded is not None
    return engine, engine.runner.recorded, recorder


@pytest.mark.parametrize(
    "kind", ["windows, local angles, sinks", "chunks, temperature", "yarn", "latent vectors, low rank, window"]
)
def test_texts_are_what_they_are_alone(kind: str) -> None:
    """In little room, so that some are preempted, others share pages, and windows give some back."""
    engine, passes, recorder = recorded_engine(
        kind, max_sequence_length=LONGEST, max_requests=5, max_step_tokens=24, capacity_tokens=LONGEST + 48
    )
    batch = draw_requests(1, 9, logprobs=1)
    for request in batch:
        engine.add(request)
        engine.step()
    engine.run([])
    for request in batch:
        assert_as_alone(engine.runner.core, request)
    assert passes.recordings == recorder.sessions == 2 and recorder.pools == 1
    assert passes.replays == recorder.replays > 2
    assert [pool.num_used for pool in engine.state.pools] == [1] * len(engine.state.pools)  # what padding is written to


def test_one_graph_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts grow from 8 to 20 tokens: the first pass of a form runs as ever, and the second is recorded."""
    monkeypatch.setattr(recorded_passes, "_SHORTEST", 16)
    engine, passes, recorder = recorded_engine("learned positions", max_sequence_length=LONGEST)
    counts = []
    requests = [engine.add(Request([3, token, *range(6)], 13, GREEDY)) for token in (4, 5)]
    while engine.has_work:
        engine.step()
        counts.append((passes.recordings, passes.replays))
    # The prompts' pass, then those of 9 .. 16 tokens, then of 17 .. 20.
    assert counts == [(0, 0), (0, 0), *((1, n) for n in range(1, 8)), (1, 7), *((2, n) for n in range(8, 11))]
    for request in requests:
        assert_as_alone(engine.runner.core, request)

    # What lies elsewhere by now is recorded again, and other values in the same place are not.
    with torch.no_grad():
        weight = engine.runner.core.decoder.layers[0].mlp.linear_fc1.weight
        weight.mul_(-1)
    engine.forget_contents()
    assert_as_alone(engine.runner.core, *engine.run([Request([3, 4], 4, GREEDY)]))
    assert recorder.sessions == 2
    weight.data = weight.data.clone()
    assert_as_alone(engine.runner.core, *engine.run([Request([3, 5], 4, GREEDY)]))
    assert recorder.sessions == 3
    engine.free_memory()
    assert_as_alone(engine.runner.core, *engine.run([Request([3, 6], 4, GREEDY)]))
    assert recorder.sessions == 4 and passes.recordings == 2


def test_drawn_texts_and_many_requests_run_alike() -> None:
    """More texts than the largest graph has run without one; draws are those of the same seeds."""
    engine, passes, _ = recorded_engine("learned positions", max_sequence_length=LONGEST, max_requests=7)
    asked = draw_requests(4, 9, Sampling(seed=5, top_k=20))
    plain = Engine(engine.runner.core, EngineSettings(LONGEST, max_requests=7)).run(
        draw_requests(4, 9, asked[0].sampling)
    )
    assert [each.new_tokens for each in engine.run(asked)] == [each.new_tokens for each in plain]
    assert 0 < passes.replays < engine.counters.passes - 2


@pytest.mark.parametrize(("kind", "words"), [("states", "mamba"), ("experts", "experts decide on the host")])
def test_models_that_cannot_be_recorded(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recorded_engine(kind, max_sequence_length=LONGEST)
    with pytest.raises(ConfigError, match="num-cuda-graphs -2 must be"):
        choose_graph_sizes(64, -2)
