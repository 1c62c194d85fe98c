# SPDX-License-Identifier: Apache-2.0
"""Speculation with multi-token prediction: its layers draft tokens, and one pass of the model confirms several.

    read ... t_p  d_1 .. d_D      one pass of the model gives the distributions of the places of d_1 .. d_D, and behind
    keep d_1 .. d_m, choose t     m: drafts that are right; each text of a batch has its number of them
    draft again behind t          by D small layers

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; DeepSeek-V3, 2024, section
2.2, for drafts by multi-token prediction. Greedy texts are the same as without, and sampled ones have the same
distribution (`sampling.confirm_tokens`).

Depth k = 1 .. D reads, at position i, the states of the depth before and the token i + k, and keeps keys and values in
a state of its own. With tokens up to position p known, what depth k has read at positions up to p - k is
final; behind them it has read drafts, and reads anew what takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.inference.sampling import Draft, Sampling, draft_next_tokens
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.sequences.state import SequenceState
from megatron.core.transformer.config_fields.moe import CAPACITY_FACTORS


class Speculation:
    """Drafts of a model's own multi-token prediction, and how many of them were right. One `generate` at a time."""

    def __init__(self, model: nn.Module) -> None:
        """model: a GPTModel on one process. Raises ConfigError where it predicts no further tokens, or drops some."""
        if not isinstance(model, GPTModel) or model.config.mtp_num_layers is None:
            raise ConfigError(
                "--speculate drafts tokens with multi-token prediction, and the model has none (--mtp-num-layers of "
                "its training); leave it out"
            )
        # Which tokens an expert drops depends on those that are read with them, so that the text would be another one.
        for name in CAPACITY_FACTORS:
            if getattr(model.config, name) is not None:
                raise ConfigError(
                    f"--speculate reads several tokens at once, of which experts with {model.config.say(name)} drop "
                    "others than they would one by one; leave it out"
                )
        self._model, self.depths = model, model.config.mtp_num_layers
        self.drafted, self.kept, self.passes, self.texts_read = 0, 0, 0, 0

    def begin(self, texts: int, max_tokens: int, vocab_size: int | None) -> None:
        """Forget the batch before. max_tokens: of the longest text with drafts; vocab_size: as for `generate`."""
        self._vocab_size = vocab_size
        self._states = [SequenceState(texts, max_tokens) for _ in range(self.depths)]
        self._read: list[Tensor] = []  # hidden states of the model's last pass, [n, 1, h] of each text
        # For each depth and text, hidden states of the depth before that are final, and are to be read with another
        # token: [n, 1, h].
        self._waiting: list[list[Tensor]] = [[] for _ in range(self.depths)]

    def read(self, tokens: Tensor, positions: Tensor, state: SequenceState, count: int) -> Tensor:
        """One pass of the model over the layout of `state`: logits [count, b, v] of each text's last tokens."""
        hidden_states = self._model.compute_states(tokens, positions, state)
        if state.is_recurrent:
            raise ConfigError(
                "--speculate reads tokens that may turn out to be wrong, and a recurrent state cannot forget them; "
                "leave it out"
            )
        self.passes += 1
        self.texts_read += len(state.lengths)
        self._read = state.layout.split(hidden_states)
        return self._model.compute_logits(state.layout.take_last(hidden_states, count)).transpose(0, 1)

    def find_right(self, draft: Draft, chosen: Sequence[int]) -> list[bool]:
        """For each text of a draft True where its token was chosen; they are counted."""
        is_right = [token == drafted for token, drafted in zip(chosen, draft.tokens.tolist(), strict=True)]
        self.drafted += len(is_right)
        self.kept += sum(is_right)
        return is_right

    def draft(
        self, texts: Sequence[Sequence[int]], rows: Sequence[int], state: SequenceState, sampling: Sampling,
        generators: Sequence[torch.Generator], count: int,
    ) -> list[Draft]:  # fmt: skip
        """Draft so many tokens behind each text, at most `depths`.

        texts: those that go on, of which the last token has not been read. rows: which of the last pass they are.
        state: theirs, which forgets wrong drafts here.
        """
        firsts = [state.layout.past[row] for row in rows]
        hidden = [
            self._read[row][: len(text) - 1 - first] for row, text, first in zip(rows, texts, firsts, strict=True)
        ]
        state.rewind([len(text) - 1 for text in texts])
        known, drafts = [list(text) for text in texts], []
        for depth in range(1, min(self.depths, count) + 1):
            own, waiting = self._states[depth - 1], self._waiting[depth - 1]
            if len(rows) < len(own.lengths):
                own.select(rows)
            if waiting:
                hidden = [torch.cat((waiting[row], x)) for row, x in zip(rows, hidden, strict=True)]
            firsts = list(own.lengths)
            layout = own.begin([len(x) for x in hidden])
            ids = [text[first + depth :][: len(x)] for text, first, x in zip(known, firsts, hidden, strict=True)]
            tokens = layout.join_tokens(ids).to(hidden[0].device)
            further = self._model.compute_further_states(depth, layout.join(hidden), tokens, own)
            # What follows from drafts is read again; the depth before has one final state more.
            own.rewind([max(0, len(text) - depth) for text in texts])
            self._waiting[depth - 1] = [
                x[length - first : max(0, min(len(text) - 1, len(text) - depth + 1)) - first]
                for x, length, first, text in zip(hidden, own.lengths, firsts, texts, strict=True)
            ]
            hidden = layout.split(further)
            drafts.append(self._choose(layout.take_last(further, 1), sampling, generators))
            for text, token in zip(known, drafts[-1].tokens.tolist(), strict=True):
                text.append(token)
        return drafts

    def _choose(self, states: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """The next token of each text behind hidden states [1, b, h]."""
        logits = self._model.compute_logits(states)[:, -1].float()
        if self._vocab_size is not None:
            logits[:, self._vocab_size :] = -math.inf
        return draft_next_tokens(logits, sampling, generators)

    def describe(self) -> str:
        """How many drafts were right, in words."""
        if not self.drafted:
            return "speculation: no token was drafted"
        share, pace = 100 * self.kept / self.drafted, 1 + self.kept / self.texts_read
        return (
            f"speculation: {self.kept} of {self.drafted} drafted tokens accepted ({share:.1f} %), "
            f"{pace:.2f} tokens for each pass of the model"
        )
