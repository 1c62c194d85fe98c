# SPDX-License-Identifier: Apache-2.0
"""One parameter of ours from the tensors in their files, and back: what the forms of a `Row` mean.

All of it only moves elements, so a round trip is exact in every dtype, and it works on tensors without values
(device `meta`), which is how the shapes in a file are known before anything is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.plan.kinds import find_kind
from megatron.core.plan.read import read_plan
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.recipes.family import Row

_NEAR_ROWS = 8
"""Rows that are no farther apart are read together with the rows between them."""


def list_names(row: Row, parameter: str, config: TransformerConfig) -> list[list[str]]:
    """The names in their files that a parameter of ours is made of: a list for each expert, or a single one.

    parameter: our name in the whole model, with the number of its layer.
    """
    kind, _, rest = parameter.partition(".layers.")
    layers = read_plan(config).prediction if kind == "mtp" else read_plan(config).decoder
    layer = layers[int(rest.partition(".")[0])].number - 1 if rest else 0
    theirs = row.theirs if not row.if_apart or config.parallel_residual_shares_norm else row.if_apart
    names = [name.replace("{layer}", str(layer)).replace("{pair}", str(layer // 2)) for name in theirs]
    count = config.num_moe_experts or 1 if is_per_expert(row) else 1
    return [[name.replace("{expert}", str(expert)) for name in names] for expert in range(count)]


def read_part(read: Callable[[str], Tensor], name: str) -> Tensor:
    """Read a tensor of theirs, or one number of it where that is what a row names: `scale[2]`, as [1]."""
    base, index = split_name(name)
    return read(base) if index is None else read(base)[index : index + 1]


def split_name(name: str) -> tuple[str, int | None]:
    """The name of a tensor in their files, and which of its numbers is meant; None for all."""
    base, _, index = name.partition("[")
    return base, int(index.removesuffix("]")) if index else None


def join_numbers(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Put numbers of one tensor, which follow one another, together: their names and tensors."""
    for base, run in itertools.groupby(pairs, lambda pair: split_name(pair[0])[0]):
        parts = list(run)
        yield from [(base, torch.cat([part for _, part in parts]))] if split_name(parts[0][0])[1] is not None else parts


def list_copies(row: Row, config: TransformerConfig) -> tuple[str, ...]:
    """Names in their files, in addition to the names of `list_names`, of tensors with the same values."""
    layers = [layer.number - 1 for layer in read_plan(config).prediction]
    return tuple(name.replace("{layer}", str(layer)) for layer in layers for name in row.copies)


def is_per_expert(row: Row) -> bool:
    """Return True if each expert has separate tensors in their files; ours are [experts, ...]."""
    return any("{expert}" in name for name in row.theirs)


def join(row: Row, config: TransformerConfig, theirs: Sequence[Tensor]) -> Tensor:
    """Our tensor of a layer, or of one expert, from theirs, in the order of the row's names."""
    tensors = [tensor.t() if row.transposed and tensor.dim() == 2 else tensor for tensor in theirs]
    if row.form == "stacked":
        return torch.cat(tensors)
    if row.form == "interleaved":
        return torch.cat([tensors[0][0::2], tensors[0][1::2]])
    if row.form == "sections":
        return torch.cat(tensors)
    if row.form == "grouped_sections":
        groups, parts = config.linear_num_key_heads, []
        for tensor, sizes in zip(tensors, _list_section_sizes(row, config), strict=True):
            by_head = tensor.unflatten(0, (groups, -1)).split([size // groups for size in sizes], dim=1)
            parts += [part.flatten(0, 1) for part in by_head]
        return torch.cat(parts)
    if row.form == "reshaped":
        return tensors[0].flatten()
    if row.form in ("qkv", "gated_qkv", "turned_qkv"):
        groups, width = _get_heads(config)
        if len(tensors) == 1:
            keys = groups * width
            tensors = list(tensors[0].split([tensors[0].shape[0] - 2 * keys, keys, keys]))
        if row.form == "gated_qkv":
            both = tensors[0].unflatten(0, (groups, -1, 2, width)).transpose(1, 2)  # [g, 2, n / g, d, h]
            tensors[0] = both.flatten(0, 3)
        parts = [tensor.reshape(groups, -1, width, *tensor.shape[1:]) for tensor in tensors]
        if row.form == "turned_qkv":
            parts[:2] = [part.roll(width // 2, 2) for part in parts[:2]]
        return torch.cat(parts, dim=1).flatten(0, 2)
    return tensors[0]


def split(row: Row, config: TransformerConfig, ours: Tensor) -> list[Tensor]:
    """The inverse of `join`: their tensors, in the order of the row's names; they may be views of ours."""
    tensors = [ours]
    if row.form == "stacked":
        tensors = list(ours.chunk(len(row.theirs)))
    if row.form == "interleaved":
        tensors = [torch.stack(ours.chunk(2), dim=1).flatten(0, 1)]
    if row.form == "sections":
        tensors = list(ours.split([sum(sizes) for sizes in _list_section_sizes(row, config)]))
    if row.form == "grouped_sections":
        groups, by_tensor = config.linear_num_key_heads, _list_section_sizes(row, config)
        parts = ours.split([size for sizes in by_tensor for size in sizes])
        by_head = iter(part.unflatten(0, (groups, -1)) for part in parts)
        tensors = [torch.cat([next(by_head) for _ in sizes], dim=1).flatten(0, 1) for sizes in by_tensor]
    if row.form == "reshaped":
        tensors = [ours.view(row.shape)]
    if row.form in ("qkv", "gated_qkv", "turned_qkv"):
        groups, width = _get_heads(config)
        by_group = ours.unflatten(0, (groups, -1, width))
        # Queries, whose gate may be a separate tensor of the same size.
        separate = max(1, len(row.theirs) - 2)
        parts = list(by_group.split([*[(by_group.shape[1] - 2) // separate] * separate, 1, 1], dim=1))
        if row.form == "gated_qkv":
            parts[0] = parts[0].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if row.form == "turned_qkv":
            parts[:2] = [part.roll(width // 2, 2) for part in parts[:2]]
        tensors = [part.flatten(0, 2) for part in parts]
        if len(row.theirs) == 1:
            tensors = [torch.cat(tensors)]
    return [tensor.t() if row.transposed and tensor.dim() == 2 else tensor for tensor in tensors]


def find_their_rows(
    row: Row, config: TransformerConfig, num_rows: int, start: int, length: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield where rows [start, start + length) of ours, of `num_rows`, lie in their tensors.

    Yields (number of the tensor in the row's names, rows of it, counted after transposing it, their places among ours,
    from `start` on) for rows that are near each other, ascending in their tensor.
    """
    # All forms but transposing only move rows, so the numbers of our rows, taken apart like a bias, tell which went
    # where.
    for number, ours in enumerate(split(row, config, torch.arange(num_rows))):
        theirs = ((ours >= start) & (ours < start + length)).nonzero().flatten()
        gaps = (theirs.diff() > _NEAR_ROWS).nonzero().flatten() + 1
        for part in torch.tensor_split(theirs, gaps):
            if len(part):
                yield number, part, ours[part] - start


def _list_section_sizes(row: Row, config: TransformerConfig) -> list[list[int]]:
    """Of each of their tensors, the rows of its sections."""
    sections = find_kind(row.kind).sections
    assert sections is not None, f"{row.kind} has no sections"
    sizes = sections(config)
    return [[sizes[name] for name in names] for names in row.sections]


def _get_heads(config: TransformerConfig) -> tuple[int, int]:
    assert config.num_query_groups is not None and config.kv_channels is not None
    return config.num_query_groups, config.kv_channels
