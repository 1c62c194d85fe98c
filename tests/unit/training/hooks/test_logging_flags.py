# SPDX-License-Identifier: Apache-2.0
"""Flags of logging, each through the real setup, step, loop and hooks of a tiny run."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.optional_deps import available
from megatron.core.ssm.libraries import StateCall, States
from megatron.core.ssm.linear_attention import attend_step
from megatron.core.ssm.state_norms import list_state_mixers
from megatron.training.hooks.progress_history import find_first_start
from megatron.training.run import Hook, Run
from tests.support.tiny_training import RandomTokens, finish, prepare, train_tiny


def printed(capsys: pytest.CaptureFixture[str], *flags: str | Path) -> list[str]:
    capsys.readouterr()
    train_tiny(*flags)
    return capsys.readouterr().out.splitlines()


# ---- timers

PHASES = ["forward-backward", "all-grads-sync", "optimizer", "params-all-gather"]
COMPUTATION = ["forward-compute", "backward-compute"]


def timed_parts(lines: list[str]) -> list[str]:
    return [match[1] for line in lines if (match := re.fullmatch(r"    ([a-z-]+)\.+: .*", line))]


@pytest.mark.flags("--timing-log-level", "--timing-log-option")
def test_timing_levels_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert timed_parts(printed(capsys, "--log-interval", "3")) == []
    lines = printed(capsys, "--log-interval", "3", "--timing-log-level", "1")
    assert timed_parts(lines) == PHASES * 2
    assert lines.count("(min, max) time across ranks (ms):") == 2
    lines = printed(capsys, "--log-interval", "6", "--timing-log-level", "2", "--timing-log-option", "max")
    assert "max time across ranks (ms):" in lines
    assert sorted(timed_parts(lines)) == sorted([*PHASES, *COMPUTATION, "batch-generator"])
    lines = printed(capsys, "--log-interval", "6", "--timing-log-level", "1", "--timing-log-option", "all")
    start = lines.index("times across ranks (ms):")
    assert lines[start + 1] == "  forward-backward:"
    assert re.fullmatch(r"     rank  0: \d+\.\d\d", lines[start + 2])


def test_times_are_means_over_the_interval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare("--log-interval", "3", "--timing-log-level", "1")
    monkeypatch.setattr(run.timers("optimizer", 1), "elapsed", lambda reset=True: 0.6)
    finish(run)
    assert "optimizer.......................: (200.00, 200.00)" in capsys.readouterr().out


@pytest.mark.flags("--barrier-with-level-1-timing")
def test_ranks_wait_before_timed_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr("megatron.core.timers.barrier", waited.append)
    train_tiny("--timing-log-level", "1", "--train-iters", "2")
    assert len(waited) == 2 * 3, "the gather is a part of the optimizer's time"
    train_tiny("--timing-log-level", "1", "--no-barrier-with-level-1-timing", "--train-iters", "2")
    train_tiny("--train-iters", "2")
    assert len(waited) == 2 * 3


# ---- the progress line and what follows it


@pytest.mark.flags("--log-num-zeros-in-grad")
def test_log_num_zeros_in_grad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counted: list[int] = []

    class Count(Hook):
        def on_gradients(self, run: Run) -> None:
            counted.append(sum(int((p.main_grad == 0).sum()) for p in run.model[0].parameters()))  # type: ignore

    # Rows of tokens that do not occur are zero on every processor: nothing is added to them. In an embedding that is
    # also the output layer they get what the softmax gives them, which is zero only where a kernel rounds it to zero.
    flags = ("--untie-embeddings-and-output-weights", "--log-num-zeros-in-grad", "--log-interval", "1")
    run = prepare(*flags, "--metrics-dir", tmp_path)
    run.hooks.hooks.append(Count())  # type: ignore[attr-defined]
    finish(run)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["num_zeros_in_grad"] for row in rows] == counted
    seen = {token for i in range(4) for token in RandomTokens(4)[i]["tokens"].tolist()}
    padded_vocabulary, hidden = run.model[0].module.embedding.word_embeddings.weight.shape  # type: ignore
    assert counted[0] >= (padded_vocabulary - len(seen)) * hidden > 0
    assert f"num zeros: {counted[-1]} |" in capsys.readouterr().out


@pytest.mark.flags("--log-layer-norms")
def test_log_layer_norms(capsys: pytest.CaptureFixture[str]) -> None:
    squares: dict[str, float] = {}

    class Keep(Hook):
        def on_gradients(self, run: Run) -> None:
            for name, param in run.model[0].module.named_parameters():
                squares[name] = float(param.main_grad.square().sum())  # type: ignore[attr-defined]

    run = prepare("--log-layer-norms", "--log-interval", "6", "--clip-grad", "0.001")
    run.hooks.hooks.append(Keep())  # type: ignore[attr-defined]
    finish(run)
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(next(line for line in lines if "norms by layer at iteration 6" in line))
    found = {}
    for line in lines[start + 1 : start + 6]:
        layer, parameters, gradients = (part.strip() for part in line.split("|")[:3])
        found[layer] = (float(parameters), float(gradients))
    assert list(found) == [
        "embedding.position_embeddings", "embedding.word_embeddings", "decoder.layers.0", "decoder.layers.1",
        "decoder.final_layernorm",
    ]  # fmt: skip
    parameters = dict(run.model[0].module.named_parameters())
    for layer, (of_parameters, of_gradients) in found.items():
        names = [name for name in parameters if name.startswith(layer)]
        squared = sum(float(parameters[name].detach().square().sum()) for name in names)
        assert of_parameters == pytest.approx(math.sqrt(squared), rel=1e-4)
        assert of_gradients == pytest.approx(math.sqrt(sum(squares[name] for name in names)), rel=1e-4)


@pytest.mark.flags("--log-layer-norms")
def test_log_norms_of_states(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In the steps that are logged, of the recurrence token by token."""
    calls: list[StateCall] = []
    pattern = "--hybrid-layer-pattern *-G --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8"
    flags = f"{pattern} --linear-value-head-dim 8 --normalization RMSNorm --log-interval 2 --train-iters 3"
    run = prepare("--log-layer-norms", *flags.split(), "--metrics-dir", str(tmp_path))
    ((name, mixer),) = list_state_mixers(run.model[0].module)
    own = mixer.states

    class Watch(States):
        def __call__(self, call: StateCall) -> tuple[Tensor, Tensor]:
            if mixer.notes_states:
                calls.append(call)
            return own(call)

    mixer.states = Watch()
    finish(run)
    norms = []
    for call in calls:
        inputs = call.inputs.map(torch.Tensor.detach)
        state = inputs.value.new_zeros(len(inputs.value), 4, 8, 8)
        for token in range(inputs.value.shape[1]):
            _, state = attend_step(inputs.map(lambda x, token=token: x[:, token]), state, call.unit)  # type: ignore
        norms += state.flatten(1).norm(dim=1).tolist()
    assert norms and name == "decoder.layers.2.self_attention"
    mean, largest = sum(norms) / len(norms), max(norms)
    # Iteration 2 alone is one of the interval.
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith(f"   {name}"))
    assert [float(x) for x in line.split("|")[1:3]] == pytest.approx([mean, largest], rel=1e-4)
    rows = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    (row,) = (row for row in rows if f"state-norm {name}" in row)
    assert row[f"state-norm {name}"] == pytest.approx(mean, rel=1e-4)
    assert row[f"state-norm-max {name}"] == pytest.approx(largest, rel=1e-4)


