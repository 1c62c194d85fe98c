# SPDX-License-Identifier: Apache-2.0
"""Flags of the training program, each through the real setup, step, loop and hooks of a tiny run."""

from __future__ import annotations

import gc
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import optional_deps
from megatron.core.errors import DataError, NonFiniteError
from megatron.core.transformer.execution import compilation
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.data.samples import build_batch_size_calculator, count_iterations
from megatron.training.hooks.evaluation import EvaluationHook
from megatron.training.run import Run
from tests.support.tiny_training import RandomTokens, finish, prepare, replace_forward_step, train_tiny


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def train_and_read(tmp_path: Path, *flags: str | Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl of a tiny run."""
    train_tiny(*flags, "--metrics-dir", tmp_path)
    return rows(tmp_path)


def losses(tmp_path: Path, *flags: str | Path) -> list[float]:
    return [row["lm loss"] for row in train_and_read(tmp_path, *flags)]


# ---- how long, how much


@pytest.mark.flags("--train-iters", "--global-batch-size", "--metrics-dir")
def test_iterations_and_batch_size(tmp_path: Path) -> None:
    found = train_and_read(tmp_path, "--train-iters", "3", "--global-batch-size", "8")
    assert [(row["iteration"], row["consumed_samples"], row["global_batch_size"]) for row in found] == [
        (1, 8, 8), (2, 16, 8), (3, 24, 8),
    ]  # fmt: skip


SAMPLE_BASED = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --lr 1e-2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50 --eval-iters 0 --num-workers 0"
)


@pytest.mark.flags("--train-samples")
def test_train_samples_are_the_steps_that_fit() -> None:
    from megatron.training.flags.read import read_run_config

    config = read_run_config(f"{SAMPLE_BASED} --global-batch-size 4 --train-samples 22".split(), {})
    assert count_iterations(config, build_batch_size_calculator(config)) == 5


@pytest.mark.flags("--train-samples", "--rampup-batch-size")
def test_train_samples_with_a_growing_batch() -> None:
    """2 2 2 then 4 4 ... up to 22 samples: 3 steps of 2 until 6 samples, 4 steps of 4."""
    from megatron.training.flags.read import read_run_config

    flags = f"{SAMPLE_BASED} --global-batch-size 4 --rampup-batch-size 2 2 6 --train-samples 22"
    config = read_run_config(flags.split(), {})
    assert count_iterations(config, build_batch_size_calculator(config)) == 7


@pytest.mark.flags("--micro-batch-size")
@pytest.mark.parametrize(("micro_batch_size", "microbatches"), [(1, 8), (4, 2)])
def test_microbatches(micro_batch_size: int, microbatches: int) -> None:
    run = prepare("--micro-batch-size", str(micro_batch_size), "--global-batch-size", "8", "--train-iters", "1")
    seen: list[int] = []
    forward_step = run.recipe.forward_step

    def counting(batches: Any, model: Any) -> Any:
        seen.append(1)
        return forward_step(batches, model)

    replace_forward_step(run, counting)
    finish(run)
    assert len(seen) == microbatches
    assert next(run.data.open("train", 0))["tokens"].shape[0] == micro_batch_size


def test_the_size_of_microbatches_does_not_change_the_curve(tmp_path: Path) -> None:
    dropout_off = ("--hidden-dropout", "0", "--attention-dropout", "0")
    ones = losses(tmp_path / "1", "--micro-batch-size", "1", *dropout_off)
    fours = losses(tmp_path / "4", "--micro-batch-size", "4", *dropout_off)
    assert ones == pytest.approx(fours, rel=1e-5)


@pytest.mark.flags("--rampup-batch-size")
def test_ramp_up(tmp_path: Path) -> None:
    flags = ("--rampup-batch-size", "2", "2", "8", "--global-batch-size", "6", "--micro-batch-size", "1")
    found = train_and_read(tmp_path, *flags)
    assert [row["global_batch_size"] for row in found] == [2, 2, 4, 6, 6, 6]
    assert [row["consumed_samples"] for row in found] == [2, 4, 8, 14, 20, 26]


@pytest.mark.flags("--seed")
def test_seed(tmp_path: Path) -> None:
    first = losses(tmp_path / "1", "--seed", "7")
    assert losses(tmp_path / "2", "--seed", "7") == first
    assert losses(tmp_path / "3", "--seed", "8") != first


# ---- number formats and compilation


@pytest.mark.flags("--bf16")
def test_bf16_is_close_to_fp32(tmp_path: Path) -> None:
    dropout_off = ("--hidden-dropout", "0", "--attention-dropout", "0")
    exact = losses(tmp_path / "fp32", *dropout_off)
    run = prepare("--bf16", *dropout_off, "--metrics-dir", tmp_path / "bf16")
    assert {parameter.dtype for chunk in run.model for parameter in chunk.parameters()} == {torch.bfloat16}
    finish(run)
    rounded = [row["lm loss"] for row in rows(tmp_path / "bf16")]
    assert rounded == pytest.approx(exact, rel=2e-2)
    assert rounded != exact


@pytest.mark.flags("--compile", "--use-transformer-engine-op-fuser")
def test_compile_compiles_the_regions_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")

    def compiled(run: Run) -> list[bool]:
        layers = [module for module in run.model[0].modules() if isinstance(module, TransformerLayer)]
        return [hasattr(layer.mlp.activate, "_torchdynamo_orig_callable") for layer in layers]

    assert compiled(prepare("--compile")) == [True, True]
    assert compiled(prepare("--use-transformer-engine-op-fuser")) == [True, True]
    assert compiled(prepare()) == [False, False]


# ---- evaluation


@pytest.mark.flags("--eval-interval", "--eval-iters")
def test_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_tiny("--eval-interval", "4", "--eval-iters", "2", "--metrics-dir", tmp_path)
    found = [(row["iteration"], row["split"], "final" in row) for row in rows(tmp_path) if "eval" in row]
    assert found == [(4, "validation", False), (6, "validation", True), (6, "test", True)]
    assert run.progress.consumed_valid_samples == 2 * 2 * 4
    assert run.model[0].training
    output = capsys.readouterr().out
    for where in ("validation loss at iteration 4 |", "validation loss at iteration 6 on validation set |",
                  "test loss at iteration 6 on test set |"):  # fmt: skip
        assert where in output


def test_an_evaluation_says_of_what_its_loss_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The last iteration is evaluated twice, as upstream does, on samples that are named."""
    found = []
    for flags in (("--eval-iters", "2"), ("--eval-iters", "6"), ("--eval-iters", "1", "--full-validation")):
        run = prepare("--eval-interval", "3", *flags)
        run.data.datasets["validation"] = RandomTokens(41)
        finish(run)
        line = r" (\w+) loss at (.*?) \| lm loss value: (\S+) .* \| (.*) \|\n"
        found.append(re.findall(line, capsys.readouterr().out))
    some, many, whole = found
    assert [(where, samples) for _, where, _, samples in some] == [
        ("iteration 3", "2 batches of 4: samples 0 to 7 of 41"),
        ("iteration 6", "2 batches of 4: samples 8 to 15 of 41"),
        ("iteration 6 on validation set", "2 batches of 4: samples 16 to 23 of 41"),
        ("iteration 6 on test set", "2 batches of 4: samples 0 to 7 of 8"),
    ]
    assert some[1][2] != some[2][2], "other samples, another loss"
    assert many[1][3] == "6 batches of 4: from sample 24 of 41 on, beginning again at the end"
    assert [samples for *_, samples in whole[:3]] == ["all 41 samples"] * 3
    assert whole[1][2] == whole[2][2]


@pytest.mark.flags("--eval-interval")
def test_no_interval_no_evaluation(tmp_path: Path) -> None:
    assert all("eval" not in row for row in train_and_read(tmp_path, "--eval-iters", "2"))


def test_evaluation_does_not_disturb_training(tmp_path: Path) -> None:
    """With dropout on: evaluation draws no random numbers and leaves no gradients."""
    alone = losses(tmp_path / "alone")
    train_tiny("--eval-interval", "2", "--eval-iters", "1", "--metrics-dir", tmp_path / "with")
    assert [row["lm loss"] for row in rows(tmp_path / "with") if "eval" not in row] == alone


def test_evaluation_sees_the_next_samples_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, int]] = []
    run = prepare("--eval-interval", "2", "--eval-iters", "1")
    open_split = run.data.open
    monkeypatch.setattr(
        run.data, "open", lambda split, at, *part: opened.append((split, at)) or open_split(split, at, *part)
    )
    run.progress.consumed_valid_samples = 8
    finish(run)
    assert opened == [("train", 0), ("validation", 8), ("test", 0)]


