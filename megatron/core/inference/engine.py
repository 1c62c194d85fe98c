# SPDX-License-Identifier: Apache-2.0
"""The engine: many requests at once, each pass of the model reading what is new of all of them.

    add(request) -> queue -> plan (scheduler.py) -> one pass (model_runner.py) -> next tokens (sampling.py) -> on_tokens

Prompts are read in parts beside texts that are being written (chunked prefill); texts that begin alike share pages
(sequences/state.py); each text has a separate generator, so that what is drawn for it depends on nothing else. Keys,
values and states are computed text by text, and nothing is padded.

On several ranks each has a copy of the engine, all of them get the same requests in the same order, and one rank
chooses the tokens for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.device_graphs import Recorder
from megatron.core.errors import ConfigError
from megatron.core.inference.model_runner import ModelRunner
from megatron.core.inference.named_adapters import NamedAdapters
from megatron.core.inference.request import EndedBy, Request, TokenLogprobs
from megatron.core.inference.sampling import choose_next_tokens
from megatron.core.inference.scheduler import RequestSlice, Scheduler
from megatron.core.sequences.state import PAGE_TOKENS, SequenceState

if TYPE_CHECKING:
    from megatron.core.inference.speculation import Drafter


@dataclass(frozen=True)
class EngineSettings:
    """Limits on what an engine takes on at once. Raises ConfigError for values out of range."""

    max_sequence_length: int
    """Tokens of the longest text, prompt included."""
    capacity_tokens: int | None = None
    """Tokens of all texts together whose keys and values are kept; None: of `max_requests` texts of the longest."""
    max_requests: int = 64
    """Requests at work together; more wait."""
    max_step_tokens: int | None = None
    """Tokens that one pass reads; a longer prompt is read in parts. None: any number."""
    reuses_prefixes: bool = True
    """Texts that begin alike share what was computed of it. Not in models with recurrent states."""
    batch_invariant: bool = False
    """Every request gets the bits that it gets alone: it is read and continued by separate passes, and keeps its memory
    to the end. Slower by as much as it saves to work on several together."""
    graph_sizes: tuple[int, ...] = ()
    """Numbers of requests for which passes of one token each are recorded as CUDA graphs (recorded_passes.py)."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} {value} must be at least 1"
            for name in ("max_sequence_length", "capacity_tokens", "max_requests", "max_step_tokens")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if problems:
            raise ConfigError(problems)


class _Choice(NamedTuple):
    """Result of one pass for one request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    read_logprobs: list[TokenLogprobs]
    fails: bool = False
    """True where no token can follow those: the model's numbers are not finite, or every token is forbidden."""


@dataclass
class Counters:
    """Counts of what an engine has done since it was made."""

    passes: int = 0
    prompt_tokens: int = 0
    """Tokens of prompts, reused ones included."""
    reused_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0


