# SPDX-License-Identifier: Apache-2.0
"""Documents follow from the code where they can: generated parts, variables, measurements. And the site builds."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.check_benchmark import CONTRIBUTED, SCHEMA, find_problems
from tools.look_at_pages import find_browser, look
from tools.write_docs import WITHOUT_PROGRAMS, list_documents, write_parts

ROOT = Path(__file__).parents[3]
TABLES = ".rst-content table"


@pytest.mark.parametrize("page", list_documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_parts_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert write_parts(text, page, WITHOUT_PROGRAMS) == text, "write it anew with: python tools/write_docs.py"


def test_every_page_is_in_the_navigation_and_on_the_first_page() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    listed = re.findall(r"- (?:\w+: )?(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(pages)
    first = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+\.md)\)", first)) == pages - {"index.md"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning: links and anchors among the pages included."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs: pip install -e .[docs]")
    directory = tmp_path_factory.mktemp("site")
    # Not --quiet, which also hides warnings from --strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return directory


def test_wide_tables_scroll_and_cells_break_their_lines(site: Path) -> None:
    """On every page, whatever scripts the browser runs."""
    for page in (ROOT / "docs").glob("*.md"):
        assert '<link href="css/site.css" rel="stylesheet" />' in (site / f"{page.stem}.html").read_text(
            encoding="utf-8"
        )
    rules = dict(
        re.findall(r"^(\.[^{}]+?) \{(.*?)\}", (site / "css" / "site.css").read_text(), re.MULTILINE | re.DOTALL)
    )
    assert {"display: block", "overflow-x: auto", "max-width: 100%"} <= set(map(str.strip, rules[TABLES].split(";")))
    assert "white-space: normal !important" in rules[f"{TABLES} td,\n{TABLES} th"], "the theme says nowrap"


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium")
def test_nothing_is_cut_off_in_a_browser(site: Path) -> None:
    """Of pages with wide tables; tools/look_at_pages.py looks at all. On a wide screen no table needs to scroll."""
    seen = look(site, ["launching.html", "migration_names.html"], [1280, 390])
    assert [page["cut"] for page in seen] == [[]] * 4
    assert [page["scrolling"] > 0 for page in seen] == [False, True] * 2


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium")
def test_what_is_cut_off_is_found(tmp_path: Path) -> None:
    box = '<div style="width: 300px; overflow-x: %s"><p style="width: 900px; white-space: nowrap">%s</p></div>'
    text = "".join(box % (overflow, f"{overflow} {'x' * 100}") for overflow in ("auto", "hidden", "visible"))
    (tmp_path / "page.html").write_text(f'<!doctype html><body class="rst-content">{text}</body>')
    (seen,) = look(tmp_path, ["page.html"], [390])
    assert [cut.split()[0] for cut in seen["cut"]] == ["hidden", "visible"]


def test_the_page_on_the_environment_has_the_variables_that_the_code_reads_and_sets() -> None:
    read = re.compile(r"""environ(?:\.get|\.setdefault|\.pop)?[(\[]\s*"([A-Z][A-Z_]+)"|environ, "([A-Z][A-Z_]+)""")
    names = {
        name for file in (ROOT / "megatron").rglob("*.py") for pair in read.findall(file.read_text()) for name in pair
    }
    launch = (ROOT / "megatron/training/launch/initialize.py").read_text()
    names |= set(re.findall(r'"(TORCH_[A-Z_]+)"', launch))
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    tables = page.split("## Of the scripts")[0]
    documented = set(re.findall(r"`([A-Z][A-Z_]{2,})`", " ".join(re.findall(r"^\| (`.+?) \|", tables, re.MULTILINE))))
    # Read by a package, and set by programs of other rooms.
    of_others = {"WANDB_MODE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"}
    assert documented - of_others == names - of_others - {""}


ENTRY: dict[str, Any] = {
    "date": "2026-11-22",
    "commit": "b5b47ba",
    "command": "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 20 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 500",
    "hardware": {"device": "a processor", "processes": 2, "nodes": 1, "interconnect": "memory", "peak_tflops": 0.1},
    "software": {"python": "3.11.7", "torch": "2.13.0+cpu"},
    "measured": {"steps": 20, "left_out": 5, "step_seconds": 0.05, "tokens_per_second": 5120, "peak_memory_gb": 0.4},
    "notes": "",
}


def judge(directory: Path, **changes: Any) -> str:
    """What stands against the entry with changes like measured__mfu=0.4; None takes a key away."""
    entry = json.loads(json.dumps(ENTRY))
    for path, value in changes.items():
        *outer, last = path.split("__")
        place = entry
        for key in outer:
            place = place[key]
        place[last] = value
        if value is None:
            del place[last]
    file = directory / "entry.json"
    file.write_text(json.dumps(entry))
    return "; ".join(find_problems(file))


def test_a_measurement_is_complete_and_its_arithmetic_right(tmp_path: Path) -> None:
    assert judge(tmp_path) == ""
    assert "the file lacks commit" in judge(tmp_path, commit=None)
    assert "measured has speed, which is not known" in judge(tmp_path, measured__speed=1)
    assert "hardware.processes is '2'; expected integer" in judge(tmp_path, hardware__processes="2")
    assert "measured.steps is 3; expected more" in judge(tmp_path, measured__steps=3)
    assert "commit is 'main'; expected the form" in judge(tmp_path, commit="main")
    assert "256 tokens in 0.05 s are 5120" in judge(tmp_path, measured__tokens_per_second=6000)
    assert "command: --global-batch-size 4" in judge(tmp_path, hardware__processes=3)
    assert "does not start pretrain_gpt.py" in judge(tmp_path, command="python train.py --fast --faster")
    assert "of the peak" in judge(tmp_path, measured__mfu=0.9)
    assert "no peak_tflops" in judge(tmp_path, measured__mfu=0.9, hardware__peak_tflops=None)
    told = judge(tmp_path, measured__mfu=0.9)
    share = float(re.findall(r"are ([0-9.]+) of the peak", told)[0])
    assert judge(tmp_path, measured__mfu=share) == ""
    (tmp_path / "entry.json").write_text("{")
    assert "cannot be read" in find_problems(tmp_path / "entry.json")[0]


def test_contributed_measurements_hold() -> None:
    for path in CONTRIBUTED.glob("*.json"):
        assert path == SCHEMA or find_problems(path) == [], path
