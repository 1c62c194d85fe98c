# SPDX-License-Identifier: Apache-2.0
"""Sizes and moments of evaluation, iterations that are passed over, and exits by a signal."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.core.errors import ConfigError
from megatron.training.flags.read import read_run_config
from megatron.training.hooks import stop_agreement
from megatron.training.hooks.stop_agreement import StopAgreement
from megatron.training.run import Hook, Run
from tests.support.run_flags import run_config
from tests.support.tiny_training import FLAGS, finish, prepare, replace_forward_step, train_tiny

NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def evaluated_batches(*flags: str) -> list[tuple[int, int]]:
    """Samples of each microbatch of the run's only evaluation, and the number it begins with."""
    run = prepare("--eval-interval", "6", "--eval-iters", "2", *flags)
    seen: list[tuple[int, int]] = []
    opened: list[int] = []
    forward_step, open_split = run.recipe.forward_step, run.data.open

    def counting(batches: Any, model: Any) -> Any:
        if not model.training:
            batch = next(batches)
            seen.append((batch["tokens"].shape[0], opened[-1]))
            return forward_step(iter([batch]), model)
        return forward_step(batches, model)

    def opening(split: str, at: int, *part: int) -> Any:
        opened.append(at)
        return open_split(split, at, *part)

    replace_forward_step(run, counting)
    run.data.open = opening  # type: ignore[method-assign]
    run.data.datasets["test"] = None
    finish(run)
    assert run.progress.consumed_valid_samples == sum(size for size, _ in seen)
    return seen


@pytest.mark.flags("--eval-global-batch-size", "--eval-micro-batch-size")
def test_evaluation_has_batches_of_its_own() -> None:
    # On-schedule and final evaluation, two global batches each.
    assert [size for size, _ in evaluated_batches()] == [2] * 2 * 2 * 2
    assert [size for size, _ in evaluated_batches("--eval-global-batch-size", "8")] == [2] * 4 * 2 * 2
    flags = ("--eval-global-batch-size", "6", "--eval-micro-batch-size", "3")
    assert [size for size, _ in evaluated_batches(*flags)] == [3] * 2 * 2 * 2
    with pytest.raises(ConfigError, match="--eval-global-batch-size 6 is not divisible by --eval-micro-batch-size 4"):
        read_run_config([*FLAGS.split(), "--eval-global-batch-size", "6", "--eval-micro-batch-size", "4"], {})


