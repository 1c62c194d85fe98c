# SPDX-License-Identifier: Apache-2.0
"""Continuing a batch of prompts: the engine with all of them as requests, until each has ended or is long enough.

The first pass of the model reads all prompts, whatever their lengths; each after it reads the last token of every text
that goes on, so that a batch takes as many passes as its longest answer has tokens. With speculation a pass reads
drafted tokens, too, of which each text keeps those that are right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from megatron.core.errors import ConfigError
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.request import EndedBy, Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.speculation import Drafter


@dataclass(frozen=True)
class Completion:
    """Text that the model wrote after a prompt, and the reason that it stopped."""

    tokens: list[int]
    """The new tokens, without the one that ended the text."""
    ended_by: EndedBy


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    eod: int | Sequence[int] | None = None,
    vocab_size: int | None = None,
    max_sequence_length: int | None = None,
    use_cache: bool = True,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    speculation: Drafter | None = None,
) -> list[Completion]:
    """Continue each prompt by at most `max_new_tokens` tokens.

    model: called as GPTModel. eod: token that ends a text, or several that do. vocab_size: tokens from this id on are
    padding and never chosen. max_sequence_length: positions that the model has; longer texts end there.
    use_cache=False computes every position again for every token. on_tokens: called with (number of the prompt, new
    tokens) as soon as they are chosen, for text that appears while it is written. speculation: fewer passes of the
    model for the same text, or with sampling for one of the same distribution. Raises ConfigError for an empty or too
    long prompt, and for speculation without cache.
    """
    _check(prompts, max_new_tokens, max_sequence_length)
    if speculation is not None and not use_cache:
        raise ConfigError("--speculate needs the cache of keys and values; leave out --no-kv-cache")
    enders = frozenset([] if eod is None else [eod] if isinstance(eod, int) else eod)
    requests = [
        Request(list(prompt), max_new_tokens, dataclasses.replace(sampling, seed=sampling.seed + row), enders)
        for row, prompt in enumerate(prompts)
    ]
    if on_tokens is not None:
        tell, rows = on_tokens, {id(request): row for row, request in enumerate(requests)}
        for request in requests:
            request.on_tokens = lambda which, new: tell(rows[id(which)], new)
    limit = max(map(len, prompts)) + max_new_tokens
    longest = limit if max_sequence_length is None else min(limit, max_sequence_length)
    settings = EngineSettings(longest, max_requests=len(prompts), reuses_prefixes=use_cache)
    engine = Engine(model, settings, vocab_size=vocab_size, drafter=speculation)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        if not use_cache:
            engine.scheduler.preempt_all()
    return [Completion(request.new_tokens, request.ended_by or "length") for request in requests]


def _check(prompts: Sequence[Sequence[int]], max_new_tokens: int, max_sequence_length: int | None) -> None:
    problems = []
    if not prompts:
        problems.append("there is no prompt; give at least one")
    if max_new_tokens < 1:
        problems.append(f"--max-new-tokens {max_new_tokens} must be at least 1")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            problems.append(f"prompt {number} has no tokens; give some text to continue")
        elif max_sequence_length is not None and len(prompt) >= max_sequence_length:
            problems.append(
                f"prompt {number} has {len(prompt)} tokens; the model has {max_sequence_length} positions "
                "(--max-position-embeddings), so at least one must stay free: shorten the prompt"
            )
    if problems:
        raise ConfigError(problems)
