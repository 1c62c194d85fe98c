# SPDX-License-Identifier: Apache-2.0
"""Upstream's ways to a tokenizer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import pad_vocab_size, tokenizer_from
from megatron.core.tokenizers.metadata import FILE_NAME, LIBRARIES, metadata_file, with_metadata_content
from megatron.core.tokenizers.tokenizer_options import TokenizerOptions

# Upstream's keyword -> the field of TokenizerOptions.
_OPTIONS = {
    "vocab_file": "vocab_file",
    "merges_file": "merge_file",
    "merge_file": "merge_file",
    "vocab_size": "vocab_size",
    "additional_special_tokens": "special_tokens",
    "special_tokens": "special_tokens",
    "chat_template": "chat_template",
    "num_special_tokens": "tiktoken_num_special_tokens",
    "pattern": "tiktoken_pattern",
    "trust_remote_code": "trust_remote_code",
    "prompt_format": "sft_tokenizer_prompt_format",
}


class MegatronTokenizer:
    """Makes tokenizers from a path and its metadata; it has no instances."""

    def __new__(cls, *args: Any, **kwargs: Any) -> MegatronTokenizer:
        """Refused."""
        raise OSError("MegatronTokenizer has no instances; call MegatronTokenizer.from_pretrained(path)")

    @classmethod
    def from_pretrained(
        cls, tokenizer_path: str | None = None, metadata_path: str | dict[str, Any] | None = None, **kwargs: Any
    ) -> Tokenizer:
        """The tokenizer in a file or directory.

        metadata_path: the file tokenizer_metadata.json, or its content, {"library": "huggingface"}; the one next to the
        tokenizer when None. kwargs: vocab_size, vocab_file, merges_file, additional_special_tokens, chat_template,
        num_special_tokens, pattern, trust_remote_code, prompt_format. Raises ConfigError.
        """
        # A misspelled keyword must not quietly give another tokenizer.
        unknown = sorted(set(kwargs) - set(_OPTIONS))
        if unknown:
            known = ", ".join(_OPTIONS)
            raise ConfigError(f"from_pretrained() does not know {', '.join(unknown)}; it takes {known}")
        options = TokenizerOptions(
            tokenizer_model=tokenizer_path, **{_OPTIONS[name]: value for name, value in kwargs.items()}
        )
        if isinstance(metadata_path, dict):
            return tokenizer_from(with_metadata_content(options, metadata_path, "(given)"))
        if metadata_path is None:
            if tokenizer_path is None:
                raise ConfigError("from_pretrained() needs tokenizer_path, metadata_path or both")
            directory = Path(tokenizer_path) if Path(tokenizer_path).is_dir() else Path(tokenizer_path).parent
            metadata_path = str(directory / FILE_NAME)
        return tokenizer_from(dataclasses.replace(options, metadata_path=metadata_path))

    @staticmethod
    def write_metadata(
        tokenizer_path: str,
        tokenizer_library: str,
        model_type: str | None = None,
        tokenizer_class: str | None = None,
        overwrite: bool = False,
        metadata_path: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Write tokenizer_metadata.json next to the tokenizer, or to metadata_path.

        Raises ConfigError for an unknown library, for a user's class (code is never run), and for a file that is there
        already unless `overwrite`.
        """
        if tokenizer_library not in LIBRARIES:
            raise ConfigError(f"tokenizer_library {tokenizer_library!r} is unknown; use one of {', '.join(LIBRARIES)}")
        if tokenizer_class is not None:
            raise ConfigError("tokenizer_class names code, which is never run; leave it out")
        path = Path(tokenizer_path)
        file = metadata_file(metadata_path or str(path if path.is_dir() else path.parent))
        if file.exists() and not overwrite:
            raise ConfigError(f"{file} exists already; give overwrite=True to replace it")
        content = {"library": tokenizer_library, "model_type": model_type, "chat_template": chat_template}
        file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


MegatronTokenizerText = Tokenizer
"""Upstream's base class of text tokenizers."""


def build_tokenizer(args: Any) -> Tokenizer:
    """The tokenizer that parsed arguments describe; whatever TokenizerOptions has and `args` lacks is its default."""
    names = [field.name for field in dataclasses.fields(TokenizerOptions)]
    return tokenizer_from(TokenizerOptions(**{name: getattr(args, name) for name in names if hasattr(args, name)}))


def vocab_size_with_padding(orig_vocab_size: int, args: Any, logging_enabled: bool = True) -> int:
    """The size rounded up to a multiple of args.make_vocab_size_divisible_by times the tensor-parallel size.

    logging_enabled: the first rank says what was added.
    """
    # Every tensor-parallel rank holds the same number of rows.
    padded = pad_vocab_size(orig_vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)
    if logging_enabled and getattr(args, "rank", 0) == 0:
        added = padded - orig_vocab_size
        print(f"padded vocabulary of {orig_vocab_size} tokens with {added} dummy tokens: {padded}", flush=True)
    return padded
