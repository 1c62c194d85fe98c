# SPDX-License-Identifier: Apache-2.0
"""From the flags to a tokenizer, and the padded size of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.chat import is_file_name
from megatron.core.tokenizers.metadata import with_metadata
from megatron.core.tokenizers.prompt_formats import with_prompt_format
from megatron.core.tokenizers.tokenizer_options import (
    DEFAULT_TYPE,
    PROMPT_FORMATS,
    TokenizerOptions,
)


def build_tokenizer(tokenizer_type: str | None = None, **options: Any) -> Tokenizer:
    """`tokenizer_from` of options by name: build_tokenizer("NullTokenizer", vocab_size=100)."""
    return tokenizer_from(TokenizerOptions(tokenizer_type=tokenizer_type, **options))


def tokenizer_from(options: TokenizerOptions) -> Tokenizer:
    """The tokenizer that the flags describe. Only local files are read; no code in them is run but with
    trust_remote_code.

    Raises ConfigError for a missing or unusable flag, DataError for unusable files.
    """
    if options.metadata_path is not None:
        options = with_metadata(options, options.metadata_path)
    tokenizer_type = options.tokenizer_type or DEFAULT_TYPE
    if options.sft_tokenizer_prompt_format != PROMPT_FORMATS[0]:
        _check_prompt_format(options, tokenizer_type)
    tokenizer = _BUILDERS[tokenizer_type](options)
    if options.chat_template is not None:
        tokenizer.chat_template = _chat_template(options.chat_template)
    return tokenizer


def pad_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int = 1) -> int:
    """`vocab_size` rounded up so that each of the tensor-parallel ranks holds a multiple of `divisible_by` rows."""
    multiple = divisible_by * tensor_parallel_size
    # Rounded up without floating point, which is exact only below 2^53.
    return -(-vocab_size // multiple) * multiple


def _huggingface(options: TokenizerOptions) -> Tokenizer:
    from megatron.core.tokenizers.huggingface import huggingface_tokenizer
    from megatron.core.tokenizers.transformers import has_own_code, tokenizer_with_own_code

    model = _needed(options, "tokenizer_model", "a tokenizer.json, or the directory with it")
    if has_own_code(model):
        if options.trust_remote_code:
            if _added_tokens(options):
                raise ConfigError(
                    "--tokenizer-special-tokens and --vocab-extra-ids cannot be added to a tokenizer with code of "
                    "its own (--trust-remote-code); leave them out"
                )
            return tokenizer_with_own_code(
                model,
                trust_remote_code=options.trust_remote_code,
                include_special_tokens=not options.tokenizer_hf_no_include_special_tokens,
            )
        # Many directories ship both; then the code is not needed, and the file is read as usual.
        if not (Path(model) / "tokenizer.json").is_file():
            raise ConfigError(
                f"--tokenizer-model {model}: its tokenizer is Python code, which runs only with --trust-remote-code; "
                "read the code before you give that flag"
            )
    return huggingface_tokenizer(
        model,
        include_special_tokens=not options.tokenizer_hf_no_include_special_tokens,
        more_special_tokens=_added_tokens(options),
    )


def _sft(options: TokenizerOptions) -> Tokenizer:
    tokenizer = _huggingface(options)
    if options.chat_template is not None:
        return tokenizer
    return with_prompt_format(tokenizer, options.sft_tokenizer_prompt_format)


def _check_prompt_format(options: TokenizerOptions, tokenizer_type: str) -> None:
    if tokenizer_type != "SFTTokenizer":
        raise ConfigError(
            f"--sft-tokenizer-prompt-format says nothing about --tokenizer-type {tokenizer_type}; leave it out, or "
            "use SFTTokenizer"
        )
    if options.chat_template is not None:
        raise ConfigError("--sft-tokenizer-prompt-format and --chat-template both say how to write; keep one")
    if options.sft_tokenizer_prompt_format not in PROMPT_FORMATS:
        raise ConfigError(
            f"--sft-tokenizer-prompt-format {options.sft_tokenizer_prompt_format} is not supported; use one of "
            f"{', '.join(PROMPT_FORMATS)}, or give the template with --chat-template"
        )


def _gpt2(options: TokenizerOptions) -> Tokenizer:
    from megatron.core.tokenizers.huggingface import gpt2_bpe_tokenizer

    missing = [
        name
        for name, value in (("--vocab-file", options.vocab_file), ("--merge-file", options.merge_file))
        if value is None
    ]
    if options.vocab_file is None or options.merge_file is None:
        raise ConfigError(
            f"--tokenizer-type GPT2BPETokenizer needs {' and '.join(missing)}: its vocab.json and merges.txt"
        )
    return gpt2_bpe_tokenizer(
        options.vocab_file,
        options.merge_file,
        include_special_tokens=not options.tokenizer_hf_no_include_special_tokens,
        more_special_tokens=_added_tokens(options),
    )


def _word_piece(options: TokenizerOptions) -> Tokenizer:
    from megatron.core.tokenizers.word_piece import word_piece_tokenizer

    return word_piece_tokenizer(
        _needed(options, "vocab_file", "its vocab.txt, a token per line"),
        lower_case=options.tokenizer_type == "BertWordPieceLowerCase",
        include_special_tokens=not options.tokenizer_hf_no_include_special_tokens,
        more_special_tokens=_added_tokens(options),
    )


def _sentencepiece(options: TokenizerOptions) -> Tokenizer:
    from megatron.core.tokenizers.sentencepiece import sentencepiece_tokenizer

    # Ignored in silence, the tokens would come apart into pieces.
    if options.special_tokens and not options.tokenizer_sentencepiece_legacy:
        raise ConfigError(
            "--tokenizer-special-tokens needs --tokenizer-sentencepiece-legacy with a SentencePiece tokenizer; "
            "add that flag, or train the model with these tokens"
        )
    return sentencepiece_tokenizer(
        _needed(options, "tokenizer_model", "a tokenizer.model, or the directory with it"),
        added_tokens=_added_tokens(options),
        ignore_extra_whitespaces=options.tokenizer_sentencepiece_ignore_extra_whitespaces,
    )


def _tiktoken(options: TokenizerOptions) -> Tokenizer:
    from megatron.core.tokenizers.tiktoken import tiktoken_tokenizer

    return tiktoken_tokenizer(
        _needed(options, "tokenizer_model", "the vocabulary, a JSON list of ranks and tokens"),
        pattern=options.tiktoken_pattern or "v2",
        vocab_size=options.vocab_size,
        num_special_tokens=options.tiktoken_num_special_tokens,
        special_tokens=options.special_tokens,
        extra_tokens=_extra_ids(options),
    )


def _null(options: TokenizerOptions) -> Tokenizer:
    from megatron.core.tokenizers.null import NullTokenizer

    vocab_size, eod_id = options.vocab_size, options.null_tokenizer_eod_id
    if vocab_size is None:
        raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size: it has no file to take the size from")
    if eod_id is not None and not 0 <= eod_id < vocab_size:
        raise ConfigError(f"--null-tokenizer-eod-id {eod_id} is outside --vocab-size {vocab_size}")
    for name, value in (
        ("--tokenizer-special-tokens", options.special_tokens),
        ("--vocab-extra-ids", options.vocab_extra_ids),
    ):
        if value:
            raise ConfigError(f"{name} has no meaning for NullTokenizer, whose texts are numbers; leave it out")
    return NullTokenizer(vocab_size, eod_id, options.null_tokenizer_pad_id)


# Each builder imports its library itself: a NullTokenizer must not need sentencepiece.
_BUILDERS: dict[str, Callable[[TokenizerOptions], Tokenizer]] = {
    "HuggingFaceTokenizer": _huggingface,
    "GPT2BPETokenizer": _gpt2,
    "BertWordPieceLowerCase": _word_piece,
    "BertWordPieceCase": _word_piece,
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "Llama2Tokenizer": _sentencepiece,
    "TikTokenizer": _tiktoken,
    "NullTokenizer": _null,
    "SFTTokenizer": _sft,
}


def _needed(options: TokenizerOptions, field: str, what: str) -> str:
    value: str | None = getattr(options, field)
    if value is None:
        raise ConfigError(f"--tokenizer-type {options.tokenizer_type} needs --{field.replace('_', '-')}: {what}")
    return value


def _extra_ids(options: TokenizerOptions) -> list[str]:
    return [f"<extra_id_{number}>" for number in range(options.vocab_extra_ids)]


def _added_tokens(options: TokenizerOptions) -> list[str]:
    """Return what the flags add after the vocabulary, in the order of the ids."""
    special_tokens = options.special_tokens or []
    repeated = sorted({token for token in special_tokens if special_tokens.count(token) > 1 or not token})
    if repeated:
        raise ConfigError(f"--tokenizer-special-tokens names {repeated[0]!r} twice or without text; name each once")
    return [*special_tokens, *_extra_ids(options)]


def _chat_template(value: str) -> str:
    """The template itself: a value without template marks is the name of the file that holds it."""
    if not is_file_name(value):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--chat-template {value[:200]}: {error.strerror}; give a file with a Jinja template, or the template"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"--chat-template {value[:200]}: not UTF-8 text; write it in UTF-8") from error
