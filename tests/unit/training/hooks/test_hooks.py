# SPDX-License-Identifier: Apache-2.0
"""Hooks: phases, what errors of writers and of others do, their state, and the example that the documentation has."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import NonFiniteError
from megatron.training.checkpoint.restore import load_checkpoint
from megatron.training.hooks.dispatch import Hooks
from megatron.training.hooks.writers import MetricsFile
from megatron.training.metrics import Metrics
from megatron.training.run import Hook, Phase, Run, StepResult
from tests.support.tiny_training import differing, finish, prepare, replace_forward_step, train_tiny

ROOT = Path(__file__).resolve().parents[4]


def with_hooks(run: Run, *hooks: Hook) -> Run:
    assert isinstance(run.hooks, Hooks)
    run.hooks.hooks += hooks
    return run


def rows(directory: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "eval" not in row]


# ---- phases


def test_phases_decide_the_order_not_the_list() -> None:
    seen: list[str] = []

    class Noting(Hook):
        def __init__(self, phase: Phase) -> None:
            self.phase = phase

        def on_step_start(self, run: Run) -> None:
            seen.append(f"start {self.phase.name}")

        def on_step_end(self, run: Run, result: StepResult) -> None:
            seen.append(f"end {self.phase.name}")

    finish(with_hooks(prepare("--train-iters", "1"), *(Noting(phase) for phase in reversed(Phase))))
    names = [phase.name for phase in Phase]
    assert seen == [*(f"start {name}" for name in reversed(names)), *(f"end {name}" for name in names)]


def test_the_order_of_building_changes_nothing(tmp_path: Path) -> None:
    flags = ("--log-interval", "2", "--check-for-spiky-loss", "--save-interval", "3", "--eval-interval", "2",
             "--eval-iters", "1", "--timing-log-level", "2")  # fmt: skip
    one = train_tiny(*flags, "--metrics-dir", tmp_path / "a", "--save", tmp_path / "save-a")
    other = prepare(*flags, "--metrics-dir", tmp_path / "b", "--save", tmp_path / "save-b")
    other.hooks.hooks.reverse()  # type: ignore[attr-defined]
    finish(other)
    assert differing(one, other) == []
    assert one.progress == other.progress
    for row, same in zip(rows(tmp_path / "a"), rows(tmp_path / "b"), strict=True):
        assert row.keys() == same.keys() and row["lm loss"] == same["lm loss"]


def test_a_step_may_be_wrapped() -> None:
    done: list[int] = []

    class Count(Hook):
        def wrap_step(self, step: Any) -> Any:
            def counted(run: Run, batches: Any) -> None:
                step(run, batches)
                done.append(run.progress.iteration)

            return counted

    finish(with_hooks(prepare("--train-iters", "3"), Count()))
    assert done == [1, 2, 3]


# ---- errors


def test_a_full_disk_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One warning; the weights are those of a run whose disk has room, and later rows are written once it has."""
    undisturbed = train_tiny("--log-interval", "1")
    run = prepare("--log-interval", "1", "--metrics-dir", tmp_path)
    real, calls = MetricsFile.write, []

    def write(file: MetricsFile, *new: dict[str, Any]) -> None:
        calls.append(new)
        if 2 <= len(calls) <= 4:
            raise OSError(28, "No space left on device")
        real(file, *new)

    monkeypatch.setattr(MetricsFile, "write", write)
    finish(run)
    errors = capsys.readouterr().err
    assert errors.count("warning: MetricsFileHook failed, training goes on") == 1
    assert "No space left on device" in errors
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 5, 6]
    assert differing(run, undisturbed) == []


def test_an_error_elsewhere_ends_the_run_and_is_told_to_all(tmp_path: Path) -> None:
    told: list[str] = []

    class Failing(Hook):
        def on_step_end(self, run: Run, result: StepResult) -> None:
            if run.progress.iteration == 4:
                raise ValueError("of a hook")

        def on_error(self, run: Run, error: Exception) -> None:
            told.append(str(error))
            raise KeyError("and in telling it, too")

    class Listening(Hook):
        def on_error(self, run: Run, error: Exception) -> None:
            told.append(str(error))

    with pytest.raises(ValueError, match="of a hook"):
        finish(with_hooks(prepare("--metrics-dir", tmp_path), Listening(), Failing()))
    assert told == ["of a hook"] * 2
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4], "what was measured until then is written"


