# SPDX-License-Identifier: Apache-2.0
"""Put token datasets one after another: the same bytes as if their text had been preprocessed in one go."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.datasets.checksums import verify_checksums
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.indexed_format import SequenceIndex, get_bin_path, get_idx_path, read_index
from megatron.core.errors import ConfigError, DataError

_SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True)
class Merged:
    """Summary of what was written."""

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int


def prefixes_in(directory: str) -> list[str]:
    """The datasets of a directory, in the order of their names. Other files are left alone.

    Raises DataError for a file without its other half, and where there is no dataset.
    """
    try:
        entries = [entry for entry in os.listdir(directory) if os.path.isfile(os.path.join(directory, entry))]
    except OSError as error:
        raise DataError(f"--input {directory}: {error.strerror}; give a directory of .bin/.idx files") from error
    names = {entry[: -len(suffix)] for suffix in _SUFFIXES for entry in entries if entry.endswith(suffix)}
    for name in sorted(names):
        for suffix in _SUFFIXES:
            if name + suffix not in entries:
                raise DataError(
                    f"--input {directory}: {name}{suffix} is missing beside its other half; copy it, or remove that one"
                )
    if not names:
        raise DataError(f"--input {directory}: holds no .bin/.idx dataset; give the directory of the parts to merge")
    return [os.path.join(directory, name) for name in sorted(names)]


def order_surprise(prefixes: Sequence[str]) -> str | None:
    """A sentence where names are numbered but not in the order of the numbers; None otherwise."""
    by_number = sorted(prefixes, key=_natural)
    for given, numbered in zip(prefixes, by_number, strict=True):
        if given != numbered:
            return (
                f"{os.path.basename(given)} comes before {os.path.basename(numbered)}: the order is that of the names; "
                "give the prefixes themselves after --input for another one"
            )
    return None


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isascii() and part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def merge(prefixes: Sequence[str], output_prefix: str, *, multimodal: bool = False, overwrite: bool = False) -> Merged:
    """Write all documents of `prefixes`, in this order, as one dataset. Every part is checked before work starts.

    Raises DataError for a damaged part or parts of different token types, ConfigError for output that is in the way.
    """
    output = {os.path.realpath(path) for path in (get_bin_path(output_prefix), get_idx_path(output_prefix))}
    for prefix in prefixes:
        if output & {os.path.realpath(get_bin_path(prefix)), os.path.realpath(get_idx_path(prefix))}:
            raise ConfigError(f"--output-prefix {output_prefix} is one of the datasets to merge; choose another one")
    existing = [path for path in (get_bin_path(output_prefix), get_idx_path(output_prefix)) if os.path.lexists(path)]
    if existing and not overwrite:
        raise ConfigError(f"{existing[0]} exists; pass --overwrite to replace it, or choose another --output-prefix")

    parts = [read_index(prefix, multimodal) for prefix in prefixes]
    _check_types(prefixes, parts)
    with IndexedDatasetBuilder(get_bin_path(output_prefix), parts[0].dtype, multimodal) as builder:
        for prefix in prefixes:
            verify_checksums(prefix)
            builder.add_index(prefix)
        builder.finalize(get_idx_path(output_prefix))
    return Merged(
        prefix=output_prefix,
        dtype=parts[0].dtype.name,
        documents=sum(len(part.document_indices) - 1 for part in parts),
        sequences=sum(map(len, parts)),
        tokens=sum(part.bin_bytes for part in parts) // parts[0].dtype.itemsize,
    )


def _check_types(prefixes: Sequence[str], parts: Sequence[SequenceIndex]) -> None:
    for prefix, part in zip(prefixes, parts, strict=True):
        if part.dtype != parts[0].dtype:
            raise DataError(
                f"{get_idx_path(prefix)}: token type is {part.dtype.name}, but {parts[0].dtype.name} in "
                f"{get_idx_path(prefixes[0])}; preprocess both with the same tokenizer"
            )