class Engine:
    """Continues requests with one model; not for several threads at once."""

    def __init__(
        self,
        model: nn.Module,
        settings: EngineSettings,
        *,
        vocab_size: int | None = None,
        drafter: Drafter | None = None,
        recorder: Recorder | None = None,
        adapters: NamedAdapters | None = None,
    ) -> None:
        """model: see ModelRunner; its weights are not copied, and `forget_contents` says that they have changed.
        vocab_size: tokens from this id on are padding and never chosen. drafter: of tokens that a pass of the model
        confirms several of. recorder: of passes with `settings.graph_sizes`. adapters: of the model,
        which requests ask for by name; texts with different ones are read in different passes."""
        self.settings, self.vocab_size, self.drafter = settings, vocab_size, drafter
        self.runner, self.adapters = ModelRunner(model), adapters or NamedAdapters()
        longest = settings.max_sequence_length + (0 if drafter is None else drafter.most)
        # In whole pages: texts do not share the rest of one.
        room = settings.capacity_tokens or settings.max_requests * -(-longest // PAGE_TOKENS) * PAGE_TOKENS
        self.capacity_tokens = max(room, longest)
        # One page more is what the runner may need.
        pages = self.capacity_tokens + PAGE_TOKENS
        self.state = SequenceState(0, longest, reaches=self.runner.find_reaches(), capacity=pages)
        self.runner.begin(self.state, recorder, settings.graph_sizes)
        # A drafter that follows the model's states has to see every token.
        reuses = settings.reuses_prefixes and not (drafter is not None and drafter.reads_states)
        self.scheduler = Scheduler(
            self.state,
            settings.max_requests,
            settings.max_step_tokens,
            reuses_prefixes=reuses and not settings.batch_invariant,
            part_tokens=(settings.max_step_tokens or longest) if settings.batch_invariant else None,
        )
        if settings.batch_invariant and drafter is not None:
            raise ConfigError("--batch-invariant-mode: drafts change the bits of a text; leave out speculation")
        self.counters = Counters()
        self._numbers = 0
        if drafter is not None:
            drafter.begin(self.runner, longest, pages + settings.max_requests * PAGE_TOKENS, vocab_size)

    @property
    def has_work(self) -> bool:
        """Return True where a request is not finished."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    # ---- requests

    def add(self, request: Request) -> Request:
        """Queue a request; returns it. Raises ConfigError for a prompt that is empty or too long."""
        length, longest = len(request.prompt), self.settings.max_sequence_length
        most = min(longest, self.capacity_tokens)
        if length == 0:
            raise ConfigError("the prompt has no tokens; give some text to continue")
        if length + min(1, request.max_new_tokens) > most:
            raise ConfigError(
                f"the prompt has {length} tokens, and texts have at most {most}, of which one must stay free: shorten "
                "the prompt"
            )
        if request.adapter is not None and request.adapter not in self.adapters.names:
            raise ConfigError(f"there are no adapters of the name {request.adapter}")
        request.number = self._numbers
        self._numbers += 1
        request.limit = min(length + request.max_new_tokens, most)
        self.scheduler.waiting.append(request)
        return request

    def end(self, request: Request, ended_by: EndedBy = "cancelled") -> None:
        """End a request, whatever it is doing; its pages are free at once."""
        if request.ended_by is not None:
            return
        request.ended_by = ended_by
        self.scheduler.remove(request)
        self.counters.finished += 1
        if self.drafter is not None:
            self.drafter.forget(request)

    def forget_contents(self) -> None:
        """Compute every prompt again from now on: the model's weights have changed."""
        for pool in self.state.pools:
            pool.forget_all()

    def free_memory(self) -> None:
        """Give back the memory of keys, values and states; what requests have written so far is read again when they
        go on, with the weights as they are then."""
        self.scheduler.preempt_all()
        self.forget_contents()
        self.state.free_memory()

    def run(self, requests: Iterable[Request]) -> list[Request]:
        """Add requests and make passes until all of the engine's are finished."""
        added = [self.add(request) for request in requests]
        while self.has_work:
            self.step()
        return added

    # ---- a pass

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Make one pass of the model. Returns the requests that are finished by it."""
        parts = self.scheduler.plan()
        if self.drafter is not None:
            for request in self.scheduler.waiting:
                if request.preemptions:  # its room is another's now
                    self.drafter.forget(request)
        if not parts:
            return []
        # Those with the same adapters side by side, each group in the order that it had.
        parts.sort(key=lambda part: part.request.adapter or "")
        wanted = [self._count_wanted(part) for part in parts]
        passes = []
        for group in self._divide(parts):
            if not any(wanted[group]):
                # Some logits at least: products of nothing are not what kernels are made for.
                wanted[group.stop - 1] = 1
            passes.append(self._run(parts[group], wanted[group]))
        own = [logits for logits in passes if logits is not None]
        logits = torch.cat(own) if own else None
        choices = None
        if logits is not None and self.runner.decides:
            choices = self._choose(parts, logits, wanted)
        choices = self.runner.agree(choices)
        if self.counters.passes == 0:  # another stage's layers may be those that decide what may be shared
            self.state.is_recurrent = self.runner.is_anywhere(self.state.is_recurrent)
        self.counters.passes += 1
        finished = [part.request for part, choice in zip(parts, choices, strict=True) if self._take(part, choice)]
        if self.drafter is not None:
            if self.state.is_recurrent:
                raise ConfigError(
                    "--speculate reads tokens that may turn out to be wrong, and a recurrent state cannot forget them; "
                    "leave it out"
                )
            self.drafter.passes += 1
            self.drafter.texts_read += len(parts)
            self.drafter.draft([part.request for part in parts])
        for part in parts:
            self.scheduler.note_read(part.request)
        return finished

    def _divide(self, parts: list[RequestSlice]) -> Iterator[slice]:
        """Yield the parts of each pass of the model: those with the same adapters, or each by itself."""
        names = [part.request.adapter for part in parts]
        first = 0
        for end in range(1, len(parts) + 1):
            if self.settings.batch_invariant or end == len(parts) or names[end] != names[first]:
                yield slice(first, end)
                first = end

    def _run(self, parts: list[RequestSlice], wanted: list[int]) -> Tensor | None:
        tokens = [self._list_tokens(part) for part in parts]
        self.adapters.use(parts[0].request.adapter)
        self.state.rows = [part.request.held for part in parts if part.request.held is not None]
        return self.runner.run(tokens, self.state, wanted)

    def _list_tokens(self, part: RequestSlice) -> list[int]:
        request = part.request
        text = request.text[request.length_read :][: part.tokens]
        return text + [int(draft.tokens) for draft in request.drafts] if part.reaches_end else text

    def _count_wanted(self, part: RequestSlice) -> int:
        request = part.request
        if request.lacks_prompt_logprobs:
            return part.new
        return 1 + len(request.drafts) if part.reaches_end and request.max_new_tokens else 0

    def _choose(self, parts: list[RequestSlice], logits: Tensor, wanted: list[int]) -> list[_Choice]:
        """Return what each request gets of logits [sum of wanted, v]."""
        # One wait for the device for all texts that take the likeliest token.
        best = logits[:, : self.vocab_size].max(dim=-1)
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        likeliest = [token if math.isfinite(value) else None for value, token in pairs]
        choices, first = [], 0
        for part, count in zip(parts, wanted, strict=True):
            rows = slice(first, first + count)
            choices.append(self._choose_for(part, logits[rows], likeliest[rows]))
            first += count
        return choices

    def _choose_for(self, part: RequestSlice, logits: Tensor, likeliest: list[int | None]) -> _Choice:
        request = part.request
        choice = _Choice([], [], [])
        if request.prompt_logprobs is not None:
            past, known = request.length_read - part.new, len(request.read_logprobs)
            expected = request.prompt[past + 1 : past + 1 + part.tokens][known - past :]
            rows = logits[known - past :][: len(expected)]
            choice.read_logprobs.extend(measure(rows, expected, request.prompt_logprobs, self.vocab_size))
        if not part.reaches_end or request.max_new_tokens == 0:
            return choice
        drafts = request.drafts
        for row, draft in zip(range(len(logits) - len(drafts) - 1, len(logits)), [*drafts, None], strict=True):
            token = self._choose_token(request, choice.tokens, logits[row], likeliest[row], draft)
            if token is None:
                return choice._replace(fails=True)
            choice.tokens.append(token)
            if request.logprobs is not None:
                choice.logprobs.extend(measure(logits[row : row + 1], [token], request.logprobs, self.vocab_size))
            # What was read after another token than this one says nothing about the text.
            if draft is None or token != int(draft.tokens) or token in request.ends:
                break
        return choice

    def _choose_token(
        self, request: Request, chosen: list[int], logits: Tensor, likeliest: int | None, draft: Any
    ) -> int | None:
        """The token after a text and the tokens chosen in this pass, of logits [v]; None where there is none."""
        sampling, is_too_short = request.sampling, len(request.new_tokens) + len(chosen) < request.min_new_tokens
        if sampling.greedy and not sampling.changes_logits and not is_too_short:
            return likeliest
        logits = logits.clone()  # log-probabilities are the model's
        if self.vocab_size is not None:
            logits[self.vocab_size :] = -math.inf
        sampling.adjust(logits, [*request.text, *chosen], len(request.prompt))
        if is_too_short:
            logits[[*request.ends]] = -math.inf
        if likeliest is None or not logits.amax().isfinite():
            return None
        return int(choose_next_tokens(logits.unsqueeze(0), sampling, [request.generator], draft))

    def _take(self, part: RequestSlice, choice: _Choice) -> bool:
        """Write down what a request got; True where it is finished."""
        request, counters = part.request, self.counters
        request.read_logprobs += choice.read_logprobs
        if part.reaches_end:
            if self.drafter is not None:
                self.drafter.note([int(draft.tokens) for draft in request.drafts], choice.tokens)
            request.drafts = []
        ended_by: EndedBy | None = "failed" if choice.fails else None
        new: list[int] = []
        for token in choice.tokens:
            if token in request.ends:
                ended_by = "eod"
                break
            request.text.append(token)
            new.append(token)
            if len(request.text) == request.limit:
                ended_by = "length"
                break
        request.token_logprobs += choice.logprobs[: len(new)]
        counters.new_tokens += len(new)
        if part.reaches_end and len(request.new_tokens) == len(new):
            counters.prompt_tokens += len(request.prompt)
            counters.reused_tokens += request.reused_tokens
        if part.reaches_end and request.max_new_tokens == 0:
            ended_by = "length"
        if request.held is not None and new:
            # Drafts after the last right token are forgotten.
            request.held.length = min(request.held.length, len(request.text) - 1)
        if ended_by is not None:
            self.end(request, ended_by)
        if new and request.on_tokens is not None:
            request.on_tokens(request, new)
        return request.ended_by is not None


def measure(logits: Tensor, tokens: list[int], top: int, vocab_size: int | None = None) -> Iterator[TokenLogprobs]:
    """Log-probabilities of tokens at places with logits [n, v], and of so many of the likeliest below vocab_size. As in
    training's loss the rows that pad a vocabulary have their share, small as it is once a model is trained."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)].tolist()
    if top == 0:
        yield from map(TokenLogprobs, own)
        return
    values, ids = (x.tolist() for x in logprobs[:, :vocab_size].topk(min(top, vocab_size or logits.shape[-1]), dim=-1))
    for mine, best_ids, best in zip(own, ids, values, strict=True):
        yield TokenLogprobs(mine, tuple(zip(best_ids, best, strict=True)))