@pytest.mark.flags("--log-memory-interval")
def test_log_memory_interval(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in printed(capsys, "--log-memory-interval", "4") if "[rank 0] memory (MB)" in line]
    (line,) = lines
    assert re.fullmatch(
        r" \[rank 0\] memory \(MB\) after iteration 4: allocated \d+ \| peak \d+ \| used on .* \d+", line
    )


class EnergyCounter(types.ModuleType):
    """NVML as far as it is needed: each reading is 1.5 J above the one before, and one may fail."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__("pynvml")
        self.readings, self.fails_at = 0, fails_at

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's name)
        pass

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return name

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        assert handle == "GPU-of-this-test"
        self.readings += 1
        if self.readings == self.fails_at:
            raise self.NVMLError("GPU is lost")
        return 1_000_000 + 1500 * self.readings


@pytest.mark.flags("--log-energy")
def test_log_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megatron.core.device.identify_gpu", lambda device: "of-this-test")
    monkeypatch.setattr("megatron.training.launch.initialize.replace_gpu_settings", lambda config: [])
    monkeypatch.setitem(sys.modules, "pynvml", EnergyCounter())
    half_seconds = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: next(half_seconds) / 2)
    monkeypatch.setattr("megatron.training.hooks.energy.time", clock)
    flags = ("--log-interval", "2", "--train-iters", "4", "--metrics-dir", tmp_path)
    assert not any("energy" in line for line in printed(capsys, *flags))
    lines = [line for line in printed(capsys, *flags, "--log-energy") if "energy per GPU" in line]
    assert len(lines) == 2 and all(
        "| energy per GPU (J/iter/GPU): 1.5 | power per GPU (W/GPU): 3.0 |" in x for x in lines
    )
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("iter-energy/gpu") for row in rows] == [None, 1.5, None, 1.5]
    assert [row.get("power/gpu") for row in rows] == [None, 3.0, None, 3.0]


def test_a_counter_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Training goes on without; a package that is missing is an error before it begins."""
    monkeypatch.setattr("megatron.core.device.identify_gpu", lambda device: "of-this-test")
    monkeypatch.setattr("megatron.training.launch.initialize.replace_gpu_settings", lambda config: [])
    for reading in (1, 7):
        monkeypatch.setitem(sys.modules, "pynvml", EnergyCounter(fails_at=reading))
        train_tiny("--log-energy", "--log-interval", "2", "--train-iters", "4")
        output = capsys.readouterr()
        assert output.err.count("GPU-of-this-test cannot be read (GPU is lost); training goes on") == 1
        assert output.out.count("energy per GPU") == (reading == 7)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match="--log-energy needs the Python package"):
        train_tiny("--log-energy")


