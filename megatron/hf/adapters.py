# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters for Hugging Face's programs: merged into the weights, or as a directory that peft reads.

adapter_config.json          rank, scale, names of the projections
adapter_model.safetensors    base_model.model.<module>.lora_A.weight [rank, in], .lora_B.weight [out, rank], with DoRA
                             .lora_magnitude_vector [out], lengths of rows, of which ours are the changes
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.durable import storage_errors, write_file
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.paths import explain_no_directory
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.core.transformer.adapters import Adapter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.hf.checkpoints import OpenCheckpoint, fresh_directory
from megatron.hf.entries import Entry
from megatron.hf.rows import is_per_expert, join, split
from megatron.hf.settings import build_empty_model
from megatron.hf.tensor_files import open_tensors, write_tensors
from megatron.training.config.container import RunConfig
from megatron.training.recipes.hf_config import read_json

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_IN, _OUT = ".adapter.linear_in.weight", ".adapter.linear_out.weight"
_MAGNITUDE = ".adapter.magnitude_change"


def list_adapters(model: nn.Module) -> dict[str, Adapter]:
    """The adapters of a model by the name of their layer in the whole model."""
    return {
        find_global_name(model, path).removesuffix(".adapter"): module
        for path, module in model.named_modules()
        if isinstance(module, Adapter)
    }


class AdaptedCheckpoint:
    """A checkpoint of ours with adapters."""

    def __init__(self, checkpoint: OpenCheckpoint, config: RunConfig, vocab_size: int) -> None:
        """config: with the settings of the adapters."""
        self._checkpoint, self._config = checkpoint, config.model
        self._adapters = list_adapters(build_empty_model(config, vocab_size, with_adapters=True))

    def read(self, key: str) -> Tensor:
        """A weight with its adapters in it, rounded once. Raises CheckpointError."""
        weight, layer = self._checkpoint.read(key), key.removesuffix(".weight")
        adapter = self._adapters.get(layer) if layer != key else None
        if adapter is None:
            return weight
        return adapter.merge(weight, *self._read_matrices(layer), self._read_magnitude(layer, adapter))

    def _read_matrices(self, layer: str) -> tuple[Tensor, Tensor]:
        return self._checkpoint.read(layer + _IN), self._checkpoint.read(layer + _OUT)

    def _read_magnitude(self, layer: str, adapter: Adapter) -> Tensor | None:
        return None if adapter.magnitude_change is None else self._checkpoint.read(layer + _MAGNITUDE)

    def write(self, output: Path, entries: list[Entry]) -> None:
        """Write the adapters as a directory that peft reads; see write_adapter()."""
        tensors: dict[str, Tensor] = {}
        names: set[str] = set()
        for entry in entries:
            layer = entry.key.removesuffix(".weight")
            if layer == entry.key or (adapter := self._adapters.get(layer)) is None:
                continue
            a, b = self._read_matrices(layer)
            for module, place, rows in _split_rows(entry, adapter, b):
                names.add(module.rpartition(".")[2])
                tensors[f"{_PREFIX}{module}.lora_A.weight"] = place.select(a, adapter.rank)
                tensors[f"{_PREFIX}{module}.lora_B.weight"] = rows
            if (change := self._read_magnitude(layer, adapter)) is not None:
                lengths = (adapter.measure_rows(self._checkpoint.read(entry.key)) + change).to(change.dtype)
                for module, _, rows in _split_rows(entry, adapter, lengths.unsqueeze(-1)):
                    tensors[f"{_PREFIX}{module}.lora_magnitude_vector"] = rows.squeeze(-1)
        tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        content = json.dumps(_describe(self._config, names), indent=2, sort_keys=True) + "\n"
        with fresh_directory(output) as temporary, storage_errors(f"writing {output}"):
            write_tensors(temporary, shapes, iter(tensors.items()), {WEIGHTS: list(shapes)})
            write_file(temporary / ADAPTER_CONFIG, content.encode())


