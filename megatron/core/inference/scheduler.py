# SPDX-License-Identifier: Apache-2.0
"""Choice of the requests that the next pass of the model works on, and of the number of tokens of each.

    waiting --admitted when its prompt fits--> running --its text ends--> finished
       ^                                          |
       +-- preempted when pages run out: the youngest first; later its text so far is read again

Each pass reads one token (and drafts) of every text that is being written. What is left of the budget of tokens is
shared by the prompts that are being read, in equal parts, of which a short prompt leaves some to the others: so neither
a long prompt delays the tokens of others by more than the budget, nor do prompts wait for one another. Requests are
admitted in the order of their arrival; one that must wait for pages holds up the ones after it, so that it is never
passed over.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from megatron.core.inference.request import Request
from megatron.core.sequences.state import PAGE_TOKENS, SequenceState, digest_pages


class RequestSlice(NamedTuple):
    """Tokens of one request in a pass: so many of its text, and its drafts where these come after them."""

    request: Request
    tokens: int
    reaches_end: bool
    """True if the last token of the text is among them, so that the next one is chosen."""

    @classmethod
    def of(cls, request: Request, count: int) -> RequestSlice:
        """The next tokens of a request."""
        return cls(request, count, count == request.missing)

    @property
    def new(self) -> int:
        """Tokens that the model reads."""
        return self.tokens + (len(self.request.drafts) if self.reaches_end else 0)


class Scheduler:
    """The queue of requests and those at work."""

    def __init__(
        self,
        state: SequenceState,
        max_requests: int,
        max_step_tokens: int | None,
        *,
        reuses_prefixes: bool,
        part_tokens: int | None = None,
    ) -> None:
        """max_requests: at work together. max_step_tokens: budget of a pass, None for any number. reuses_prefixes:
        whether texts that begin alike share pages. part_tokens: each text is read in parts of so many, and never
        preempted, whatever others do; instead of a budget."""
        self._state, self.max_requests, self.max_step_tokens = state, max_requests, max_step_tokens
        self._part_tokens = part_tokens
        self._reuses_prefixes = reuses_prefixes
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    @property
    def reuses_prefixes(self) -> bool:
        """Return True where texts that begin alike share pages; a recurrent state has none."""
        return self._reuses_prefixes and not self._state.is_recurrent

    def plan(self) -> list[RequestSlice]:
        """Admit, preempt, and choose the parts of the next pass; their pages are reserved."""
        parts: dict[int, RequestSlice] = {}
        for request in sorted((each for each in self.running if not each.is_reading), key=_arrival):
            if request.held is not None:  # not preempted for an older one
                self._add(parts, RequestSlice.of(request, 1))
        budget = None
        if self.max_step_tokens is not None:
            budget = max(self.max_step_tokens - sum(part.new for part in parts.values()), PAGE_TOKENS)
        self._admit()
        reading = sorted((each for each in self.running if each.is_reading), key=lambda each: each.missing)
        for index, request in enumerate(reading):
            if request.held is None:
                continue
            count = request.missing
            if self._part_tokens is not None:
                count = min(count, self._part_tokens)
            elif budget is not None:
                count = min(count, max(1, budget // (len(reading) - index)), budget)
            if count and self._add(parts, RequestSlice.of(request, count)) and budget is not None:
                budget = max(0, budget - count)
        # In the order of arrival, so that those that stay lie side by side in each pass.
        return [parts[number] for number in sorted(parts)]

    def remove(self, request: Request) -> None:
        """Take out a request that has ended."""
        if request.held is not None:
            self._state.release(request.held)
            request.held = None
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def preempt_all(self) -> None:
        """Forget what was computed of all requests at work."""
        for request in [*self.running]:
            self._preempt(request)

    def note_read(self, request: Request) -> None:
        """After a pass: pages that no token sees any more are free, and full ones may serve others."""
        if request.held is None:
            return
        if self.reuses_prefixes:
            self._digest(request)
            self._state.note_content(request.held, request.contents)
        self._state.give_back_unseen(request.held)

    def _admit(self) -> None:
        state = self._state
        being_read = {each.contents[0] for each in self.running if each.is_reading and each.contents}
        for request in [*self.waiting]:
            if len(self.running) >= self.max_requests:
                break
            held = state.add()
            if self.reuses_prefixes and not request.lacks_prompt_logprobs:
                self._digest(request)
                known = state.count_known(request.contents)
                # Another is reading the same beginning: what it reads is shared when it is there.
                if known == 0 and request.contents and request.contents[0] in being_read:
                    continue
                state.adopt(held, request.contents, len(request.text) - 1)
            length = len(request.text) if self._part_tokens is None else request.limit
            if not state.can_reserve(held, length):
                state.release(held)
                # Alone it fits at any rate, if need be into the pages that it would have shared.
                if self.running or not state.can_reserve(held, length):
                    break
            state.reserve(held, length, request.limit)
            if not request.preemptions:
                request.reused_tokens = held.length
            request.held = held
            self.waiting.remove(request)
            self.running.append(request)
            being_read.update(request.contents[:1])

    def _digest(self, request: Request) -> None:
        request.contents = digest_pages(request.text, request.contents, (request.adapter or "").encode())

    def _add(self, parts: dict[int, RequestSlice], part: RequestSlice) -> bool:
        """Plan a part, if need be in place of younger requests; False where it is the youngest and has to wait."""
        request, state = part.request, self._state
        assert request.held is not None
        length = request.held.length + part.new
        while not state.can_reserve(request.held, length):
            youngest = max(self.running, key=_arrival)
            self._preempt(youngest)
            parts.pop(youngest.number, None)
            if youngest is request:
                return False
        state.reserve(request.held, length, request.limit)
        parts[request.number] = part
        return True

    def _preempt(self, request: Request) -> None:
        assert request.held is not None
        self._state.release(request.held)
        request.held = None
        request.drafts = []
        request.preemptions += 1
        self.preemptions += 1
        self.running.remove(request)
        # Preempted ones arrived before all that wait for the first time: the queue stays in the order of arrival.
        index = next((i for i, each in enumerate(self.waiting) if each.number > request.number), len(self.waiting))
        self.waiting.insert(index, request)


def _arrival(request: Request) -> int:
    return request.number
