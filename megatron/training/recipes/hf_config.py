# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory's config.json and tokenizer as flags of ours: the model that a run is to train on.

Loads neither torch nor any weight, so that a command line with --load hf:DIR is checked as fast as any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.errors import CheckpointError, ConfigError
from megatron.training.recipes.families import FAMILIES, find_family
from megatron.training.recipes.family import Family, build_flags

CONFIG_JSON = "config.json"
WITHOUT_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
"""What no config.json means by saying nothing: published models are trained on without dropout."""


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a JSON document. Raises CheckpointError."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointError(f"{path} {reason}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must hold an object with fields")
    return content


def find_family_of(fields: Mapping[str, Any], where: Path, families: Sequence[Family] = FAMILIES) -> Family:
    """The family of a config.json. Raises CheckpointError for one that is not known."""
    try:
        return find_family(str(fields.get("model_type")), families)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def list_model_flags(fields: Mapping[str, Any], where: Path, families: Sequence[Family] = FAMILIES) -> list[str]:
    """The flags of the model that a config.json describes, and of its tokenizer, as words of a command line.

    fields: of the config.json `where`, beside which the tokenizer lies. Raises CheckpointError or ConfigError for a
    model that cannot be built.
    """
    family = find_family_of(fields, where, families)
    vocab_size = fields.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise CheckpointError(f"{where}: vocab_size is {vocab_size!r}; it must be the number of the embedding's rows")
    try:
        words = " ".join(build_flags(family, fields)).split()
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, IndexError) as error:
        raise CheckpointError(f"{where} has fields that describe no {family.name} model: {error}") from None
    if "--max-position-embeddings" not in words:
        words += ["--max-position-embeddings", str(find_length(fields))]
    return [*words, *WITHOUT_DROPOUT, *list_tokenizer_flags(where.parent, vocab_size)]


def find_length(fields: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that the model is made for."""
    # Learned positions end with their table, and files of a family without a limit have none.
    return int(next((fields[name] for name in ("max_position_embeddings", "n_positions") if fields.get(name)), 2048))


def list_tokenizer_flags(directory: Path, vocab_size: int) -> list[str]:
    """The directory's tokenizer where it has one; the vocabulary has all rows of the embedding in any case."""
    kinds = {"tokenizer.json": ("HuggingFaceTokenizer", directory),
             "tokenizer.model": ("Llama2Tokenizer", directory / "tokenizer.model")}  # fmt: skip
    for file, (kind, path) in kinds.items():
        if (directory / file).is_file():
            found = ["--tokenizer-type", kind, "--tokenizer-model", str(path.resolve())]
            return [*found, "--vocab-size", str(vocab_size)]
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size)]
