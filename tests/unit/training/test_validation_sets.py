# SPDX-License-Identifier: Apache-2.0
"""--full-validation and --multiple-validation-sets, through the real setup, loop and hooks of a tiny run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.training.data.samples import count_samples
from megatron.training.flags.read import read_run_config
from megatron.training.run import Run
from megatron.training.setup import setup
from tests.support import tiny_training
from tests.support.tiny_training import FLAGS, RandomTokens, finish, prepare

EVERY_2 = ("--eval-interval", "2", "--train-iters", "2")


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call with validation sets to let the next run have them."""

    def use(*sets: RandomTokens) -> None:
        real = tiny_training.setup

        def with_sets(config: Any, process: Any, recipe: Any) -> Run:
            def build(counts: tuple[int, int | None, int]) -> list[Any]:
                return [RandomTokens(counts[0]), list(sets) if len(sets) > 1 else sets[0], None]

            return real(config, process, dataclasses.replace(recipe, build_datasets=build))

        monkeypatch.setattr(tiny_training, "setup", with_sets)

    assert tiny_training.setup is setup
    return use


def evaluations(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "eval" in row]


def mean_loss(run: Run, dataset: RandomTokens) -> float:
    """Mean over all tokens of a dataset, one sample after the other."""
    model = run.model[0].eval()
    total = count = 0.0
    with torch.no_grad():
        for i in range(len(dataset)):
            sample = {name: value[None] for name, value in dataset[i].items()}
            losses = model(sample["tokens"], sample["position_ids"], None, labels=sample["labels"])
            total, count = total + float(losses.sum()), count + losses.numel()
    return total / count


@pytest.mark.flags("--full-validation")
@pytest.mark.parametrize("samples", [1, 3, 4, 9])
def test_full_validation_is_the_mean_over_everything(tmp_path: Path, data: Any, samples: int) -> None:
    """Whatever the last batch lacks, and however often it is done: --eval-iters has no part in it."""
    validation = RandomTokens(samples)
    data(validation)
    run = finish(prepare(*EVERY_2, "--full-validation", "--eval-iters", "1", "--metrics-dir", tmp_path))
    at_the_end = mean_loss(run, validation)
    found = [row["eval"]["lm loss"] for row in evaluations(tmp_path)]
    assert found == pytest.approx([at_the_end] * 2, abs=2e-6), "after the last iteration, and at the end"
    assert run.progress.consumed_valid_samples == 0


@pytest.mark.flags("--full-validation")
def test_full_validation_asks_for_all_samples() -> None:
    flags = [*FLAGS.split(), "--eval-interval", "2", "--eval-iters", "3"]
    partly, fully = (read_run_config([*flags, *more], {}) for more in ([], ["--full-validation"]))
    assert count_samples(partly, 6, 4) == (24, 48, 12) and count_samples(fully, 6, 4) == (24, None, 12)
    skipping = read_run_config([*flags, "--full-validation", "--skip-train"], {})
    assert count_samples(skipping, 6, 4) == (0, None, 12)
    assert count_samples(read_run_config([*FLAGS.split(), "--full-validation"], {}), 6, 4) == (24, 0, 0)


@pytest.mark.flags("--multiple-validation-sets", "--validation-set-names")
@pytest.mark.parametrize("full", [True, False])
def test_each_set_has_a_loss_of_its_own(
    tmp_path: Path, data: Any, capsys: pytest.CaptureFixture[str], full: bool
) -> None:
    first, second = RandomTokens(5), RandomTokens(9)
    data(first, second)
    named = ("--validation-set-names", "books", "code") if full else ()
    flags = ("--multiple-validation-sets", "--eval-iters", "1", "--metrics-dir", tmp_path, *named)
    run = finish(prepare(*EVERY_2, *flags, *(["--full-validation"] if full else [])))
    rows = evaluations(tmp_path)
    names = ["books", "code"] if full else ["0", "1"]
    assert [row["set"] for row in rows] == names * 2
    if full:
        expected = [mean_loss(run, first), mean_loss(run, second)]
        assert [row["eval"]["lm loss"] for row in rows[2:]] == pytest.approx(expected, abs=2e-6)
        assert "validation-books loss at iteration 2 |" in capsys.readouterr().out
    else:
        assert run.progress.consumed_valid_samples == 8, "two evaluations of four samples, of each set"


@pytest.mark.flags("--validation-set-names")
def test_names_must_fit_the_sets(data: Any) -> None:
    data(RandomTokens(5), RandomTokens(9))
    with pytest.raises(ConfigError, match="has 1 names, but there are 2 validation sets"):
        finish(prepare(*EVERY_2, "--multiple-validation-sets", "--eval-iters", "1", "--validation-set-names", "books"))
    with pytest.raises(ConfigError, match="--validation-set-names a needs --multiple-validation-sets"):
        read_run_config([*FLAGS.split(), "--validation-set-names", "a"], {})
    with pytest.raises(ConfigError, match="--validation-set-names a a names a set twice"):
        read_run_config([*FLAGS.split(), "--multiple-validation-sets", "--validation-set-names", "a", "a"], {})
