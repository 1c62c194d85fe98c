# SPDX-License-Identifier: Apache-2.0
"""tokenizer_metadata.json: which library a tokenizer belongs to, and its chat template (--tokenizer-metadata)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.tokenizer_options import TokenizerOptions

FILE_NAME = "tokenizer_metadata.json"
LIBRARIES: dict[str, tuple[str, ...]] = {
    "huggingface": ("HuggingFaceTokenizer", "SFTTokenizer"),
    "sentencepiece": ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
    "tiktoken": ("TikTokenizer",),
    "megatron": ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"),
    "null-text": ("NullTokenizer",),
}
"""Types of tokenizers by library; the first is meant where --tokenizer-type is not given."""
_CODE = ("class_path", "class_name", "tokenizer_class")


def with_metadata(options: TokenizerOptions, path: str) -> TokenizerOptions:
    """The options, with what the file at the path says; see `with_metadata_content`."""
    return with_metadata_content(options, _read(path), path)


def with_metadata_content(options: TokenizerOptions, content: dict[str, Any], path: str) -> TokenizerOptions:
    """The options, with what the metadata say of type and chat template where the flags do not. path: where they are
    from, for errors.

    Raises ConfigError for a missing file, one that contradicts --tokenizer-type and one that names code to run,
    DataError for one that cannot be read.
    """
    # Such a class would have to be imported; a data file that chooses the code to run is a door that stays shut.
    code = next((name for name in _CODE if content.get(name)), None)
    if code is not None:
        raise ConfigError(
            f"--tokenizer-metadata {path}: {code} {content[code]!r} is code, which is never run; take the entry out "
            "and name one of the known libraries"
        )
    library = content.get("library")
    types = LIBRARIES.get(library) if isinstance(library, str) else None
    if types is None:
        raise ConfigError(
            f"--tokenizer-metadata {path}: library {library!r} is not one of {', '.join(LIBRARIES)}; correct it"
        )
    if options.tokenizer_type not in (None, *types):
        raise ConfigError(
            f"--tokenizer-type {options.tokenizer_type} is no tokenizer of library {library!r}, which "
            f"--tokenizer-metadata {path} names; leave one of the two out"
        )
    template = content.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise DataError(f"{path}: chat_template must be text, found {type(template).__name__}; correct it")
    return dataclasses.replace(
        options,
        tokenizer_type=options.tokenizer_type or types[0],
        chat_template=template if options.chat_template is None else options.chat_template,
    )


def metadata_file(path: str) -> Path:
    """The file; a directory stands for the tokenizer_metadata.json in it."""
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)


def _read(path: str) -> dict[str, Any]:
    file = metadata_file(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--tokenizer-metadata {path}: {error.strerror}; give a tokenizer_metadata.json") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not a usable JSON file ({str(error)[:200]}); correct it") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: expected a JSON object, found {type(content).__name__}; correct it")
    return content
