# SPDX-License-Identifier: Apache-2.0
"""Choice of the next token: the likeliest, or one drawn from the likely ones.

    logits --penalties, biases--> --/ temperature--> keep the k largest --> keep the fewest that hold the share p
        --> keep tokens of at least min_p times the likeliest's probability --> draw

A token that was drafted by another distribution is accepted or replaced in such a way that the result has the model's
distribution (Leviathan et al., 2023, section 2.3).

A low temperature sharpens the distribution. Top-p is nucleus sampling (Holtzman et al., 2020).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.errors import ConfigError

_COLDEST = 1e-6
"""Below this only the likeliest token is left in any case, and quotients would not be finite."""


@dataclass(frozen=True)
class Sampling:
    """Settings by which the next token is chosen. Raises ConfigError for values out of range."""

    greedy: bool = False
    """Always the likeliest token; the rest is then without effect."""
    temperature: float = 1.0
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have at least this probability; 1: from all."""
    min_p: float = 0.0
    """Draw from tokens that are at least this share as likely as the likeliest; 0: from all."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that the text has, prompt included, are divided by it, others multiplied (Keskar et
    al., 2019)."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that was written already."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that it was written."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of tokens."""
    seed: int = 1234
    """Each sequence of a batch has a separate generator: what is drawn for it does not depend on its neighbours."""

    def __post_init__(self) -> None:
        problems = []
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            problems.append(f"--temperature {self.temperature} must be above 0; for the likeliest token use --greedy")
        if self.top_k < 0:
            problems.append(f"--top-k {self.top_k} must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p} must be above 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            problems.append(f"min_p {self.min_p} must be from 0 (off) to 1")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            problems.append(f"repetition_penalty {self.repetition_penalty} must be above 0; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                problems.append(f"{name} {getattr(self, name)} must be a number; 0 is off")
        if problems:
            raise ConfigError(problems)

    @property
    def changes_logits(self) -> bool:
        """Return True where `adjust` does anything."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)

    def adjust(self, logits: Tensor, text: Sequence[int], prompt_length: int) -> None:
        """Apply penalties and biases in place to the logits [v] of the token after a text."""
        if self.repetition_penalty != 1:
            seen = torch.tensor(sorted({*text}), device=logits.device)
            old = logits[seen]
            logits[seen] = torch.where(old > 0, old / self.repetition_penalty, old * self.repetition_penalty)
        if self.presence_penalty or self.frequency_penalty:
            written = Counter(text[prompt_length:])
            taken = [self.presence_penalty + self.frequency_penalty * count for count in written.values()]
            logits[[*written]] -= torch.tensor(taken, device=logits.device)
        if self.logit_bias:
            logits[[*self.logit_bias]] += torch.tensor([*self.logit_bias.values()], device=logits.device)

    def build_generators(self, count: int) -> list[torch.Generator]:
        """One for each sequence, on the CPU, so that draws do not depend on the device."""
        return [torch.Generator().manual_seed((self.seed + row) % 2**63) for row in range(count)]


def choose_next_tokens(
    logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator], draft: Draft | None = None
) -> Tensor:
    """The next token of each sequence: logits [b, v] -> int64 [b] on the same device. -inf marks what may not come.
    draft: what `confirm_tokens` keeps or replaces."""
    if draft is not None:
        return confirm_tokens(logits, draft, sampling, generators)
    if sampling.greedy:
        return logits.argmax(dim=-1)
    return _draw(find_probabilities(logits, sampling), generators).to(logits.device)


def find_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return what the next token of each sequence is drawn from: logits [b, v] -> [b, v] float32, on the CPU."""
    # On the CPU in float32, as the generators are: a seed gives the same text on every device.
    temperature = max(sampling.temperature, _COLDEST)
    return torch.softmax(keep_likely(logits.float().cpu() / temperature, sampling), dim=-1)


def _draw(probabilities: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    # Row by row, since each row has a separate generator.
    drawn = [
        torch.multinomial(row, num_samples=1, generator=generator)
        for row, generator in zip(probabilities, generators, strict=True)
    ]
    return torch.cat(drawn)


@dataclass(frozen=True)
class Draft:
    """A token for each sequence that the model has not confirmed yet."""

    tokens: Tensor
    """[b] int64."""
    probabilities: Tensor | None
    """[b, v] float32 on the CPU, what they were drawn from; None where they are certain, such as copied ones."""

    def select(self, rows: Sequence[int]) -> Draft:
        """Select the drafts of some sequences."""
        return Draft(self.tokens[rows], None if self.probabilities is None else self.probabilities[rows])


def draft_next_tokens(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
    """Choose like `choose_next_tokens`, for tokens that `confirm_tokens` may replace."""
    if sampling.greedy:
        return Draft(logits.argmax(dim=-1), None)
    probabilities = find_probabilities(logits, sampling)
    return Draft(_draw(probabilities, generators).to(logits.device), probabilities)


def confirm_tokens(logits: Tensor, draft: Draft, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """The next token of each sequence: its draft, or another one; logits [b, v] of the model -> int64 [b].

    A draft x is kept with probability min(1, p(x) / q(x)), p being the model's distribution and q the draft's;
    otherwise a token is drawn from what p has more than q. So the result has the distribution p.
    """
    if sampling.greedy:
        return logits.argmax(dim=-1)
    chosen = draft.tokens.tolist()
    wanted = find_probabilities(logits, sampling)
    for row, generator in enumerate(generators):
        own, token = wanted[row], chosen[row]
        certain = torch.nn.functional.one_hot(torch.tensor(token), len(own)).to(own.dtype)
        drafted = certain if draft.probabilities is None else draft.probabilities[row]
        if torch.rand((), generator=generator) * drafted[token] < own[token]:
            continue
        more = (own - drafted).clamp_(min=0)
        # Nothing is left only where the two are the same except for rounding.
        left = more if more.sum() > 0 else own
        chosen[row] = int(torch.multinomial(left, num_samples=1, generator=generator))
    return torch.tensor(chosen, device=logits.device)


def keep_likely(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [b, v] with -inf for all tokens outside top-k, top-p and min-p; the likeliest always stays."""
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        # Ties with the k-th logit all stay: which of them `topk` named depends on the device.
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = torch.softmax(ordered, dim=-1)
        # Without the token's share, so that the token that crosses top_p is still inside, and the likeliest always is.
        before = probabilities.cumsum(dim=-1) - probabilities  # what the likelier ones hold already
        outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(outside, -math.inf)
    if sampling.min_p > 0:
        least = logits.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, -math.inf)
    return logits