def test_the_size_of_evaluation_batches_does_not_change_the_loss(tmp_path: Path) -> None:
    for name, flags in {"usual": (), "own": ("--eval-global-batch-size", "8", "--eval-micro-batch-size", "8")}.items():
        iterations = "4" if name == "usual" else "2"
        train_tiny("--eval-interval", "6", "--eval-iters", iterations, *flags, *NO_DROPOUT, "--metrics-dir",
                   tmp_path / name)  # fmt: skip
    usual, own = ([row["eval"] for row in rows(tmp_path / name) if "eval" in row] for name in ("usual", "own"))
    for ours, theirs in zip(own, usual, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.flags("--start-eval-at-iter")
def test_start_eval_at_iter(tmp_path: Path) -> None:
    for name, flags in {"all": (), "late": ("--start-eval-at-iter", "3")}.items():
        train_tiny("--eval-interval", "2", "--eval-iters", "1", *flags, "--metrics-dir", tmp_path / name)
    found = {name: [row["iteration"] for row in rows(tmp_path / name) if "eval" in row] for name in ("all", "late")}
    assert found == {"all": [2, 4, 6, 6, 6], "late": [4, 6, 6, 6]}


@pytest.mark.flags("--iterations-to-skip")
def test_iterations_that_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare("--iterations-to-skip", "2", "4", *NO_DROPOUT, "--metrics-dir", tmp_path / "skipping")
    finish(run)
    found = rows(tmp_path / "skipping")
    assert [(row["iteration"], row["consumed_samples"]) for row in found] == [(1, 4), (3, 12), (5, 20), (6, 24)]
    assert run.progress.iteration == 6 and run.optimizer.step_count == 4 and run.scheduler.num_steps == 4 * 4
    assert "iteration 2 is passed over: --iterations-to-skip 2" in capsys.readouterr().out
    # The third iteration trains on the samples that it always does, with the weights after the first.
    train_tiny(*NO_DROPOUT, "--metrics-dir", tmp_path / "plain")
    plain = rows(tmp_path / "plain")
    assert found[0]["lm loss"] == plain[0]["lm loss"]
    assert found[1]["lm loss"] != plain[2]["lm loss"]
    with pytest.raises(ConfigError, match="--iterations-to-skip 0 is out of range; give a whole number of at least 1"):
        prepare("--iterations-to-skip", "0")


@pytest.mark.flags("--decrease-batch-size-if-needed")
def test_decrease_batch_size_if_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--global-batch-size 7 is not divisible"):
        prepare("--global-batch-size", "7")
    flags = ("--global-batch-size", "7", "--decrease-batch-size-if-needed", "--eval-interval", "3", "--eval-iters", "1")
    run = train_tiny(*flags, "--train-iters", "3", "--metrics-dir", tmp_path)
    assert [row["consumed_samples"] for row in rows(tmp_path) if "eval" not in row] == [6, 12, 18]
    assert run.evaluation_batch_size == 6


# ---- a signal


class Kill(Hook):
    """Sends a signal to this process, and to its loader processes, in the second iteration."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_step_start(self, run: Run) -> None:
        if run.progress.iteration == 1:
            for child in multiprocessing.active_children():
                assert child.pid is not None
                os.kill(child.pid, self.number)
            os.kill(os.getpid(), self.number)


def train_and_kill(number: int, *flags: str | Path) -> Run:
    run = prepare(*flags)
    run.hooks.hooks.append(Kill(number))  # type: ignore[attr-defined]
    return finish(run)


@pytest.mark.flags("--exit-signal-handler", "--exit-signal", "--exit-signal-handler-for-dataloader")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_saves_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    before = signal.getsignal(signal.Signals[name])
    flags = ["--exit-signal-handler", "--save", tmp_path, "--save-interval", "100", "--num-workers", "1",
             "--exit-signal-handler-for-dataloader"]  # fmt: skip
    flags += [] if name == "SIGTERM" else ["--exit-signal", name]
    run = train_and_kill(signal.Signals[name], *flags)
    assert run.progress.iteration == 2
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert f"exiting program after signal {name}" in capsys.readouterr().out
    assert signal.getsignal(signal.Signals[name]) is before


def test_another_signal_does_what_it_always_does() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with pytest.raises(Interrupted):
            train_and_kill(signal.SIGUSR2, "--exit-signal-handler")
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_signals_that_nobody_can_catch_are_refused() -> None:
    with pytest.raises(ConfigError, match="--exit-signal SIGKILL ends a process without asking it; use SIGTERM"):
        run_config("--exit-signal-handler --exit-signal SIGKILL")


def test_all_ranks_stop_when_one_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another rank has got comes through the job's store, to both after the same step."""
    store = HashStore()
    monkeypatch.setattr(stop_agreement, "rendezvous_store", lambda: store)
    groups = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2) for rank in range(2)]
    ranks = [StopAgreement(group) for group in groups]  # type: ignore[arg-type]
    together, stopped = threading.Barrier(2), {}

    def train(rank: int) -> None:
        for step in range(1, 50):
            together.wait()
            if (rank, step) == (1, 3):
                ranks[1].ask("a signal")
            if (reason := ranks[rank].look()) is not None:
                stopped[rank] = (step, reason)
                return

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stopped[0] == stopped[1] and stopped[0][0] >= 3 and stopped[0][1] == "a signal"
