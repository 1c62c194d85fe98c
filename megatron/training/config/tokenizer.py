"""Which tokenizer, and the size of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.tokenizers.tokenizer_options import TokenizerOptions


@dataclass(kw_only=True)
class TokenizerConfig(TokenizerOptions):
    """Size of the vocabulary."""

    padded_vocab_size: int | None = flag(None, minimum=1, unit="tokens")
    """Rows of the embedding; computed from the vocabulary when not given."""
    pad_vocab_size: bool = True
    """Pad the vocabulary to a multiple of --make-vocab-size-divisible-by on each tensor-parallel rank."""
