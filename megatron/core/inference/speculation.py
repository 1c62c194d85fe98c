# SPDX-License-Identifier: Apache-2.0
"""Speculation: tokens are drafted cheaply, and one pass of the model confirms several of them.

    read ... t_p  d_1 .. d_D      one pass of the model gives the distributions of the places of d_1 .. d_D, and behind
    keep d_1 .. d_m, choose t     m: drafts that are right; each text has its number of them
    draft again behind t

| drafter            | what it drafts                                             | costs                             |
|--------------------|------------------------------------------------------------|-----------------------------------|
| PromptLookup       | what followed the same last tokens earlier in the text     | nothing                           |
| ModelDrafter       | what a smaller model says                                  | D passes of the smaller model     |
| PredictionDrafter  | what the model's multi-token prediction says               | D small layers                    |

Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Saxena, "Prompt Lookup
Decoding", 2023; DeepSeek-V3, 2024, section 2.2, for drafts by multi-token prediction. Greedy texts are the same as
without, and sampled ones have the same distribution (`sampling.confirm_tokens`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.inference.model_runner import ModelRunner
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Draft, draft_next_tokens
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.sequences.state import HeldSequence, SequenceState
from megatron.core.transformer.config_fields.moe import CAPACITY_FACTORS


class Drafter(ABC):
    """Drafts tokens for an engine, and counts how many of them were right."""

    reads_states = False
    """True if it needs the model's hidden states of every token."""

    def __init__(self, most: int) -> None:
        """most: tokens drafted at a time."""
        self.most = most
        self.drafted, self.kept, self.passes, self.texts_read = 0, 0, 0, 0

    def begin(self, runner: ModelRunner, max_tokens: int, capacity: int, vocab_size: int | None) -> None:
        """Forget the engine before. runner: of the model that confirms. max_tokens: of the longest text with drafts;
        capacity: of all texts together. Raises ConfigError for models that cannot read tokens on trial."""
        refuse_dropping(runner.config)

    @abstractmethod
    def draft(self, requests: Sequence[Request]) -> None:
        """After a pass with these requests: set `drafts` of those whose text goes on. Every rank takes part."""

    def forget(self, request: Request) -> None:  # noqa: B027 (most keep nothing)
        """Forget what is kept of a request that has ended, or was preempted."""

    def note(self, drafted: Sequence[int], chosen: Sequence[int]) -> None:
        """Count drafts that were confirmed, of those that came to be judged."""
        judged = list(zip(drafted, chosen, strict=False))
        self.drafted += len(judged)
        self.kept += sum(draft == token for draft, token in judged)

    def describe(self) -> str:
        """Return how many drafts were right, in words."""
        if not self.drafted:
            return "speculation: no token was drafted"
        share, pace = 100 * self.kept / self.drafted, 1 + self.kept / self.texts_read
        return (
            f"speculation: {self.kept} of {self.drafted} drafted tokens accepted ({share:.1f} %), "
            f"{pace:.2f} tokens for each pass of the model"
        )


def refuse_dropping(config: Any) -> None:
    """Raise ConfigError where experts drop tokens: which ones depends on those that are read with them, so that the
    text would be another one."""
    for name in CAPACITY_FACTORS:
        if getattr(config, name, None) is not None:
            raise ConfigError(
                f"--speculate reads several tokens at once, of which experts with {config.say(name)} drop others than "
                "they would one by one; leave it out"
            )


def list_writing(requests: Sequence[Request]) -> list[Request]:
    """List the requests of which only the last token is to be read, and that have room for a draft and a token."""
    return [
        each
        for each in requests
        if each.held is not None and each.ended_by is None and each.missing == 1 and count_room(each) > 0
    ]


def count_room(request: Request) -> int:
    """Drafts that may all be right, with a token after them, before the text is at its limit."""
    return request.limit - len(request.text) - 1


class PromptLookup(Drafter):
    """Drafts what followed the last few tokens where the text had them before."""

    def __init__(self, most: int = 4, longest_match: int = 3) -> None:
        super().__init__(most)
        self.longest_match = longest_match

    def draft(self, requests: Sequence[Request]) -> None:
        """See Drafter."""
        for request in list_writing(requests):
            found = self.find(request.text)[: count_room(request)]
            request.drafts = [Draft(torch.tensor([token]), None) for token in found]

    def find(self, text: Sequence[int]) -> Sequence[int]:
        """Return what followed the latest earlier place of the longest end of the text that has one."""
        for length in range(min(self.longest_match, len(text) - 1), 0, -1):
            end = text[-length:]
            # From the end backwards: a text repeats rather what it has said last.
            for place in range(len(text) - length - 1, -1, -1):
                if text[place : place + length] == end:
                    return text[place + length : place + length + self.most]
        return []


