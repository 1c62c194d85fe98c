# SPDX-License-Identifier: Apache-2.0
"""A teacher's likeliest tokens in files, found by a sample's tokens, whatever run, order or batch it comes in.

DIR/manifest.json                  sizes; written last, so that a directory without it is not complete
DIR/<writer>-<number>.keys.npy     int64 [n]: the samples' keys
DIR/<writer>-<number>.tokens.npy   int32 [n, s, k]
DIR/<writer>-<number>.values.npy   [n, s, k] log-probabilities, -inf where fewer than k are kept; bf16 as its bits
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.errors import ConfigError, DataError, StorageError

MANIFEST = "manifest.json"
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_PARTS = ("keys", "tokens", "values")


def compute_key(sample: Mapping[str, Any]) -> int:
    """A number by which a sample is known: a digest of its tokens and its documents."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("tokens", "cu_seqlens"):
        if name in sample:
            digest.update(torch.as_tensor(sample[name]).long().numpy().tobytes() + b"|")
    return int.from_bytes(digest.digest(), "big", signed=True)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The sizes that a teacher's run has written. Raises ConfigError for a directory without complete logits."""
    try:
        found = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return {name: found[name] for name in ("k", "sequence_length", "vocab_size", "dtype", "samples", "files")}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--logits-load-dir {directory}: no complete logits of a teacher there ({error}); write them with "
            "--logits-save-dir, and wait for its end"
        ) from error


class LogitsWriter:
    """Writes the samples of one process."""

    def __init__(self, directory: Path, writer: int, dtype: str, samples_per_file: int = 256) -> None:
        self.files: list[str] = []
        self._directory, self._writer, self._dtype = directory, writer, dtype
        self._most = samples_per_file
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, keys: Tensor, tokens: Tensor, values: Tensor) -> None:
        """Some samples: keys int64 [n], tokens [n, s, k], log-probabilities [n, s, k]. Raises StorageError."""
        self._waiting.append((keys.cpu(), tokens.int().cpu(), values.to(_DTYPES[self._dtype]).cpu()))
        if sum(len(part[0]) for part in self._waiting) >= self._most:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting. Raises StorageError."""
        if not self._waiting:
            return
        name = f"{self._writer:05d}-{len(self.files):06d}"
        keys, tokens, values = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        values = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
        for part, content in zip(_PARTS, (keys, tokens, values), strict=True):
            path = self._directory / f"{name}.{part}.npy"
            try:
                np.save(path, content.numpy())
            except OSError as error:
                raise StorageError(f"{path}: {error.strerror}") from error
        self.files.append(name)
        self._waiting.clear()


def write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    """Declare the logits complete. Raises StorageError."""
    path, temporary = directory / MANIFEST, directory / f".{MANIFEST}.new"
    try:
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


class TeacherLogits:
    """A teacher's likeliest tokens by the samples' keys; files are mapped when they are read."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError for a directory without complete logits, DataError for a file that cannot be read."""
        self.manifest = read_manifest(directory)
        self._directory = directory
        keys = [self._open(name, "keys") for name in self.manifest["files"]]
        self._places = np.concatenate(
            [np.stack([np.full(len(own), number), np.arange(len(own))], 1) for number, own in enumerate(keys)]
        )
        joined = np.concatenate(keys)
        self._order = np.argsort(joined, kind="stable")
        self._keys = joined[self._order]
        self._maps: dict[tuple[int, str], npt.NDArray[Any]] = {}

    def find(self, key: int) -> tuple[Tensor, Tensor] | None:
        """Tokens int64 [s, k] and log-probabilities float32 [s, k] of a sample; None where there are none."""
        place = int(np.searchsorted(self._keys, key))
        if place == len(self._keys) or int(self._keys[place]) != key:
            return None
        file, row = self._places[self._order[place]].tolist()
        tokens, values = (torch.from_numpy(np.array(self._map(file, part)[row])) for part in _PARTS[1:])
        if self.manifest["dtype"] == "bf16":
            values = values.view(torch.bfloat16)
        return tokens.long(), values.float()

    def _map(self, file: int, part: str) -> npt.NDArray[Any]:
        if (file, part) not in self._maps:
            self._maps[file, part] = self._open(self.manifest["files"][file], part)
        return self._maps[file, part]

    def _open(self, name: str, part: str) -> npt.NDArray[Any]:
        path = self._directory / f"{name}.{part}.npy"
        try:
            return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); write the logits again") from error


class KeyedDataset:
    """A dataset whose samples have their key, int64 []: what a teacher's logits are written under."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = self.dataset[index]
        return sample | {"key": torch.tensor(compute_key(sample))}

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet while a copy is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class DistillationDataset(KeyedDataset):
    """A dataset whose samples have a teacher's likeliest tokens, int64 [s, k], and their log-probabilities, float32."""

    def __init__(self, dataset: Any, logits: TeacherLogits, *, may_lack: bool) -> None:
        """may_lack: samples without logits have log-probabilities of -inf."""
        super().__init__(dataset)
        self.logits, self.may_lack = logits, may_lack

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = self.dataset[index]
        found = self.logits.find(compute_key(sample))
        if found is None:
            if not self.may_lack:
                locate = getattr(self.dataset, "locate", None)
                place = f"sample {index}" + ("" if locate is None else f" ({locate(index)})")
                raise DataError(
                    f"{place} has no logits in --logits-load-dir: they were written with other data, another seed or "
                    "--seq-length, or for fewer samples; write them with this run's data, or train on such samples "
                    "without a teacher by --logits-load-ignore-errors"
                )
            shape = (len(sample["tokens"]), self.logits.manifest["k"])
            found = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -torch.inf)
        return sample | {"teacher_tokens": found[0], "teacher_log_probs": found[1]}
