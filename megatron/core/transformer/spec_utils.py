# SPDX-License-Identifier: Apache-2.0
"""A module to be built later: its class, its keyword arguments and the specs of its parts.

Specs let a user exchange one part of a layer (a norm, the core attention) without copying the layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModuleSpec:
    """Description of a module to build: what to call, with which arguments, and from which parts."""

    module: Callable[..., Any]
    """A class, or a function that returns a module."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments on top of those the builder gives."""
    submodules: Any = None
    """Specs of the module's parts, handed over as `submodules`."""


def build_module(spec_or_module: ModuleSpec | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a module from a spec, or from a bare class."""
    spec = spec_or_module
    # A bare class is the usual case of a part that needs nothing but the builder's arguments.
    if not isinstance(spec, ModuleSpec):
        return spec(*args, **kwargs)
    if spec.submodules is not None:
        kwargs["submodules"] = spec.submodules
    # A name in both is an error that Python raises: a spec cannot silently replace what the builder gives.
    return spec.module(*args, **spec.params, **kwargs)


def import_module(module_path: Iterable[str]) -> Any:
    """(module, name) -> what is called so there: `import_module(("torch.nn", "Linear"))`. Raises ImportError."""
    base, name = module_path
    try:
        return getattr(importlib.import_module(base), name)
    except AttributeError as error:
        raise ImportError(f"cannot import {name!r} from {base!r}") from error


def get_submodules(spec: ModuleSpec | type) -> Any:
    """The specs of a module's parts; None for a class without any."""
    return spec.submodules if isinstance(spec, ModuleSpec) else None