@pytest.mark.flags("--skip-train")
def test_skip_train_only_evaluates(tmp_path: Path) -> None:
    train_tiny("--save", tmp_path / "ckpt", "--save-interval", "6")
    flags = ("--load", tmp_path / "ckpt", "--skip-train", "--eval-iters", "2", "--metrics-dir", tmp_path / "metrics")
    run = train_tiny(*flags)
    assert run.progress.iteration == 6
    found = [(row["iteration"], row["split"]) for row in rows(tmp_path / "metrics")]
    assert found == [(6, "validation"), (6, "test")]


# ---- reasons to stop


@pytest.mark.flags("--exit-interval")
def test_exit_interval_saves_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--exit-interval", "4", "--save", tmp_path, "--save-interval", "100")
    run = train_tiny(*flags, "--eval-interval", "100", "--eval-iters", "1")
    assert run.progress.iteration == 4
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    output = capsys.readouterr().out
    assert "exiting program at iteration 4" in output
    assert "validation loss" not in output, "a run that was stopped is not over"


@pytest.mark.flags("--exit-duration-in-mins")
def test_exit_duration(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megatron.training.hooks.exits.PROGRAM_STARTED_AT", time.monotonic())
    assert train_tiny("--exit-duration-in-mins", "2").progress.iteration == 6
    monkeypatch.setattr("megatron.training.hooks.exits.PROGRAM_STARTED_AT", time.monotonic() - 10_000)
    assert train_tiny("--exit-duration-in-mins", "2").progress.iteration == 1
    assert "exiting program after" in capsys.readouterr().out


class Diverging:
    """A forward_step whose loss becomes NaN at the third microbatch-pair."""

    def __init__(self, run: Run) -> None:
        self.forward_step, self.calls = run.recipe.forward_step, 0

    def __call__(self, batches: Any, model: Any) -> Any:
        self.calls += 1
        output, loss_func = self.forward_step(batches, model)
        return (output * float("nan") if self.calls == 5 else output), loss_func


@pytest.mark.flags("--check-for-nan-in-loss-and-grad")
def test_a_nan_stops_the_run_or_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare("--save", tmp_path / "ckpt", "--save-interval", "1")
    replace_forward_step(run, Diverging(run))
    with pytest.raises(NonFiniteError):
        finish(run)
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "2"

    run = prepare("--no-check-for-nan-in-loss-and-grad", "--metrics-dir", tmp_path, "--log-interval", "6")
    replace_forward_step(run, Diverging(run))
    finish(run)
    found = rows(tmp_path)
    assert [row["skipped"] for row in found] == [False, False, True, False, False, False]
    assert found[2]["lm loss"] is None
    assert run.progress.skipped_iterations == run.progress.nan_iterations == 1
    assert found[2]["lr"] == found[1]["lr"], "a skipped step does not advance the learning rate"
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [("--init-method-std", "0"), ("--embedding-init-method-std", "0"), ("--hidden-dropout", "1")]
)
def test_what_is_noted_to_learn_nothing_learns_nothing(flags: tuple[str, ...]) -> None:
    """The notes are true: after three steps at a rate of 0.1 the matrices they are about are what they were."""
    run = prepare(*flags, "--attention-dropout", "0", "--weight-decay", "0", "--lr", "0.1", "--train-iters", "3")
    name = "embedding.word_embeddings" if "embedding" in flags[0] else "layers.1.mlp.linear_fc1.weight"
    (matrix,) = (p for found, p in run.model[0].module.named_parameters() if name in found)
    before = matrix.detach().clone()
    finish(run)
    assert torch.equal(matrix, before)


