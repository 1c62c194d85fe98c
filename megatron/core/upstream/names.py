# SPDX-License-Identifier: Apache-2.0
"""Upstream's names at upstream's places, by one table: where each is defined here, or why there is none.

Importing megatron.core or megatron.training puts an UpstreamNames with the room's table on Python's list of finders
(sys.meta_path). From then on these work, whatever the table says of them:

    from megatron.core.transformer.identity_op import IdentityOp     a module that has no file here
    from megatron.core.pipeline_parallel.schedules import ...        a name that the module's file does not define
    from megatron.core.resharding.refit import ...                    a name without anything behind it: it can be
                                                                     imported, and refuses in a sentence when called
    from megatron.energon import ...                                 a name that nobody imports unconditionally: the
                                                                     ImportError says what to use instead

A name is looked up in the table when it is first used, so that the table costs nothing at the start. Modules that have
a file keep it: they only get a `__getattr__` (PEP 562) after they have been executed.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from megatron.core.errors import UnsupportedError

Defined = Mapping[str, Mapping[str, str]]
"""Upstream's module -> {name: the module that defines it here}; "module:other" where it has another name there,
"module:" for the module itself."""
Absent = Mapping[str, str]
"""Upstream's module, or module.name, that does not exist here -> the rest of a sentence about it."""
Refused = Mapping[str, Mapping[str, str]]
"""Upstream's module -> {name: the rest of a sentence about it}, of names that can be imported and not called."""
Starred = Mapping[str, Sequence[str]]
"""Module whose star import must also give these names -> the names, of the table or of the file."""


def read_table(package: str, text: str) -> dict[str, dict[str, str]]:
    """Read where a package's names are defined, to be imported when a name is used: `import megatron.core` loads none.

    Each row, with the further ones that are indented: upstream's module below the package; the defining one, where
    `@x` is package.upstream.x and `.x` is package.x; names. `name=other` is called other there, `name=` is that module.
    """
    table: dict[str, dict[str, str]] = {}
    for row in text.strip().replace("\n    ", " ").splitlines():
        module, place, *names = row.split()
        if place[0] in "@.":
            place = f"{package}.upstream.{place[1:]}" if place[0] == "@" else package + place
        found = table.setdefault(package if module == "." else f"{package}.{module}", {})
        for name, is_other, other in (given.partition("=") for given in names):
            found[name] = f"{place}:{other}" if is_other else place
    return table


class _Refusing(ABCMeta):
    """The class of refusing classes: programs derive from these and ask isinstance; nothing can be made of them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(str(cls._sentence))

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or "_sentence" not in cls.__dict__:
            raise AttributeError(name)
        raise AttributeError(f"{cls._sentence} ({name!r} was asked for)")


def refuse(module: str, name: str, sentence: str) -> Any:
    """Make what stands for `name`: a class where it begins with a capital letter, else a function. Calling it, or a
    class derived from it, raises UnsupportedError."""
    text = f"{module}.{name} has nothing behind it here: {sentence}"
    if name.lstrip("_")[:1].isupper():
        return _Refusing(name, (), {"__module__": module, "__doc__": text, "_sentence": text})

    def refusing(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(text)

    refusing.__name__, refusing.__qualname__, refusing.__module__, refusing.__doc__ = name, name, module, text
    return refusing


class UpstreamNames:
    """Finds modules that the table mentions; all others are left to Python's finders.

    A finder by its methods, without importlib.abc, whose import would make every start a tenth slower.
    """

    def __init__(
        self, defined: Defined, absent: Absent, refused: Refused | None = None, starred: Starred | None = None
    ) -> None:
        self.defined = defined
        self.absent = absent
        self.refused = refused or {}
        self.starred = starred or {}
        self._mentioned = {*defined, *self.refused, *(name.rpartition(".")[0] for name in absent)}
        self._packages = {parent for module in (*defined, *self.refused) for parent in _list_parents(module)}

    def install(self) -> None:
        """Put this finder before Python's."""
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
            # A folder without __init__.py: the files in it are modules all the same.
            folder = list(spec.submodule_search_locations or ()) if spec is not None else []
            made = importlib.machinery.ModuleSpec(
                fullname, loader, is_package=fullname in self._packages or bool(folder)
            )
            if made.submodule_search_locations is not None:
                made.submodule_search_locations += folder
            return made
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            # Python's loader with one step more, so that byte code, tracebacks and `inspect` work as always.
            spec.loader = _FileLoader(spec.loader.name, spec.loader.path, self)
        return spec

    def lookup(self, module: str, otherwise: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
        """A `__getattr__` for the module. otherwise: the one that it has already."""

        def getattr_(name: str) -> Any:
            place = self.defined.get(module, {}).get(name)
            if place is not None:
                defining, colon, other = place.partition(":")
                loaded = importlib.import_module(defining)
                return loaded if colon and not other else getattr(loaded, other or name)
            sentence = self.refused.get(module, {}).get(name)
            if sentence is not None:
                # Kept in the module, so that everybody who asks gets the same class.
                return vars(sys.modules[module]).setdefault(name, refuse(module, name, sentence))
            if f"{module}.{name}" in self.absent:
                raise ImportError(self._describe_absent(f"{module}.{name}"), name=module)
            if otherwise is not None:
                return otherwise(name)
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        return getattr_

    def _describe_absent(self, name: str) -> str:
        return f"{name} does not exist here: {self.absent[name]}"


class _TableLoader:
    """Makes a module that has no file: its names come from the table."""

    def __init__(self, names: UpstreamNames) -> None:
        self.names = names

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """None: Python makes the module object."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the new module its lookup."""
        defined, refused = (table.get(module.__name__, {}) for table in (self.names.defined, self.names.refused))
        module.__doc__ = f"Upstream's {module.__name__}: names that are defined elsewhere here."
        module.__dict__["__all__"] = sorted({*defined, *refused})
        module.__dict__["__getattr__"] = self.names.lookup(module.__name__)


class _FileLoader(importlib.machinery.SourceFileLoader):
    """Python's loader of a file; afterwards the module also has the names of the table."""

    def __init__(self, name: str, path: str, names: UpstreamNames) -> None:
        super().__init__(name, path)
        self.names = names

    def exec_module(self, module: ModuleType) -> None:
        """Execute the file, then add the lookup."""
        super().exec_module(module)
        more = self.names.starred.get(module.__name__)
        if more is not None:
            public = [name for name in vars(module) if not name.startswith("_") and name != "annotations"]
            module.__dict__["__all__"] = sorted({*public, *more})
        # Packages that load their names when first used have one already.
        own = module.__dict__.get("__getattr__")
        module.__dict__["__getattr__"] = self.names.lookup(module.__name__, own)


def _list_parents(module: str) -> list[str]:
    """megatron.core.a.b -> [megatron.core.a]: packages on the way, which may have no file either."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(3, len(parts))]
