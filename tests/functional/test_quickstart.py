# SPDX-License-Identifier: Apache-2.0
"""The quickstart as a user runs it, shortened: it trains, resumes when run again, and leaves what it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.optional_deps import available

ROOT = Path(__file__).parents[2]


def run_quickstart(out: Path, script: str = "examples/quickstart.sh") -> str:
    environment = os.environ | {
        "QUICKSTART_DIR": str(out),
        "ITERATIONS": "3",
        "CORPUS_MEGABYTES": "1",
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    finished = subprocess.run(
        ["bash", script],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    return finished.stdout


def iterations(out: Path) -> list[int]:
    rows = [json.loads(line) for line in (out / "metrics" / "metrics.jsonl").read_text().splitlines()]
    return [row["iteration"] for row in rows if "lm loss" in row]


def test_the_hybrids_quickstart_trains_and_writes(tmp_path: Path) -> None:
    said = run_quickstart(tmp_path / "hybrid", "examples/hybrid/quickstart.sh")
    assert "3. Text from the model" in said
    assert list((tmp_path / "hybrid" / "hybrid" / "iter_0000003").iterdir())


@pytest.mark.timeout(900)
@pytest.mark.flags("--tensorboard-dir", "--metrics-dir", "--save", "--load")
def test_quickstart_trains_and_then_resumes(tmp_path: Path) -> None:
    out = tmp_path / "quickstart"
    first = run_quickstart(out)
    assert iterations(out) == list(range(1, 4))
    assert "unigram entropy of corpus" in first
    assert "+ python pretrain_gpt.py" in first, "each step's command is echoed"
    assert (out / "loss.png").stat().st_size > 5_000
    assert list((out / "tensorboard").iterdir())

    second = run_quickstart(out)
    assert iterations(out) == list(range(1, 7)), "the second run goes on where the first stopped"
    assert "preprocess_data.py" not in second, "finished steps are not done twice"
    open_in_transformers(out)


def open_in_transformers(out: Path) -> None:
    """The lines of docs/quickstart.md, and the model computes what ours does."""
    if not available("transformers"):
        return
    document = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    lines = document.split("```python\n")[1].split("```")[0]
    check = """
import pathlib, torch
from megatron.training.checkpoint.trained_model import load_trained_model
ids = torch.tensor([tokenizer("def read_file(path):")["input_ids"]])
ours = load_trained_model(pathlib.Path("quickstart/checkpoints")).model(ids, torch.arange(ids.shape[1])[None])
assert ids.shape[1] > 3 and (model(ids).logits - ours).abs().max() < 1e-4
assert tokenizer.eos_token_id == model.config.eos_token_id
"""
    finished = subprocess.run(
        [sys.executable, "-c", lines + check],
        cwd=out.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MEGATRON_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr


def test_the_page_leads_from_a_folder_of_texts_to_a_run_on_two_processes(tmp_path: Path) -> None:
    """Its last commands, which the run's summary prints as well, are those of tests/functional/test_summary.py."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split("\n\n")):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    section = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").split("## Your own text, step by step")[1]
    prepare, train = (block.split("```")[0] for block in section.split("```sh\n")[1:3])
    # The environment is the one of this test.
    commands = prepare.replace("source tools/install.sh\n", "") + train.replace("--train-iters 200", "--train-iters 4")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path), "MEGATRON_DEVICE": "cpu",
    }  # fmt: skip
    finished = subprocess.run(
        ["bash", "-e", "-c", commands.replace("--lr-warmup-iters 20", "--lr-warmup-iters 1")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    following = finished.stdout.split("What to do next:\n")[1]
    assert re.match("train on +torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 4 ", following)
    assert (tmp_path / "mine" / "checkpoints" / "iter_0000004").is_dir()


def test_a_folder_without_texts_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "examples/quickstart/build_corpus.py", "--from", tmp_path, "--output", tmp_path / "x"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 2
    assert finished.stderr.startswith(f"error: {tmp_path} has no files that end with .txt or .md; give the folder")
