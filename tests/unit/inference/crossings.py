# SPDX-License-Identifier: Apache-2.0
"""Crossings of what an engine does at once, drawn by a seed: how many texts, in how much room, in what parts, with
which drafts, and which of them come late or are cancelled. On several ranks all draw the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.request import Request, TokenLogprobs
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.speculation import Drafter, ModelDrafter, PredictionDrafter, PromptLookup
from tests.support.gpt_models import VOCAB_SIZE

GREEDY = Sampling(greedy=True)
LONGEST = 64
Way = Literal["none", "lookup", "model", "prediction"]


def draw_requests(seed: int, count: int, sampling: Sampling = GREEDY, **options: int | None) -> list[Request]:
    """Prompts of 1 to 48 tokens, half of which begin with the same ones, for 0 to 15 new tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    found = []
    for _ in range(count):
        begin = shared[: rng.choice([0, 0, 16, 31, 32, 33, 40])]
        prompt = [*begin, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(9)))] or [3]
        found.append(Request(prompt, rng.randrange(16), sampling, **options))
    return found


def build_drafter(way: Way, model: nn.Module) -> Drafter | None:
    """A drafter for a model, which drafts for itself where another model would."""
    if way == "none":
        return None
    if way == "lookup":
        return PromptLookup()
    return ModelDrafter(model, most=3) if way == "model" else PredictionDrafter(model)


def write_crossing(model: nn.Module, seed: int, ways: Sequence[Way]) -> list[Request]:
    """Write greedy texts as drawn; returns the requests that were not cancelled."""
    rng = random.Random(seed)
    way = rng.choice(ways)
    settings = EngineSettings(
        LONGEST,
        capacity_tokens=rng.choice([None, LONGEST, LONGEST + 32, 300]),
        max_requests=rng.choice([3, 7, 65]),
        max_step_tokens=rng.choice([None, 7, 19, 64]),
        reuses_prefixes=rng.random() < 0.8,
        batch_invariant=way == "none" and rng.random() < 0.2,
    )
    engine = Engine(model, settings, drafter=build_drafter(way, model))
    asked = draw_requests(seed, rng.choice([5, 12, 65]), logprobs=1)
    for request in asked:
        request.prompt_logprobs = rng.choice([None, None, None, 0])
    late = list(asked)
    while late or engine.has_work:
        for _ in range(rng.choice([0, 1, 8])):
            if late:
                engine.add(late.pop(0))
        engine.step()
        if rng.random() < 0.1 and len(late) < len(asked):
            engine.end(asked[rng.randrange(len(asked) - len(late))])
    # Of padding for sequence parallelism a page of each kind is kept.
    padding = int(engine.runner.config.sequence_parallel)
    assert [pool.num_used for pool in engine.state.pools] == [padding] * len(engine.state.pools)
    kept = [request for request in asked if request.ended_by != "cancelled"]
    assert all(len(request.new_tokens) == request.max_new_tokens for request in kept)
    return kept


@torch.no_grad()
def assert_as_alone(model: nn.Module, request: Request) -> None:
    """The tokens are the likeliest ones, and the log-probabilities those, of one forward of the whole text."""
    text, length = request.text, len(request.prompt)
    logprobs = model(torch.tensor([text]), torch.arange(len(text))[None], None)[0].log_softmax(-1)
    best = logprobs.topk(2, dim=-1)
    for place in range(length, len(text)):
        values, ids = best.values[place - 1], best.indices[place - 1].tolist()
        assert text[place] == ids[0] or values[0] - values[1] < 1e-5
    assert len(request.new_tokens) == request.max_new_tokens

    def compare(found: Sequence[TokenLogprobs], first: int) -> None:
        for place, entry in enumerate(found, start=first):
            expected = [float(logprobs[place - 1, text[place]]), *logprobs[place - 1].topk(len(entry.top)).values]
            got = [entry.logprob, *(value for _, value in entry.top)]
            torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-6, atol=1e-5)

    if request.logprobs is not None:
        assert len(request.token_logprobs) == len(request.new_tokens)
        compare(request.token_logprobs, length)
    if request.prompt_logprobs is not None:
        assert len(request.read_logprobs) == length - 1
        compare(request.read_logprobs, 1)
