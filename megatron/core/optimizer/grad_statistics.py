"""Numbers about gradients and parameters that a log may want: zeros, and norms layer by layer.

Every element of the model counts once, as in the global norm (clip_grads.py). Call between the end of gradient
synchronisation and the next step's first backward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.flat_ranges import Range, common, ranges_of_box
from megatron.core.optimizer.clip_grads import sum_of_squares
from megatron.core.placement import placement_of
from megatron.core.process_groups_config import ProcessGroupCollection

_LAYER = re.compile(r"(.*\blayers\.\d+)\.")


def count_zeros(buffers: Iterable[ParamAndGradBuffer], groups: ProcessGroupCollection) -> Tensor:
    """Elements of the model's gradient that are zero; a float64 scalar, equal on all processes."""
    zeros = None
    shards = None
    for buffer in buffers:
        shards = buffer.reduction.shards
        for _, ranges in _counted(buffer, groups):
            for start, stop in ranges:
                found = (stop - start) - torch.count_nonzero(buffer.grad_data[start:stop]).double()
                zeros = found if zeros is None else zeros + found
        if zeros is None:
            zeros = torch.zeros((), dtype=torch.float64, device=buffer.grad_data.device)
    assert zeros is not None and shards is not None, "a model without a buffer"
    all_reduce(zeros, groups.mp)
    all_reduce(zeros, shards)
    return zeros


def layer_norms(
    buffers: Iterable[ParamAndGradBuffer], groups: ProcessGroupCollection, of: Literal["parameters", "gradients"]
) -> dict[str, float]:
    """L2 norm by layer, such as decoder.layers.3, in the model's order; what is in no layer goes by its module."""
    squares: dict[str, float] = defaultdict(float)
    shards = None
    for buffer in buffers:
        shards = buffer.reduction.shards
        for name, ranges in _counted(buffer, groups):
            values = (buffer.values(*r) if of == "parameters" else buffer.grad_data[slice(*r)] for r in ranges)
            squares[_layer_of(name)] += sum(float(sum_of_squares(part)) for part in values)
    assert shards is not None, "a model without a buffer"
    for group in (groups.mp, shards):
        squares = _added(all_gather_object(dict(squares), group))
    return {layer: square**0.5 for layer, square in sorted(squares.items(), key=lambda entry: _place(entry[0]))}


def _counted(buffer: ParamAndGradBuffer, groups: ProcessGroupCollection) -> Iterator[tuple[str, list[Range]]]:
    """Each parameter's name in the model, and the flat ranges of it that this process counts, without padding."""
    for name, param, slot in zip(buffer.names, buffer.params, buffer.layout.slots, strict=True):
        placement = placement_of(param, name)
        if placement.is_copy or ("tp" not in placement.axes and groups.tp.rank() != 0):
            continue
        blocks = placement.pieces()
        ranges = [(slot.start, slot.start + slot.numel)]
        if not all(block.owned for block in blocks):
            inside = (found for block in blocks if block.owned for found in ranges_of_box(param.shape, block.local_box))
            ranges = sorted((slot.start + start, slot.start + stop) for start, stop in inside)
        yield placement.name, common(ranges, buffer.owned)


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0]


def _place(layer: str) -> tuple[int, int, str]:
    """Embeddings, layers by number, then what follows them."""
    match = re.search(r"\.layers\.(\d+)$", layer)
    group = 0 if layer.startswith("embedding") else 2 if match is None else 1
    return group, int(match[1]) if match else 0, layer


def _added(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            total[name] += value
    return total
