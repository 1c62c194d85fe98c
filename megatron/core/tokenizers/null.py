# SPDX-License-Identifier: Apache-2.0
"""A tokenizer whose text is already token ids: `"17 42 5"` is `[17, 42, 5]`."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.errors import DataError
from megatron.core.tokenizers.base import Tokenizer


class NullTokenizer(Tokenizer):
    """Ids written as decimal numbers, separated by white space; the last id of the vocabulary ends a document."""

    def __init__(self, vocab_size: int, eod_id: int | None = None, pad_id: int = -1) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod_id is None else eod_id
        self.pad = pad_id
        numbers = {"vocab_size": vocab_size, "eod_id": self.eod, "pad_id": pad_id}
        self.unique_identifiers = {"class": type(self).__name__, **{name: str(n) for name, n in numbers.items()}}

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            # str.isdigit() alone would also let "²" and Arabic digits through.
            if not (word.isascii() and word.isdigit() and len(word) <= 18):
                raise DataError(f"NullTokenizer reads token ids separated by spaces, found {word[:40]!r}")
            token_id = int(word)
            if token_id >= self.vocab_size:
                raise DataError(f"token id {token_id} is outside --vocab-size {self.vocab_size}")
            ids.append(token_id)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(token_id) for token_id in ids)
