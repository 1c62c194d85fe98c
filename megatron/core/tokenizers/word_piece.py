# SPDX-License-Identifier: Apache-2.0
"""BERT's word pieces from a vocab.txt, through the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer, add_special, digest_files, read

_SPECIAL_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def word_piece_tokenizer(
    vocab_file: str,
    *,
    lower_case: bool,
    include_special_tokens: bool = True,
    more_special_tokens: Sequence[str] = (),
) -> HuggingFaceTokenizer:
    """A token per line, its id is the number of the line; `[CLS]` begins and `[SEP]` ends a text and a document.

    lower_case   make texts lower case and take accents off
    Raises ConfigError when the file is missing, DataError when it cannot be used.
    """
    path = Path(vocab_file)
    if not path.is_file():
        raise ConfigError(f"--vocab-file {vocab_file}: no such file; BertWordPiece tokenizers read a vocab.txt")
    model = read(path, lambda: tokenizers.models.WordPiece.from_file(vocab_file, unk_token="[UNK]"))
    backend = tokenizers.Tokenizer(model)
    missing = [token for token in _SPECIAL_TOKENS.values() if backend.token_to_id(token) is None]
    if missing:
        raise DataError(f"{path}: not a usable vocabulary: it lacks {' '.join(missing)}; use BERT's vocab.txt")
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece(prefix="##")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    add_special(backend, [*_SPECIAL_TOKENS.values(), *more_special_tokens])
    return HuggingFaceTokenizer(
        backend,
        _SPECIAL_TOKENS,
        source=vocab_file,
        digest=f"{digest_files(path)} {'lower' if lower_case else 'any'} case {list(more_special_tokens)}",
        include_special_tokens=include_special_tokens,
    )
