#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Write the .pyi files of upstream's modules that have no file here, and of packages whose names load when first used,
so that editors and type checkers follow imports.

    python tools/write_stubs.py            # write them
    python tools/write_stubs.py --check    # exit code 1 where one is not current

The tables of megatron/core/upstream and megatron/training/upstream say which names stand where. At run time a finder
makes these modules from the tables; a type checker reads the stub.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.core.upstream.names import UpstreamNames  # noqa: E402
from megatron.core.upstream.table import CORE_NAMES  # noqa: E402
from megatron.training.upstream.table import TRAINING_NAMES  # noqa: E402

HEAD = "# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)\n"


def list_stubs() -> dict[Path, str]:
    """List every stub's file and content."""
    found = {}
    for names in (CORE_NAMES, TRAINING_NAMES):
        modules = sorted({*names.defined, *names.refused})
        for module in modules:
            path = ROOT.joinpath(*module.split("."))
            parent = path.parent.with_suffix(".py")
            if any(file.exists() for file in (path.with_suffix(".py"), path / "__init__.py", parent)):
                continue
            is_package = any(other.startswith(f"{module}.") for other in modules)
            file = path / "__init__.pyi" if is_package else path.with_suffix(".pyi")
            found[file] = write_stub(names, module)
    for file in (ROOT / "megatron").rglob("__init__.py"):
        module = ".".join(file.parent.relative_to(ROOT).parts)
        names = TRAINING_NAMES if module.startswith("megatron.training") else CORE_NAMES
        # Packages whose file defines nothing by itself.
        is_bare = "import " not in file.read_text() and module in names.defined
        if "__getattr__" in file.read_text() or is_bare:
            found[file.with_suffix(".pyi")] = write_stub(names, module, list_lazy_names(module))
    return found


def list_lazy_names(package: str) -> dict[str, str]:
    """List the names that a package loads when they are first used, and the modules that define them."""
    loaded = vars(importlib.import_module(package))
    table: dict[str, str] = loaded.get("_NAMES") or loaded.get("_DEFINED_IN", {})
    modules = {name: f"{package}.{name}:" for name in loaded.get("_MODULES", ())}
    return modules | {name: f"{package}.{module}" for name, module in table.items()}


def write_stub(names: UpstreamNames, module: str, lazy: Mapping[str, str] | None = None) -> str:
    """Write the content of a module's stub: where each name is defined, those of `lazy` among them, and the signature
    of those that refuse."""
    taken: dict[str, list[str]] = {}
    refusals = []
    for name, place in sorted({**(lazy or {}), **names.defined.get(module, {})}.items()):
        defining, colon, other = place.partition(":")
        package, _, child = defining.rpartition(".")
        source, what = (package, child) if colon and not other else (defining, other or name)
        taken.setdefault(source, []).append(f"{what} as {name}")
    for name in sorted(names.refused.get(module, {})):
        if name.lstrip("_")[:1].isupper():
            refusals.append(f"class {name}:\n    def __init__(self, *args: Any, **kwargs: Any) -> None: ...")
        else:
            refusals.append(f"def {name}(*args: Any, **kwargs: Any) -> NoReturn: ...")
    if refusals:
        taken["typing"] = ["Any", "NoReturn"]
    imports = [f"from {source} import {', '.join(whats)}" for source, whats in sorted(taken.items())]
    # What the package's table of names gives to `from package import *`.
    public = [f"__all__ = {sorted(lazy)!r}"] if lazy else []
    constants = [
        f"{name}: str" for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, str) and (name.isupper() or name == "__version__")
    ] if lazy else []  # fmt: skip
    return HEAD + "\n".join([*imports, *refusals, *constants, *public]) + "\n"


def main() -> int:
    """Write the stubs, or check that they are current."""
    stubs = list_stubs()
    old = {path for path in (ROOT / "megatron").rglob("*.pyi") if path not in stubs}
    stale = [path for path, text in stubs.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in sorted({*stale, *old}):
            print(f"{path.relative_to(ROOT)} is not current; run python tools/write_stubs.py")
        return 1 if stale or old else 0
    for path in old:
        path.unlink()
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stubs[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
