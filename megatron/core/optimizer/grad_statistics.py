# SPDX-License-Identifier: Apache-2.0
"""Numbers about gradients and parameters that a log may want: zeros, and norms layer by layer.

Every element of the model counts once, as in the global norm (clip_grads.py). Call between the end of gradient
synchronisation and the next step's first backward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_object
from megatron.core.device import current_device
from megatron.core.distributed.model_chunk import FlatBuffer
from megatron.core.flat_ranges import Range, find_ranges, intersect_ranges
from megatron.core.optimizer.clip_grads import ModelSum, is_counted, sum_squares
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection

_LAYER = re.compile(r"(.*\blayers\.\d+)\.")


def count_zeros(buffers: Sequence[FlatBuffer], model_sum: ModelSum) -> Tensor:
    """Elements of the model's gradient that are zero; a float64 scalar, equal on all processes."""
    # A pipeline stage may have nothing that is trained.
    device = buffers[0].grad_data.device if buffers else current_device()
    zeros = {of_experts: torch.zeros((), dtype=torch.float64, device=device) for of_experts in model_sum.shards}
    for buffer in buffers:
        for _, ranges in _find_counted(buffer, model_sum.groups):
            for start, stop in ranges:
                # The ranges leave out the padding, whose zeros are not the model's.
                zeros[buffer.is_expert] += (stop - start) - torch.count_nonzero(buffer.grad_data[start:stop])
    return model_sum(zeros)


def compute_layer_norms(
    buffers: Sequence[FlatBuffer], model_sum: ModelSum, of: Literal["parameters", "gradients"]
) -> dict[str, float]:
    """L2 norm by layer, such as decoder.layers.3, in the model's order; what is in no layer goes by its module."""
    groups = model_sum.groups
    own: dict[bool, dict[str, float]] = {of_experts: defaultdict(float) for of_experts in model_sum.shards}
    for buffer in buffers:
        for name, ranges in _find_counted(buffer, groups):
            values = (buffer.values(*r) if of == "parameters" else buffer.grad_data[slice(*r)] for r in ranges)
            # float() waits for the device once for each range. Logging norms by layer accepts that.
            own[buffer.is_expert][_find_layer(name)] += sum(float(sum_squares(part)) for part in values)
    for of_experts, shards in model_sum.shards.items():
        for group in (groups.get_model_copy(of_experts), shards):
            # Sent by name: stages hold other layers, so there is no tensor of one shape to reduce.
            own[of_experts] = _add_up(all_gather_object(dict(own[of_experts]), group))
    squares = _add_up(own.values())
    return {layer: square**0.5 for layer, square in sorted(squares.items(), key=lambda entry: _make_sort_key(entry[0]))}


def _find_counted(buffer: FlatBuffer, groups: ProcessGroupCollection) -> Iterator[tuple[str, list[Range]]]:
    """Each parameter's name in the model, and the flat ranges of it that this process counts, without padding."""
    for name, param, slot in zip(buffer.names, buffer.params, buffer.layout.slots, strict=True):
        placement = get_placement(param, name)
        if not is_counted(placement, groups):
            continue
        blocks = placement.pieces()
        ranges = [(slot.start, slot.start + slot.numel)]
        if not all(block.owned for block in blocks):
            inside = (found for block in blocks if block.owned for found in find_ranges(param.shape, block.local_box))
            ranges = sorted((slot.start + start, slot.start + stop) for start, stop in inside)
        yield placement.name, intersect_ranges(ranges, buffer.owned)


def _find_layer(name: str) -> str:
    match = _LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0]


def _make_sort_key(layer: str) -> tuple[int, int, str]:
    """Embeddings, layers by number, what follows them, layers of multi-token prediction, and the rest."""
    match = re.search(r"\.layers\.(\d+)$", layer)
    # The model's order, not the alphabet's: layer 10 comes after layer 9.
    if layer.startswith(("embedding", "mtp")):
        group = 0 if layer.startswith("embedding") else 3
    else:
        group = 1 if match is not None else 2 if layer.startswith("decoder") else 4
    return group, int(match[1]) if match else 0, layer


def _add_up(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            total[name] += value
    return total
