# SPDX-License-Identifier: Apache-2.0
"""Pickles as upstream's programs write them, which name classes of theirs.

    write_pickle({"args": Namespace(attention_backend=UpstreamObject(module, "AttnBackend", (3,)))}, file)

A pickle holds the name of a class and the arguments to call it with. Python's pickler writes a name only where it can
import it and finds the very object there, and most of upstream's classes do not exist here. So one that takes names as
they are given writes them. safe_pickle.py is the reader.
"""

from __future__ import annotations

import pickle
import types
from dataclasses import dataclass
from typing import IO, Any

import torch


@dataclass(frozen=True)
class _ClassName:
    """Stands for a class where a pickle names one."""

    module: str
    name: str

    def __call__(self, *values: Any) -> Any:
        """Never called: pickle wants what makes an object to be callable."""
        raise AssertionError(f"{self.module}.{self.name} is a name to be written, no class")


@dataclass(frozen=True)
class UpstreamObject:
    """An object of a class of upstream's, such as a member of an enumeration: `module.name(*values)` when it is read
    there."""

    module: str
    name: str
    values: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _ClassName(self.module, self.name), self.values


_PythonPickler: Any = pickle._Pickler
"""Of its methods typeshed knows none."""


class _NamePickler(_PythonPickler):  # type: ignore[misc]
    """The pickler written in Python, of which a subclass decides how its objects are written."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, _ClassName):
            super().save(obj, save_persistent_id)
        elif (known := self.memo.get(id(obj))) is not None:
            self.write(self.get(known[0]))
        else:
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            self.memoize(obj)


_MODULE = types.SimpleNamespace(__name__="pickle", Pickler=_NamePickler)


def write_pickle(content: Any, file: IO[bytes]) -> None:
    """torch.save() for content with UpstreamObjects in it. Raises OSError, or RuntimeError where torch hides it."""
    torch.save(content, file, pickle_module=_MODULE)
