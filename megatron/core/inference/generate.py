# SPDX-License-Identifier: Apache-2.0
"""The generation loop: continue a batch of prompts until each has ended or is long enough.

Prompts of different lengths run together without padding. The shortest one's length is read at once; from there on one
position at a time, where a longer prompt still gives its own tokens and a shorter one gets chosen ones:

    prompt 1   a b c . .          a b c | x y z      read at once | position by position
    prompt 2   d e f g h          d e f | g h z'

With speculation several positions are read at a time, of which as many are kept as are right in all texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.inference.kv_cache import KVCache
from megatron.core.inference.sampling import Draft, Sampling, choose_next_tokens, confirm_tokens
from megatron.core.inference.speculation import Speculation


@dataclass(frozen=True)
class Completion:
    """What the model wrote after a prompt, and why it stopped."""

    tokens: list[int]
    """The new tokens, without the one that ended the text."""
    ended_by: Literal["eod", "length"]


# Not inference_mode: a model that goes on training may keep what is made here, such as a table of rotary positions, and
# backward takes no tensor that was made in that mode.
@torch.no_grad()
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
    speculation: Speculation | None = None,
) -> list[Completion]:
    """Continue each prompt by at most `max_new_tokens` tokens.

    model: called as GPTModel, in evaluation mode. eod: token that ends a text, or several that do. vocab_size: tokens
    from this id on are padding and never chosen. max_sequence_length: positions that the model has; longer texts end
    there. use_cache=False computes every position anew for every token. on_tokens: called with (number of the prompt,
    new tokens) as soon as they are chosen, for text that appears while it is written. speculation: of this model;
    fewer passes of it for the same text, or with sampling for one of the same distribution. Raises ConfigError for an
    empty or too long prompt, and for speculation without cache.
    """
    _check(prompts, max_new_tokens, max_sequence_length)
    if speculation is not None and not use_cache:
        raise ConfigError("--speculate needs the cache of keys and values; leave out --no-kv-cache")
    device = next(model.parameters()).device
    limits = [_limit(len(prompt), max_new_tokens, max_sequence_length) for prompt in prompts]
    tokens = _padded(prompts, max(limits)).to(device)  # [b, longest]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ends = torch.tensor(limits, device=device)
    ended_at = ends.clone()  # where each text ends; the token there, if any, is the eod

    enders = torch.tensor([] if eod is None else [eod] if isinstance(eod, int) else list(eod), device=device)
    cache = KVCache(max(limits)) if use_cache else None
    generators = sampling.build_generators(len(prompts))
    if speculation is not None:
        speculation.begin(tokens.shape[1], vocab_size)
    # All prompts have tokens up to the shortest one's end; from there on each may read or say a token.
    seen, position = 0, min(len(prompt) for prompt in prompts)
    drafts: list[Draft] = []
    # One wait for the device per pass: the host has to know whether any text goes on.
    while position < int(ended_at.max()):
        every = _compute_logits(model, tokens[:, seen : position + len(drafts)], seen, cache, speculation)
        for place, logits in enumerate(every[:, -1 - len(drafts) :].float().unbind(1)):
            if vocab_size is not None:
                # Rows that pad the vocabulary to a multiple of the ranks were never trained.
                logits[:, vocab_size:] = -math.inf
            draft = drafts[place] if place < len(drafts) else None
            if draft is None:
                chosen = choose_next_tokens(logits, sampling, generators)
            else:
                chosen = confirm_tokens(logits, draft, sampling, generators)
            is_open = (position >= lengths) & (position < ended_at)
            # Also rows that have ended are computed on: a batch of changing size would need a cache that shrinks.
            read = tokens[:, position].clone()
            tokens[:, position] = torch.where(is_open, chosen, read)
            ended_at = torch.where(is_open & torch.isin(chosen, enders), position, ended_at)
            if on_tokens is not None:
                _hand_over(on_tokens, chosen, is_open & (position < ended_at))
            position += 1
            # What was read behind another token than this one says nothing about the text.
            if draft is not None and speculation is not None:
                is_wrong, goes_on = is_open & (tokens[:, position - 1] != read), position < ended_at
                if not speculation.confirm(is_open, is_wrong, goes_on):
                    break
        # Without a cache the next call reads everything from the first token again.
        seen = position - 1 if cache is not None else 0
        if cache is not None and speculation is not None:
            cache.rewind(seen)
            drafts = speculation.draft(tokens, position, lengths, sampling, generators)
    return [
        Completion(tokens[row, len(prompt) : end].tolist(), "eod" if end < limits[row] else "length")
        for row, (prompt, end) in enumerate(zip(prompts, ended_at.tolist(), strict=True))
    ]


def _hand_over(on_tokens: Callable[[int, list[int]], None], chosen: Tensor, is_new: Tensor) -> None:
    for row, (token, counts) in enumerate(zip(chosen.tolist(), is_new.tolist(), strict=True)):
        if counts:
            on_tokens(row, [token])


def _compute_logits(
    model: nn.Module, tokens: Tensor, offset: int, cache: KVCache | None, speculation: Speculation | None
) -> Tensor:
    """Logits [b, s, v] of these tokens [b, s], the first of which is at position `offset`; with speculation those of
    the last ones."""
    positions = torch.arange(offset, offset + tokens.shape[1], device=tokens.device).expand_as(tokens)
    if speculation is not None:
        assert cache is not None, "refused before"
        logits = speculation.read(tokens, positions, cache)
    else:
        logits = model(tokens, positions, None, inference_context=cache)
    if cache is not None:
        cache.advance(tokens.shape[1])
    return logits


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


def _limit(prompt_length: int, max_new_tokens: int, max_sequence_length: int | None) -> int:
    """Length at which a text ends if it does not end by itself."""
    limit = prompt_length + max_new_tokens
    return limit if max_sequence_length is None else min(limit, max_sequence_length)


def _padded(prompts: Sequence[Sequence[int]], length: int) -> Tensor:
    """int64 [b, length] with zeros after each prompt; they are overwritten before the model sees them."""
    tokens = torch.zeros(len(prompts), length, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    return tokens
