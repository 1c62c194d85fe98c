# SPDX-License-Identifier: Apache-2.0
"""Every row of the fault catalogue on flags, text, datasets, checkpoints and running jobs has a test that bears its id,
but for those of UNTESTED."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROWS = {
    "F": 15,  # flags and environment
    "J": 15,  # raw text to .bin/.idx
    "I": 15,  # .bin/.idx reading and dataset cache
    "S": 39,  # saving a checkpoint
    "L": 18,  # loading one, and going on
    "R": 27,  # a running job: processes, network, numbers, resources
}
UNTESTED = {
    "R11": "training over sites that exchange rarely is not part of the system yet",
}
"""Rows without a test of their own, and why."""
_IDS = re.compile(r"(?:^|_)([A-Z])(\d+)(?:_to_([A-Z])(\d+))?(?=_|$)")


def names_of_tests() -> Iterator[tuple[str, str]]:
    """(file, name) of every test."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield str(path.relative_to(TESTS)), node.name


def rows_tested() -> dict[str, list[str]]:
    """Catalogue id -> the tests named after it; test_J1_to_J6_... stands for six rows."""
    found: dict[str, list[str]] = defaultdict(list)
    for file, name in names_of_tests():
        for letter, first, _, last in _IDS.findall(name):
            for number in range(int(first), int(last or first) + 1):
                found[f"{letter}{number}"].append(f"{file}::{name}")
    return found


def test_every_row_has_a_test() -> None:
    found = rows_tested()
    missing = [
        f"{letter}{n}" for letter, count in ROWS.items() for n in range(1, count + 1) if not found[f"{letter}{n}"]
    ]
    assert missing == list(UNTESTED)


def test_ids_are_those_of_the_catalogue() -> None:
    """A typing mistake in a test's name would count for nothing."""
    strange = {name: tests for name, tests in rows_tested().items() if int(name[1:]) > ROWS.get(name[0], 99)}
    assert not strange
