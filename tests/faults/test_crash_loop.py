# SPDX-License-Identifier: Apache-2.0
"""A run that fails three times in succession at the same place is not started a fourth time."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import ConfigError, NonFiniteError
from megatron.training.launch.crash_loop import FAILURES, Failure, FailureRecord, describe_failure
from megatron.training.loop import train
from megatron.training.run import Run
from tests.support.tiny_training import prepare, replace_forward_step


def _begin(save: Path, *flags: str) -> Run:
    return prepare("--save", save, "--load", save, "--save-interval", "2", *flags)


def _fail(save: Path, iteration: int, words: str, *flags: str) -> None:
    run = _begin(save, *flags)
    usual = run.recipe.forward_step

    def forward_step(*arguments: Any) -> Any:
        if run.progress.iteration + 1 == iteration:
            raise ValueError(words)
        return usual(*arguments)

    replace_forward_step(run, forward_step)
    try:
        with pytest.raises(ValueError, match=words):
            train(run)
    finally:
        run.hooks.on_close(run)


def test_R8_the_fourth_start_ends_at_once_until_the_settings_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        _fail(tmp_path, 4, "poison")
    assert "failed 3 times in succession at iteration 4: poison" in capsys.readouterr().err
    for _ in range(2):
        with pytest.raises(ConfigError, match="at iteration 4: poison; .*--iterations-to-skip 4 passes over"):
            _begin(tmp_path)
    with pytest.raises(ConfigError, match="3 times"):
        _begin(tmp_path, "--log-interval", "1")  # how a run reports has nothing to do with its failures
    run = _begin(tmp_path, "--iterations-to-skip", "4")
    train(run)
    run.hooks.on_close(run)
    run = _begin(tmp_path)
    assert run.progress.iteration == 6
    run.hooks.on_close(run)


def test_other_places_other_words_and_progress_are_no_loop(tmp_path: Path) -> None:
    for iteration, words in ((4, "one"), (4, "one"), (4, "two"), (5, "two"), (5, "two")):
        _fail(tmp_path, iteration, words)
    # Between two of them the run has been beyond iteration 4.
    lines = [json.loads(line) for line in (tmp_path / FAILURES).read_text().splitlines()]
    assert [line.get("iteration", "passed") for line in lines] == [4, 4, 4, "passed", 5, 5]
    run = _begin(tmp_path)
    run.hooks.on_close(run)


def test_the_data_to_skip_are_those_of_the_iteration_that_has_gone_bad(tmp_path: Path) -> None:
    """A value that is no number is found when values are read, which may be iterations later."""
    for _ in range(3):
        run = _begin(tmp_path, "--log-interval", "5", "--save-interval", "100")
        replace_forward_step(run, _spoil(run, 3))
        with pytest.raises(NonFiniteError, match="iteration 3: "):
            train(run)
        run.hooks.on_close(run)
    with pytest.raises(ConfigError, match="at iteration [45]: iteration 3: .*--iterations-to-skip 3 passes over"):
        _begin(tmp_path, "--log-interval", "5", "--save-interval", "100")


def _spoil(run: Run, iteration: int) -> Any:
    forward_step = run.recipe.forward_step

    def spoil(*arguments: Any) -> Any:
        output, loss = forward_step(*arguments)
        return (output * math.nan if run.progress.iteration + 1 == iteration else output), loss

    return spoil


def test_what_ends_from_outside_does_not_count() -> None:
    assert describe_failure(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")) is None
    assert describe_failure(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed")) is None
    assert describe_failure(RuntimeError("expected 3, found 4")) == "expected 3, found 4"


def test_a_record_in_any_state_is_read(tmp_path: Path) -> None:
    record = FailureRecord(tmp_path)
    generator = random.Random(5)
    for number in range(3):
        record.add(Failure(number, 7, f"Tensor at 0x7f{number:08x}", "s"))
        record.add(Failure(number, 7, "another rank's", "s"))
    whole = record.path.read_bytes()
    assert record.count_repetitions() == 3
    assert record.explain_loop("s") is not None
    assert record.explain_loop("t") is None
    for _ in range(50):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        record.path.write_bytes(damaged[: generator.randrange(len(whole))])
        assert record.count_repetitions() <= 3
