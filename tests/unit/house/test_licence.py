# SPDX-License-Identifier: Apache-2.0
"""Every source file says under which licence it is, in the words that programs look for (spdx.dev)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.support.source_code import ROOT

LINE = "SPDX-License-Identifier: Apache-2.0"
PLACES = ("megatron", "tools", "examples", "benchmarks", "tests", ".ci", "docs", ".github")
SUFFIXES = {".py", ".sh", ".c", ".yaml", ".yml", ".toml"}
MOST_LINES_BEFORE = 2
"""A line for the shell, and an editor's."""


def list_source_files() -> Iterator[Path]:
    roots = [path for place in PLACES for path in (ROOT / place).rglob("*")]
    for path in [*roots, *ROOT.glob("*")]:
        is_data = path.is_relative_to(ROOT / "tests" / "golden" / "data")
        if path.is_file() and not is_data and (path.suffix in SUFFIXES or path.name == "Dockerfile"):
            yield path


def test_every_source_file_names_its_licence() -> None:
    files = list(list_source_files())
    assert len(files) > 500
    missing = [str(path.relative_to(ROOT)) for path in files if not names_licence(path)]
    assert missing == [], f"add `# {LINE}` as the first line, or after #!: {missing}"


def names_licence(path: Path) -> bool:
    first = path.read_text(encoding="utf-8").splitlines()[: MOST_LINES_BEFORE + 1]
    return any(line.strip("#/*- ") == LINE for line in first)


def test_it_is_the_licence_of_the_repository() -> None:
    words = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split())
    assert words.startswith("Apache License Version 2.0")
    assert 'license="Apache-2.0"' in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_a_file_without_it_is_seen(tmp_path: Path) -> None:
    for text, expected in ((f"#!/bin/sh\n# {LINE}\n", True), ("# Apache\n", False), (f"\n\n\n# {LINE}\n", False)):
        (tmp_path / "a.py").write_text(text)
        assert names_licence(tmp_path / "a.py") is expected
