# SPDX-License-Identifier: Apache-2.0
"""The documentation is true: its commands run, its paths exist, its diagram names real packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.errors import MegatronError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# Commands that another test (or this very run) executes, with where.
RUN_ELSEWHERE = {
    "bash examples/quickstart.sh": "tests/functional/test_quickstart.py",
    "bash tests/run.sh": "this run",
    "LAPTOP=1 bash examples/deepseek/train_deepseek_v3.sh": "tests/functional/test_launchers.py",
    "python -m tests.faults.crash_matrix": "tests/faults/test_crash_matrix.py",
    "python tools/checkpoint/average.py": "tests/unit/test_checkpoint_tools.py",
    "python tools/checkpoint/doctor.py": "tests/unit/test_checkpoint_tools.py",
    "python tools/checkpoint/inspect_checkpoint.py": "tests/unit/test_checkpoint_tools.py",
    "python -m megatron.bridge.convert": "tests/unit/test_bridge.py",
    "HF_DIR=Llama-3.1-8B MEGATRON_DIR=llama-3 bash": "tests/unit/test_documented_conversions.py",
    "MEGATRON_DIR=llama-3 HF_DIR=llama-3-hf bash": "tests/unit/test_documented_conversions.py",
    "torchrun --nproc_per_node 2 pretrain_gpt.py --load hf:Llama-3.1-8B": "tests/unit/test_hugging_face_runs.py",
}


def shell_commands() -> list[tuple[str, str]]:
    """(page, command) for every line of every ```bash block; a trailing backslash joins lines."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.split(" #")[0].strip()
                if command and not command.startswith("#"):
                    found.append((page.name, command))
    return found


def is_run_elsewhere(command: str) -> bool:
    return any(command == known or command.startswith(f"{known} ") for known in RUN_ELSEWHERE)


@pytest.mark.parametrize(
    ("page", "command"),
    [pair for pair in shell_commands() if not is_run_elsewhere(pair[1])],
    ids=lambda text: text[:60],
)
def test_documented_command_runs(page: str, command: str, tmp_path: Path) -> None:
    # What a command leaves where it was started, such as its checkpoints, is not left in the checkout.
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    finished = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, f"{page}: {command}\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}"


def test_the_two_commands_of_the_first_screen_exist() -> None:
    commands = [command for page, command in shell_commands() if page == "README.md"]
    assert commands[:2] == list(RUN_ELSEWHERE)[:2]


def test_readme_tree_matches_the_disk() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("## Where things are")[1].split("```")[1]
    for line in block.strip().splitlines():
        name, _, description = line.partition(" ")
        assert (ROOT / name).exists(), f"README names {name}, which does not exist"
        for file in re.findall(r"[\w/]+\.(?:py|sh|md)\b", description):
            assert (ROOT / name / file).exists(), f"README names {name}{file}, which does not exist"


def test_architecture_page_names_real_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:megatron|tests|tools|examples)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), f"docs/architecture.md names {path}, which does not exist"
    corridor = text.split("## The way of a batch")[1].split("```")[1]
    for line in corridor.strip().splitlines():
        name = line.split()[0].rstrip("…")
        places = [ROOT / "megatron" / "core" / name, ROOT / "megatron" / name, ROOT / name]
        assert any(place.exists() for place in places), f"docs/architecture.md names {name}, which does not exist"


def test_pictures_of_the_documentation_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} shows {target}, which does not exist"


def test_the_page_on_training_has_every_exit_code() -> None:
    def codes(kind: type[MegatronError]) -> set[int]:
        return {kind.exit_code}.union(*(codes(below) for below in kind.__subclasses__()))

    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([0-9]+) \|", text.split("| exit code | meaning |")[1].split("\n\n")[0], re.MULTILINE)
    # Beside the errors: success, and what a shell reports of Ctrl-C.
    assert set(map(int, listed)) == codes(MegatronError) | {0, 130}
