# SPDX-License-Identifier: Apache-2.0
"""SentencePiece models (tokenizer.model) through the `sentencepiece` library."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import sentencepiece

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.base import Tokenizer

FILE_NAME = "tokenizer.model"
_SEPARATOR = "▁"
_KEEP_SPACES = b"\x1a\x02\x20\x00"
"""ModelProto{normalizer_spec{remove_extra_whitespaces: false}}: appended to a serialized model it replaces that value,
because protobuf merges what comes twice."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model and tokens added to it.

    added_tokens   looked for in the text before the model sees it. One that is a piece of the model keeps its id, any
                   other gets the next id after the model's. Text between added tokens is encoded separately; a
                   separator that this puts after an added token is dropped.

    `detokenize` leaves out the model's control tokens (`<s>`, `</s>`), as the library does.
    """

    def __init__(
        self, processor: sentencepiece.SentencePieceProcessor, added_tokens: Sequence[str] = (), *, digest: str = ""
    ) -> None:
        self._processor = processor
        self._num_pieces: int = processor.vocab_size()
        self.vocab_size = self._num_pieces
        self._added_ids: dict[str, int] = {}
        for token in added_tokens:
            piece_id = processor.piece_to_id(token)
            if piece_id == processor.unk_id():
                piece_id = self.vocab_size
                self.vocab_size += 1
            self._added_ids[token] = piece_id
        self._added_texts = {token_id: token for token, token_id in self._added_ids.items()}
        # In a regular expression the first alternative wins, so `<a>` must not come before `<a>b`.
        longest_first = sorted(added_tokens, key=len, reverse=True)
        self._added = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if added_tokens else None
        self._separator_id: int = processor.piece_to_id(_SEPARATOR)
        self.eod, self.bos = _known(processor.eos_id()), _known(processor.bos_id())
        self.pad = int(processor.pad_id())
        ids = {"bos_token": self.bos, "eos_token": self.eod, "unk_token": processor.unk_id(),
               "pad_token": _known(self.pad)}  # fmt: skip
        self.special_token_texts = {role: processor.id_to_piece(n) for role, n in ids.items() if n is not None}
        added = str(list(self._added_ids))
        self.unique_identifiers = {"class": type(self).__name__, "content": digest, "added_tokens": added}

    def tokenize(self, text: str) -> list[int]:
        if self._added is None:
            return self._encode(text)
        ids: list[int] = []
        for number, piece in enumerate(self._added.split(text)):
            if number % 2:
                ids.append(self._added_ids[piece])
            elif piece:
                encoded = self._encode(piece)
                # SentencePiece puts a separator before every text it is given, here also in the middle of one.
                ids += encoded[1:] if number and encoded[0] == self._separator_id else encoded
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        pieces = []
        for is_added, run in groupby(ids, key=self._added_texts.__contains__):
            if is_added:
                pieces += [self._added_texts[token_id] for token_id in run]
            else:
                # The embedding is padded, so an untrained model may write ids that no piece has.
                known = [token_id for token_id in run if 0 <= token_id < self._num_pieces]
                pieces.append(self._processor.decode(known))
        return "".join(pieces)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids


def sentencepiece_tokenizer(
    model: str, *, added_tokens: Sequence[str] = (), ignore_extra_whitespaces: bool = True
) -> SentencePieceTokenizer:
    """Read a SentencePiece model, or the directory that holds a tokenizer.model.

    ignore_extra_whitespaces   False: keep leading, trailing and repeated spaces even if the model was trained without
    Raises ConfigError when there is no such file, DataError for a file that is no such model.
    """
    path = Path(model)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"--tokenizer-model {model}: no such file; SentencePiece tokenizers read a model file "
            f"such as {FILE_NAME}, or the directory that holds it"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if not ignore_extra_whitespaces:
        content += _KEEP_SPACES
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
        pieces = processor.vocab_size()
    except Exception as error:
        raise DataError(
            f"{path}: not a usable SentencePiece model ({_first_line(error)}); fetch or train it again"
        ) from error
    if not pieces:
        raise DataError(f"{path}: not a usable SentencePiece model (it has no pieces); fetch or train it again")
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return SentencePieceTokenizer(processor, list(dict.fromkeys(added_tokens)), digest=digest)


def _known(token_id: int) -> int | None:
    """SentencePiece says -1 for a token that a model does not have."""
    return token_id if token_id >= 0 else None


def _first_line(error: Exception) -> str:
    lines: Iterable[str] = str(error).splitlines() or [type(error).__name__]
    return next(iter(lines))[:200]