@pytest.mark.flags("--log-device-memory-used")
def test_log_device_memory_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron.core.device.read_used_memory_bytes", lambda: 7 * 2**20)
    flags = ("--metrics-dir", tmp_path, "--log-interval", "2", "--train-iters", "2")
    assert not any("device memory used" in line for line in printed(capsys, *flags))
    (line,) = (line for line in printed(capsys, *flags, "--log-device-memory-used") if "device memory used" in line)
    assert "| device memory used (MB): 7 |" in line
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["device-memory-used-bytes"] for row in rows] == [7 * 2**20] * 2


@pytest.mark.flags("--log-progress")
def test_log_progress(tmp_path: Path) -> None:
    for stop in ("4", "6"):
        train_tiny(
            "--log-progress", "--save", tmp_path, "--load", tmp_path, "--save-interval", "2", "--exit-interval", stop
        )
    lines = (tmp_path / "progress.txt").read_text().splitlines()
    columns = [line.split("\t") for line in lines]
    assert [entry[2] for entry in columns] == [
        "Starting job", "Saved checkpoint", "Saved checkpoint", "Starting job", "Saved checkpoint",
    ]  # fmt: skip
    assert [entry[3] for entry in columns] == [f"Iteration: {n}" for n in (0, 2, 4, 4, 6)]
    assert all(entry[1] == "# GPUs: 1" for entry in columns)
    flops = [float(entry[4 if "Starting" in entry[2] else 6].split(": ")[1]) for entry in columns]
    assert flops[1] > 0 and flops == pytest.approx([0, flops[1], 2 * flops[1], 2 * flops[1], 3 * flops[1]], rel=1e-5)
    assert columns[-1][-1] == f"Tokens (in billions): {6 * 4 * 16 / 1e9:.6g}"
    train_tiny("--save", tmp_path / "other", "--save-interval", "6")
    assert not (tmp_path / "other" / "progress.txt").exists()


def test_cumulative_throughput_counts_jobs_of_the_same_size() -> None:
    text = "".join(
        f"2026-01-01 00:00:0{second}\t# GPUs: {gpus}\tStarting job\tIteration: 0\tFloating-point operations: {flops}\n"
        for second, gpus, flops in ((1, 8, 10.0), (2, 4, 20.0), (3, 8, 30.0), (4, 8, 40.0))
    )
    start = find_first_start(text, 8)
    assert start is not None and start.flops == 30.0
    assert find_first_start(text, 4) is None


