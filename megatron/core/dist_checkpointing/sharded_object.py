# SPDX-License-Identifier: Apache-2.0
"""Objects of single processes in a checkpoint, such as the states of random-number generators."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.errors import ConfigError

_PLAIN = (str, int, float, bool, type(None))


@dataclass
class ShardedObject:
    """Element `global_offset` of a grid of objects `global_shape`, each of one process, or of replicas of it.

    data: numbers, texts, tensors, arrays of numpy, and dictionaries, lists and tuples of these; anything else is
    refused, because unpickling it could run code. replica_id: 0, or zeros, for the one that is saved.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0

    @property
    def unique_key(self) -> str:
        """Key and place."""
        place = "_".join(map(str, self.global_offset))
        return f"{self.key}/shard_{place}_{'_'.join(map(str, self.global_shape))}"

    @property
    def is_main_replica(self) -> bool:
        """True if this is the replica that is saved."""
        return not any(self.replica_id) if isinstance(self.replica_id, tuple) else self.replica_id == 0

    def to_text(self) -> str:
        """The object as text for a document. Raises ConfigError for what is not kept."""
        memory = io.BytesIO()
        torch.save(_flatten(self.data, self.key), memory)
        return base64.b64encode(memory.getvalue()).decode()

    @staticmethod
    def from_text(text: str) -> Any:
        """The inverse of `to_text`."""
        return _restore(torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True))


def _flatten(value: Any, where: str) -> Any:
    if isinstance(value, np.ndarray):
        return {"__array__": torch.from_numpy(value.copy().view(np.uint8).reshape(-1)), "dtype": str(value.dtype),
                "shape": list(value.shape)}  # fmt: skip
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _flatten(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_flatten(item, where) for item in value)
    if isinstance(value, (*_PLAIN, torch.Tensor)):
        return value
    raise ConfigError(f"{where} holds a {type(value).__name__}; a checkpoint keeps numbers, texts, tensors and arrays")


def _restore(value: Any) -> Any:
    if isinstance(value, dict) and "__array__" in value:
        return value["__array__"].numpy().view(np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if isinstance(value, dict):
        return {key: _restore(item) for key, item in value.items()}
    return type(value)(map(_restore, value)) if isinstance(value, list | tuple) else value
