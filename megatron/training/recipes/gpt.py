"""From the settings of a run to its tokenizer and its GPT model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from megatron.core.errors import ConfigError
from megatron.core.tokenizers.build import pad_vocab_size, tokenizer_from
from megatron.training.config.container import RunConfig
from megatron.training.recipes.layer_spec import layer_spec

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tokenizers.base import Tokenizer


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """The tokenizer that the settings name. Raises ConfigError or DataError."""
    return tokenizer_from(config.tokenizer)


def vocab_size_of(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Tokens without padding: the tokenizer's, or the larger --vocab-size.

    Raises ConfigError for a --vocab-size that does not hold the tokenizer's tokens.
    """
    asked = config.tokenizer.vocab_size
    if asked is None or asked == tokenizer.vocab_size - config.tokenizer.vocab_extra_ids:
        return tokenizer.vocab_size
    if asked < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {asked} does not hold the {tokenizer.vocab_size} tokens of the tokenizer; leave it out"
        )
    return asked


def padded_vocab_size_of(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Rows of the embedding: the vocabulary, padded so that every tensor-parallel rank holds equally many.

    Raises ConfigError for a --padded-vocab-size that is too small or cannot be divided.
    """
    settings, ranks = config.tokenizer, config.model.tensor_model_parallel_size
    vocab_size = vocab_size_of(config, tokenizer)
    if settings.padded_vocab_size is None and settings.pad_vocab_size:
        return pad_vocab_size(vocab_size, config.gpt.make_vocab_size_divisible_by, ranks)
    rows = settings.padded_vocab_size or vocab_size
    if rows < vocab_size:
        raise ConfigError(
            f"--padded-vocab-size {rows} does not hold the {vocab_size} tokens of the vocabulary; "
            "raise it or leave it out"
        )
    if rows % ranks:
        flag = "--padded-vocab-size" if settings.padded_vocab_size else "--no-pad-vocab-size with a vocabulary of"
        raise ConfigError(
            f"{flag} {rows} cannot be divided among --tensor-model-parallel-size {ranks}; "
            f"use --padded-vocab-size {-(-rows // ranks) * ranks}"
        )
    return rows


def build_gpt_model(
    config: RunConfig,
    padded_vocab_size: int,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """One pipeline chunk of the model, on torch's default device, with its initial weights.

    pre_process, post_process: the chunk holds the embedding, the output layer.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    assert config.gpt.max_position_embeddings is not None, "checked by read_run_config"
    return GPTModel(
        config=config.model,
        transformer_layer_spec=layer_spec(config.gpt.spec, config.model),
        vocab_size=padded_vocab_size,
        max_sequence_length=config.gpt.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
        position_embedding_type=cast(Any, config.model.position_embedding_type),
        rotary_percent=config.gpt.rotary_percent,
        rotary_base=config.gpt.rotary_base,
        rope_scaling=config.gpt.use_rope_scaling,
        rope_scaling_factor=config.gpt.rope_scaling_factor,
        seq_len_interpolation_factor=config.gpt.rotary_seq_len_interpolation_factor,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
