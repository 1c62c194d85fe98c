# SPDX-License-Identifier: Apache-2.0
"""From a body to jobs of the engine, and from its events to text: what all ways of asking have in common."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from megatron.core.errors import ConfigError
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.text_stream import TextStream
from megatron.core.tokenizers.base import Tokenizer
from megatron.serving.bodies import BadRequest, ChatBody, CompletionBody
from megatron.serving.metrics import ServerMetrics
from megatron.serving.service import RequestEvent, ServedRequest, Service

FINISH = {"eod": "stop", "stop": "stop", "length": "length", "cancelled": "abort"}
"""Reason that a text ended, in the words of OpenAI's interface."""

_LONGEST_TOKEN = 64
"""Characters of a token, about: of a text beyond as many for each token that a model reads, first the beginning is
tokenised."""


@dataclass(frozen=True)
class ServedModel:
    """Facts about the model that the server knows."""

    name: str
    tokenizer: Tokenizer
    max_sequence_length: int
    vocab_size: int
    chat_ends: tuple[int, ...]
    """Tokens of which each ends an answer in a conversation."""
    adapters: tuple[str, ...] = ()
    """Names of adapters, each of which makes a further model of it."""
    adapter: str | None = None
    """The one that is in use."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens of which each ends a text."""
        eod = self.tokenizer.eod
        return () if eod is None or eod < 0 else (eod,)

    def choose(self, name: str | None) -> ServedModel | None:
        """The model of this name, with the adapters that have it; None where there is none."""
        if name in self.adapters:
            return replace(self, name=str(name), adapter=name)
        return self if name in (None, "", self.name, "EMPTY") else None

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise BadRequest for ids that are no tokens."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise BadRequest(f"{param}: {token} is no token id; ids are 0 to {self.vocab_size - 1}", param)

    def tokenize(self, text: str, param: str = "prompt", *, as_is: bool = False) -> list[int]:
        """Token ids of a prompt. as_is: without the special tokens that belong around one. Raises BadRequest for one
        that is too long by far, of which only the beginning is read."""
        tokenize = self.tokenizer.tokenize_as_is if as_is else self.tokenizer.tokenize
        begin = text[: _LONGEST_TOKEN * self.max_sequence_length]
        # The cut may come within a token, which is several there.
        if len(begin) < len(text) and (count := len(tokenize(begin))) > self.max_sequence_length + _LONGEST_TOKEN:
            raise self.refuse_length(f"more than {count - _LONGEST_TOKEN}", param)
        return tokenize(text)

    def refuse_length(self, found: object, param: str) -> BadRequest:
        """Return the error of a prompt with so many tokens."""
        # The first sentence is one that clients look for.
        return BadRequest(
            f"This model's maximum context length was exceeded: it is {self.max_sequence_length} tokens, and the "
            f"prompt has {found}; shorten the prompt",
            param,
            code="context_length_exceeded",
        )


@dataclass(eq=False)
class Answer:
    """One text that is being written."""

    index: int
    prompt: list[int]
    stream: TextStream
    job: ServedRequest | None = None
    new: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    first_seconds: float | None = None


class AnswerDelta(NamedTuple):
    """New part of an answer."""

    answer: Answer
    text: str
    tokens: list[int]


def read_sampling(body: CompletionBody | ChatBody, index: int) -> Sampling:
    """Return how the tokens of the answer with this index are chosen."""
    try:
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise BadRequest("logit_bias: its keys must be token ids", "logit_bias") from error
    temperature = 1.0 if body.temperature is None else body.temperature
    seed = secrets.randbits(62) if body.seed is None else body.seed + index
    try:
        return Sampling(
            greedy=temperature == 0,
            temperature=temperature or 1.0,
            top_k=max(body.top_k or 0, 0),
            # Nothing at all of the distribution means the likeliest token.
            top_p=1.0 if body.top_p is None else max(body.top_p, 1e-9),
            min_p=body.min_p or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=bias,
            seed=seed,
        )
    except ConfigError as error:
        raise BadRequest(str(error)) from error


