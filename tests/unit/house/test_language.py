# SPDX-License-Identifier: Apache-2.0
"""Names that mean one thing, and prose in the field's words: docstrings and comments of megatron/, README and docs/."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.programs import ROOT

# Word sequences translated from another language -> what an engineer writes.
PHRASES = {
    "of its own": "nothing, or separate, local, private",
    "of their own": "nothing, or separate, local, private",
    "dealt out": "assigned",
    "few bits": "low precision",
    "number format": "dtype",
    "number formats": "dtypes",
    "further tokens": "MTP tokens, MTP depths",
    "waits for backward": "is saved for backward",
    "wait for backward": "are saved for backward",
    "anew": "again",
    "whoever": "the caller, the user",
    "those of": "repeat the noun",
    "that of": "repeat the noun",
}
RELATIVE = {"What", "Whether", "How", "Where", "When", "Which", "Who", "Those"}
MOST_OWN = 8
"""Times `own` per 10,000 words."""

# Tables that programs write into pages.
GENERATED_PAGES = {"flags.md", "migration_flags.md", "migration_names.md"}
QUOTED = re.compile(r"```.*?```|`[^`]*`|\"[^\"]*\"|<!-- generated.*?<!-- end of generated -->", re.DOTALL)


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def list_texts(path: Path) -> Iterator[str]:
    """Texts of one file that are prose: a page, or the strings that stand alone in a module and its comments."""
    source = path.read_text()
    if path.suffix == ".md":
        yield source
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    comments = (
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    )
    yield from (token.string.lstrip("# ") for token in comments)


@cache
def read_prose() -> dict[str, str]:
    """Prose of each file in lower case and one line, without what it quotes."""
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED_PAGES)]
    return {
        str(path.relative_to(ROOT)): " ".join(QUOTED.sub(" ", "\n".join(list_texts(path))).lower().split())
        for path in sorted([*(ROOT / "megatron").rglob("*.py"), *pages])
    }


def count(words: str) -> Counter[str]:
    pattern = re.compile(rf"\b{words}\b")
    return Counter({path: n for path, text in read_prose().items() if (n := len(pattern.findall(text)))})


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_translated_phrase_is_nowhere(phrase: str) -> None:
    assert not count(phrase), f"{phrase!r} -> {PHRASES[phrase]}: {count(phrase).most_common(20)}"


def test_own_is_rare() -> None:
    words = sum(len(text.split()) for text in read_prose().values())
    found = count("own")
    assert found.total() <= MOST_OWN * words / 10_000, (found.total(), words, found.most_common(30))


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """At most one in a hundred begins with a relative clause."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    places: list[tuple[str, str]] = []
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                places.append((str(path.relative_to(ROOT)), text.split()[0]))
    found = [place for place in places if place[1] in RELATIVE]
    assert len(found) * 100 <= len(places), found
