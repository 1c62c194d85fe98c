# SPDX-License-Identifier: Apache-2.0
"""TikTokenizer: a byte-level BPE vocabulary in a JSON file, encoded by the `tiktoken` library.

The file is a list of `{"rank": 0, "token_bytes": "AA==", ...}` in the order of the ranks; token_bytes is base64.
Special tokens come first: ids 0, 1, ... up to `num_special_tokens`, those without a name as `<SPECIAL_7>`; a token of
rank r has the id `num_special_tokens + r`. The text of a special token becomes its id.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core import optional_deps
from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.base import Tokenizer

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
LARGEST_DEFAULT_VOCABULARY = 2**17
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Patterns that cut text into words, by --tiktoken-pattern."""


class TikTokenizer(Tokenizer):
    """A tiktoken encoding whose special tokens may occur in the text."""

    def __init__(self, encoding: Any, special_ids: Mapping[str, int], vocab_size: int, *, digest: str = "") -> None:
        self._encoding = encoding
        self._allowed = set(special_ids)
        self._num_known = encoding.n_vocab
        self.vocab_size = vocab_size
        self.eod, self.bos, self.pad = (special_ids[token] for token in ("</s>", "<s>", "<pad>"))
        roles = ("unk", "bos", "eos", "mask", "pad", "cls", "sep")
        self.special_token_texts = {f"{role}_token": token for role, token in zip(roles, SPECIAL_TOKENS, strict=True)}
        self.unique_identifiers = {"class": type(self).__name__, "content": digest, "vocab_size": str(vocab_size)}

    def tokenize(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._encoding.encode(text, allowed_special=self._allowed, disallowed_special=())
        except ValueError as error:
            # The engine gives up on about a million white-space characters in a row.
            raise DataError(f"tiktoken cannot encode the text {text[:40]!r}: {str(error)[:200]}") from error
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self._encoding.decode([token_id for token_id in ids if 0 <= token_id < self._num_known])
        return text


def tiktoken_tokenizer(
    model: str,
    *,
    pattern: str = "v2",
    vocab_size: int | None = None,
    num_special_tokens: int = 1000,
    special_tokens: Sequence[str] | None = None,
    extra_tokens: Sequence[str] = (),
) -> TikTokenizer:
    """Read a vocabulary.

    vocab_size       tokens to keep, special ones included; the file's, at most 2^17, when None
    special_tokens   names of the first special ids; SPECIAL_TOKENS, which must be among them, when None
    extra_tokens     special tokens after all others
    Raises ConfigError for sizes and names that cannot be and for a missing file, DataError for an unusable file.
    """
    tiktoken = optional_deps.require("tiktoken", needed_by="--tokenizer-type TikTokenizer")
    names = _special_names(special_tokens, num_special_tokens)
    content, tokens = _read_vocabulary(model)
    if vocab_size is None:
        vocab_size = min(len(tokens) + num_special_tokens, LARGEST_DEFAULT_VOCABULARY)
    kept = tokens[: max(vocab_size - num_special_tokens, 0)]
    # Without all single bytes some texts could not be encoded at all.
    if len(kept) < 256 or {token for token in kept if len(token) == 1} != {bytes([byte]) for byte in range(256)}:
        raise ConfigError(
            f"--vocab-size {vocab_size} leaves {len(kept)} tokens of {model} beside --tiktoken-num-special-tokens "
            f"{num_special_tokens}, and the 256 single bytes are not all among them; give a larger --vocab-size"
        )
    special = {name: number for number, name in enumerate(names)}
    # Behind the vocabulary, as upstream numbers them, not among the special tokens at its beginning.
    special |= {token: vocab_size + number for number, token in enumerate(extra_tokens)}
    encoding = tiktoken.Encoding(
        name=Path(model).name,
        pat_str=PATTERNS[pattern],
        mergeable_ranks={token: num_special_tokens + rank for rank, token in enumerate(kept)},
        special_tokens=special,
    )
    digest = hashlib.blake2b(content + json.dumps([pattern, special]).encode(), digest_size=16).hexdigest()
    return TikTokenizer(encoding, special, vocab_size + len(extra_tokens), digest=digest)


def _special_names(special_tokens: Sequence[str] | None, count: int) -> list[str]:
    """The text of each special id."""
    names = list(SPECIAL_TOKENS if special_tokens is None else special_tokens)
    missing = [token for token in SPECIAL_TOKENS if token not in names]
    if missing:
        raise ConfigError(
            f"--tokenizer-special-tokens lacks {' '.join(missing)}; TikTokenizer needs all of "
            f"{' '.join(SPECIAL_TOKENS)}"
        )
    if count < len(names):
        raise ConfigError(
            f"--tiktoken-num-special-tokens {count} is less than the {len(names)} named special tokens; raise it"
        )
    names += [f"<SPECIAL_{number}>" for number in range(len(names), count)]
    if len(set(names)) < len(names):
        raise ConfigError("--tokenizer-special-tokens names a token twice, or one of the form <SPECIAL_7>; rename it")
    return names


def _read_vocabulary(model: str) -> tuple[bytes, list[bytes]]:
    """The bytes of the file, and the tokens by rank."""
    path = Path(model)
    if not path.is_file():
        raise ConfigError(f"--tokenizer-model {model}: no such file; TikTokenizer reads a vocabulary in JSON")
    tokens = []
    rank = 0
    try:
        content = path.read_bytes()
        for rank, entry in enumerate(json.loads(content)):
            if entry["rank"] != rank:
                raise ValueError(f"found rank {entry['rank']!r}")
            tokens.append(base64.b64decode(entry["token_bytes"], validate=True))
    except (ValueError, LookupError, TypeError, RecursionError, binascii.Error, OSError) as error:
        raise DataError(
            f"{path}: not a usable vocabulary at entry {rank} ({type(error).__name__}: {str(error)[:200]}); expected "
            'a list of {"rank": 0, "token_bytes": base64} in the order of the ranks'
        ) from error
    if len(set(tokens)) < len(tokens):
        raise DataError(f"{path}: not a usable vocabulary: a token stands in it twice; make the file again")
    return content, tokens
