# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that come with Python code, run by `transformers` when the user says so.

Only with --trust-remote-code, only from a local directory, and only where its tokenizer_config.json names such code
(auto_map). Everything else is read by huggingface.py, which runs no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from megatron.core import optional_deps
from megatron.core.errors import DataError
from megatron.core.tokenizers.base import Tokenizer


class TransformersTokenizer(Tokenizer):
    """A tokenizer of `transformers`.

    include_special_tokens   let it add its tokens, such as a beginning of text, to every text
    """

    def __init__(self, inner: Any, *, digest: str, include_special_tokens: bool = True) -> None:
        self._inner = inner
        self._include_special_tokens = include_special_tokens
        self._max_id: int = max(inner.get_vocab().values(), default=-1)
        self.chat_template = inner.chat_template if isinstance(inner.chat_template, str) else None
        self.vocab_size = len(inner)
        texts = inner.special_tokens_map.items()
        self.special_token_texts = {role: str(token) for role, token in texts if isinstance(token, str)}
        self.eod = self._first_of("eos_token_id", "sep_token_id")
        self.bos = self._first_of("bos_token_id", "cls_token_id")
        self.pad = self._first_of("pad_token_id")
        self.unique_identifiers = {
            "class": type(self).__name__, "content": digest, "include_special_tokens": str(include_special_tokens),
        }  # fmt: skip

    @property
    def max_id(self) -> int:
        return self._max_id

    def tokenize(self, text: str) -> list[int]:
        return self._encode(text, self._include_special_tokens)

    def tokenize_as_is(self, text: str) -> list[int]:
        return self._encode(text, False)

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids)))

    def _encode(self, text: str, include_special_tokens: bool) -> list[int]:
        try:
            return cast("list[int]", self._inner.encode(text, add_special_tokens=include_special_tokens))
        except Exception as error:
            raise DataError(f"the tokenizer's own code fails on the text {text[:40]!r}: {str(error)[:200]}") from error

    def _first_of(self, *roles: str) -> int | None:
        ids = (getattr(self._inner, role, None) for role in roles)
        return next((token_id for token_id in ids if token_id is not None), None)


def has_own_code(model: str) -> bool:
    """Return whether this is a directory whose tokenizer_config.json names code for the tokenizer."""
    try:
        config = json.loads((Path(model) / "tokenizer_config.json").read_text(encoding="utf-8"))
        return bool(config["auto_map"]["AutoTokenizer"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def tokenizer_with_own_code(
    model: str, *, trust_remote_code: bool, include_special_tokens: bool = True
) -> TransformersTokenizer:
    """Run the tokenizer code of a local directory. trust_remote_code: the user's consent, from the flag.

    Raises ConfigError without transformers, DataError where the code, or what it needs, fails.
    """
    transformers = optional_deps.require("transformers", needed_by="--trust-remote-code")
    try:
        inner = transformers.AutoTokenizer.from_pretrained(
            str(Path(model).resolve()), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise DataError(
            f"--tokenizer-model {model}: its own code fails ({type(error).__name__}: {str(error)[:200]}); correct it, "
            "or leave --trust-remote-code out"
        ) from error
    digest = hashlib.blake2b(digest_size=16)
    # The code is part of what determines the ids, so index caches must tell its versions apart.
    for path in sorted(Path(model).glob("*")):
        if path.suffix in (".json", ".py", ".model", ".txt", ".jinja"):
            digest.update(path.name.encode() + path.read_bytes())
    return TransformersTokenizer(inner, digest=digest.hexdigest(), include_special_tokens=include_special_tokens)
