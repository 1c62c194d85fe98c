# SPDX-License-Identifier: Apache-2.0
"""The generation loop: continue a batch of prompts until each has ended or is long enough.

One call of the model reads all prompts, whatever their lengths; each call after it reads the last token of every text
that goes on. So a batch takes as many calls as its longest answer has tokens:

    prompt 1   a b c            a b c     | x | y | z
    prompt 2   d e f g h        d e f g h | u | .            ended: no longer computed

With speculation a call reads drafted tokens, too, of which each text keeps those that are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.inference.sampling import Draft, Sampling, choose_next_tokens
from megatron.core.inference.speculation import Speculation
from megatron.core.sequences.state import SequenceState


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
    enders = frozenset([] if eod is None else [eod] if isinstance(eod, int) else eod)
    generators = sampling.build_generators(len(prompts))
    texts = [list(prompt) for prompt in prompts]
    limits = [_limit(len(prompt), max_new_tokens, max_sequence_length) for prompt in prompts]
    ended_by: dict[int, Literal["eod", "length"]] = {}
    # Drafts may reach beyond the end of a text.
    longest = max(limits) + (0 if speculation is None else speculation.depths)
    state = SequenceState(len(texts), longest) if use_cache else None
    if speculation is not None:
        speculation.begin(len(texts), longest, vocab_size)
    rows, drafts = list(range(len(texts))), list[Draft]()
    while rows:
        every = _compute_logits(model, [texts[row] for row in rows], drafts, state, speculation)
        writing = list(range(len(rows)))
        for place, logits in enumerate(every.float().unbind()):
            if vocab_size is not None:
                # Rows that pad the vocabulary to a multiple of the ranks were never trained.
                logits[:, vocab_size:] = -math.inf
            own = [generators[rows[index]] for index in writing]
            draft = drafts[place].select(writing) if place < len(drafts) else None
            # One wait for the device in each pass without speculation: the host says what is read next.
            chosen = choose_next_tokens(logits[writing], sampling, own, draft).tolist()
            for index, token in zip(writing, chosen, strict=True):
                row = rows[index]
                if token in enders:
                    ended_by[row] = "eod"
                    continue
                texts[row].append(token)
                if len(texts[row]) == limits[row]:
                    ended_by[row] = "length"
                if on_tokens is not None:
                    on_tokens(row, [token])
            if draft is not None and speculation is not None:
                # What was read behind another token than this one says nothing about the text.
                right = speculation.find_right(draft, chosen)
                writing = [index for index, is_right in zip(writing, right, strict=True) if is_right]
                writing = [index for index in writing if rows[index] not in ended_by]
                if not writing:
                    break
        kept = [index for index, row in enumerate(rows) if row not in ended_by]
        rows = [rows[index] for index in kept]
        if state is None or not rows:
            continue
        state.select(kept)
        if speculation is not None:
            room = max(limits[row] - len(texts[row]) for row in rows)
            own = [generators[row] for row in rows]
            drafts = speculation.draft([texts[row] for row in rows], kept, state, sampling, own, room - 1)
    return [
        Completion(text[len(prompt) :], ended_by[row])
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]


def _compute_logits(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    drafts: Sequence[Draft],
    state: SequenceState | None,
    speculation: Speculation | None,
) -> Tensor:
    """Logits [1 + drafts, b, v] of the last tokens of the texts and of their drafts."""
    device = next(model.parameters()).device
    if state is None:
        # No token sees the padding behind a shorter text.
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        logits = model(tokens, positions, None, inference_context=None)
        return torch.stack([logits[row, len(text) - 1] for row, text in enumerate(texts)]).unsqueeze(0)
    new = [list(text[length:]) for text, length in zip(texts, state.lengths, strict=True)]
    for draft in drafts:
        for read, token in zip(new, draft.tokens.tolist(), strict=True):
            read.append(token)
    layout = state.begin([len(read) for read in new])
    tokens = layout.join_tokens(new).to(device)
    positions = layout.positions.to(device).expand_as(tokens)
    if speculation is not None:
        return speculation.read(tokens, positions, state, 1 + len(drafts))
    logits = model(tokens, positions, None, inference_context=state)
    return layout.take_last(logits.transpose(0, 1), 1)


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
