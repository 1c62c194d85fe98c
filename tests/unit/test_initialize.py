# SPDX-License-Identifier: Apache-2.0
"""What a process does first: backend, time-out, seeds, environment; and that a single process opens nothing."""

from __future__ import annotations

import dataclasses
import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import GROUP_AXES, ProcessGroupCollection, SingleRankGroup
from megatron.training.launch import initialize as subject
from megatron.training.launch.initialize import build_rank_grid, explain_lost_peer, initialize, shut_down
from tests.unit.run_flags import run_config
from tests.unit.tiny_training import finish, prepare

TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29777"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    yield
    shut_down()


def test_one_process_needs_no_process_group() -> None:
    process = initialize(run_config())
    assert not dist.is_initialized()
    assert isinstance(process.groups.world, SingleRankGroup)
    assert ProcessGroupCollection.current() is process.groups


@pytest.mark.flags("--seed")
def test_seed_reaches_every_generator() -> None:
    def draws(flags: str) -> tuple[float, float, float]:
        initialize(run_config(flags))
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draws("--seed 5") == draws("--seed 5")
    assert all(a != b for a, b in zip(draws("--seed 5"), draws("--seed 6"), strict=True))


def joining(monkeypatch: pytest.MonkeyPatch, flags: str) -> dict[str, Any]:
    """The arguments with which a first of two ranks would join."""
    given: dict[str, Any] = {}
    for name, value in TWO_RANKS.items():
        monkeypatch.setenv(name, value)

    class Stop(Exception):
        pass

    def init_process_group(**arguments: Any) -> None:
        given.update(arguments)
        raise Stop

    def open_store(launch: Any, seconds: float) -> Any:
        given["store_seconds"] = seconds

    monkeypatch.setattr(subject, "open_store", open_store)
    monkeypatch.setattr(subject.StartupCheck, "check", lambda self, flags: given.update(flags=flags))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(Stop):
        initialize(run_config(flags))
    return given


@pytest.mark.flags("--distributed-timeout-minutes")
def test_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = joining(monkeypatch, "--distributed-timeout-minutes 3")
    assert given["timeout"] == timedelta(minutes=3)
    assert given["store_seconds"] == 180
    assert given["backend"] == "gloo"


@pytest.mark.flags("--distributed-backend")
def test_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joining(monkeypatch, "--distributed-backend nccl")["backend"] == "gloo", "on a machine without CUDA"
    monkeypatch.setattr(subject.device_module, "choose_backend", lambda device: "another")
    assert joining(monkeypatch, "--distributed-backend gloo")["backend"] == "gloo"


def test_flags_that_ranks_compare_are_spelled_as_flags() -> None:
    flags = run_config("--norm-epsilon 1e-6 --seed 9").flag_values()
    assert flags["--norm-epsilon"] == 1e-6
    assert flags["--seed"] == 9
    assert flags["--lr"] == 0.01


def test_a_lost_peer_is_told_from_a_bug() -> None:
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:12345")
    assert "another rank was lost" in (explain_lost_peer(lost) or "")
    assert explain_lost_peer(RuntimeError("shape mismatch")) is None


@pytest.mark.flags("--use-tp-pp-dp-mapping")
def test_order_of_the_ranks() -> None:
    """Of four ranks in two stages: a stage's replicas are neighbours, or the stages of a pipeline are."""

    def pipelines(flags: str) -> list[list[int]]:
        config = run_config(flags)
        model = dataclasses.replace(config.model, num_layers=2, pipeline_model_parallel_size=2)
        return build_rank_grid(dataclasses.replace(config, model=model, world_size=4), 4).groups("pp")

    assert pipelines("") == [[0, 2], [1, 3]]
    assert pipelines("--use-tp-pp-dp-mapping") == [[0, 1], [2, 3]]