class Diverging:
    """A forward_step whose loss is no number in the third iteration."""

    def __init__(self, forward_step: Any) -> None:
        self.forward_step, self.calls = forward_step, 0

    def __call__(self, batches: Any, model: Any) -> Any:
        self.calls += 1
        output, loss_func = self.forward_step(batches, model)
        return (output * float("nan") if self.calls == 5 else output), loss_func


@pytest.mark.parametrize("interval", ["1", "3", "4", "6", "100"])
def test_weights_stay_as_they_were_before_a_nan_whenever_it_is_found(interval: str, tmp_path: Path) -> None:
    before = train_tiny("--train-iters", "2", "--lr-decay-iters", "6")
    run = prepare("--lr-decay-iters", "6", "--log-interval", interval, "--metrics-dir", tmp_path, "--save",
                  tmp_path / "save", "--save-interval", "50")  # fmt: skip
    replace_forward_step(run, Diverging(run.recipe.forward_step))
    with pytest.raises(NonFiniteError, match="the gradient of|iteration 3: "):
        finish(run)
    assert differing(run, before) == []
    assert not (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()
    written = rows(tmp_path)
    assert [row["iteration"] for row in written[:2]] == [1, 2] and all(row["lm loss"] for row in written[:2])


# ---- state


class Remembering(Hook):
    """Counts the iterations of a run over all its jobs."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_hooks_have_state_in_the_checkpoint(tmp_path: Path) -> None:
    flags = ("--save", tmp_path, "--load", tmp_path, "--save-interval", "2", "--check-for-spiky-loss")
    finish(with_hooks(prepare(*flags, "--exit-interval", "4"), Remembering()))
    run = with_hooks(prepare(*flags), again := Remembering())
    load_checkpoint(run)  # prepare() has loaded before the hook was there
    assert again.count == 4
    finish(run)
    assert again.count == 6


# ---- metrics


def test_values_are_copied_reduced_and_read_together() -> None:
    metrics = Metrics(interval=2)
    moving = torch.zeros(())
    for step in (1, 2):
        metrics.record("moving", moving)
        metrics.record("parts", torch.tensor(step, dtype=torch.int64), reduce="sum")
        metrics.record("parts", 10, reduce="sum")
        metrics.record("late", lambda: 0.5)
        metrics.record("unknown", None)
        moving += 1
        metrics.end_step(step)
        assert metrics.is_due(step) is (step == 2)
    first, second = metrics.read()
    assert (first["moving"], second["moving"]) == (0.0, 1.0)
    assert first.values["parts"] == 11 and isinstance(first.values["parts"], int)
    assert second["late"] == 0.5 and second.values["unknown"] is None
    assert metrics.read() == []
    with pytest.raises(ValueError, match=r"has the shape \[3\]"):
        metrics.record("vector", torch.zeros(3))


def test_all_writers_get_the_same_values(tmp_path: Path) -> None:
    """Times of the timers went to the curves only."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_tiny("--metrics-dir", tmp_path, "--tensorboard-dir", tmp_path, "--timing-log-level", "1", "--log-interval",
               "3", "--log-timers-to-tensorboard", "--log-layer-norms")  # fmt: skip
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = rows(tmp_path)
    for name in ("optimizer-time", "params-norm decoder.layers.0", "lm loss"):
        points = {point.step: point.value for point in events.Scalars(name)}
        assert points == {row["iteration"]: pytest.approx(row[name], rel=1e-6) for row in found if name in row}
    assert [row["iteration"] for row in found if "optimizer-time" in row] == [3, 6]


def test_the_example_of_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "logging.md").read_text()
    (example,) = re.findall(r"```python\n(.*?class EmbeddingNorm.*?)```", text, re.DOTALL)
    (tmp_path / "example_hook.py").write_text(example.partition("pretrain(")[0])
    spec = importlib.util.spec_from_file_location("example_hook", tmp_path / "example_hook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    finish(with_hooks(prepare("--metrics-dir", tmp_path, "--log-interval", "3"), module.EmbeddingNorm()))
    assert "| embedding norm: " in capsys.readouterr().out
    found = [row["embedding-norm"] for row in rows(tmp_path)]
    assert len(found) == 6 and all(0 < value < 100 for value in found)
