# SPDX-License-Identifier: Apache-2.0
"""The engine: whatever is asked for together, and however little room there is, each text is what it is alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.generate import generate
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.speculation import Drafter, ModelDrafter, PredictionDrafter, PromptLookup
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.sequences.state import PAGE_TOKENS
from tests.support.gpt_models import VOCAB_SIZE, build_model
from tests.unit.inference import test_unequal_prompts
from tests.unit.inference.crossings import (
    GREEDY,
    LONGEST,
    Way,
    assert_as_alone,
    draw_requests,
    write_crossing,
)
from tests.unit.inference.test_unequal_prompts import KINDS, ROPE


def model_of(flags: str) -> GPTModel:
    """Weights with which rounding stays rounding."""
    return test_unequal_prompts.model_of(f"{flags} --init-method-std 0.1")


def assert_nothing_is_held(engine: Engine) -> None:
    assert [pool.num_used for pool in engine.state.pools] == [0] * len(engine.state.pools)


SETTINGS = [
    EngineSettings(LONGEST),
    EngineSettings(LONGEST, max_requests=5, max_step_tokens=7),
    EngineSettings(LONGEST, capacity_tokens=LONGEST + 48, max_step_tokens=24),
    EngineSettings(LONGEST, capacity_tokens=LONGEST, max_requests=7, reuses_prefixes=False),
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_text_is_what_it_is_alone(kind: str) -> None:
    model = model_of(KINDS[kind])
    preemptions, reused = 0, 0
    for seed, settings in enumerate(SETTINGS):
        engine = Engine(model, settings)
        batch = draw_requests(seed, 12)
        for index, request in enumerate(batch):
            request.logprobs = (None, 0, 3)[index % 3]
            request.prompt_logprobs = (None, None, None, 2)[index % 4]
        # Some come while others are at work.
        engine.run(batch[:4])
        for request in batch[4:]:
            engine.add(request)
            engine.step()
        engine.run([])
        for request in batch:
            assert_as_alone(model, request)
        assert_nothing_is_held(engine)
        preemptions += engine.scheduler.preemptions
        reused += sum(request.reused_tokens for request in batch)
    assert preemptions > 0
    assert (reused > 0) == (kind != "states")


@pytest.mark.parametrize(("seed", "kind"), [*enumerate(KINDS)])
def test_drawn_crossings(seed: int, kind: str) -> None:
    ways: list[Way] = ["none", "lookup", "model", "prediction"]
    count = 1 if kind == "states" else 3 if kind == "learned positions" else 4
    model = model_of(KINDS[kind] + (" --mtp-num-layers 2" if count == 4 else ""))
    for request in write_crossing(model, seed, ways[:count]):
        assert_as_alone(model, request)


def test_one_among_64_others() -> None:
    model = model_of(KINDS["grouped queries, part of a head rotated"])
    engine = Engine(model, EngineSettings(LONGEST, max_requests=65))
    for request in engine.run(draw_requests(9, 65, logprobs=2)):
        assert_as_alone(model, request)


@pytest.mark.parametrize("kind", ["learned positions", "windows, local angles, sinks", "chunks, temperature",
                                  "latent vectors", "experts"])  # fmt: skip
@pytest.mark.parametrize("way", ["lookup", "model", "prediction"])
def test_drafts_change_nothing(kind: str, way: str) -> None:
    predicts = way == "prediction" and kind != "learned positions"
    model = model_of(KINDS[kind] + (" --mtp-num-layers 2" if predicts else ""))
    for seed, settings in enumerate(SETTINGS[1:]):
        drafter: Drafter = PromptLookup()
        if way == "model":
            drafter = ModelDrafter(model, most=3)
        elif predicts:
            drafter = PredictionDrafter(model)
        engine = Engine(model, settings, drafter=drafter)
        for request in engine.run(draw_requests(seed, 8, logprobs=1)):
            assert_as_alone(model, request)
        assert_nothing_is_held(engine)
        if predicts:
            assert [pool.num_used for state in drafter._states for pool in state.pools] == [0, 0]
        assert drafter.drafted > 0 and drafter.kept <= drafter.drafted
        assert way != "model" or drafter.kept == drafter.drafted, "the model agrees with itself"


def test_drafts_of_a_preempted_text_take_no_room() -> None:
    """Two texts grow until there is room for only one; both get their whole answers."""
    model = model_of(f"{ROPE} --max-position-embeddings 128 --mtp-num-layers 1")
    settings = EngineSettings(112, capacity_tokens=112, max_requests=2)
    engine = Engine(model, settings, drafter=PredictionDrafter(model))
    requests = engine.run([Request([(row + place) % VOCAB_SIZE for place in range(52)], 60, GREEDY) for row in (0, 1)])
    assert engine.scheduler.preemptions
    for request in requests:
        assert_as_alone(model, request)
    assert_nothing_is_held(engine)


def test_a_window_gives_back_its_pages_and_a_state_stays_as_it_is() -> None:
    model = model_of(KINDS["windows, local angles, sinks"])
    engine = Engine(model, EngineSettings(LONGEST, reuses_prefixes=False))
    engine.add(Request([1] * 8, LONGEST - 8, GREEDY))
    most = [0] * len(engine.state.pools)
    while engine.has_work:
        engine.step()
        most = [max(one, pool.num_used) for one, pool in zip(most, engine.state.pools, strict=True)]
    used = dict(zip(engine.state.groups, most, strict=True))
    assert sorted(used.values()) == [2, LONGEST // PAGE_TOKENS]
    assert max(used, key=lambda reach: used[reach]).window is None


def test_shared_pages_are_copied_before_they_are_written() -> None:
    model = model_of("")
    engine = Engine(model, EngineSettings(LONGEST))
    prompt = list(range(2 * PAGE_TOKENS))
    first, second = Request(prompt, 6, GREEDY), Request(list(prompt), 6, GREEDY)
    engine.run([first])
    engine.run([second])
    # The last token of a prompt is read in any case, into a page of its own.
    assert second.reused_tokens == len(prompt) - 1
    assert second.new_tokens == first.new_tokens
    third = Request([*prompt[:-1], 0], 6, GREEDY)
    engine.run([third])
    assert third.reused_tokens == PAGE_TOKENS
    assert_as_alone(model, third)
    # New weights make what is known worthless.
    engine.forget_contents()
    (fourth,) = engine.run([Request(list(prompt), 1, GREEDY)])
    assert fourth.reused_tokens == 0


def test_a_cancelled_request_frees_its_pages_and_disturbs_nobody() -> None:
    model = model_of("")
    engine = Engine(model, EngineSettings(LONGEST, max_requests=3, max_step_tokens=16))
    batch = [engine.add(request) for request in draw_requests(4, 6)]
    for request in batch[::2]:
        engine.step()
        engine.end(request)
        engine.end(request)
    engine.run([])
    for request in batch[1::2]:
        assert_as_alone(model, request)
    assert {request.ended_by for request in batch[::2]} <= {"cancelled", "length"}
    assert_nothing_is_held(engine)


def test_a_long_prompt_delays_nobody_by_more_than_its_chunks() -> None:
    model = model_of("--max-position-embeddings 600")
    engine = Engine(model, EngineSettings(600, max_step_tokens=32))
    writing = engine.add(Request([1], 40, GREEDY))
    engine.step()
    engine.add(Request([2] * 500, 4, GREEDY))
    for _ in range(3):
        before = len(writing.new_tokens)
        engine.step()
        assert len(writing.new_tokens) == before + 1
    late = engine.add(Request([3] * 12, 2, GREEDY))
    engine.step()
    assert len(late.new_tokens) == 1


def test_draws_depend_on_the_seed_alone() -> None:
    model = model_of("")
    sampling = Sampling(seed=7, top_k=9, repetition_penalty=1.3, min_p=0.01)
    prompt = [5, 6, 7]
    (alone,) = Engine(model, EngineSettings(LONGEST)).run([Request(list(prompt), 20, sampling)])
    cramped = Engine(model, EngineSettings(LONGEST, capacity_tokens=LONGEST, max_step_tokens=5))
    others = draw_requests(1, 6, Sampling(seed=8))
    request = Request(list(prompt), 20, sampling)
    cramped.run([*others, request])
    assert request.preemptions > 0
    assert request.new_tokens == alone.new_tokens


def test_training_goes_on_with_a_model_that_has_written() -> None:
    """What the model keeps from generation, such as a table of angles, is fit for gradients."""
    model = build_model("--position-embedding-type rope --swiglu --normalization RMSNorm --no-rope-fusion")
    generate(model, [[1, 2, 3]], max_new_tokens=4, sampling=Sampling(greedy=True))
    ids = torch.arange(6).unsqueeze(0)
    model.train()(ids, ids, labels=ids).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_changes_logits() -> None:
    model = model_of("")

    def write(sampling: Sampling, **options: Any) -> list[int]:
        return Engine(model, EngineSettings(LONGEST)).run([Request([5, 6], 24, sampling, **options)])[0].new_tokens

    plain = write(GREEDY)
    assert len({*plain}) < len(plain)
    assert len({*write(Sampling(greedy=True, presence_penalty=1e4))}) == 24
    assert len({*write(Sampling(greedy=True, frequency_penalty=1e4))}) == 24
    assert not {5, 6} & {*write(Sampling(greedy=True, repetition_penalty=1e9))}
    assert set(write(Sampling(greedy=True, logit_bias={11: 1e5}))) == {11}
    assert write(Sampling(min_p=1.0)) == plain
    ends = frozenset(plain[:1])
    assert write(GREEDY, ends=ends) == []
    assert len(write(GREEDY, ends=ends, min_new_tokens=5)) >= 5


def test_bad_requests_are_refused_and_change_nothing() -> None:
    engine = Engine(model_of(""), EngineSettings(LONGEST, capacity_tokens=40))
    for prompt in ([], [1] * LONGEST, [1] * 65):
        with pytest.raises(ConfigError, match="the prompt has"):
            engine.add(Request(prompt, 4, GREEDY))
    assert not engine.has_work
    with pytest.raises(ConfigError, match="max_requests 0 must be at least 1"):
        EngineSettings(LONGEST, max_requests=0)


def test_a_request_without_a_next_token_fails_alone() -> None:
    model = model_of("")
    every = frozenset(range(VOCAB_SIZE))
    sampled = Sampling(seed=1)
    for drafter in (None, PromptLookup()):
        engine = Engine(model, EngineSettings(LONGEST), drafter=drafter)
        forbidden = [Request([1], 4, each, ends=every, min_new_tokens=2) for each in (GREEDY, sampled)]
        cold, other = Request([1], 4, Sampling(temperature=1e-320)), Request([1], 4, GREEDY)
        engine.run([*forbidden, cold, other])
        assert [request.ended_by for request in forbidden] == ["failed", "failed"]
        assert cold.new_tokens == other.new_tokens
        assert_as_alone(model, other)
        assert_nothing_is_held(engine)
    with torch.no_grad():
        model.decoder.layers[0].mlp.linear_fc2.weight.fill_(math.nan)
    for request in Engine(model, EngineSettings(LONGEST)).run([Request([1], 4, GREEDY), Request([1], 4, sampled)]):
        assert (request.new_tokens, request.ended_by) == ([], "failed")


@pytest.mark.parametrize(
    "kind",
    ["grouped queries, part of a head rotated", "windows, local angles, sinks", "latent vectors", "states", "experts"],
)
def test_batch_invariance_to_the_bit(kind: str) -> None:
    """The same bits among 64 others, in whatever order and little room, as alone."""
    model = model_of(KINDS[kind])

    def write(requests: Sequence[Request]) -> list[tuple[list[int], list[float]]]:
        settings = EngineSettings(LONGEST, capacity_tokens=300, max_step_tokens=19, batch_invariant=True)
        engine = Engine(model, settings, vocab_size=VOCAB_SIZE)
        done = engine.run(requests)
        assert engine.scheduler.preemptions == 0
        return [
            (each.new_tokens, [entry.logprob for entry in (*each.read_logprobs, *each.token_logprobs)]) for each in done
        ]

    def draw() -> list[Request]:
        return [
            *draw_requests(1, 33, logprobs=0, prompt_logprobs=0),
            *draw_requests(2, 32, Sampling(seed=5, top_k=20), logprobs=0),
        ]

    together = write(draw())
    for index in random.Random(3).sample(range(65), 12):
        assert write(draw()[index : index + 1]) == together[index : index + 1]
