"""Sizes and moments of evaluation, iterations that are passed over, and exits by a signal."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.training.flags.read import read_run_config
from megatron.training.run import Hook, Run
from tests.unit.run_flags import run_config
from tests.unit.tiny_training import FLAGS, differing, finish, prepare, replace_forward_step, train_tiny

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
    run = prepare("--iterations-to-skip", "1", "3", *NO_DROPOUT, "--metrics-dir", tmp_path / "skipping")
    finish(run)
    found = rows(tmp_path / "skipping")
    assert [(row["iteration"], row["consumed_samples"]) for row in found] == [(1, 4), (3, 12), (5, 20), (6, 24)]
    assert run.progress.iteration == 6 and run.optimizer.step_count == 4 and run.scheduler.num_steps == 4 * 4
    assert "iteration 2 is passed over: --iterations-to-skip 1" in capsys.readouterr().out
    # The third iteration trains on the samples that it always does, with the weights after the first.
    train_tiny(*NO_DROPOUT, "--metrics-dir", tmp_path / "plain")
    plain = rows(tmp_path / "plain")
    assert found[0]["lm loss"] == plain[0]["lm loss"]
    assert found[1]["lm loss"] != plain[2]["lm loss"]


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
    """What another rank has got comes through the reduction."""
    run = prepare("--exit-signal-handler")

    def with_another_rank(tensor: torch.Tensor, group: Any, op: str) -> None:
        assert op == "max" and group is run.groups.world
        tensor.fill_(1.0)

    monkeypatch.setattr("megatron.training.hooks.iterations.all_reduce", with_another_rank)
    finish(run)
    assert run.progress.iteration == 1


@pytest.mark.flags("--test-mode", "--train-sync-interval")
def test_flags_that_have_nothing_to_do_say_so() -> None:
    notes = run_config("--test-mode --train-sync-interval 5").notes
    assert any("--test-mode has no effect" in note for note in notes)
    assert any("--train-sync-interval" in note and "no effect" in note for note in notes)


SAMPLE = ("--eval-interval", "3", "--eval-iters", "1", "--eval-sample-prompt", "7 3 9", "--eval-sample-tokens", "5")
STYLES = {
    "gpt": (),
    "rope": ("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--ffn-hidden-size", "32"),
    "experts": ("--num-experts", "4", "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.1",
                "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid",
                "--moe-input-jitter-eps", "0.1"),
    "clipped": ("--log-max-attention-logit", "--use-distributed-optimizer", "--overlap-grad-reduce",
                "--overlap-param-gather"),
}  # fmt: skip


@pytest.mark.flags("--eval-sample-prompt", "--eval-sample-tokens")
@pytest.mark.parametrize("style", STYLES)
def test_generated_text_is_written_and_changes_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], style: str
) -> None:
    """With dropout on: every weight, every moment and every loss is bit for bit that of the run without."""
    runs = {}
    for name, flags in {"plain": SAMPLE[:4], "sampled": (*SAMPLE, "--tensorboard-dir", tmp_path / "curves")}.items():
        runs[name] = train_tiny(*STYLES[style], *flags, "--metrics-dir", tmp_path / name)
    assert differing(runs["plain"], runs["sampled"]) == []
    found = {name: rows(tmp_path / name) for name in runs}
    for plain, sampled in zip(found["plain"], found["sampled"], strict=True):
        assert plain.get("lm loss") == sampled.get("lm loss") and plain.get("eval") == sampled.get("eval")
    texts = {row["iteration"]: row["generated"] for row in found["sampled"] if "generated" in row}
    assert list(texts) == [3, 6] and sum("generated" in row for row in found["sampled"]) == 2, "once for each iteration"
    for text in texts.values():
        words = [int(word) for word in text.split()]
        assert words[:3] == [7, 3, 9] and 3 < len(words) <= 8 and max(words) < 50
    out = capsys.readouterr().out
    assert all(f"text generated at iteration {at}:\n    {text}\n" in out for at, text in texts.items())
    assert runs["sampled"].model[0].training

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "curves"))
    events.Reload()
    points = events.Tensors("generated text/text_summary")
    assert [(point.step, point.tensor_proto.string_val[0].decode().strip()) for point in points] == list(texts.items())


def test_a_prompt_that_does_not_fit_is_found_before_the_first_step() -> None:
    for prompt, problem in (("", "has no tokens"), (" ".join("1" * 16), "has 16 tokens and the model 16 positions")):
        with pytest.raises(ConfigError, match=f"--eval-sample-prompt .*{problem}"):
            train_tiny(*SAMPLE, "--eval-sample-prompt", prompt)


def test_a_model_that_cannot_generate_trains_on(capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare(*SAMPLE)
    forward = run.model[0].module.forward

    def without_cache(*tensors: Any, **named: Any) -> Any:
        if "inference_context" in named:
            raise TypeError("forward() got an unexpected keyword argument 'inference_context'")
        return forward(*tensors, **named)

    run.model[0].module.forward = without_cache
    assert finish(run).progress.iteration == 6
    streams = capsys.readouterr()
    assert streams.err.count("warning: --eval-sample-prompt: no text is generated, training goes on (TypeError") == 1
    assert "text generated" not in streams.out


def test_layouts_that_cannot_generate_are_noted() -> None:
    def said(flags: str, world_size: str) -> bool:
        argv = f"{FLAGS} --eval-interval 3 --eval-iters 1 --eval-sample-prompt 1 {flags}".split()
        notes = read_run_config(argv, {"WORLD_SIZE": world_size}).notes
        return any(
            note.startswith("--eval-sample-prompt 1 has no effect without a model that is whole") for note in notes
        )

    assert not said("", "2") and said("--tensor-model-parallel-size 2", "2")
    assert said("--pipeline-model-parallel-size 2", "2") and said("--context-parallel-size 2", "2")


def test_an_evaluation_without_data_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for data, said in ((None, True), ("kept", False)):
        run = prepare("--eval-interval", "6", "--eval-iters", "1", "--train-iters", "1")
        if data is None:
            run.data.datasets["validation"] = None
        finish(run)
        assert ("note: there is no validation data" in capsys.readouterr().out) == said
