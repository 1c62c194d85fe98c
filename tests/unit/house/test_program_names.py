# SPDX-License-Identifier: Apache-2.0
"""Names that other programs import from Megatron-LM, counted for each program: golden/data/program_names.tsv.

A name counts where the import and the attribute resolve; those of `refused.py` can be imported and refuse when called.
What is missing is listed, so that nothing goes missing unnoticed.
"""

from __future__ import annotations

import ast
import csv
import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import UnsupportedError
from megatron.core.upstream.table import CORE_NAMES
from megatron.training.upstream.table import TRAINING_NAMES
from tests.support.source_code import ROOT
from tools.write_stubs import list_stubs

ROWS = list(csv.DictReader((Path(__file__).parents[2] / "golden/data/program_names.tsv").open(), delimiter="\t"))
AT_LEAST = {
    "lm-eval": 19, "slime": 117, "verl": 124, "mbridge": 142, "mcore-bridge": 127, "ms-swift": 93, "nemo-rl": 93,
    "modelopt": 92,
}  # fmt: skip
"""Program -> how many of its names must resolve."""
MISSING = {"megatron.core.inference.unified_memory"}
"""Names that do not resolve: ms-swift imports this one in a try, and does not use it."""


def find(module: str, name: str) -> Any:
    """What `from module import name` binds; the module may be a class or an enumeration inside one."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")
    raise ModuleNotFoundError(module)


def test_names_of_each_program_resolve() -> None:
    counts: Counter[str] = Counter()
    missing = set()
    for row in ROWS:
        try:
            find(row["module"], row["name"])
        except (ImportError, AttributeError):
            missing.add(f"{row['module']}.{row['name']}")
        else:
            counts.update(row["programs"].split(","))
    assert missing == MISSING
    assert {program: counts[program] for program, least in AT_LEAST.items() if counts[program] < least} == {}


def test_stubs_are_current_and_import_what_is_there() -> None:
    stubs = list_stubs()
    assert {path for path, text in stubs.items() if not path.exists() or path.read_text() != text} == set()
    assert set((ROOT / "megatron").rglob("*.pyi")) == set(stubs)
    for path, text in stubs.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module != "typing":
                for alias in node.names:
                    assert find(str(node.module), alias.name) is not find, path


def test_files_declare_what_a_table_puts_there() -> None:
    """Type checkers do not see names that are found at run time. Those of star imports alone need no declaration."""
    missing = []
    for names in (CORE_NAMES, TRAINING_NAMES):
        for module in {*names.defined, *names.refused} - {*names.starred}:
            file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            if file.exists() and "__getattr__" not in file.read_text():
                declared = {word for line in file.read_text().splitlines() for word in re.findall(r"\w+", line)}
                wanted = {*names.defined.get(module, {}), *names.refused.get(module, {})}
                missing += [f"{module}.{name}" for name in wanted - declared]
    assert missing == []


@pytest.mark.parametrize("module", CORE_NAMES.refused)
def test_names_without_anything_behind_them_say_what_to_use(module: str) -> None:
    for name, sentence in CORE_NAMES.refused[module].items():
        found = find(module, name)
        # Callers give what upstream takes, by position and by name.
        for given, named in (((), {}), ((1,), {"config": None})):
            with pytest.raises(UnsupportedError, match="has nothing behind it here") as caught:
                found(*given, **named)
            assert str(caught.value).endswith(sentence)
        assert found is find(module, name)
        if isinstance(found, type):
            derived: Any = type(found)("Derived", (found,), {})
            assert not isinstance(object(), found)
            with pytest.raises(UnsupportedError):
                derived(1)
            with pytest.raises(AttributeError, match="has nothing behind it here"):
                _ = found.RUNNING
