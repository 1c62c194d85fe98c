# SPDX-License-Identifier: Apache-2.0
"""tests/unit mirrors the code: the tests of a package are in the folder of its name, those of the code itself in house.

megatron/core/optimizer, megatron/hf, megatron/training/hooks       optimizer, hf, training/hooks
single modules of megatron/core, of megatron/training               core, training
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source_code import ROOT

TESTED_ELSEWHERE = {"kernels": "tests/kernels"}
"""Package -> folder of its tests."""


def list_packages(megatron: Path) -> Iterator[str]:
    """Folders of tests that the code asks for."""
    for base, prefix in (("", ""), ("core", ""), ("training", "training/")):
        for path in (megatron / base).iterdir():
            if path.is_dir() and any(path.glob("*.py")):
                yield prefix + path.name


def find_differences(megatron: Path, unit: Path) -> list[str]:
    """Sentences about folders without a package, packages without a folder, and tests in neither."""
    packages = {*list_packages(megatron)} - {*TESTED_ELSEWHERE}
    folders = {path.parent.relative_to(unit).as_posix() for path in unit.rglob("test_*.py")} - {"house"}
    found = [f"{name} is directly in tests/unit" for name in sorted(path.name for path in unit.glob("*.py"))]
    found += [f"tests/unit/{name} has no tests" for name in sorted(packages - folders)]
    return found + [f"tests/unit/{name} is named after no package" for name in sorted(folders - packages - {"."})]


def test_the_folders_are_the_packages() -> None:
    assert find_differences(ROOT / "megatron", ROOT / "tests" / "unit") == []
    assert all((ROOT / folder).is_dir() for folder in TESTED_ELSEWHERE.values())


def test_support_has_no_tests() -> None:
    assert list((ROOT / "tests" / "support").rglob("test_*.py")) == []


@pytest.mark.parametrize(
    ("test", "sentences"),
    [
        ("optimizer/test_adam.py", []),
        ("training/hooks/test_log.py", ["tests/unit/optimizer has no tests"]),
        ("test_adam.py", ["test_adam.py is directly in tests/unit", "tests/unit/optimizer has no tests"]),
        ("adam/test_adam.py", ["tests/unit/optimizer has no tests", "tests/unit/adam is named after no package"]),
    ],
)
def test_differences_are_seen(tmp_path: Path, test: str, sentences: list[str]) -> None:
    others = ("core/test_a.py", "training/test_a.py", "house/test_a.py", "training/hooks/test_a.py")
    for name in ("megatron/core/a.py", "megatron/core/optimizer/adam.py", "megatron/training/hooks/log.py"):
        write(tmp_path / name)
    write(tmp_path / "megatron" / "training" / "step.py")
    for name in (test, *others):
        write(tmp_path / "unit" / name)
    assert find_differences(tmp_path / "megatron", tmp_path / "unit") == sentences


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
