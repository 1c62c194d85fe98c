# SPDX-License-Identifier: Apache-2.0
"""Upstream's names at upstream's places, by one table: where each is defined here, or why there is none.

Importing megatron.core or megatron.training puts an UpstreamNames with the room's table on Python's list of finders
(sys.meta_path). From then on these work, whatever the table says of them:

    from megatron.core.transformer.identity_op import IdentityOp     a module that has no file here
    from megatron.core.pipeline_parallel.schedules import ...        a name that the module's file does not define
    from megatron.core.transformer.transformer_config import MLA...  a name that does not exist: the ImportError says
                                                                     what to use instead, or what it waits for

A name is looked up in the table when it is first used, so that the table costs nothing at the start. Modules that have
a file keep it: they only get a `__getattr__` (PEP 562) after they have been executed.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Defined = Mapping[str, Mapping[str, str]]
"""Upstream's module -> {name: the module that defines it here}; "module:other" where it has another name there."""
Absent = Mapping[str, str]
"""Upstream's module, or module.name, that does not exist here -> the rest of a sentence about it."""


class UpstreamNames:
    """Finds modules that the table mentions; all others are left to Python's own finders.

    A finder by its methods, without importlib.abc, whose import would make every start a tenth slower.
    """

    def __init__(self, defined: Defined, absent: Absent) -> None:
        self.defined = defined
        self.absent = absent
        self._mentioned = {*defined, *(name.rpartition(".")[0] for name in absent)}
        self._packages = {parent for module in defined for parent in _list_parents(module)}

    def install(self) -> None:
        """Put this finder before Python's own ones."""
        # Behind them it would not be asked about modules that have a file.
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called by Python for every import. Raises ModuleNotFoundError with a sentence for an absent module."""
        if fullname in self.absent:
            raise ModuleNotFoundError(self._describe_absent(fullname), name=fullname)
        if fullname not in self._mentioned and fullname not in self._packages:
            return None
        # A file of ours wins: the table only adds to it.
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None and fullname in self._packages:
            # Upstream has a package where a file stands here: with a search path, if an empty one, it has submodules.
            spec.submodule_search_locations = spec.submodule_search_locations or []
        if spec is None or spec.loader is None:
            loader: Any = _TableLoader(self)
            is_package = fullname in self._packages
            return importlib.machinery.ModuleSpec(fullname, loader, is_package=is_package)
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            # Python's own loader with one step more, so that byte code, tracebacks and `inspect` work as always.
            spec.loader = _FileLoader(spec.loader.name, spec.loader.path, self)
        return spec

    def lookup(self, module: str, otherwise: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
        """A `__getattr__` for the module. otherwise: the one that it has already."""

        def getattr_(name: str) -> Any:
            place = self.defined.get(module, {}).get(name)
            if place is not None:
                defining, _, other = place.partition(":")
                return getattr(importlib.import_module(defining), other or name)
            if f"{module}.{name}" in self.absent:
                raise ImportError(self._describe_absent(f"{module}.{name}"), name=module)
            if otherwise is not None:
                return otherwise(name)
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        return getattr_

    def _describe_absent(self, name: str) -> str:
        return f"{name} does not exist here: {self.absent[name]}"


class _TableLoader:
    """Makes a module that has no file: its names are those of the table."""

    def __init__(self, names: UpstreamNames) -> None:
        self.names = names

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """None: Python makes the module object."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the new module its lookup."""
        defined = self.names.defined.get(module.__name__, {})
        module.__doc__ = f"Upstream's {module.__name__}: names that are defined elsewhere here."
        module.__dict__["__all__"] = sorted(defined)
        module.__dict__["__getattr__"] = self.names.lookup(module.__name__)


class _FileLoader(importlib.machinery.SourceFileLoader):
    """Python's loader of a file; afterwards the module also has the names of the table."""

    def __init__(self, name: str, path: str, names: UpstreamNames) -> None:
        super().__init__(name, path)
        self.names = names

    def exec_module(self, module: ModuleType) -> None:
        """Execute the file, then add the lookup."""
        super().exec_module(module)
        # Packages that load their names when first used have one already.
        own = module.__dict__.get("__getattr__")
        module.__dict__["__getattr__"] = self.names.lookup(module.__name__, own)


def _list_parents(module: str) -> list[str]:
    """megatron.core.a.b -> [megatron.core.a]: packages on the way, which may have no file either."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(3, len(parts))]
