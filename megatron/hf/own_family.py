# SPDX-License-Identifier: Apache-2.0
"""A user's model family: a Python file that says FAMILY = Family(...)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megatron.core.errors import ConfigError
from megatron.training.recipes.family import Family


def read_family(path: Path) -> Family:
    """Run the file, and return its FAMILY. Raises ConfigError where it has none; errors of the file pass."""
    if not path.is_file():
        raise ConfigError(f"--family {path} is no file; give a Python file that says FAMILY = Family(...)")
    spec = importlib.util.spec_from_file_location(f"family_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--family {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    family = getattr(module, "FAMILY", None)
    if not isinstance(family, Family):
        raise ConfigError(f"--family {path} has no FAMILY that is a Family of megatron.training.recipes.family")
    return family
