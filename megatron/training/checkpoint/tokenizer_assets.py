# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's files, which every checkpoint carries along: with it, a checkpoint alone can generate text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.chat import is_file_name
from megatron.core.tokenizers.metadata import metadata_file
from megatron.training.config.data import TokenizerConfig

DIRECTORY = "tokenizer"
_FILE_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
_BESIDE_A_FILE = _FILE_NAMES[1:5]
_MERGES_NAME, _GIVEN_TEMPLATE, _METADATA = "merges.txt", "given_chat_template.jinja", "tokenizer_metadata.json"


def list_tokenizer_files(settings: TokenizerConfig) -> dict[str, Path]:
    """Name in the checkpoint -> file. Empty for a tokenizer without files, and for files that are gone meanwhile."""
    files: dict[str, Path] = {}
    if settings.tokenizer_model is not None:
        model = Path(settings.tokenizer_model)
        if model.is_dir():
            files = {name: model / name for name in _FILE_NAMES}
        else:
            # A tokenizer.json does not have its special tokens or its chat template; the files next to it do.
            beside = {name: model.with_name(name) for name in _BESIDE_A_FILE}
            files = {model.name: model, **beside}
    named = ((_choose_vocab_name(settings), settings.vocab_file), (_MERGES_NAME, settings.merge_file))
    files |= {name: Path(path) for name, path in named if path is not None}
    if settings.chat_template is not None and is_file_name(settings.chat_template):
        files[_GIVEN_TEMPLATE] = Path(settings.chat_template)
    if settings.metadata_path is not None:
        files[_METADATA] = metadata_file(settings.metadata_path)
    return {f"{DIRECTORY}/{name}": path for name, path in files.items() if path.is_file()}


def use_saved_files(settings: TokenizerConfig, checkpoint: Path) -> TokenizerConfig:
    """The settings, pointing to the files inside the checkpoint where it has them.

    A checkpoint may come from anybody: that it was made with --trust-remote-code does not let it run code here.
    """
    directory = checkpoint / DIRECTORY
    # Files of the checkpoint are data. Code that a tokenizer brings runs only where the user's flags allow it.
    changes: dict[str, Any] = {"trust_remote_code": False}
    if settings.tokenizer_model is not None and directory.is_dir():
        # --tokenizer-model may have been a file or a directory; both were copied with their names.
        file = directory / Path(settings.tokenizer_model).name
        changes["tokenizer_model"] = str(file if file.is_file() else directory)
    names = (
        ("vocab_file", _choose_vocab_name(settings)),
        ("merge_file", _MERGES_NAME),
        ("chat_template", _GIVEN_TEMPLATE),
        ("metadata_path", _METADATA),
    )
    for field, name in names:
        if getattr(settings, field) is not None and (directory / name).is_file():
            changes[field] = str(directory / name)
    return dataclasses.replace(settings, **changes)


def _choose_vocab_name(settings: TokenizerConfig) -> str:
    """GPT-2's vocabulary is JSON, BERT's has a token per line."""
    return "vocab.txt" if settings.merge_file is None else "vocab.json"