class AdapterDirectory:
    """A directory that peft has saved, whose adapters a run is to start from; see `ForeignAdapters`."""

    def __init__(
        self,
        directory: Path,
        config: RunConfig,
        entries: list[Entry],
        vocab_size: int,
        read_weight: Callable[[Entry], Tensor],
    ) -> None:
        """config: of the run. entries: of its model without adapters. read_weight: gives a weight that it has begun
        with. Raises CheckpointError for missing, damaged and surplus tensors, ConfigError where the run's settings are
        others."""
        self._read_weight = read_weight
        if problem := explain_no_directory(directory):
            raise CheckpointError(f"--load-adapter {directory} {problem}; give a directory that peft has saved")
        _compare_settings(directory / ADAPTER_CONFIG, config.model)
        self._tensors = open_tensors(directory, "adapter_model")
        self._entries: dict[str, Entry] = {}
        self._adapters = list_adapters(build_empty_model(config, vocab_size, with_adapters=True))
        expected: dict[str, tuple[int, ...]] = {}
        for entry in entries:
            layer = entry.key.removesuffix(".weight")
            if layer != entry.key and (adapter := self._adapters.get(layer)) is not None:
                self._entries[layer] = entry
                b = torch.empty(adapter.linear_out.weight.shape, device="meta")
                for module, _, rows in _split_rows(entry, adapter, b):
                    expected[f"{_PREFIX}{module}.lora_A.weight"] = (adapter.rank, adapter.linear_in.weight.shape[-1])
                    expected[f"{_PREFIX}{module}.lora_B.weight"] = tuple(rows.shape)
                    if adapter.magnitude_change is not None:
                        expected[f"{_PREFIX}{module}.lora_magnitude_vector"] = (rows.shape[0],)
        found = {name: tuple(tensor.shape) for name, tensor in self._tensors.contents.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                sizes = [str(sizes.get(name, "missing")) for sizes in (found, expected)]
                raise CheckpointError(
                    f"--load-adapter {directory}: {name} is {sizes[0]} there and {sizes[1]} in this model; give the "
                    "model that it was trained for, and its --lora-target-modules"
                )

    def load(self, tensors: ShardedStateDict) -> None:
        """Fill the tensors that belong to adapters. Raises CheckpointError."""
        for tensor in tensors.values():
            name = tensor.fallback_key or tensor.key
            if not name.endswith((_IN, _OUT, _MAGNITUDE)):
                continue
            full = self._make(*name.split(".adapter."))
            for index, block in enumerate(tensor.blocks):
                tensor.block(index).copy_(full[tuple(slice(start, start + length) for start, length in block.box)])

    def _make(self, layer: str, matrix: str) -> Tensor:
        entry, adapter = self._entries[layer], self._adapters[layer]
        b = torch.empty(adapter.linear_out.weight.shape, device="meta")
        if matrix == "linear_in.weight":
            read = {
                place: self._tensors.read(f"{_PREFIX}{module}.lora_A.weight")
                for module, place, _ in _split_rows(entry, adapter, b)
            }
            ours = torch.empty(adapter.linear_in.weight.shape, dtype=next(iter(read.values())).dtype, device="cpu")
            for place, a in read.items():
                place.select(ours, adapter.rank).copy_(a)
            return ours
        is_magnitude = matrix == "magnitude_change"
        if is_magnitude:
            b = adapter.measure_rows(self._read_weight(entry)).unsqueeze(-1)
        stack = []
        for modules, rows_of_all in _list_matrices(entry, adapter, b):
            parts = []
            for projection, module, rows in zip(adapter.projections, modules, rows_of_all, strict=True):
                if projection not in adapter.chosen:
                    # Its rows of the joint matrix are there, and change nothing.
                    parts.append(torch.zeros(rows.shape))
                elif is_magnitude:
                    lengths = self._tensors.read(f"{_PREFIX}{module}.lora_magnitude_vector")
                    parts.append(lengths.unsqueeze(-1) - rows)
                else:
                    parts.append(self._tensors.read(f"{_PREFIX}{module}.lora_B.weight"))
            stack.append(join(entry.row, entry.config, parts))
        joined = torch.stack(stack) if entry.is_by_expert else stack[0]
        return joined.squeeze(-1) if is_magnitude else joined


def _compare_settings(file: Path, config: TransformerConfig) -> None:
    """Raise ConfigError where an adapter_config.json says something else than the run's settings."""
    fields, expected = read_json(file), _describe(config, set())
    remedies = {
        "r": "--lora-rank {}", "lora_alpha": "--lora-alpha {}", "use_rslora": "the --lora-type that it says",
        "use_dora": "the --lora-type that it says",
    }  # fmt: skip
    for name in ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "modules_to_save", "rank_pattern",
                 "alpha_pattern", "fan_in_fan_out"):  # fmt: skip
        found = fields.get(name, expected[name])
        if found != expected[name] and (found or expected[name]):
            remedy = remedies.get(name, "adapters of a form that --lora-type does not have cannot be loaded")
            remedy = f"give {remedy.format(found)}" if name in remedies else remedy
            raise ConfigError(f"{file}: {name} is {found!r} and {expected[name]!r} in this run; {remedy}")


def write_adapter(checkpoint: AdaptedCheckpoint | None, entries: list[Entry], output: Path) -> None:
    """Write the adapters of a checkpoint as a directory that peft reads.

    Raises CheckpointError where it has none, ConfigError for a family that packs what has several adapters here, or
    StorageError; `output` then does not exist.
    """
    if checkpoint is None:
        raise CheckpointError("--adapter: the checkpoint has none, it was trained without --lora-rank; leave it out")
    checkpoint.write(output, entries)


class _Place(NamedTuple):
    """Place of an adapter among the adapters of its layer."""

    projection: int
    expert: int | None

    def select(self, a: Tensor, rank: int) -> Tensor:
        """Its A [rank, in] in the layer's."""
        return (a if self.expert is None else a[self.expert]).split(rank)[self.projection]


def _split_rows(entry: Entry, adapter: Adapter, b: Tensor) -> Iterator[tuple[str, _Place, Tensor]]:
    """Yield for each adapter of a layer: their module, its place, and its B [out, rank]."""
    for expert, (modules, parts) in enumerate(_list_matrices(entry, adapter, b)):
        for module, projection, rows in zip(modules, adapter.projections, parts, strict=True):
            if projection in adapter.chosen:
                yield module, _Place(adapter.chosen.index(projection), expert if entry.is_by_expert else None), rows


def _list_matrices(entry: Entry, adapter: Adapter, b: Tensor) -> Iterator[tuple[list[str], list[Tensor]]]:
    """Yield their modules for the projections of a layer, or of each of its experts, and the parts of a tensor with the
    weight's rows."""
    is_apart = is_per_expert(entry.row) or not entry.is_by_expert
    for names, rows in zip(entry.names, b if entry.is_by_expert else [b], strict=is_apart):
        modules = [name.removesuffix(".weight") for name in names]
        if len(modules) != len(adapter.projections) or entry.row.transposed or not is_apart:
            raise ConfigError(
                f"peft's files: {', '.join(modules)} of this family is not one linear layer for each of "
                f"{', '.join(adapter.projections)}, which have an adapter each; merge them with convert, without "
                "--adapter"
            )
        yield modules, split(entry.row, entry.config, rows)


def _describe(config: TransformerConfig, names: set[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.lora_rank,
        "lora_alpha": config.lora_rank if config.lora_alpha is None else config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.lora_type == "rslora",
        "use_dora": config.lora_type == "dora",
        "target_modules": sorted(names),
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
