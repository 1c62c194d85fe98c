# SPDX-License-Identifier: Apache-2.0
"""Names that mean one thing: no two modules define classes of one name."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.programs import ROOT

# Programs subclass it under upstream's path, where it has upstream's arguments.
TWICE = {"MLATransformerConfig"}


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name for name, found in places.items() if len(found) > 1} == TWICE, {
        name: found for name, found in places.items() if len(found) > 1
    }
