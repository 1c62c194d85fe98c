# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in the forms of OpenAI's two interfaces."""

from __future__ import annotations

from typing import Any

from megatron.core.inference.request import TokenLogprobs
from megatron.core.tokenizers.base import Tokenizer
from megatron.serving.answers import Answer


def list_completion_logprobs(tokenizer: Tokenizer, answer: Answer, first: int, *, echo: bool) -> dict[str, Any]:
    """Of new tokens from number `first` on; with echo of the prompt's before them, the first of which has none."""
    assert answer.job is not None
    request = answer.job.request
    ids, entries = answer.new[first:], list[TokenLogprobs | None]()
    if request is not None:
        entries = list(request.token_logprobs[first : len(answer.new)])
        if echo and first == 0:
            ids, entries = [*answer.prompt, *ids], [None, *request.read_logprobs, *entries]
    tokens = [tokenizer.detokenize([token]) for token in ids]
    offsets, offset = [], 0
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
        "top_logprobs": [
            None if entry is None else {tokenizer.detokenize([other]): value for other, value in entry.top}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def list_chat_logprobs(tokenizer: Tokenizer, answer: Answer, first: int) -> dict[str, Any]:
    """Of new tokens from number `first` on."""
    assert answer.job is not None
    request = answer.job.request

    def describe(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.detokenize([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    entries = [] if request is None else request.token_logprobs[first : len(answer.new)]
    return {
        "content": [
            describe(token, entry.logprob) | {"top_logprobs": [describe(*other) for other in entry.top]}
            for token, entry in zip(answer.new[first:], entries, strict=False)
        ]
    }