@pytest.mark.flags("--high-priority-stream-groups")
def test_groups_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    build = ProcessGroupCollection.build

    def recorded(grid: Any, rank: int, timeout: Any, high_priority: Any) -> ProcessGroupCollection:
        asked.append(list(high_priority))
        return build(grid, rank, timeout, high_priority)

    monkeypatch.setattr(ProcessGroupCollection, "build", recorded)
    initialize(run_config("--high-priority-stream-groups tp dp_cp"))
    assert asked == [["tp", "dp_cp"]]
    with pytest.raises(ConfigError, match="--high-priority-stream-groups"):
        run_config("--high-priority-stream-groups nodes")
    from megatron.training.config.distributed import DistributedInitConfig

    setting = next(f for f in dataclasses.fields(DistributedInitConfig) if f.name == "high_priority_stream_groups")
    assert set(setting.metadata["flag"].choices) == set(GROUP_AXES)


@pytest.mark.flags("--use-gloo-process-groups", "--disable-gloo-process-groups")
def test_groups_beside_the_backends_own() -> None:
    assert any(
        "--disable-gloo-process-groups has no effect" in n for n in run_config("--disable-gloo-process-groups").notes
    )
    assert run_config("--use-gloo-process-groups").distributed.use_gloo_process_groups


@pytest.mark.flags("--use-layer-wise-param-layout")
@pytest.mark.parametrize("flag", ["--use-layer-wise-param-layout", "--no-use-layer-wise-param-layout"])
def test_a_layout_by_whole_matrices_is_not_needed(flag: str) -> None:
    assert any("--use-layer-wise-param-layout has no effect" in note for note in run_config(flag).notes)
    assert not any("layer-wise" in note for note in run_config("").notes)


@pytest.mark.flags(
    "--flight-recorder-dump-path", "--flight-recorder-trace-buffer-size", "--no-flight-recorder-dump-on-timeout",
    "--flight-recorder-include-stack-trace", "--no-flight-recorder-include-only-active",
    "--no-flight-recorder-extra-dump-on-exec", "--flight-recorder-dump-on-timeout",
    "--flight-recorder-include-only-active", "--flight-recorder-extra-dump-on-exec",
)  # fmt: skip
def test_flight_recorder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(flags: str, **environ: str) -> dict[str, str]:
        before = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_FR", "TORCH_NCCL", "TORCH_INCL"))}
        monkeypatch.setattr(os, "environ", before | environ)
        initialize(run_config(flags))
        shut_down()
        return {k: v for k, v in os.environ.items() if k.startswith(("TORCH_FR", "TORCH_NCCL", "TORCH_INCL"))}

    path = tmp_path / "traces" / "rank"
    usual = {
        "TORCH_FR_DUMP_TEMP_FILE": str(path), "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(path),
        "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_INCLUDE_STACK_TRACE": "0", "TORCH_INCLUDE_ONLY_ACTIVE": "1", "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "1",
    }  # fmt: skip
    assert told("--flight-recorder-trace-buffer-size 5") == {}
    dump = f"--flight-recorder-dump-path {path}"
    assert told(dump) == usual and path.parent.is_dir()
    assert told(dump, TORCH_FR_BUFFER_SIZE="7") == usual | {"TORCH_FR_BUFFER_SIZE": "7"}
    size = {"TORCH_FR_BUFFER_SIZE": "5", "TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}
    for flag, expected in (
        ("--flight-recorder-trace-buffer-size 5", size),
        ("--no-flight-recorder-dump-on-timeout", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}),
        ("--flight-recorder-include-stack-trace", {"TORCH_INCLUDE_STACK_TRACE": "1"}),
        ("--no-flight-recorder-include-only-active", {"TORCH_INCLUDE_ONLY_ACTIVE": "0"}),
        ("--no-flight-recorder-extra-dump-on-exec", {"TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0"}),
    ):
        assert told(f"{dump} {flag}") == usual | expected
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--flight-recorder-dump-path .*/file/x/y: .*; give a writable directory"):
        told(f"--flight-recorder-dump-path {tmp_path}/file/x/y")


@pytest.mark.flags("--distributed-timeout-seconds-after-init")
def test_collectives_have_another_limit_after_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, timedelta]] = []
    run = prepare("--distributed-timeout-seconds-after-init", "7", "--train-iters", "3")
    note = lambda groups, limit: limits.append((run.progress.iteration, limit))  # noqa: E731
    monkeypatch.setattr(ProcessGroupCollection, "set_timeout", note)
    finish(run)
    assert limits == [(1, timedelta(seconds=7))]
