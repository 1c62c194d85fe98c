# SPDX-License-Identifier: Apache-2.0
"""Names that other programs import from Megatron-LM, counted for each program: golden/data/program_names.tsv.

A name counts where the import and the attribute resolve; those of `refused.py` can be imported and refuse when called.
What is missing is listed, so that nothing goes missing unnoticed.
"""

from __future__ import annotations

import ast
import csv
import importlib
import inspect
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.errors import ConfigError, UnsupportedError
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


OTHER_PARAMETERS = {
    "BlendedMegatronDatasetBuilder": "its own `cls` is no class method's",
    "ChainedOptimizer": "made by get_megatron_optimizer, never by its constructor",
    "DistributedOptimizer": "likewise",
    "MegatronOptimizer": "likewise",
    "L2Norm": "takes config, of which upstream's **kwargs are",
    "MegatronTokenizerText": "an abstract class",
    "MockGPTDataset": "the same six in the same order",
    "get_megatron_muon_optimizer": "upstream's are *args and **kwargs",
    "pretrain": "tells both of upstream's orders apart by the first",
}
"""Names whose own parameters are other than upstream's, and why."""


def list_callables() -> dict[str, tuple[Any, list[str]]]:
    """Full name -> what programs call there, and upstream's parameters, of those that do not refuse altogether."""
    found = {}
    for row in ROWS:
        name = f"{row['module']}.{row['name']}"
        if row["parameters"] and row["name"] not in OTHER_PARAMETERS and name not in MISSING:
            called = find(row["module"], row["name"])
            if callable(called) and "has nothing behind it here" not in (called.__doc__ or ""):
                found[name] = called, row["parameters"].split(", ")
    return found


def test_all_of_upstreams_arguments_are_taken() -> None:
    missing, callables = {}, list_callables()
    for name, (called, upstreams) in callables.items():
        ours = list(inspect.signature(called).parameters.values())
        if isinstance(called, type) and ours[-1].kind is inspect.Parameter.VAR_KEYWORD:
            bases = (base for base in called.__mro__[1:] if "__init__" in vars(base) and base is not object)
            ours += [one for base in bases for one in inspect.signature(base.__init__).parameters.values()]
        left_out = {one for one in upstreams if one[0] != "*" and one != "self"} - {one.name for one in ours}
        missing |= {name: left_out} if left_out else {}
    assert missing == {} and len(callables) > 150


OTHER_VALUES = {bool: True, int: 3, str: "other", type(None): "other", float: 2.5, tuple: (1,)}


def list_refusals() -> list[tuple[str, Any, str, Any]]:
    """(name, callable, argument, value) of all that is taken with one value alone."""
    found = []
    for name, (called, _) in list_callables().items():
        of = getattr(called.__init__ if isinstance(called, type) else called, "upstream_only", {})
        found += [(name, called, one, accepted) for one, accepted in of.items() if accepted is not ...]
    return found


@pytest.mark.parametrize(("name", "called", "argument", "accepted"), list_refusals())
def test_an_argument_without_anything_behind_it_is_refused_in_a_sentence(
    name: str, called: Any, argument: str, accepted: Any
) -> None:
    config = SimpleNamespace(hidden_size=8, hidden_dropout=0.1, mtp_num_layers=1)
    other = 9 if accepted in (True, "none") or str(accepted)[:1] == "@" else OTHER_VALUES[type(accepted)]
    with pytest.raises(ConfigError, match=rf"\(\) has no {argument} .+: .+; leave it out"):
        called(**{argument: other}, **({"config": config} if str(accepted)[:1] == "@" else {}))


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
