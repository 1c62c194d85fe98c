# SPDX-License-Identifier: Apache-2.0
"""Encode many documents at once, as fast as the tokenizer allows, always with the ids that the tokenizer gives.

`choose_encoder` takes tiktoken's encoder where a byte-level BPE can be converted for it (byte_pair_conversion) and a
sample of the input comes out equal; otherwise the tokenizer's batch encoding. A worker also compares a short excerpt of
each chunk as it goes (`verify`): a difference ends the fast path, not the correctness of the output.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.core import optional_deps
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.byte_pair_conversion import BytePairTables, NotConvertible, convert

Ids = npt.NDArray[np.uint32]

PROBES = (
    "",
    " ",
    "a",
    "Hello world, it's 12345 o'clock; WE'LL SEE\r\n\r\n\tx_1+=y**2  // ok \n",
    "naïve café — “x” 你好 👩‍👩‍👧 ﬁ e\u0301 \u00a0\u3000 \u200b ١٢٣ ½ Ⅷ",
    "trailing spaces   ",
    "\n\n  \n x\t\t\ty\n",
)
"""Texts that every verification compares besides the sample."""

_MAX_WHITESPACE_RUN = 100_000
"""tiktoken's regex engine overflows its stack on white space about ten times as long."""


class EncoderMismatch(Exception):
    """A fast encoder gave other ids than its tokenizer."""


class DocumentEncoder(Protocol):
    """Methods that preprocessing needs of a tokenizer."""

    tokenizer: Tokenizer
    description: str
    """Name of the encoder, and the reason for it."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, uint32 [tokens]."""
        ...

    def verify(self, text: str) -> None:
        """Raise EncoderMismatch if this text's ids differ from the tokenizer's."""
        ...


class PlainEncoder:
    """The tokenizer's batch encoding."""

    def __init__(self, tokenizer: Tokenizer, reason: str = "") -> None:
        self.tokenizer = tokenizer
        self.description = type(tokenizer).__name__ + (f" ({reason})" if reason else "")

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(ids, dtype=np.uint32) for ids in self.tokenizer.tokenize_batch(texts)]

    def verify(self, text: str) -> None:
        """Nothing to compare: this is the tokenizer itself."""


class TiktokenEncoder:
    """tiktoken's encoder over a converted byte-level BPE; the tokenizer itself takes the texts that tiktoken cannot."""

    def __init__(self, tokenizer: Tokenizer, tables: BytePairTables, *, include_special_tokens: bool) -> None:
        tiktoken = optional_deps.require("tiktoken", needed_by="the fast encoder of byte-level BPE tokenizers")
        if not hasattr(tiktoken.Encoding, "encode_to_numpy"):
            raise NotConvertible(f"tiktoken {tiktoken.__version__} is too old, 0.9 or later is needed")
        self.tokenizer = tokenizer
        self.description = "tiktoken encoder"
        # A special token that is never allowed: encode_to_numpy wants at least one, and treats it as ordinary text.
        self._encoding: Any = tiktoken.Encoding(
            "converted",
            pat_str=tables.pattern,
            mergeable_ranks=tables.ranks,
            special_tokens={"<|never|>": len(tables.ranks)},
        )
        self._ids = tables.ids
        self._needs_nfc = tables.needs_nfc
        special = (tables.prefix, tables.suffix) if include_special_tokens else ((), ())
        self._prefix, self._suffix = (np.array(ids, dtype=np.uint32) for ids in special)
        self._added_ids = {token.content: np.array([token.id], dtype=np.uint32) for token in tables.added_tokens}
        plain = [token.content for token in tables.added_tokens if token.is_plain]
        other = [token.content for token in tables.added_tokens if not token.is_plain]
        self._added = _any_of(plain)
        self._awkward = _any_of(other)
        self._long_whitespace = re.compile(rf"\s{{{_MAX_WHITESPACE_RUN}}}")

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self._encode(text) for text in texts]

    def verify(self, text: str) -> None:
        expected = np.array(self.tokenizer.tokenize(text), dtype=np.uint32)
        if not np.array_equal(self._encode(text), expected):
            raise EncoderMismatch(f"the fast encoder differs from the tokenizer on {text[:60]!r}")

    def _encode(self, text: str) -> Ids:
        if not self._can_take(text):
            return np.array(self.tokenizer.tokenize(text), dtype=np.uint32)
        body = (
            self._encode_around_added(text) if self._added and self._added.search(text) else self._encode_ordinary(text)
        )
        if len(self._prefix) or len(self._suffix):
            return np.concatenate([self._prefix, body, self._suffix])
        return body

    def _can_take(self, text: str) -> bool:
        if self._awkward and self._awkward.search(text):
            return False
        if self._needs_nfc and not unicodedata.is_normalized("NFC", text):
            return False
        return len(text) < _MAX_WHITESPACE_RUN or not self._long_whitespace.search(text)

    def _encode_around_added(self, text: str) -> Ids:
        """Added tokens become their ids; what lies between them is encoded piece by piece."""
        assert self._added is not None
        pieces = []
        for number, piece in enumerate(self._added.split(text)):
            if number % 2:
                pieces.append(self._added_ids[piece])
            elif piece:
                pieces.append(self._encode_ordinary(piece))
        return np.concatenate(pieces)

    def _encode_ordinary(self, text: str) -> Ids:
        ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        ids: Ids = self._ids[ranks]
        return ids


def choose_encoder(tokenizer: Tokenizer, sample: Sequence[str]) -> DocumentEncoder:
    """The fastest encoder that agrees with the tokenizer on `sample` and on PROBES; its `description` says why."""
    from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer

    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return PlainEncoder(tokenizer)
    if not optional_deps.available("tiktoken"):
        return PlainEncoder(tokenizer, "pip install tiktoken makes it several times faster")
    try:
        tables = convert(tokenizer.backend)
        encoder = TiktokenEncoder(tokenizer, tables, include_special_tokens=tokenizer.include_special_tokens)
        for text in (*PROBES, *sample):
            encoder.verify(text)
    except NotConvertible as reason:
        return PlainEncoder(tokenizer, f"no faster encoder: {reason}")
    except EncoderMismatch as reason:
        return PlainEncoder(tokenizer, f"faster encoder set aside: {reason}")
    compared = sum(len(text) for text in sample)
    encoder.description += f", verified on {compared:,} characters of the input"
    return encoder


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern for any of the texts, the longest one first; None without texts."""
    if not texts:
        return None
    return re.compile("(" + "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) + ")")
