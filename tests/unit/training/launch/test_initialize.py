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
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.config_base import get_settings
from megatron.core.errors import ConfigError, explain_refused_memory
from megatron.core.process_groups_config import GROUP_AXES, ProcessGroupCollection, SingleRankGroup
from megatron.training.launch import initialize as subject
from megatron.training.launch.initialize import (
    build_rank_grid,
    connect_groups,
    explain_lost_peer,
    initialize,
    shut_down,
)
from tests.support.run_flags import run_config
from tests.support.tiny_training import finish, prepare

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
        return object()

    monkeypatch.setattr(subject, "open_store", open_store)

    def check(self: Any, flags: dict[str, Any], gpu: str | None, obstacles: dict[str, str | None]) -> None:
        given.update(flags=flags, gpu=gpu, obstacles=obstacles)

    monkeypatch.setattr(subject.StartupCheck, "check", check)
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


def test_groups_connect_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `device_id`, transfers between stages would share one communicator with all else of their group."""
    given = joining(monkeypatch, "")
    assert set(given) - {"flags", "gpu", "obstacles", "store_seconds"} == {
        "backend", "store", "rank", "world_size", "timeout"
    }  # fmt: skip
    assert given["obstacles"] == {"kernels in Triton": "no GPU"}
    assert given["gpu"] is None, "no GPU is anybody's alone on the CPU"


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ("", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            "",
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
        ),
        ("", {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
        ("--use-nccl-ub --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", {}, {}),
    ],
)
def test_blocks_of_memory_grow_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, flags: str, environment: dict[str, str], expected: dict[str, str]
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        # Set first, so that what the program sets is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = run_config(flags)
    initialize(config)
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [("", None, None), ("--cuda-graph-impl local", None, "0"), ("--cuda-graph-impl local", "1", "1")],
)
def test_recorded_collectives_register_no_buffers(
    monkeypatch: pytest.MonkeyPatch, flags: str, given: str | None, expected: str | None
) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    initialize(run_config(flags))
    assert os.environ.get("NCCL_GRAPH_REGISTER") == expected


def test_communicators_are_made_in_the_same_order_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks, one after the other: what each does first in its groups, and the note."""
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2 --num-experts 2"
    config = run_config(f"{flags} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", world_size=8)
    used = iter(range(0, 100 * 10**9, 10**9))
    monkeypatch.setattr(subject.device_module, "read_used_memory_bytes", lambda: next(used))
    sequences: dict[tuple[int, ...], set[tuple[Any, ...]]] = {}
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        groups = ProcessGroupCollection.build(build_rank_grid(config, 8), rank)
        met: list[tuple[int, ...]] = []
        monkeypatch.setattr(
            subject, "all_reduce", lambda token, group, met=met: met.append(tuple(dist.get_process_group_ranks(group)))
        )
        assert connect_groups(groups, config, torch.device("cpu")) is None, "only NCCL makes them late"
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        note = connect_groups(groups, config, torch.device("cpu"))
        monkeypatch.undo()
        monkeypatch.setattr(subject.device_module, "read_used_memory_bytes", lambda: next(used))
        assert note == f"communicators of {len(met)} process groups were made and take 1.0 GB of this GPU"
        assert len(set(met)) == len(met) and all(rank in ranks for ranks in met)
        assert (0, 1, 2, 3, 4, 5, 6, 7) in met and len(met) >= 5
        for ranks in met:
            # Ranks that meet in two groups must come to them in the same order.
            own = tuple(other for other in met if set(ranks) <= set(other))
            sequences.setdefault(ranks, set()).add(own)
        # Transfers between stages have groups for each direction, which nothing else uses.
        up, down = groups.pp_directions
        assert up is not down and groups.pp not in (up, down)
        assert dist.get_process_group_ranks(up) == dist.get_process_group_ranks(down)
        shut_down()
    assert all(len(orders) == 1 for orders in sequences.values())


def test_a_lost_peer_is_told_from_a_bug() -> None:
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:12345")
    assert "another rank was lost" in (explain_lost_peer(lost) or "")
    assert explain_lost_peer(RuntimeError("shape mismatch")) is None
    nccl = "NCCL error in: NCCLUtils.hpp:94, {}, NCCL version 2.28.9\n{}"
    aborted = dist.DistBackendError(
        nccl.format("remote process exited or there was a network error", "ncclRemoteError")
    )
    assert "another rank was lost" in (explain_lost_peer(aborted) or "")
    full = nccl.format("unhandled cuda error", "ncclUnhandledCudaError: Last error: Cuda failure 2 'out of memory'")
    assert explain_lost_peer(dist.DistBackendError(full)) is None and explain_refused_memory(RuntimeError(full))


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

    choices = get_settings(DistributedInitConfig)["high_priority_stream_groups"].choices
    assert choices is not None and set(choices) == set(GROUP_AXES)


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
