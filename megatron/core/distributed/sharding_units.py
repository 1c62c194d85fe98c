"""Which parts of a network are gathered together when its parameters are divided."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megatron.core.distributed.fully_sharded_config import FullyShardedConfig


def sharding_units(module: nn.Module, config: FullyShardedConfig) -> Iterator[list[nn.Module]]:
    """The layers (elements of module lists), and the parts before and after them, embedding and output layer.

    Parts of layers come before the layer that keeps the rest. A weight that embedding and output layer share belongs to
    the whole network, as everything that is in no unit.
    """
    layers = list(_layers(module))
    if config.megatron_fsdp_enable_fine_grained_param_gather:
        for layer in layers:
            yield from ([part] for part in layer.children() if len(list(part.children())) > 0 and _numel(part) > 0)
    yield from _together(layers, config.suggested_communication_unit_size or 0)
    if not getattr(module, "share_embeddings_and_output_weights", False):
        for child in module.children():
            if next(_layers(child), None) is None and _numel(child) > 0:
                yield [child]


def _together(layers: list[nn.Module], size: int) -> Iterator[list[nn.Module]]:
    """Neighbours until they have `size` parameters."""
    unit: list[nn.Module] = []
    for layer in layers:
        unit.append(layer)
        if sum(map(_numel, unit)) >= size:
            yield unit
            unit = []
    if unit:
        yield unit


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)
