# SPDX-License-Identifier: Apache-2.0
"""Perplexity against one forward of each window, and tasks of lm-evaluation-harness with the engine as their model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.evaluate import list_windows, main
from megatron.training.checkpoint.trained_model import load_trained_model
from tests.support.tiny_training import train_tiny

DOCUMENTS = ["3 4 5 6", "7", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30", "9 9"]
TASK = """
task: counting
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["4", "9", "30 1"]
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluate") / "tiny"
    train_tiny("--save", root, "--save-interval", "6", "--position-embedding-type", "rope")
    return root


def evaluate(monkeypatch: pytest.MonkeyPatch, output: Path, *flags: object) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, flags), "--output", str(output)])
    assert main() == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_every_token_but_the_first_counts_once() -> None:
    for length in range(2, 40):
        for stride in (None, 1, 3, 7, 50):
            windows = list_windows(length, 8, stride)
            counted = [place for each in windows for place in range(each.scored, each.end)]
            assert counted == list(range(1, length))
            assert all(each.first < each.scored and each.end - each.first <= 8 for each in windows)
    assert list_windows(1, 8, None) == []


@pytest.mark.parametrize("stride", [None, 5])
def test_perplexity_by_definition(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int | None
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in DOCUMENTS) + "\n\n")
    flags: tuple[object, ...] = () if stride is None else ("--stride", stride)
    found = evaluate(
        monkeypatch, tmp_path / "out.json", "--load", checkpoints, "--data", data, "--seq-length", 12, *flags
    )
    row = found["files"][str(data)]
    model, losses = load_trained_model(checkpoints).model, list[list[float]]()
    for text in DOCUMENTS:
        tokens = [int(word) for word in text.split()]
        own: list[float] = []
        for first, scored, end in list_windows(len(tokens), 12, stride):
            ids = torch.tensor([tokens[first:end]])
            with torch.no_grad():
                logits = model(ids, torch.arange(ids.shape[1])[None], None)[0].double()
            every = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none").tolist()
            own += every[scored - first - 1 :]
        losses.append(own)
    flat = [loss for own in losses for loss in own]
    assert row["tokens"] == len(flat) == sum(len(text.split()) - 1 for text in DOCUMENTS)
    assert row["loss"] == pytest.approx(sum(flat) / len(flat), abs=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert [entry["tokens"] for entry in row["documents"]] == [len(own) for own in losses]
    assert row["documents"][2]["loss"] == pytest.approx(sum(losses[2]) / len(losses[2]), abs=1e-5)
    assert [(entry["first"], entry["last"], entry["tokens"]) for entry in row["positions"]] == [
        (1, 16, 20),
        (17, 33, 13),
    ]


def test_tasks_of_the_harness(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    questions = [{"question": "1 2 3", "answer": 0}, {"question": "7 8", "answer": 1}, {"question": "5 6", "answer": 2}]
    data = tmp_path / "questions.json"
    data.write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "counting.yaml").write_text(TASK.format(data=data))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    flags = ("--load", checkpoints, "--tasks", "counting", "--include-path", tmp_path)
    row = evaluate(monkeypatch, tmp_path / "out.json", *flags)["results"]["counting"]
    model, right = load_trained_model(checkpoints).model, 0
    for question in questions:
        scores = []
        for choice in ("4", "9", "30 1"):
            tokens = [int(word) for word in f"{question['question']} {choice}".split()]
            ids, count = torch.tensor([tokens]), len(choice.split())
            with torch.no_grad():
                logprobs = model(ids, torch.arange(len(tokens))[None], None)[0].log_softmax(-1)
            scores.append(
                sum(float(logprobs[place - 1, tokens[place]]) for place in range(len(tokens) - count, len(tokens)))
            )
        right += scores.index(max(scores)) == question["answer"]
    assert row["acc,none"] == pytest.approx(right / 3)


def test_bad_input_is_one_sentence(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    bad = tmp_path / "bad.jsonl"
    for content, words in (
        ('{"text": 3}', "line 1 has no text 'text'"),
        ("{", "line 1 is not JSON"),
        ("", "no documents"),
    ):
        bad.write_text(content)
        monkeypatch.setattr(sys, "argv", ["evaluate", "--load", str(checkpoints), "--data", str(bad)])
        assert main() == 2
        assert words in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["evaluate", "--load", str(checkpoints)])
    assert main() == 2 and "nothing to evaluate" in capsys.readouterr().err
