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
from megatron.core import optional_deps
from megatron.core.errors import ConfigError
from megatron.core.inference.harness_tasks import HarnessTasks
from megatron.report.metrics_reader import MetricsReader
from megatron.training.checkpoint.trained_model import load_trained_model
from megatron.training.hooks import task_scores
from tests.support.tiny_training import differing, train_tiny

DOCUMENTS = ["3 4 5 6", "7", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30", "9 9"]
QUESTIONS = [{"question": "1 2 3", "answer": 0}, {"question": "7 8", "answer": 1}, {"question": "5 6", "answer": 2}]
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


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval")
    directory = tmp_path_factory.mktemp("tasks")
    data = directory / "questions.json"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (directory / "counting.yaml").write_text(TASK.format(data=data))
    return directory


@pytest.fixture(scope="module")
def counted(checkpoints: Path, tasks: Path) -> float:
    """The score of `evaluate --tasks`."""
    with pytest.MonkeyPatch.context() as patch:
        flags = ("--load", checkpoints, "--tasks", "counting", "--include-path", tasks)
        score: float = evaluate(patch, tasks / "out.json", *flags)["results"]["counting"]["acc,none"]
    return score


def test_tasks_of_the_harness(checkpoints: Path, counted: float) -> None:
    model, right = load_trained_model(checkpoints).model, 0
    for question in QUESTIONS:
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
    assert counted == pytest.approx(right / 3)


@pytest.mark.flags("--eval-tasks", "--eval-tasks-path", "--eval-tasks-limit")
def test_tasks_during_training(tasks: Path, counted: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Scores at each evaluation are those of `evaluate --tasks`; training is bit for bit the run without."""
    asked = ("--eval-interval", "3", "--eval-iters", "1", "--position-embedding-type", "rope")
    plain = train_tiny(*asked)
    flags = ("--eval-tasks", "counting", "--eval-tasks-path", tasks)
    run = train_tiny(*asked, *flags, "--metrics-dir", tmp_path)
    assert differing(run, plain) == []
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(row["iteration"], row["tasks"]["counting acc"]) for row in rows if "tasks" in row]
    assert [iteration for iteration, _ in found] == [3, 6]
    assert found[-1][1] == counted
    assert f"tasks at iteration 6: counting acc {found[-1][1]:.4f}" in capsys.readouterr().out
    reader = MetricsReader(tmp_path / "metrics.jsonl")
    reader.update()
    assert reader.tasks == {"counting acc": found}
    with pytest.raises(ConfigError, match="--eval-tasks nothing: lm-evaluation-harness has no such task"):
        train_tiny(*asked, "--eval-tasks", "nothing")
    limits: list[int] = []

    class Failing(HarnessTasks):
        def __init__(self, *_: object, limit: int, **__: object) -> None:
            limits.append(limit)

        def run(self, *_: object) -> Any:
            raise OSError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(task_scores, "HarnessTasks", Failing)
        train_tiny(*asked, *flags, "--eval-tasks-limit", "1")
    assert limits == [1]
    assert capsys.readouterr().err.count("--eval-tasks: tasks are left out, training goes on") == 1
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.setattr(optional_deps, "available", lambda _: False)
    with pytest.raises(ConfigError, match="--eval-tasks needs .* run: pip install 'lm-eval'"):
        train_tiny(*asked, *flags)


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
