# SPDX-License-Identifier: Apache-2.0
"""--preflight: machines that are not fit are named before the first step."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from megatron.cli import train
from megatron.core.errors import PreflightError, command_line
from megatron.planner.parameters import count_whole
from megatron.training.checkpoint.run_tensors import iterate_placed_parameters
from megatron.training.hooks.sniff_test import describe
from megatron.training.launch import machine_checks
from megatron.training.launch.launch import Launch
from megatron.training.launch.preflight import check_before_training, count_checkpoint_bytes
from megatron.training.verify.parity import open_local_run
from tests.functional.pretrain_runs import TINY, metrics, run_ranks
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import STYLES, own_rank, training


@pytest.mark.flags("--preflight", "--gpu-sniff-test-interval")
def test_R26_a_run_on_good_machines_prints_one_table_and_trains(tmp_path: Path) -> None:
    places = ["--save", tmp_path / "save", "--save-interval", "2", "--keep-last", "1", "--metrics-dir", tmp_path]
    result = run_ranks([*TINY, "--preflight", *places, "--gpu-sniff-test-interval", "4"], 2)
    assert result.returncode == 0, result.stderr
    assert f"--preflight: 2 ranks on 1 host\n  same python {'':21} {platform.python_version()}" in result.stdout
    for row in ("clocks", "products are right", "speed of sums, data", "write, rename and read in --save"):
        assert result.stdout.count(f"  {row} ") == 1
    # Of 2, 4 and 5, one and the one that is being written.
    assert "for 2 checkpoints" in result.stdout
    assert len(metrics(tmp_path)) == 5
    assert result.stdout.count("sniff test after iteration") == 1
    assert "sniff test after iteration 4\n  products, GFLOP/s: median " in result.stdout
    assert "\n  sums over data, GB/s: median " in result.stdout


def test_the_sniff_test_names_who_is_far_from_the_median() -> None:
    speeds = (100.0, 101.0, 99.0, 50.0)
    measured = [
        machine_checks.Measured(
            rank, f"host{rank}", {}, 0.0, speed * 1e9, 0.0, True, 0, None, True, None,
            groups={"data": {"bytes_per_second": 2e9, "expected": None}},
        )
        for rank, speed in enumerate(speeds)
    ]  # fmt: skip
    assert list(describe(measured)) == [
        "products, GFLOP/s: median 99.5, mean 87.5, min 50, max 101",
        "OUTLIER rank 3 (host3): 50 (-49.7 %)",
        "sums over data, GB/s: median 2, mean 2, min 2, max 2",
    ]


def test_R26_where_a_check_fails_nothing_is_trained_and_launchers_see_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2_000_000)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(machine_checks, "_LEAST_FREE_BYTES", 0)
    flags = ["--preflight", "--save", str(tmp_path / "save"), "--save-interval", "1", "--train-iters"]
    for iterations, code in (("4", 0), ("100", 1)):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *TINY, *flags, iterations, "--start-over"])
        assert command_line(train.main)() == code, capsys.readouterr()
    output = capsys.readouterr()
    *_, row = [line for line in output.out.splitlines() if "room in --save" in line]
    assert "2.0 MB free, 34.3 MB for 100 checkpoints" in row
    assert row.endswith(f" FAILED on {platform.node()} (rank 0)")
    (error,) = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: --preflight: room in --save (2.0 MB free, 34.3 MB for 100 checkpoints) on ")
    assert "iteration        1/     100" not in output.out


def spoil_one_rank() -> tuple[str, int, int]:
    """With a clock that is wrong on rank 3: what ends the run, bytes of a checkpoint, and parameters of the model."""
    config, recipe = training(STYLES["llama"], "tp2,dp2,dist-opt")
    rank = own_rank(config)
    with open_local_run(config, recipe, rank) as run:
        counted = count_checkpoint_bytes(run)
        elements = count_whole(placement for *_, placement in iterate_placed_parameters(run.model)).total
        usual = time.time
        time.time = lambda: usual() + (50.0 if rank == 3 else 0.0)
        try:
            check_before_training(run, Launch(rank, 4, local_rank=rank), run.groups)
        except PreflightError as error:
            return str(error), counted, elements
        finally:
            time.time = usual
    return "", counted, elements


def test_R26_every_rank_ends_with_the_bad_host_and_the_size_of_a_checkpoint_is_right() -> None:
    found = run_distributed(spoil_one_rank, 4)
    ((sentence, counted, elements),) = set(found)
    # Beside other programs a rank may also be named for its speed.
    clocks, *_, remedy = sentence.split("; ")
    assert re.fullmatch(rf"--preflight: clocks \(at most .*\) on {re.escape(platform.node())} \(rank 3\)", clocks)
    assert remedy == "mend it or take that host out of the job, then start again"
    assert counted == 12 * elements, "a weight and two moments, each in 32 bits"