def list_asked(
    served: ServedModel, body: CompletionBody | ChatBody, prompt: list[int], index: int, max_tokens: int,
    ends: Sequence[int], logprobs: int | None, prompt_logprobs: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of Request. Raises BadRequest for a prompt that is too long, and for ids that are no tokens."""
    if not prompt:
        raise BadRequest("prompt has no tokens; give some text to continue", "prompt")
    if len(prompt) + min(1, max_tokens) > served.max_sequence_length:
        raise served.refuse_length(len(prompt), "prompt" if isinstance(body, CompletionBody) else "messages")
    sampling = read_sampling(body, index)
    served.check_ids(list(sampling.logit_bias), "logit_bias")
    further = list(body.stop_token_ids or ())
    served.check_ids(further, "stop_token_ids")
    return {
        "prompt": prompt,
        "max_new_tokens": max_tokens,
        "sampling": sampling,
        "ends": frozenset([*([] if body.ignore_eos else ends), *further]),
        "min_new_tokens": body.min_tokens or 0,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "adapter": served.adapter,
    }


class Batch:
    """The answers to one HTTP request."""

    def __init__(self, service: Service, served: ServedModel, metrics: ServerMetrics, timeout: float) -> None:
        """timeout: seconds after which all are cut off."""
        self._service, self.served, self._metrics = service, served, metrics
        self._deadline = time.monotonic() + timeout
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Answer, RequestEvent]] = asyncio.Queue()
        self.answers: list[Answer] = []

    def add(self, asked: dict[str, Any], stops: Sequence[str]) -> None:
        """Add a text; work begins with `pieces`."""
        prompt = asked["prompt"]
        answer = Answer(len(self.answers), prompt, TextStream(self.served.tokenizer, prompt, stops))
        answer.job = ServedRequest(asked, partial(self._note, answer))
        self.answers.append(answer)

    def _note(self, answer: Answer, event: RequestEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the server's thread has ended, and nobody reads
            self._loop.call_soon_threadsafe(self._events.put_nowait, (answer, event))

    async def pieces(self) -> AsyncIterator[AnswerDelta]:
        """Submit the jobs and yield what comes; the last piece of an answer has its finish_reason set. Left early, as
        when the client goes away, it cancels what is not done."""
        if self._service.is_full:
            raise BadRequest("too many requests are waiting; try again later", status=429, code="queue_full")
        for answer in self.answers:
            assert answer.job is not None
            self._service.submit(answer.job)
        open_answers = len(self.answers)
        try:
            while open_answers:
                left = self._deadline - time.monotonic()
                try:
                    answer, event = await asyncio.wait_for(self._events.get(), max(left, 0.001))
                except asyncio.TimeoutError as error:  # noqa: UP041 (another class before Python 3.11)
                    raise BadRequest("the request took longer than the server allows", status=504) from error
                if answer.finish_reason is not None:
                    continue
                piece = self._take(answer, event)
                open_answers -= answer.finish_reason is not None
                if piece.text or piece.tokens or answer.finish_reason is not None:
                    yield piece
        finally:
            for answer in self.answers:
                if answer.finish_reason is None and answer.job is not None:
                    self._service.end(answer.job)
                    self._metrics.note("abort", None, time.monotonic() - answer.job.began_at, len(answer.new))

    def _take(self, answer: Answer, event: RequestEvent) -> AnswerDelta:
        assert answer.job is not None
        if event.problem is not None:
            raise BadRequest(event.problem)
        if event.ended_by == "failed":
            raise BadRequest(
                "no token can follow: the model's numbers are not finite, or all are forbidden", status=500
            )
        if event.ended_by == "lost":
            raise BadRequest("the model cannot be reached any more", status=503)
        elapsed = time.monotonic() - answer.job.began_at
        if event.tokens and answer.first_seconds is None:
            answer.first_seconds = elapsed
        answer.new += event.tokens
        text = answer.stream.add(event.tokens) if event.tokens else ""
        if event.ended_by is not None:
            text += answer.stream.finish()
            answer.finish_reason = FINISH[event.ended_by]
        if answer.stream.is_stopped:
            answer.finish_reason = "stop"
            self._service.end(answer.job, "stop")
        if answer.finish_reason is not None:
            self._metrics.note(answer.finish_reason, answer.first_seconds, elapsed, len(answer.new))
        return AnswerDelta(answer, text, list(event.tokens))

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens read and written."""
        read, written = sum(len(each.prompt) for each in self.answers), sum(len(each.new) for each in self.answers)
        cached = sum(each.job.request.reused_tokens for each in self.answers if each.job and each.job.request)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