def test_missing_data_is_one_sentence() -> None:
    run = prepare()
    run.data.datasets["train"] = None
    with pytest.raises(DataError, match="there is no train data"):
        finish(run)


# ---- logs


@pytest.mark.flags("--log-interval")
def test_log_interval_and_what_a_line_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = train_and_read(tmp_path, "--log-interval", "2")
    lines = [line for line in capsys.readouterr().out.splitlines() if "elapsed time per iteration (ms):" in line]
    assert [line.split("] ")[1].split(" |")[0] for line in lines] == [f"iteration {i:8d}/{6:8d}" for i in (2, 4, 6)]
    mean = (found[0]["lm loss"] + found[1]["lm loss"]) / 2
    for text in ("consumed samples:            8 |", "throughput per GPU (TFLOP/s/GPU):", "MFU (%):",
                 "tokens per second:", "learning rate:", "global batch size:     4 |", f"lm loss: {mean:.6E} |",
                 f"grad norm: {found[1]['grad_norm']:.3f} |", "number of skipped iterations:   0 |",
                 "number of nan iterations:   0 |", "memory (MB):"):  # fmt: skip
        assert text in lines[0]
    assert "params norm" not in lines[0]


@pytest.mark.flags("--log-params-norm")
def test_log_params_norm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_tiny("--log-params-norm", "--log-interval", "6", "--metrics-dir", tmp_path)
    squares = sum(float(parameter.detach().square().sum()) for parameter in run.model[0].parameters())
    norm = rows(tmp_path)[-1]["params_norm"]
    assert norm == pytest.approx(squares**0.5, rel=1e-5)
    assert f"params norm: {norm:.3f}" in capsys.readouterr().out