class ModelDrafter(Drafter):
    """Drafts what another, smaller model with the same vocabulary says, divided over the same ranks."""

    def __init__(self, model: nn.Module, most: int = 4) -> None:
        super().__init__(most)
        self._runner = ModelRunner(model)

    def begin(self, runner: ModelRunner, max_tokens: int, capacity: int, vocab_size: int | None) -> None:
        """See Drafter."""
        super().begin(runner, max_tokens, capacity, vocab_size)
        own, ranks = self._runner.world_size, runner.world_size
        if own != ranks:
            raise ConfigError(f"a draft model is on as many processes as the model, {ranks}, and not on {own}")
        self._vocab_size = vocab_size
        self._state = SequenceState(0, max_tokens, reaches=self._runner.find_reaches(), capacity=capacity)
        self._runner.begin(self._state)
        self._held: dict[int, HeldSequence] = {}

    def draft(self, requests: Sequence[Request]) -> None:
        """See Drafter; texts are read together, each from where the smaller model has read it to."""
        state = self._state
        writing = [each for each in list_writing(requests) if self._reserve(each)]
        text = {each.number: list(each.text) for each in writing}
        for count in range(self.most):
            writing = [each for each in writing if count_room(each) > count]
            if not writing:
                break
            state.rows = [self._held[each.number] for each in writing]
            # First all that was confirmed since the last drafts, then each draft by itself.
            new = [text[each.number][held.length :] for each, held in zip(writing, state.rows, strict=True)]
            logits = self._runner.run(new, state, [1] * len(new))
            own = choose_drafts(writing, logits, self._vocab_size) if logits is not None else None
            for request, draft in zip(writing, self._runner.agree(own), strict=True):
                request.drafts.append(draft)
                text[request.number].append(int(draft.tokens))
            state.is_recurrent = self._runner.is_anywhere(state.is_recurrent)

    def _reserve(self, request: Request) -> bool:
        """Take back drafts, and reserve what the next ones need; False where there is no room, as what texts share in
        the engine each has for itself here."""
        state, text = self._state, request.text
        held = self._held.setdefault(request.number, state.add())
        # A recurrent state cannot take a draft back: it reads the text again.
        fits = 0 if state.is_recurrent else min(held.length, len(text) - 1)
        if fits == 0:
            state.release(held)
        held.length = fits
        length = len(text) + min(self.most, count_room(request)) - 1
        if not state.can_reserve(held, length):
            self.forget(request)
            return False
        state.reserve(held, length)
        return True

    def forget(self, request: Request) -> None:
        """See Drafter."""
        held = self._held.pop(request.number, None)
        if held is not None:
            self._state.release(held)


def choose_drafts(requests: Sequence[Request], logits: Tensor, vocab_size: int | None) -> list[Draft]:
    """A draft for each request from logits [requests, v], of tokens below vocab_size."""
    if vocab_size is not None:
        logits[:, vocab_size:] = -math.inf
    return [
        draft_next_tokens(logits[index : index + 1], each.sampling, [each.generator])
        for index, each in enumerate(requests)
    ]


@dataclass
class _Depths:
    """State that multi-token prediction keeps of a text."""

    sequences: list[HeldSequence]
    """Of each depth."""
    waiting: list[Tensor | None] = field(default_factory=list)
    """For each depth, hidden states of the depth before that are final, and are to be read with another token."""


