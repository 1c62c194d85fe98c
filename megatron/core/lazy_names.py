# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when they are first used (PEP 562): importing the package costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def load_when_used(package: str, defined_in: Mapping[str, str]) -> Callable[[str], Any]:
    """Build the `__getattr__` of a package. defined_in: name -> the package's module that defines it."""

    def load(name: str) -> Any:
        if name not in defined_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{defined_in[name]}"), name)

    return load
