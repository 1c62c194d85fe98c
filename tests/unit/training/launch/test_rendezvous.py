# SPDX-License-Identifier: Apache-2.0
"""Finding the other processes: who never comes, comes twice, was started differently. Threads play the ranks."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.core.errors import ConfigError, MegatronError, TemporaryError
from megatron.training.launch import rendezvous
from megatron.training.launch.launch import Launch
from megatron.training.launch.rendezvous import StartupCheck, open_store


def _check_startup(
    ranks: list[tuple[int, int, dict[str, Any]]],
    timeout: float = 5.0,
    gpus: list[str | None] | None = None,
    obstacles: list[str | None] | None = None,
) -> list[MegatronError | None]:
    """What `check` raised for each (rank, world size, flags). gpus, obstacles: that of each, for kernels."""
    store = HashStore()

    def attend(rank: int, world_size: int, flags: dict[str, Any]) -> MegatronError | None:
        try:
            found = {} if obstacles is None else {"kernels": obstacles[rank]}
            StartupCheck(store, rank, world_size, timeout).check(flags, None if gpus is None else gpus[rank], found)
        except MegatronError as error:
            return error
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: attend(*rank), ranks))


def test_equal_ranks_go_on() -> None:
    assert _check_startup([(rank, 3, {"--lr": 0.1}) for rank in range(3)]) == [None, None, None]


def test_two_ranks_on_one_gpu_are_named_on_every_rank() -> None:
    """Where a launcher shows each process one GPU, LOCAL_RANK does not tell which."""
    ranks: list[tuple[int, int, dict[str, Any]]] = [(rank, 3, {}) for rank in range(3)]
    assert _check_startup(ranks, gpus=["GPU-a", "GPU-b", "GPU-c"]) == [None, None, None]
    assert _check_startup(ranks, gpus=[None, None, None]) == [None, None, None]
    errors = _check_startup(ranks, gpus=["GPU-a", "GPU-b", "GPU-a"])
    assert all(isinstance(error, ConfigError) for error in errors)
    (text,) = {str(error) for error in errors}
    assert text.startswith("ranks 0 and 2 compute on the same GPU (GPU-a), which NCCL refuses; start as many processes")
    assert "--distributed-backend gloo" in text


def test_a_rank_that_computes_otherwise_is_named_on_every_rank() -> None:
    """A machine without a C compiler has no kernels, whose collectives are others than those of torch's forms."""
    ranks: list[tuple[int, int, dict[str, Any]]] = [(rank, 3, {}) for rank in range(3)]
    assert _check_startup(ranks, obstacles=[None, None, None]) == [None, None, None]
    assert _check_startup(ranks, obstacles=["no compiler", "no GPU", "no compiler"]) == [None, None, None]
    for obstacles, sentence in (
        (
            [None, None, "no compiler"],
            "kernels cannot be used on rank 2 (no compiler) and can on rank 0; all ranks have",
        ),
        (
            ["no compiler", "no GPU", None],
            "kernels cannot be used on rank 0 (no compiler) and can on rank 2; all ranks",
        ),
    ):
        errors = _check_startup(ranks, obstacles=obstacles)
        assert all(isinstance(error, ConfigError) for error in errors)
        (text,) = {str(error) for error in errors}
        assert text.startswith(sentence)


def test_F10_missing_ranks_are_named() -> None:
    errors = _check_startup([(0, 4, {}), (2, 4, {})], timeout=0.3)
    assert all(isinstance(error, TemporaryError) for error in errors)
    assert all(str(error).startswith("rank(s) 1, 3 of WORLD_SIZE=4 never joined within 0.3 s") for error in errors)


def test_F9_a_rank_given_twice_is_named() -> None:
    errors = _check_startup([(0, 3, {}), (1, 3, {}), (1, 3, {})])
    assert {str(error) for error in errors} == {"RANK=1 was given to two processes; every process needs its own rank"}


def test_F11_another_flag_is_named_on_every_rank() -> None:
    errors = _check_startup([(0, 3, {"--lr": 0.1}), (1, 3, {"--lr": 0.1}), (2, 3, {"--lr": 0.2})])
    assert all(isinstance(error, ConfigError) for error in errors)
    assert {str(error) for error in errors} == {
        "rank 2 was started with --lr 0.2, rank 0 with --lr 0.1; start all ranks alike"
    }


def test_F11_another_world_size_is_named() -> None:
    errors = _check_startup([(0, 3, {}), (1, 3, {}), (2, 4, {})])
    texts = {str(error) for error in errors}
    assert len(texts) == 1
    text = texts.pop()
    assert "rank 2 was started with WORLD_SIZE=4" in text
    assert "was started with WORLD_SIZE=3" in text


def test_F12_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TemporaryError, match=f"rank 0 cannot listen on MASTER_PORT={port}"):
            open_store(Launch(rank=0, world_size=2, master_addr="127.0.0.1", master_port=port), 2.0)


def test_F12_a_stranger_at_the_port_does_not_hang_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for as long as ranks that start late are waited for."""
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.5)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        began_at = time.monotonic()
        with pytest.raises(TemporaryError, match=f"MASTER_PORT={port}"):
            open_store(Launch(rank=1, world_size=2, master_addr="127.0.0.1", master_port=port), 600.0)
        assert time.monotonic() - began_at < 60


def test_F13_nobody_at_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(TemporaryError, match=f"rank 1 cannot reach rank 0 at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"):
        open_store(Launch(rank=1, world_size=2, master_addr="127.0.0.1", master_port=port), 1.0)


def test_two_ranks_meet_over_a_port() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launches = [Launch(rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port) for rank in range(2)]
    problems: list[MegatronError] = []

    def attend(launch: Launch) -> None:
        try:
            store = open_store(launch, 10.0)
            StartupCheck(store, launch.rank, 2, 10.0).check({})
            store.set(f"done{launch.rank}", "")
            store.wait(["done0", "done1"])
        except MegatronError as error:
            problems.append(error)

    threads = [threading.Thread(target=attend, args=(launch,)) for launch in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