class PredictionDrafter(Drafter):
    """Drafts by a model's multi-token prediction.

    Depth k = 1 .. D reads, at position i, the states of the depth before and the token i + k, and keeps keys and values
    in a separate state. With a text of L tokens, what depth k has read at positions below L - k is final; after them it
    has read drafts, and reads again what takes their place.
    """

    reads_states = True

    def __init__(self, model: nn.Module) -> None:
        """model: a GPTModel. Raises ConfigError where it has no MTP layers."""
        if not isinstance(model, GPTModel) or model.config.mtp_num_layers is None:
            raise ConfigError(
                "--speculate drafts tokens with multi-token prediction, and the model has none (--mtp-num-layers of "
                "its training); leave it out"
            )
        if model.config.num_streams is not None:
            raise ConfigError(
                "--speculate drafts from a model's hidden states, and multi-token prediction of one with "
                "--enable-hyper-connections goes on from its residual streams; leave it out, or take another drafter"
            )
        refuse_dropping(model.config)
        super().__init__(model.config.mtp_num_layers)
        self._model = model

    def begin(self, runner: ModelRunner, max_tokens: int, capacity: int, vocab_size: int | None) -> None:
        """See Drafter."""
        super().begin(runner, max_tokens, capacity, vocab_size)
        if runner.groups.pp.size() > 1 or runner.config.sequence_parallel:
            raise ConfigError(
                "--speculate with multi-token prediction needs all layers on one stage, without --sequence-parallel; "
                "leave it out"
            )
        runner.keeps_states = True
        self._runner, self._vocab_size = runner, vocab_size
        self._of: dict[int, _Depths] = {}
        self._states = [SequenceState(0, max_tokens, capacity=capacity) for _ in range(self.most)]

    def forget(self, request: Request) -> None:
        """See Drafter."""
        kept = self._of.pop(request.number, None)
        for state, sequence in zip(self._states, kept.sequences if kept else (), strict=False):
            state.release(sequence)

    @torch.no_grad()
    def draft(self, requests: Sequence[Request]) -> None:
        """See Drafter. Texts of which a part of the prompt was read are followed, and get no drafts."""
        runner, hidden = self._runner, dict[int, Tensor]()
        followed = [each for each in requests if each.held is not None and each.ended_by is None]
        for request, past, states in zip(requests, runner.layout.past, runner.states, strict=False):
            if request.held is not None:
                hidden[request.number] = states[: request.held.length - past]
                # Read from the beginning again, as after a preemption: what was kept is of other positions.
                if past == 0:
                    self.forget(request)
        rooms = {each.number: count_room(each) for each in list_writing(followed)}
        known = {each.number: list(each.text) for each in followed}
        for depth in range(1, self.most + 1):
            writing = [each for each in followed if rooms.get(each.number, 0) >= depth]
            reading = [each for each in followed if each.number not in rooms]
            if writing or reading:
                self._read_depth(depth, [*writing, *reading], hidden, known)
            if not writing:
                continue
            last = torch.cat([hidden[each.number][-1:] for each in writing], dim=1)
            logits = runner.gather(self._model.compute_logits(last))[:, -1].float()
            drafts = runner.agree(choose_drafts(writing, logits, self._vocab_size) if runner.decides else None)
            for request, draft in zip(writing, drafts, strict=True):
                request.drafts.append(draft)
                known[request.number].append(int(draft.tokens))

    def _read_depth(
        self, depth: int, requests: Sequence[Request], hidden: dict[int, Tensor], known: dict[int, list[int]]
    ) -> None:
        """Read with one depth what it has not read, by request: hidden states [n, 1, h] of the depth before, which
        become this depth's, and the known tokens."""
        state, read = self._states[depth - 1], []
        for request in requests:
            kept = self._of.setdefault(
                request.number, _Depths([each.add() for each in self._states], [None] * self.most)
            )
            waiting, first = kept.waiting[depth - 1], kept.sequences[depth - 1].length
            before = hidden[request.number] if waiting is None else torch.cat((waiting, hidden[request.number]))
            # A state waits where the token that it is read with is not known yet.
            ids = known[request.number][first + depth :][: len(before)]
            kept.waiting[depth - 1] = before
            hidden[request.number] = before[:0]
            if ids:
                read.append((request, kept, before, first, ids))
        if not read:
            return
        state.rows = [kept.sequences[depth - 1] for _, kept, *_ in read]
        layout = state.begin([len(ids) for *_, ids in read])
        tokens = layout.join_tokens([ids for *_, ids in read]).to(self._runner.device)
        states = layout.join([before[: len(ids)] for _, _, before, _, ids in read])
        further = layout.split(self._model.compute_further_states(depth, states, tokens, state))
        for (request, kept, before, first, _), found in zip(read, further, strict=True):
            own, text = kept.sequences[depth - 1], len(request.text)
            assert request.held is not None
            final = request.held.length if depth == 1 else kept.sequences[depth - 2].length  # of the depth before
            own.length = min(own.length, final, max(0, text - depth))
            kept.waiting[depth - 1] = before[own.length - first : final - first]
            hidden[request.number] = found
