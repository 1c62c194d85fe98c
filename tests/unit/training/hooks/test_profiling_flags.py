# SPDX-License-Identifier: Apache-2.0
"""Flags of profiling, through the real setup, step, loop and hooks of a tiny run; GPU calls are recorded, not made."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.core import device
from megatron.core.errors import ConfigError
from megatron.training.launch import initialize
from tests.support.run_flags import run_config
from tests.support.tiny_training import prepare, train_tiny


def trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


TORCH = ("--profile", "--use-pytorch-profiler", "--log-interval", "1")


def updates(path: Path) -> int:
    """Optimizer steps in a trace."""
    return sum(event.get("name") == "aten::_fused_adamw_" for event in trace(path))


@pytest.mark.flags("--profile", "--use-pytorch-profiler", "--profile-step-start", "--profile-step-end", "--profile-dir")
def test_torch_profiler_records_the_window(tmp_path: Path) -> None:
    train_tiny(*TORCH, "--profile-dir", tmp_path / "one", "--profile-step-start", "2", "--profile-step-end", "3")
    train_tiny(*TORCH, "--profile-dir", tmp_path / "four", "--profile-step-start", "2", "--profile-step-end", "60")
    one, four = (updates(tmp_path / name / "rank-0.json.gz") for name in ("one", "four"))
    assert one > 0 and four == 4 * one, "iterations 3 to 6; a run that ends inside the window keeps what it has"
    train_tiny("--profile-dir", tmp_path / "none", "--use-pytorch-profiler", "--train-iters", "3")
    assert not (tmp_path / "none").exists(), "nothing without --profile"


@pytest.mark.flags(
    "--pytorch-profiler-collect-shapes", "--pytorch-profiler-collect-callstack", "--pytorch-profiler-collect-chakra"
)
def test_torch_profiler_options(tmp_path: Path) -> None:
    window = ("--profile-step-start", "1", "--profile-step-end", "2", "--train-iters", "2")
    train_tiny(*TORCH, *window, "--profile-dir", tmp_path / "plain")
    options = ("--pytorch-profiler-collect-shapes", "--pytorch-profiler-collect-callstack",
               "--pytorch-profiler-collect-chakra")  # fmt: skip
    train_tiny(*TORCH, *window, "--profile-dir", tmp_path / "all", *options)
    plain, full = (trace(tmp_path / name / "rank-0.json.gz") for name in ("plain", "all"))
    for found, expected in ((plain, False), (full, True)):
        assert any("Input Dims" in event.get("args", {}) for event in found) == expected
        assert any("step.py" in event.get("name", "") for event in found) == expected
    assert not (tmp_path / "plain" / "rank-0.chakra.json").exists()
    chakra = json.loads((tmp_path / "all" / "rank-0.chakra.json").read_text())
    assert any("aten::" in node["name"] for node in chakra["nodes"])


@pytest.mark.flags("--profile-ranks")
def test_only_the_chosen_ranks_are_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--profile-ranks 3 is none of the 2 ranks; give numbers below 2"):
        run_config("--profile --use-pytorch-profiler --profile-ranks 1 3", world_size=2)
    run = prepare(*TORCH, "--profile-ranks", "0")
    hook = next(hook for hook in run.hooks.hooks if type(hook).__name__ == "ProfilerHook")  # type: ignore[attr-defined]
    begun: list[int] = []
    monkeypatch.setattr(hook, "_begin", lambda run: begun.append(1))
    run.progress.iteration = 10
    hook.on_step_start(run)
    hook.config.profile_ranks = [1]
    hook.on_step_start(run)
    assert begun == [1]


def test_the_window_must_not_be_empty() -> None:
    with pytest.raises(ConfigError, match="--profile-step-end 5 is not after --profile-step-start 5"):
        run_config("--profile --profile-step-start 5 --profile-step-end 5")


@pytest.fixture
def gpu_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The hooks take this process for one with a GPU; what they would tell it is written down."""
    calls: list[Any] = []

    @contextlib.contextmanager
    def ranges(record_shapes: bool) -> Iterator[None]:
        calls.append(("ranges", record_shapes))
        yield
        calls.append("ranges end")

    monkeypatch.setattr("torch.autograd.profiler.emit_nvtx", ranges)
    for name in ("start_cuda_profiler", "stop_cuda_profiler", "record_memory_history"):
        monkeypatch.setattr(device, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(device, "dump_memory_snapshot", lambda path: calls.append(path))
    return calls


def train_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(initialize, "replace_gpu_settings", lambda config: [])
    train_tiny(*flags)


@pytest.mark.flags("--profile", "--record-shapes")
@pytest.mark.parametrize("shapes", [False, True])
def test_window_for_nsight_systems(gpu_calls: list[Any], monkeypatch: pytest.MonkeyPatch, shapes: bool) -> None:
    flags = ["--profile", "--profile-step-start", "1", "--profile-step-end", "3", *(["--record-shapes"] * shapes)]
    train_as_on_a_gpu(monkeypatch, *flags)
    assert gpu_calls == ["start_cuda_profiler", ("ranges", shapes), "ranges end", "stop_cuda_profiler"]


@pytest.mark.flags("--record-memory-history", "--memory-snapshot-path")
def test_memory_history(gpu_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    train_as_on_a_gpu(monkeypatch, "--record-memory-history", "--memory-snapshot-path", "memory.pickle")
    assert gpu_calls == ["record_memory_history", Path("memory.pickle")]


@pytest.mark.flags("--nvtx-ranges")
def test_parts_of_layers_have_names(tmp_path: Path) -> None:
    window = ("--profile-step-start", "1", "--profile-step-end", "2", "--train-iters", "2")
    train_tiny(*TORCH, *window, "--profile-dir", tmp_path / "plain")
    train_tiny(*TORCH, *window, "--profile-dir", tmp_path / "named", "--nvtx-ranges")
    plain, named = (trace(tmp_path / name / "rank-0.json.gz") for name in ("plain", "named"))
    assert not any(event.get("name", "").endswith(".mlp") for event in plain)
    parts = [event for event in named if event.get("cat") == "user_annotation" and "decoder" in event.get("name", "")]
    names = [event["name"] for event in parts]
    for layer in (0, 1):
        for part in ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"):
            assert names.count(f"decoder.layers.{layer}.{part}") == 2, "one for each microbatch"
    (mlp, *_) = (event for event in parts if event["name"] == "decoder.layers.0.mlp")
    inside = [
        e["name"] for e in named if mlp["ts"] <= e.get("ts", -1) <= mlp["ts"] + mlp["dur"] and e.get("cat") == "cpu_op"
    ]
    assert any("mm" in name for name in inside)


@pytest.mark.flags("--nvtx-ranges")
def test_ranges_reach_the_gpu_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(device, "is_cuda", lambda _: True)
    monkeypatch.setattr("torch.cuda.nvtx.range_push", calls.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: calls.append("end"))
    with device.NamedRange("outer"), device.NamedRange("inner"):
        pass
    assert calls == ["outer", "inner", "end", "end"]
