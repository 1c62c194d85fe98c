# SPDX-License-Identifier: Apache-2.0
"""A request to the engine: a prompt, how it is to be continued, and what has come of it so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from megatron.core.inference.sampling import Draft, Sampling

if TYPE_CHECKING:
    from megatron.core.sequences.state import HeldSequence

EndedBy = Literal["eod", "length", "stop", "cancelled", "failed"]
"""failed: no token could follow, see the engine's _Choice."""


class TokenLogprobs(NamedTuple):
    """The natural logarithm of a token's probability, and of the likeliest tokens' at its place."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob), the likeliest first."""


@dataclass(eq=False)
class Request:
    """One text that the engine continues. What stands above the line is asked for, what stands below has come of it."""

    prompt: list[int]
    max_new_tokens: int
    """0: only the prompt is read."""
    sampling: Sampling
    ends: frozenset[int] = frozenset()
    """Tokens of which each ends the text; they do not belong to it."""
    min_new_tokens: int = 0
    """So many tokens come before one of `ends` may."""
    logprobs: int | None = None
    """Log-probabilities of the new tokens, and of so many of the likeliest; None for none."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens except the first, before which there is nothing to expect it from."""
    adapter: str | None = None
    """Name of the adapters that the model reads and writes it with; None for none."""
    on_tokens: Callable[[Request, list[int]], None] | None = None
    """Called as soon as tokens are chosen."""

    # ---- progress

    number: int = -1
    """The engine's, in the order of arrival."""
    text: list[int] = field(default_factory=list)
    """The prompt and the new tokens."""
    limit: int = 0
    """Length at which the text ends if it does not end by itself."""
    ended_by: EndedBy | None = None
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the new tokens."""
    read_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on."""
    reused_tokens: int = 0
    """Tokens of the prompt that were not computed, as another text began alike."""
    preemptions: int = 0
    held: HeldSequence | None = None
    drafts: list[Draft] = field(default_factory=list)
    """Of the tokens after the text, to be confirmed or replaced."""
    contents: list[bytes] = field(default_factory=list)
    """Digests of the text's full pages, as far as they were asked for."""

    def __post_init__(self) -> None:
        self.text = list(self.prompt)
        self.generator = torch.Generator().manual_seed(self.sampling.seed % 2**63)

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt."""
        return self.text[len(self.prompt) :]

    @property
    def length_read(self) -> int:
        """Tokens that the model has read."""
        return 0 if self.held is None else self.held.length

    @property
    def missing(self) -> int:
        """Tokens of the text that the model has not read; one of them where it goes on token by token."""
        return len(self.text) - self.length_read

    @property
    def is_reading(self) -> bool:
        """Return True where more than the last token is to be read: a prompt, or a text that was preempted."""
        return self.missing > 1 or self.length_read == 0

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Return True where log-probabilities of the prompt are asked for, and not all of them are there."""
        return self.prompt_logprobs is not None and len(self.read_logprobs) < len(self.prompt) - 1
