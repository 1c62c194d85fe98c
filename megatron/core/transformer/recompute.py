"""Which layers and parts of layers are computed again in backward, and how much of them is kept until then.

| setting             | kept until backward                                                                      |
|---------------------|------------------------------------------------------------------------------------------|
| full uniform n      | the input of every n-th layer                                                            |
| full block n        | the inputs of the first n layers of a stage; of the others everything                    |
| selective core_attn | all but what attention keeps beside query, key and value: the probabilities, unless a    |
|                     | flash kernel does without them                                                           |
| selective layernorm | all but the outputs of the norms before attention and MLP                                |
| selective mlp       | all but what lies inside the MLP                                                         |

Of a layer with experts, only attention and the norm before it are recomputed selectively.

While backward is in a unit, all of that unit is there. Source: Korthikanti et al., 2022, sections 4 and 5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.transformer.config_fields.recompute import RecomputeFields


class Unit(NamedTuple):
    """Consecutive layers of a stage, counted from 0 there."""

    layers: range
    is_recomputed: bool


def recompute_units(config: RecomputeFields, layers: int) -> list[Unit]:
    """How the layers of a pipeline stage, or of a chunk of it, are divided."""
    if config.recompute_granularity != "full":
        return [Unit(range(layers), False)]
    count = config.recompute_num_layers
    assert count is not None, "full recomputation needs recompute_num_layers"
    if config.recompute_method == "uniform":
        return [Unit(range(first, min(first + count, layers)), True) for first in range(0, layers, count)]
    assert config.recompute_method == "block", f"recompute_method {config.recompute_method} of full recomputation"
    first_layers = [Unit(range(index, index + 1), True) for index in range(min(count, layers))]
    return [*first_layers, Unit(range(len(first_layers), layers), False)]


def recomputes(config: RecomputeFields, module: str) -> bool:
    """Whether selective recomputation concerns this part of a layer: core_attn, layernorm or mlp."""
    chosen = config.recompute_modules or ["core_attn"]
    return config.recompute_granularity == "selective" and module in chosen


@contextlib.contextmanager
def computed_when_needed(value: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """What operations in this block keep of `value` for backward is not kept, but made anew by compute().

    A copy of it, or another view than of all its elements in order, is kept as usual.
    """
    place, size, version = value.untyped_storage().data_ptr(), value.numel(), value._version

    def pack(kept: Tensor) -> Any:
        is_value = kept.untyped_storage().data_ptr() == place and kept.numel() == size and kept.is_contiguous()
        return kept.shape if is_value and kept._version == version else kept

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return compute().view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
