# SPDX-License-Identifier: Apache-2.0
"""tools/generate.py as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.pretrain_runs import ROOT, environment, run
from tests.support.tiny_training import train_tiny


def generate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run(arguments, program="tools/generate.py", directory=Path("/"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generate") / "checkpoints"
    train_tiny("--save", root, "--save-interval", "3", "--bf16")
    return root


def test_greedy_with_and_without_cache(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("9 9 9\n\n10\n")
    flags = ("--load", checkpoints, "--prompt", "3 4 5", "--prompts-file", tmp_path / "prompts.txt", "--greedy")
    cached = generate(*flags, "--max-new-tokens", "7", "--batch-size", "2")
    assert cached.returncode == 0, cached.stderr
    texts = [text.split() for text in cached.stdout.split("-" * 60)]
    assert [len(text) for text in texts] == [10, 10, 8]
    assert [text[0] for text in texts] == ["3", "9", "10"]
    assert "iter_0000006" in cached.stderr
    recomputed = generate(*flags, "--max-new-tokens", "7", "--no-kv-cache")
    assert recomputed.stdout == cached.stdout
    assert "iter_0000003" in generate(*flags, "--ckpt-step", "3", "--max-new-tokens", "1").stderr


def test_speculation_writes_the_same_text(checkpoints: Path, tmp_path: Path) -> None:
    train_tiny("--save", tmp_path, "--save-interval", "6", "--position-embedding-type", "rope", "--mtp-num-layers", "2")
    flags = ("--load", tmp_path, "--prompt", "3 4 5", "--prompt", "9", "--greedy", "--max-new-tokens", "9")
    plain, drafted = generate(*flags), generate(*flags, "--speculate")
    assert drafted.stdout == plain.stdout and plain.returncode == drafted.returncode == 0, drafted.stderr
    said = (
        r"speculation: (\d+) of (\d+) drafted tokens accepted \(\d+\.\d %\), \d\.\d\d tokens for each pass of the model"
    )
    found = re.search(said, drafted.stderr)
    assert found is not None and "drafted" not in plain.stderr, drafted.stderr
    assert 0 <= int(found[1]) <= int(found[2]) > 0
    sampled = [
        generate(*flags[:-3], "--speculate", "--seed", seed, "--max-new-tokens", "9").stdout for seed in ("1", "1")
    ]
    assert sampled[0] == sampled[1] != plain.stdout
    refused = generate("--load", checkpoints, "--prompt", "1", "--speculate")
    assert refused.returncode == 2 and "error: --speculate drafts tokens" in refused.stderr


def test_sampling_depends_on_the_seed(checkpoints: Path) -> None:
    flags = ("--load", checkpoints / "iter_0000006", "--prompt", "3 4 5", "--max-new-tokens", "10", "--top-k", "20")
    texts = [generate(*flags, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2] and len(texts[0].split()) == 13


def test_bad_input_is_one_sentence(checkpoints: Path, tmp_path: Path) -> None:
    usual = ("--load", checkpoints, "--prompt", "1")
    for arguments, words in (
        (("--prompt", "1"), "--load"),
        (("--load", checkpoints), "give --prompt TEXT or --prompts-file FILE"),
        ((*usual, "--max-new-tokns", "3"), "--max-new-tokns"),
        ((*usual, "--max-new-tokens", "0"), "--max-new-tokens 0 must be at least 1"),
        ((*usual, "--temperature", "0"), "--temperature 0.0 must be above 0"),
        ((*usual, "--prompts-file", tmp_path / "absent"), "--prompts-file"),
        (("--load", tmp_path, "--prompt", "1"), "holds no checkpoint"),
        (("--load", checkpoints, "--prompt", "1 " * 60), "16 positions"),
    ):
        result = generate(*arguments)
        assert result.returncode == 2, (arguments, result.stderr)
        errors = [line for line in result.stderr.splitlines() if not line.startswith("model: ")]
        assert len(errors) == 1 and errors[0].startswith("error: ") and words in errors[0], (arguments, errors)
        assert result.stdout == ""


def test_a_conversation_through_a_pipe(checkpoints: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate.py"), "--load", str(checkpoints), "--chat", "--greedy"]
    finished = subprocess.run(
        [*command, "--max-new-tokens", "4"], input="3 4 5\nwords\n6\n/new\n3 4 5\n", capture_output=True, text=True,
        cwd="/", env=environment({}), timeout=240,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    first, second, again = finished.stdout.splitlines()
    assert len(first.split()) == len(second.split()) == 4 and again == first
    assert "this is a base model, which continues the text that you type" in finished.stderr
    assert "note: " in finished.stderr and "'words'" in finished.stderr
    for flags, words in (
        ("--prompt 1", "--chat reads what is typed"),
        ("--system x", "--system needs a chat template"),
    ):
        refused = generate("--load", checkpoints, "--chat", *flags.split())
        assert refused.returncode == 2 and f"error: {words}" in refused.stderr
