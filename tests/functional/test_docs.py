# SPDX-License-Identifier: Apache-2.0
"""The documentation is true: its commands run, its paths exist, its diagram names real packages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.errors import MegatronError
from tests.functional.pretrain_runs import environment, finish
from tests.programs import Program
from tools.write_docs import PART

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / ".github" / "skills").rglob("*.md")),
]

# Commands that another test (or this very run) executes, with where.
RUN_ELSEWHERE = {
    "bash examples/quickstart.sh": "tests/functional/test_quickstart.py",
    "bash tests/run.sh": "this run",
    "LAPTOP=1 bash examples/deepseek/train_deepseek_v3.sh": "tests/functional/test_launchers.py",
    "LAPTOP=1 bash examples/llama/train_llama_70b.sh": "tests/functional/test_launchers.py",
    "python -m tests.faults.crash_matrix": "tests/faults/test_crash_matrix.py",
    "python -m megatron convert": "tests/functional/test_fine_tuning.py",
    "python -m megatron generate --load tuned": "tests/functional/test_fine_tuning.py",
    "python -m megatron generate --load adapted": "tests/functional/test_fine_tuning.py",
    "python -m megatron generate --load preferred": "tests/functional/test_fine_tuning.py",
    "python -m megatron launch --nproc_per_node 8": "tests/functional/test_fine_tuning.py",
    "python -m megatron generate --load taught": "tests/functional/test_fine_tuning.py",
    "python -m megatron prune --load tuned": "tests/functional/test_fine_tuning.py",
    "python examples/programs/evaluate_with_lm_eval.py --model": "tests/functional/test_example_programs.py",
    "python examples/programs/sync_weights.py --model": "tests/functional/test_example_programs.py",
    "python examples/images/learn_shapes.py": "tests/functional/test_image_runs.py",
    "python pretrain_vlm.py": "tests/functional/test_image_runs.py",
    "python tools/autotune.py": "tests/unit/cli/test_autotune.py",
    "python tools/checkpoint/average.py": "tests/unit/upstream_checkpoints/test_checkpoint_tools.py",
    "python tools/checkpoint/doctor.py": "tests/unit/upstream_checkpoints/test_checkpoint_tools.py",
    "python tools/checkpoint/inspect_checkpoint.py": "tests/unit/upstream_checkpoints/test_checkpoint_tools.py",
    "python -m megatron.bridge.convert": "tests/unit/hf/test_bridge.py",
    "HF_DIR=Llama-3.1-8B MEGATRON_DIR=llama-3 bash": "tests/unit/hf/test_documented_conversions.py",
    "MEGATRON_DIR=llama-3 HF_DIR=llama-3-hf bash": "tests/unit/hf/test_documented_conversions.py",
    "torchrun --nproc_per_node 2 pretrain_gpt.py --load hf:Llama-3.1-8B": "tests/unit/hf/test_hugging_face_runs.py",
}


def shell_commands() -> list[tuple[str, str]]:
    """(page, command) for every line of every ```bash block; a trailing backslash joins lines.

    A command whose output is shown, too, is run by tests/unit/house/test_documents.py.
    """
    found = []
    for page in PAGES:
        text = PART.sub(lambda part: "" if part["kind"] == "output" else part[0], page.read_text(encoding="utf-8"))
        for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.split(" #")[0].strip()
                if command and not command.startswith("#"):
                    found.append((page.name, command))
    return found


def is_run_elsewhere(command: str) -> bool:
    return any(command == known or command.startswith(f"{known} ") for known in RUN_ELSEWHERE)


def commands_to_run() -> list[tuple[str, str]]:
    """(page, command), each command once."""
    first = {command: page for page, command in reversed(shell_commands()) if not is_run_elsewhere(command)}
    return [(page, command) for command, page in reversed(first.items())]


PYTHON_COMMAND = re.compile(r"(?P<variables>(?:[A-Z_]+=\S+ )*)python (?P<program>[\w/]+\.py)(?P<arguments>[^|;<>&$]*)")


def is_started_before(command: str) -> bool:
    """Whether it is a program that another command of the documents has started before."""
    programs = [found["program"] for _, other in commands_to_run() if (found := PYTHON_COMMAND.fullmatch(other))]
    first = {program: other for program in programs for _, other in reversed(commands_to_run()) if program in other}
    found = PYTHON_COMMAND.fullmatch(command)
    return found is not None and first[found["program"]] != command


def run_command(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """As a user's shell would. A program that was started so already is forked, which spares the import of torch."""
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    found = PYTHON_COMMAND.fullmatch(command)
    if found is None or not is_started_before(command):
        return subprocess.run(
            ["bash", "-c", command], cwd=directory, env=variables, capture_output=True, text=True, timeout=120
        )
    given = dict(word.split("=", 1) for word in found["variables"].split())
    arguments = [str(ROOT / found["program"]), *shlex.split(found["arguments"])]
    return finish([Program(arguments, environment(given), directory)], timeout=120)[0]


@pytest.mark.parametrize(("page", "command"), commands_to_run(), ids=lambda text: text[:60])
def test_documented_command_runs(page: str, command: str, tmp_path: Path) -> None:
    # What a command leaves where it was started, such as its checkpoints, is not left in the checkout.
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    finished = run_command(command, tmp_path)
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
        # What is said of a directory names files in it; what is said of a file, files beside it.
        place = ROOT / name if name.endswith("/") else (ROOT / name).parent
        for file in re.findall(r"[\w/]+\.(?:py|sh|md)\b", description):
            assert (place / file).exists(), f"README names {file} at {name}, which does not exist"


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