@pytest.mark.flags("--logging-level")
def test_logging_level(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().level
    try:
        train_tiny("--logging-level", "10", "--train-iters", "1")
        assert logging.getLogger("a.script").isEnabledFor(logging.DEBUG)
        train_tiny("--logging-level", "40", "--train-iters", "1")
        assert not logging.getLogger("a.script").isEnabledFor(logging.WARNING)
    finally:
        logging.getLogger().setLevel(before)


# ---- curves


def curves(directory: Path) -> dict[str, list[int]]:
    """Curve -> iterations at which it has points."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {name: [point.step for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.flags(
    "--log-timers-to-tensorboard", "--log-memory-to-tensorboard", "--log-validation-ppl-to-tensorboard",
    "--log-world-size-to-tensorboard",
)  # fmt: skip
def test_curves_that_are_asked_for(tmp_path: Path) -> None:
    basics = ("--eval-interval", "3", "--eval-iters", "1", "--timing-log-level", "1", "--log-interval", "3",
              "--train-iters", "3")  # fmt: skip
    train_tiny("--tensorboard-dir", tmp_path / "none", *basics)
    plain = set(curves(tmp_path / "none"))
    for flag, expected in {
        "--log-timers-to-tensorboard": {"iteration-time", *(f"{name}-time" for name in PHASES)},
        "--log-memory-to-tensorboard": {"mem-allocated-bytes", "mem-max-allocated-bytes"},
        "--log-validation-ppl-to-tensorboard": {"lm loss validation ppl", "lm loss test ppl"},
        "--log-world-size-to-tensorboard": {"world-size"},
    }.items():
        train_tiny("--tensorboard-dir", tmp_path / flag, flag, *basics)
        assert set(curves(tmp_path / flag)) - plain == expected
    assert curves(tmp_path / "--log-timers-to-tensorboard")["optimizer-time"] == [3]


class RecordingWandb(types.ModuleType):
    """Stands in for the package: keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.points: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **arguments: Any) -> RecordingWandb:
        self.started.append(arguments)
        return self

    def log(self, points: dict[str, float], step: int) -> None:
        self.points.append((step, points))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.flags("--wandb-project", "--wandb-exp-name", "--wandb-entity", "--wandb-save-dir")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = RecordingWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = ("--wandb-project", "p", "--wandb-exp-name", "n", "--wandb-entity", "e", "--wandb-save-dir", tmp_path / "w")
    train_tiny(*flags, "--tensorboard-log-interval", "3", "--eval-interval", "4", "--eval-iters", "1")
    (started,) = wandb.started
    config = started.pop("config")
    assert started == {"project": "p", "name": "n", "entity": "e", "dir": str(tmp_path / "w")}
    assert config["training"]["train_iters"] == 6 and json.dumps(config)
    assert [(step, "lm loss" in points) for step, points in wandb.points] == [
        (3, True), (4, False), (6, True), (6, False), (6, False),
    ]  # fmt: skip
    assert "lm loss validation" in wandb.points[1][1]
    assert wandb.finished == 1
    train_tiny("--train-iters", "1")
    assert len(wandb.started) == 1, "nothing goes there unasked"


def test_wandb_that_is_missing_or_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--wandb-project", "p", "--wandb-save-dir", tmp_path)
    if not available("wandb"):
        with pytest.raises(ConfigError, match="--wandb-project p needs the Python package wandb"):
            train_tiny(*flags)
    wandb = RecordingWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(wandb, "init", lambda **_: (_ for _ in ()).throw(RuntimeError("no\nAPI key")))
    with pytest.raises(ConfigError, match=r"begin a run \(RuntimeError: no API key\); log in, or set WANDB_MODE"):
        train_tiny(*flags)


@pytest.mark.skipif(not available("wandb"), reason="the package is not installed")
def test_the_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    train_tiny("--wandb-project", "p", "--wandb-save-dir", tmp_path, "--train-iters", "2")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_flags_without_anything_to_do_are_noted() -> None:
    notes = prepare("--log-memory-to-tensorboard", "--wandb-entity", "me", "--log-progress").config.notes
    assert "--log-memory-to-tensorboard has no effect without --tensorboard-dir" in notes
    assert "--wandb-entity me has no effect without --wandb-project" in notes
    assert "--log-progress has no effect without --save" in notes


def test_logs_do_not_change_the_run() -> None:
    """Counting, norms and timers leave every weight as it is."""
    plain = train_tiny("--train-iters", "3")
    logged = train_tiny("--train-iters", "3", "--log-layer-norms", "--log-num-zeros-in-grad", "--log-interval", "1",
                        "--timing-log-level", "2")  # fmt: skip
    for ours, theirs in zip(plain.model[0].parameters(), logged.model[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_curves_that_cannot_be_written_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match="--tensorboard-dir .*/file/x cannot be written .*; give a writable directory"
    ):
        train_tiny("--tensorboard-dir", tmp_path / "file" / "x", "--train-iters", "1")


def test_the_log_begins_with_what_each_operation_got(capsys: pytest.CaptureFixture[str]) -> None:
    finish(prepare())
    lines = capsys.readouterr().out.splitlines()
    started = next(index for index, line in enumerate(lines) if line.startswith("training "))
    assert "layers: eager" in lines[:started]
    assert any(line.startswith("attention: ") for line in lines[:started])
    assert not any(line.startswith("rotary positions") for line in lines), "this model learns its positions"
