# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle (Bavarian et al. 2022, https://arxiv.org/abs/2207.14255): documents with their middle at the end.

A document's text is cut at two random places, and with the sentinels written as <…> it becomes

    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle

so that a model that predicts the next token learns to fill the gap between a prefix and a suffix. What
happens to sample i depends only on the seed and on i, not on what was read before it (a resumed run, or one with more
loader processes, sees the same samples); an empty document stays empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.blend import DataSplit
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, Sample
from megatron.core.errors import ConfigError, MegatronError

Array = npt.NDArray[Any]

_ROLES = ("prefix", "middle", "suffix", "pad", "eod")


@dataclass(kw_only=True)
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """Settings by which documents become samples to fill in. The tokenizer must turn ids into text and text into
    ids."""

    fim_rate: float
    """Share of the documents that are rearranged; with fim_split_sample, of those whose parts may be."""
    fim_spm_rate: float
    """Share of the rearranged ones in SPM order."""
    fim_extra_tokens: dict[str, str]
    """Texts of the sentinels prefix, middle, suffix, pad, and of eod, which ends a document."""
    fim_split_sample: str | None = None
    """Token at which a document falls into parts that are rearranged one by one."""
    fim_fragment_rate: float | None = None
    """Share of those parts that are rearranged."""
    fim_no_prefix: str | None = None
    """A text that begins so is left as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fim_split_sample is not None and self.fim_fragment_rate is None:
            raise ConfigError("--fim-split-sample needs --fim-fragment-rate")
        if self.inter_document_masking:
            raise ConfigError("--fim-data moves the document bounds that --dataloader-inter-document-masking needs")


class GPTFIMDataset(GPTDataset):
    """GPT samples whose documents are rearranged; the constructor takes GPTDataset's arguments.

    A sample that grew is cut to its length, one that shrank is filled up with the pad sentinel, which has no loss.
    """

    config: GPTFIMDatasetConfig

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        tokenizer: Any = self.config.tokenizer
        token = {role: token_id(tokenizer, self.config.fim_extra_tokens[role], role) for role in _ROLES}
        self._prefix, self._middle, self._suffix = token["prefix"], token["middle"], token["suffix"]
        self._fill = token["pad"]
        self._document_end = token["eod"]
        if tokenizer.eod not in (None, self._document_end):
            raise ConfigError(
                f"--fim-eod-token {self.config.fim_extra_tokens['eod']} is token {self._document_end}, but documents "
                f"end with token {tokenizer.eod}; give the text of that one"
            )
        split = self.config.fim_split_sample
        self._part_end = None if split is None else token_id(tokenizer, split, "split-sample")

    def __getitem__(self, index: int | None) -> Sample:
        sample = super().__getitem__(index)
        sample["loss_mask"][sample["labels"] == self._fill] = 0.0
        return sample

    def _read(self, index: int) -> tuple[Array, list[int]]:
        text, starts = super()._read(index)
        end = len(text)
        # Padding is no part of a document.
        while end > 0 and text[end - 1] == self._pad:
            end -= 1
        # Seeded by the sample's number: a resumed run, or another number of loader processes, rearranges alike.
        random = np.random.default_rng((self.config.random_seed, self._split_number(), int(self.shuffle_index[index])))
        rearranged = self._each(text[:end], self._document_end, lambda part: self._document(part, random))
        kept = min(len(rearranged), end)
        text[:kept] = rearranged[:kept]
        text[kept:end] = self._fill
        return text, starts

    def _split_number(self) -> int:
        assert isinstance(self.index_split, DataSplit)
        return self.index_split.value

    def _each(self, tokens: Array, separator: int, change: Callable[[Array], Array]) -> Array:
        """`change` applied to every stretch between separators; empty ones stay empty."""
        pieces: list[Array] = []
        start = 0
        for place in [*np.flatnonzero(tokens == separator).tolist(), len(tokens)]:
            if place > start:
                pieces.append(change(tokens[start:place]))
            pieces.append(tokens[place : place + 1])
            start = place + 1
        return np.concatenate(pieces)

    def _document(self, tokens: Array, random: np.random.Generator) -> Array:
        """One document, or what the sample has of it."""
        config = self.config
        if self._part_end is None or not (tokens == self._part_end).any():
            return self._rearranged(tokens, config.fim_rate, random)
        if random.random() >= config.fim_rate:
            return tokens
        rate = config.fim_fragment_rate
        assert rate is not None, "checked by GPTFIMDatasetConfig"
        return self._each(tokens, self._part_end, lambda part: self._rearranged(part, rate, random))

    def _rearranged(self, tokens: Array, rate: float, random: np.random.Generator) -> Array:
        """The tokens in PSM or SPM order, or, with probability 1 - rate, as they are."""
        if random.random() >= rate:
            return tokens
        tokenizer: Any = self.config.tokenizer
        # Cut between characters, not between tokens: at inference the cursor may be in the middle of a word.
        text: str = tokenizer.detokenize(tokens.tolist())
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return tokens
        first, second = sorted(random.integers(0, len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (
            tokenizer.tokenize_as_is(part) if part else [] for part in (text[:first], text[first:second], text[second:])
        )
        if random.random() < self.config.fim_spm_rate:
            order = [self._prefix, self._suffix, *suffix, self._middle, *prefix, *middle]
        else:
            order = [self._prefix, *prefix, self._suffix, *suffix, self._middle, *middle]
        return np.asarray(order, dtype=np.int64)


def token_id(tokenizer: Any, text: str, role: str) -> int:
    """The id of a text that is one token. Raises ConfigError naming the flag --fim-ROLE-token."""
    flag = f"--fim-{role}" if role == "split-sample" else f"--fim-{role}-token"
    try:
        ids = tokenizer.tokenize_as_is(text)
    except MegatronError as error:
        raise ConfigError(f"{flag} {text!r} is unknown to the tokenizer: {error}") from error
    if len(ids) != 1:
        raise ConfigError(
            f"{flag} {text!r} is not one token of the tokenizer, but {len(ids)}; add it to the tokenizer's special "
            "tokens, or name a token that it has"
        )
    return int(ids[0])
