# SPDX-License-Identifier: Apache-2.0
"""Several adapters of one model by name, of which a pass of the model uses one or none."""

from __future__ import annotations

from typing import Any

from torch import nn


class NamedAdapters:
    """Adapters of a model's layers, in sets with names; none is in use at first."""

    def __init__(self) -> None:
        self._sets: dict[str, list[tuple[Any, nn.Module]]] = {}
        self._used: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sets, in the order in which they came."""
        return tuple(self._sets)

    def take(self, name: str, model: nn.Module) -> None:
        """Take the adapters out of the layers of a model, as the set of this name."""
        layers: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "adapter", None), nn.Module)]
        found = [(layer, layer.adapter) for layer in layers]
        for layer in layers:
            layer.adapter = None
        self._sets[name] = found

    def use(self, name: str | None) -> None:
        """Put the set of this name into the layers; None for the model without adapters."""
        if name == self._used:
            return
        for layer, _ in self._sets.get(self._used or "", []):
            layer.adapter = None
        for layer, adapter in self._sets.get(name or "", []):
            layer.adapter = adapter
        self._used = name
