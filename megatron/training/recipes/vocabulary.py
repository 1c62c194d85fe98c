# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a language model: the tokenizer that the settings name, and how many rows the embedding has.

Tokenizers are imported only where they are used, so that a program answers `--help` at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.errors import ConfigError
from megatron.training.config.container import RunConfig
from megatron.training.config.model_relations import find_uneven_rows

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import Tokenizer


def build_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer that the settings name. Raises ConfigError or DataError."""
    from megatron.core.tokenizers.build import tokenizer_from

    return tokenizer_from(config.tokenizer)


def compute_vocab_size(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Tokens without padding: the tokenizer's, or the larger --vocab-size.

    Raises ConfigError for a --vocab-size that does not hold the tokenizer's tokens.
    """
    requested = config.tokenizer.vocab_size
    # Scripts give the size of the vocabulary file, which does not count the extra ids.
    if requested is None or requested == tokenizer.vocab_size - config.tokenizer.vocab_extra_ids:
        return tokenizer.vocab_size
    if requested < tokenizer.vocab_size and config.sources.get("--vocab-size") == "checkpoint":
        raise ConfigError(
            f"--use-checkpoint-args: the checkpoint has rows for {requested} tokens, and the tokenizer has "
            f"{tokenizer.vocab_size}; give the tokenizer that it was trained with, or a smaller one"
        )
    if requested < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {requested} does not hold the {tokenizer.vocab_size} tokens of the tokenizer; leave it out"
        )
    return requested


def compute_padded_vocab_size(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Rows of the embedding: the vocabulary, padded so that every tensor-parallel rank holds equally many.

    A checkpoint's rows beyond the tokenizer's tokens are padding already: they get no more of it than the ranks need,
    as padding takes part in the softmax. --make-vocab-size-divisible-by says otherwise.
    Raises ConfigError for a --padded-vocab-size that is too small, and for unpadded rows that cannot be divided.
    """
    from megatron.core.tokenizers.build import pad_vocab_size

    settings, ranks = config.tokenizer, config.model.tensor_model_parallel_size
    vocab_size = compute_vocab_size(config, tokenizer)
    if settings.padded_vocab_size is None and settings.pad_vocab_size:
        is_padded = vocab_size > tokenizer.vocab_size and config.sources.get("--vocab-size") == "checkpoint"
        if is_padded and config.sources.get("--make-vocab-size-divisible-by") in ("default", "checkpoint"):
            return pad_vocab_size(vocab_size, 1, ranks)
        return pad_vocab_size(vocab_size, config.gpt.make_vocab_size_divisible_by, ranks)
    rows = settings.padded_vocab_size or vocab_size
    if rows < vocab_size:
        raise ConfigError(
            f"--padded-vocab-size {rows} does not hold the {vocab_size} tokens of the vocabulary; "
            "raise it or leave it out"
        )
    problem = find_uneven_rows("--no-pad-vocab-size with a vocabulary of", rows, ranks)
    if settings.padded_vocab_size is None and problem is not None:
        raise ConfigError(problem)
    return rows
