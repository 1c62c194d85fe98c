# SPDX-License-Identifier: Apache-2.0
"""Two hosts and the network between them: slow, lossy, and cut."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.training.launch import hang_watcher
from tests.emulated_network import EmulatedNetwork, Link, can_emulate
from tests.functional.pretrain_runs import TINY, finish, free_port, metrics, run_ranks, start

pytestmark = pytest.mark.skipif(not can_emulate(), reason="hosts are network namespaces, which need root")

FLAGS = [*TINY, "--train-iters", "12", "--save-interval", "11", "--hang-timeout", "4"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of the run on one host."""
    root = tmp_path_factory.mktemp("undisturbed")
    assert run_ranks([*FLAGS, "--save", root, "--metrics-dir", root], 2).returncode == 0
    return metrics(root)


@pytest.fixture
def network() -> Iterator[EmulatedNetwork]:
    with EmulatedNetwork(2) as network:
        yield network


def train(
    network: EmulatedNetwork, root: Path, after_three_steps: Callable[[], None] = lambda: None, *more: str
) -> Sequence[subprocess.CompletedProcess[str]]:
    """A rank on each host; what is done to the network comes when three steps are done. more: flags."""
    job = {"WORLD_SIZE": "2", "MASTER_PORT": free_port()}
    flags = [*FLAGS, "--save", root, "--metrics-dir", root, *more]
    ranks = [start(flags, RANK=str(rank), **job, **network.variables(rank)) for rank in range(2)]
    rows, deadline = root / "metrics.jsonl", time.monotonic() + 60
    while not (rows.exists() and rows.read_text().count("\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    after_three_steps()
    return finish(ranks)


def await_watchers(reports: Path) -> None:
    """Wait until the watchers of both hosts have met at the store: loading torch takes them seconds."""
    deadline = time.monotonic() + 60
    while _count_connected_watchers(str(reports)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2.0)


def _count_connected_watchers(reports: str) -> int:
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_text().split("\0")
            if reports in words and any(hang_watcher.__name__ in word for word in words):
                found += any(os.readlink(file).startswith("socket:") for file in (process / "fd").iterdir())
    return found


def test_R9_a_bad_network_makes_a_run_slower_and_nothing_else(
    network: EmulatedNetwork, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    network.link = Link(delay_seconds=0.01, jitter_seconds=0.005, loss=0.02, bytes_per_second=10e6 / 8)
    ranks = train(network, tmp_path)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert metrics(tmp_path) == undisturbed


def test_R10_a_partition_that_heals_before_the_limit_leaves_no_trace(
    network: EmulatedNetwork, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    def cut_and_heal() -> None:
        for cut in ({(0, 1), (1, 0)}, {(1, 0)}):
            network.cut = cut
            time.sleep(1)
            network.cut = set()
            time.sleep(0.2)

    ranks = train(network, tmp_path, cut_and_heal)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert metrics(tmp_path) == undisturbed


def test_R10_a_partition_that_stays_ends_both_sides_and_neither_saves(network: EmulatedNetwork, tmp_path: Path) -> None:
    cut_at: list[float] = []

    def cut() -> None:
        await_watchers(tmp_path)
        # One way is worse than both: what one side sends arrives, and looks as if all were well.
        network.cut = {(0, 1)}
        cut_at.append(time.monotonic())

    ranks = train(network, tmp_path, cut, "--train-iters", "1000000", "--save-interval", "1000000")
    # The limit of 4 s and 2 s, and as much again for a busy machine: nobody waits for who cannot answer.
    assert time.monotonic() - cut_at[0] < 12
    assert [rank.returncode for rank in ranks] == [75, 75], ranks
    for rank, other in zip(ranks, (1, 0), strict=True):
        assert f"rank {other} is not heard of: its host, or the network to it, is gone" in rank.stderr
        # Of torch's own errors, with the frames of its stack, nothing is shown.
        assert "frame #" not in rank.stderr
    assert not list(tmp_path.glob("iter_*"))
