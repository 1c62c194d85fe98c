# SPDX-License-Identifier: Apache-2.0
"""Speculation with multi-token prediction: its layers draft tokens, and one pass of the model confirms several.

    read ... t_p  d_1 .. d_D      one pass of the model gives the distributions of the places of d_1 .. d_D, and behind
    keep d_1 .. d_m, choose t     m: drafts that are kept in all texts of the batch; t takes the place of the next one
    draft again behind t          by D small layers

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; DeepSeek-V3, 2024, section
2.2, for drafts by multi-token prediction. Greedy texts are the same as without, and sampled ones have the same
distribution (`sampling.confirm_tokens`). Texts of a batch grow in step: a draft counts where it is right in all.

Depth k = 1 .. D reads, at position i, the states of the depth before and the token i + k, and keeps keys and values in
a cache of its own. With tokens up to position p known, what depth k has read at positions up to p - k is
final; behind them it has read drafts, and reads anew what takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.inference.kv_cache import KVCache
from megatron.core.inference.sampling import Draft, Sampling, draft_next_tokens
from megatron.core.models.gpt.gpt_model import GPTModel
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
        self.drafted, self.kept, self.passes, self.written = 0, 0, 0, 0

    def begin(self, max_tokens: int, vocab_size: int | None) -> None:
        """Forget the batch before. max_tokens: of the longest text; vocab_size: as for `generate`."""
        self._max_tokens, self._vocab_size = max_tokens, vocab_size
        self._caches = [KVCache(max_tokens) for _ in range(self.depths)]
        self._states: Tensor | None = None  # of the model's last pass, [s, b, h]
        self._first = 0  # the position of the first of them
        # For each depth, states of the depth before that are final, and are to be read with another token: [s, b, h].
        self._waiting: list[Tensor | None] = [None] * self.depths

    def read(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """One pass of the model: [b, s] -> logits [b, at most depths + 1, v] of the last tokens."""
        self._first = cache.sequence_len_offset
        self._states = self._model.compute_states(tokens, positions, cache)
        self.passes += 1
        self.written += 1
        return self._model.compute_logits(self._states[-1 - self.depths :])

    def confirm(self, is_open: Tensor, is_wrong: Tensor, goes_on: Tensor) -> bool:
        """Count the drafts of one place; returns whether what was read behind it is right in all texts.

        bool [b] each: rows for which a token was drafted, of these the ones that got another one, and those whose text
        goes on.
        """
        drafted, wrong, hindered = torch.stack([is_open.sum(), is_wrong.sum(), (is_wrong & goes_on).sum()]).tolist()
        self.drafted += drafted
        self.kept += drafted - wrong
        self.written += 0 if hindered else 1
        return not hindered

    def draft(
        self,
        tokens: Tensor,
        position: int,
        lengths: Tensor,
        sampling: Sampling,
        generators: Sequence[torch.Generator],
    ) -> list[Draft]:
        """Write drafts into tokens [b, longest] from `position` on, in rows whose prompts (lengths [b]) have ended; a
        Draft for each place, none behind the last one but one."""
        assert self._states is not None, "there was no pass yet"
        # The last token has not been read: its states are those that the next pass makes.
        end = position - 1
        states, drafts = self._states[: end - self._first], []
        for depth in range(1, min(self.depths, self._max_tokens - position - 1) + 1):
            cache, waiting = self._caches[depth - 1], self._waiting[depth - 1]
            states = states if waiting is None else torch.cat([waiting, states])
            first = cache.sequence_len_offset
            assert first + states.shape[0] == end, f"depth {depth}: {first} + {states.shape[0]} states, not {end}"
            further = self._model.compute_further_states(depth, states, tokens[:, first + depth : end + depth], cache)
            cache.advance(states.shape[0])
            # What follows from drafts is read again; the depth before has one final state more.
            final = max(0, position - depth)
            cache.rewind(final)
            before = max(0, min(end, position - depth + 1))
            self._waiting[depth - 1] = states[final - first : before - first]
            states = further
            drafts.append(self._choose(further[-1:], tokens, end + depth, lengths, sampling, generators))
        return drafts

    def _choose(
        self,
        states: Tensor,
        tokens: Tensor,
        place: int,
        lengths: Tensor,
        sampling: Sampling,
        generators: Sequence[torch.Generator],
    ) -> Draft:
        logits = self._model.compute_logits(states)[:, -1].float()
        if self._vocab_size is not None:
            logits[:, self._vocab_size :] = -math.inf
        draft = draft_next_tokens(logits, sampling, generators)
        tokens[:, place] = torch.where(lengths > place, tokens[:, place], draft.tokens)
        return Draft(tokens[:, place].clone(), draft.probabilities)

    def describe(self) -> str:
        """How many drafts were right, in words."""
        if not self.drafted:
            return "speculation: no token was drafted"
        share, pace = 100 * self.kept / self.drafted, self.written / self.passes
        return (
            f"speculation: {self.kept} of {self.drafted} drafted tokens accepted ({share:.1f} %), "
            f"{pace:.2f} tokens for each pass of the model"
        )
