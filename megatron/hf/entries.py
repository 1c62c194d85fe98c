# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model, each with its tensors in the files of its family: what conversion goes through."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.placement import Box, Placement, get_placement
from megatron.core.stacked_parameters import list_parameters
from megatron.core.tensor_parallel.parameters import declare_vocabulary
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.hf.rows import (
    find_their_rows,
    is_per_expert,
    join,
    join_numbers,
    list_copies,
    list_names,
    split,
    split_name,
)
from megatron.hf.settings import build_empty_model
from megatron.hf.tensor_files import Shapes
from megatron.training.config.container import RunConfig
from megatron.training.recipes.family import Family, Row, find_row


@dataclass(frozen=True)
class Entry:
    """One parameter of ours, and the tensors in their files that hold its values."""

    placement: Placement
    row: Row
    names: list[list[str]]
    """A list for each expert, or a single one."""
    config: TransformerConfig
    copies: tuple[str, ...] = ()
    """Further tensors of theirs with the values of the only one in `names`."""

    @property
    def key(self) -> str:
        """Our name."""
        return self.placement.name

    @property
    def is_by_expert(self) -> bool:
        """True if ours is a stack [experts, ...] of what the row says of one expert."""
        return ".experts." in self.key

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """Our tensor from theirs."""
        if not self.is_by_expert:
            theirs = [read(name) for name in self.names[0]]
            self._check_copies(theirs[0], read)
            return join(self.row, self.config, theirs).contiguous()
        if is_per_expert(self.row):
            parts = ([read(name) for name in names] for names in self.names)
        else:
            stacks = [read(name) for name in self.names[0]]
            parts = ([stack[expert] for stack in stacks] for expert in range(self.num_experts))
        ours: Tensor | None = None
        # Filled expert by expert: all of them in addition to their stack would be twice the memory.
        for expert, theirs in enumerate(parts):
            part = join(self.row, self.config, theirs)
            if ours is None:
                ours = torch.empty((self.num_experts, *part.shape), dtype=part.dtype, device=part.device)
            ours[expert] = part
        assert ours is not None
        return ours

    @property
    def num_experts(self) -> int:
        """Number of experts in a stack."""
        return self.placement.logical_shape[0]

    def read_box(self, box: Box, read_box: Callable[[str, Box], Tensor]) -> Tensor:
        """A part of our tensor, (start, length) for each dimension, from the parts of theirs that it is made of."""
        if not self.is_by_expert:
            ours = self._read_rows(self.names[0], self.placement.logical_shape[0], box, read_box)
            self._check_copies(ours, lambda name: read_box(name, box))
            return ours
        (first, count), inner = box[0], box[1:]
        rows, experts = self.placement.logical_shape[1], range(first, first + count)
        if is_per_expert(self.row):
            return torch.stack([self._read_rows(self.names[expert], rows, inner, read_box) for expert in experts])

        def read_of(expert: int) -> Callable[[str, Box], Tensor]:
            return lambda name, part: read_box(name, ((expert, 1), *part))[0]

        return torch.stack([self._read_rows(self.names[0], rows, inner, read_of(expert)) for expert in experts])

    def _check_copies(self, values: Tensor, read: Callable[[str], Tensor]) -> None:
        """Raise CheckpointError where a copy has other values: here it is one parameter."""
        for name in self.copies:
            if not torch.equal(read(name).contiguous().view(torch.uint8), values.contiguous().view(torch.uint8)):
                raise CheckpointError(
                    f"{name} is not equal to {self.names[0][0]}; multi-token prediction has the model's own embedding "
                    "and output layer here: set num_nextn_predict_layers to 0 in config.json to leave it out"
                )

    def _read_rows(self, names: list[str], num_rows: int, box: Box, read_box: Callable[[str, Box], Tensor]) -> Tensor:
        if self.row.form == "reshaped":
            return read_box(names[0], tuple(box[0] if size < 0 else (0, 1) for size in self.row.shape)).flatten()
        transposed = self.row.transposed and len(box) == 2
        ours: Tensor | None = None
        for number, theirs, places in find_their_rows(self.row, self.config, num_rows, *box[0]):
            first, last = int(theirs[0]), int(theirs[-1])
            wanted = ((first, last + 1 - first), *box[1:])
            read = read_box(names[number], wanted[::-1] if transposed else wanted)
            read = read.t() if transposed else read
            if len(read) == len(theirs) == box[0][1] and bool((places.diff() == 1).all()):
                return read  # nothing is moved, and no copy needed
            if ours is None:
                ours = read.new_empty([length for _, length in box])
            ours[places] = read[theirs - first]
        assert ours is not None, f"{self.key}: the part {box} is empty"
        return ours

    def split(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield their names and tensors."""
        for region, names in self.list_regions():
            first, count = region[0] if region else (0, 0)
            yield from self.split_region(ours[first : first + count] if region else ours, names)

    def list_regions(self) -> Iterator[tuple[Box, list[str]]]:
        """The parts of our tensor that are tensors in their files, each with their names: one expert after the other,
        or the whole."""
        shape = self.placement.logical_shape
        if not is_per_expert(self.row):
            yield tuple((0, length) for length in shape), self.names[0]
            return
        for expert, names in enumerate(self.names):
            yield ((expert, 1), *((0, length) for length in shape[1:])), names

    def split_region(self, ours: Tensor, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield their names and tensors of such a part."""
        if not self.is_by_expert:
            tensors = split(self.row, self.config, ours)
        elif is_per_expert(self.row):
            tensors = split(self.row, self.config, ours[0])
        else:
            by_expert = [split(self.row, self.config, part) for part in ours]
            tensors = [torch.stack(parts) for parts in zip(*by_expert, strict=True)]
        yield from zip(names, tensors, strict=True)
        for name in self.copies:
            yield name, tensors[0]


def list_entries(family: Family, config: RunConfig, vocab_size: int) -> list[Entry]:
    """The parameters of the model with these settings. Raises ConfigError for one that the family has no row for."""
    model = build_empty_model(config, vocab_size)
    # All rows are tokens here; how many rows a run adds to them as padding is its business.
    declare_vocabulary(model, vocab_size)
    entries = []
    for name, parameter in list_parameters(model):
        placement = get_placement(parameter, name)
        row = find_row(family, placement.name)
        if row is None:
            raise ConfigError(f"{family.name}: no row of the table of families says where {placement.name} is stored")
        names, copies = list_names(row, placement.name, config.model), list_copies(row, config.model)
        entries.append(Entry(placement, row, names, config.model, copies))
    return entries


def count_values(entries: Iterable[Entry]) -> int:
    """Numbers in the model."""
    return sum(math.prod(entry.placement.logical_shape) for entry in entries)


def list_their_shapes(entries: Iterable[Entry]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in their files."""
    pairs = (pair for e in entries for pair in e.split(torch.empty(e.placement.logical_shape, device="meta")))
    return {name: tuple(tensor.shape) for name, tensor in join_numbers(pairs)}


def list_shapes(entries: Iterable[Entry], get_dtype: Callable[[str], torch.dtype]) -> Shapes:
    """Return dtype and shape of their tensors, by name. get_dtype: of a parameter of ours, by our name."""
    entries = list(entries)
    formats = {
        split_name(name)[0]: get_dtype(e.key) for e in entries for names in e.names for name in (*names, *e.copies)
    }
    return {name: (formats[name], shape) for name, shape in list_their_shapes(entries).items()}
