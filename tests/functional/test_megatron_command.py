# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron`, what a shell completes, and an installed wheel."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli.commands import COMMANDS, find_command
from megatron.cli.completion import format_completion
from megatron.core.errors import ConfigError
from tests.functional.pretrain_runs import TINY

ROOT = Path(__file__).resolve().parents[2]
ALL = {command.name: command for group in COMMANDS.values() for command in group}
FOR_THE_REPOSITORY = {"check_benchmark.py", "list_flags.py", "look_at_pages.py", "write_docs.py", "write_stubs.py"}
"""Tools for those who have a checkout: they write or check its pages and stubs."""


def call(*arguments: str, directory: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MEGATRON_DEVICE": "cpu"} | variables
    return subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=240
    )


# ---- python -m megatron


def test_it_lists_every_program_and_runs_one_by_name(tmp_path: Path) -> None:
    listed = call("-m", "megatron", directory=tmp_path)
    assert listed.returncode == 0, listed.stderr
    for command in ALL.values():
        assert re.search(rf"^  {command.name} +{re.escape(command.text)}$", listed.stdout, re.MULTILINE)
    refused = call("-m", "megatron", "train", "--num-layers", "2", directory=tmp_path)
    assert refused.returncode == 2
    assert {line.split()[0] for line in refused.stderr.splitlines()} == {"error:"}
    helped = call("-m", "megatron", "generate", "--help", directory=tmp_path)
    assert helped.stdout.startswith("usage: megatron generate ")


def test_a_name_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="preproces: there is no program of this name; did you mean preprocess?"):
        find_command("preproces")


# `train` leaves the process itself, and is asked by the test of the list above.
@pytest.mark.parametrize("name", sorted(ALL.keys() - {"train"}))
def test_every_program_answers_a_mistake_in_sentences(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag that there is not: exit code 2, and no usage or traceback around the sentence."""
    monkeypatch.setattr(sys, "argv", [name, "--no-such-flag", "3"])
    assert importlib.import_module(ALL[name].module).main() == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("error: ") for line in lines), lines


def test_every_tool_has_a_name() -> None:
    scripts = [*(ROOT / "tools").glob("*.py"), *(ROOT / "tools" / "checkpoint").glob("*.py"), ROOT / "pretrain_gpt.py"]
    modules = {command.module for command in ALL.values()}
    for script in scripts:
        if script.name not in FOR_THE_REPOSITORY:
            started = re.findall(r"^from (megatron\.cli\.\w+) import main", script.read_text(), re.MULTILINE)
            assert len(started) == 1, f"{script.name} starts no program of megatron/cli, so that a wheel lacks it"
            assert started[0] in modules, f"{script.name} has no line in megatron/cli/commands.py"


# ---- completion


def complete(line: str, shell: str = "bash") -> list[str]:
    """What bash offers for the last word of this line."""
    words = [*shlex.split(line), ""] if line.endswith(" ") else shlex.split(line)
    program = f"{format_completion(shell)}\nCOMP_WORDS=({shlex.join(words)})\nCOMP_CWORD={len(words) - 1}\n_megatron\n"
    finished = subprocess.run(
        ["bash", "--norc", "-c", f'{program}printf "%s\\n" "${{COMPREPLY[@]}}"'], capture_output=True, text=True
    )
    assert finished.returncode == 0 and finished.stderr == "", finished.stderr
    return [word for word in finished.stdout.split("\n") if word]


def test_bash_completes_flags_their_values_and_programs() -> None:
    for start in ("torchrun --nproc_per_node 2 pretrain_gpt.py", "megatron-train", "python -m megatron train"):
        assert complete(f"{start} --num-lay")[0] == "--num-layers"
        assert "--optimizer" in complete(f"{start} --bf16 --opti")
    assert set(complete("megatron-train --lr-decay-style c")) == {"constant", "cosine"}
    assert complete("megatron-train --preset llama3-7") == ["llama3-70b"]
    assert complete("python -m megatron prep") == ["preprocess"]
    # Where it has nothing to say the shell offers files.
    assert complete("megatron-train --data-path my") == complete("torchrun --no") == complete("python scr") == []


def test_the_script_for_zsh_loads_bashs_completion_first() -> None:
    assert format_completion("zsh") == f"autoload -Uz bashcompinit && bashcompinit\n{format_completion('bash')}"


# ---- a wheel


def test_an_installed_wheel_trains_in_an_empty_directory(tmp_path: Path) -> None:
    """Built and installed without network; the checkout is not on the path."""
    # Not imported here: setuptools takes the place of distutils, which something may have imported already.
    if not all(importlib.util.find_spec(needed) for needed in ("pip", "setuptools")):
        pytest.skip("needs pip and setuptools")
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "empty"
    # Of a copy, because setuptools leaves its own files beside setup.py.
    shutil.copytree(ROOT / "megatron", source / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    empty.mkdir()
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    built = call("-m", "pip", "wheel", *options, "--wheel-dir", str(tmp_path), str(source))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("megatron_lm_torch-*.whl")
    installed = call("-m", "pip", "install", *options[:3], "--target", str(site), "--no-compile", str(wheel))
    assert installed.returncode == 0, installed.stderr
    assert (site / "megatron" / "core" / "py.typed").exists()
    assert not (site / "tests").exists() and not (site / "tools").exists()
    programs = {path.name for path in (site / "bin").iterdir()}
    assert programs == {f"megatron-{name}" for name in ("train", "preprocess", "generate", "convert")}
    for program in programs:
        said = call(str(site / "bin" / program), "--help", directory=empty, PYTHONPATH=str(site))
        assert said.returncode == 0 and "--" in said.stdout, said.stderr
    trained = call(str(site / "bin" / "megatron-train"), *TINY, "--save", "checkpoints", directory=empty,
                   PYTHONPATH=str(site))  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert "iteration        5/       5" in trained.stdout
    arguments = ("--load", "checkpoints", "--prompt", "1 2 3", "--max-new-tokens", "2")
    written = call("-m", "megatron", "generate", *arguments, directory=empty, PYTHONPATH=str(site))
    assert written.returncode == 0 and len(written.stdout.split()) == 5, written.stderr
