# SPDX-License-Identifier: Apache-2.0
"""The guide in .github/skills/megatron-lm-expert holds: its sections, links, flags, paths, figures and outputs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megatron.training.flags.declarations import flags_by_spelling
from megatron.training.flags.flag import former_flags
from tests.support.source_code import ROOT
from tools.write_docs import PART, show_output

GUIDE = ROOT / ".github" / "skills" / "megatron-lm-expert"
TEXT = (GUIDE / "SKILL.md").read_text(encoding="utf-8")
PAGES = sorted(GUIDE.rglob("*.md"))
SECTIONS = {
    "1. Quick start": 50,
    "2. Prerequisites": 100,
    "3. Configuration": 200,
    "4. Usage patterns": 450,
    "5. Performance optimization": 200,
    "6. Examples": 800,
    "7. Troubleshooting": 400,
    "8. Advanced topics": 300,
}
"""Heading -> lines; the first one begins with the file."""
FORMER = {former.name for former in former_flags()}
OF_OTHER_PROGRAMS = {"--nproc_per_node", "--nodes", "--gpus-per-node", "--time"}


def without_code(text: str) -> str:
    """Lines outside of blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def headings(text: str, level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", without_code(text), re.MULTILINE)


def test_the_head_says_when_to_use_it() -> None:
    _, head, _ = TEXT.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["name"] == GUIDE.name and set(fields) == {"name", "description"}
    introduction, *uses = re.split(r" \(\d\) ", " ".join(fields["description"].split()))
    assert introduction.endswith("Use when:") and len(uses) == 8 and all(len(use) > 30 for use in uses)


def test_there_are_eight_sections_each_as_long_as_it_shall_be() -> None:
    assert headings(TEXT, 2) == list(SECTIONS)
    lines = TEXT.splitlines()
    starts = [0, *(lines.index(f"## {name}") for name in list(SECTIONS)[1:]), len(lines)]
    found = {name: end - start for name, start, end in zip(SECTIONS, starts, starts[1:], strict=False)}
    wrong = {name: found[name] for name, wanted in SECTIONS.items() if abs(found[name] - wanted) > 0.2 * wanted}
    assert wrong == {}, f"lines found; wanted, within a fifth: {SECTIONS}"
    assert len(lines) >= 2000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\s?\(([^)\s]+)\)", without_code(text)):
        path, _, fragment = target.partition("#")
        if "://" in target or path == "...":
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if fragment:
            content = file.read_text(encoding="utf-8")
            known = {anchor(heading) for level in range(1, 6) for heading in headings(content, level)}
            assert fragment in known, f"{page.name} links to {target}; there are {sorted(known)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"[`\" ]((?:megatron|tools|examples|tests|benchmarks|docs)/[\w./-]*\w/?)[`\": ,]", text):
        if "X" not in path and "NAME" not in path:
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_pictures_have_boxes_for_files() -> None:
    text = (GUIDE / "assets" / "architecture.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```mermaid\n(\w+).*?```", text, flags=re.DOTALL)
    assert len(blocks) >= 4 and set(blocks) == {"flowchart", "sequenceDiagram"}
    assert len(re.findall(r"megatron/[\w./]+", text)) >= 30
    for block in re.findall(r"```mermaid\n(.*?)```", text, flags=re.DOTALL):
        opened = len(re.findall(r"^\s*(?:subgraph|loop) ", block, re.MULTILINE))
        assert opened == len(re.findall(r"^\s*end$", block, re.MULTILINE))


def test_flags_exist() -> None:
    """In running text and tables; commands are run, or checked below."""
    for span in re.findall(r"`(--[^`]+)`", without_code(TEXT)):
        for flag in re.findall(r"(?<!\S)(--[a-z][\w-]*)", span):
            known = flag in flags_by_spelling() or flag in OF_OTHER_PROGRAMS
            assert known or flag in FORMER or is_flag_of_a_program(flag), f"{flag} does not exist"


def is_flag_of_a_program(flag: str) -> bool:
    places = [
        *(ROOT / "tools").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "megatron/cli").rglob("*.py"),
    ]
    places += [ROOT / "megatron/hf/convert.py"]
    return any(f'"{flag}"' in path.read_text(encoding="utf-8") for path in places if path.exists())


def test_three_workflows_have_checklists() -> None:
    for number, steps in ((1, 4), (2, 3), (3, 5)):
        (part,) = re.findall(rf"^### Workflow {number}: .*?(?=^### |\Z)", TEXT, re.MULTILINE | re.DOTALL)
        assert len(re.findall(r"^- \[ \] \*\*", part, re.MULTILINE)) == steps


def test_six_examples_stand_in_it_whole() -> None:
    shown = {found["words"] for found in PART.finditer(TEXT) if found["kind"] == "file"}
    complete = {str(path.relative_to(ROOT)) for path in (ROOT / "examples" / "complete").iterdir() if path.is_file()}
    assert len(complete) == 6 and complete < shown
    assert [heading.split(":")[0] for heading in headings(TEXT, 3) if heading.startswith("Example ")] == [
        f"Example {number}" for number in range(1, 7)
    ]


OUTPUTS = [found["words"] for found in PART.finditer(TEXT) if found["kind"] == "output"]


def test_four_questions_are_answered() -> None:
    questions = re.findall(r'^\*\*"(.+?)"\*\*', TEXT, re.MULTILINE)
    for question, words in zip(questions, (("70B", "64"), ("memory",), ("3D", "175B"), ("Hugging Face",)), strict=True):
        assert all(word in question for word in words)
    assert len(OUTPUTS) >= 8


@pytest.mark.parametrize("command", OUTPUTS, ids=lambda command: command[:70])
def test_outputs_are_those_of_the_commands(command: str) -> None:
    assert show_output(command, GUIDE / "SKILL.md").strip() in TEXT, "write it anew with: python tools/write_docs.py"