def test_rows_of_metrics_are_complete(tmp_path: Path) -> None:
    row = train_and_read(tmp_path)[-1]
    assert set(row) == {
        "iteration", "consumed_samples", "lm loss", "grad_norm", "lr", "global_batch_size", "skipped",
        "iteration_time_seconds", "tokens_per_second", "tflops", "mfu", "memory_bytes", "peak_memory_bytes",
        "loss_scale",
    }  # fmt: skip
    assert row["tokens_per_second"] == pytest.approx(4 * 16 / row["iteration_time_seconds"])
    assert 0 < row["mfu"] < 1


def scalars(directory: Path) -> dict[str, list[int]]:
    """Curve -> iterations at which it has points."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {name: [point.step for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.flags("--tensorboard-dir", "--tensorboard-log-interval", "--log-throughput")
def test_tensorboard(tmp_path: Path) -> None:
    flags = ("--tensorboard-log-interval", "3", "--eval-interval", "4", "--eval-iters", "1")
    train_tiny("--tensorboard-dir", tmp_path / "plain", *flags)
    curves = scalars(tmp_path / "plain")
    assert curves["lm loss"] == curves["learning-rate"] == curves["grad-norm"] == [3, 6]
    assert curves["lm loss validation"] == [4, 6]
    assert "throughput" not in curves
    train_tiny("--tensorboard-dir", tmp_path / "throughput", "--log-throughput")
    assert scalars(tmp_path / "throughput")["throughput"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.flags("--tensorboard-queue-size")
def test_tensorboard_queue_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    real = optional_deps.require("torch.utils.tensorboard", needed_by="test").SummaryWriter

    class Recording(real):  # type: ignore[misc, valid-type]
        def __init__(self, **arguments: Any) -> None:
            given.append(arguments)
            super().__init__(**arguments)

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Recording)
    train_tiny("--tensorboard-dir", tmp_path, "--tensorboard-queue-size", "17")
    assert given[0]["max_queue"] == 17


# ---- garbage collection


def collections(monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[int]:
    """Iterations at which garbage was collected by hand."""
    run = prepare("--eval-interval", "4", "--eval-iters", "1", *flags)
    at: list[int] = []
    automatic: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda *_: at.append(run.progress.iteration) or automatic.append(gc.isenabled()))
    finish(run)
    monkeypatch.undo()
    assert gc.isenabled()
    assert not any(automatic)
    return at


@pytest.mark.flags("--manual-gc", "--manual-gc-interval", "--manual-gc-eval")
def test_manual_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collections(monkeypatch) == []
    assert collections(monkeypatch, "--manual-gc") == [0, 4, 6, 6]
    assert collections(monkeypatch, "--manual-gc", "--no-manual-gc-eval") == [0]
    assert collections(monkeypatch, "--manual-gc", "--no-manual-gc-eval", "--manual-gc-interval", "3") == [0, 3, 6]


def test_hooks_only_for_what_was_asked() -> None:
    kinds = {type(hook) for hook in prepare().hooks.hooks}
    assert EvaluationHook not in kinds
    assert {kind.__name__ for kind in kinds} == {"StepHook", "ConsoleHook", "NonFiniteHook", "ExitHook"}
