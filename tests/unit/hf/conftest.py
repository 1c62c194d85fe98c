# SPDX-License-Identifier: Apache-2.0
"""Directories of Hugging Face that several files of tests read, or spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def hf_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16, in several shards, with a tokenizer and a generation config."""
    import torch

    # Importing it skips the test where there is no transformers.
    from tests.support.family_models import ODD, TOKENIZER, make

    directory = tmp_path_factory.mktemp("llama") / "hf"
    hf = make("Llama", **ODD | {"vocab_size": 1009}).to(torch.bfloat16)
    hf.save_pretrained(directory, max_shard_size="100KB")
    for file in TOKENIZER.glob("*.json"):
        shutil.copy(file, directory)
    return directory


@pytest.fixture
def copied(hf_directory: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(hf_directory, tmp_path / "hf"))
