# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron doctor` without a directory: checks of the machine."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import check_checkpoint
from megatron.training.launch.machine_checks import Measured, judge
from tests.functional.pretrain_runs import ROOT, environment, finish, free_port
from tests.programs import Program

GOOD = Measured(
    rank=0, host="a", versions={"torch": "2.13.0"}, clock=100.0, product_flops=1e11, product_error=1e-6, repeats=True,
    free_memory_bytes=1 << 34, sum_bytes_per_second=1e9, sum_is_right=True,
    disk={"bytes_per_second": 1e8, "free_bytes": 1 << 40, "problem": None},
)  # fmt: skip


def _doctor(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["doctor", *map(str, arguments)])
    return check_checkpoint.main()


def test_a_machine_in_order_is_good_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _doctor(monkeypatch, "--save", tmp_path) == 0
    out = capsys.readouterr().out
    assert "write, rename and read in --save" in out
    assert "FAILED" not in out
    assert list(tmp_path.iterdir()) == []
    assert _doctor(monkeypatch, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert all(check["is_good"] for check in report["checks"])


def test_where_it_cannot_look_the_exit_code_is_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _doctor(monkeypatch, "--save", tmp_path / "none") == 2
    assert "is no directory; make it" in capsys.readouterr().err
    assert _doctor(monkeypatch, tmp_path, "--save", tmp_path) == 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"versions": {"torch": "2.12.0"}}, "same torch"),
        ({"clock": 103.0}, "clocks"),
        ({"product_error": 0.5}, "products are right"),
        ({"repeats": False}, "products are right"),
        ({"product_flops": 4e10}, "speed of products"),
        ({"free_memory_bytes": 1 << 20}, "free memory"),
        ({"sum_is_right": False}, "sums over all ranks are right"),
        ({"disk": {"bytes_per_second": 0.0, "free_bytes": 1 << 40, "problem": "Read-only"}}, "write, rename and read"),
        ({"disk": {"bytes_per_second": 1e8, "free_bytes": 5, "problem": None}}, "room in --save"),
    ],
)
def test_the_bad_host_is_named(change: dict[str, Any], name: str) -> None:
    ranks = [dataclasses.replace(GOOD, rank=rank, host="ab"[rank // 2]) for rank in range(4)]
    assert all(check.is_good for check in judge(ranks))
    ranks[3] = dataclasses.replace(ranks[3], **change)
    failed = [check for check in judge(ranks) if not check.is_good]
    assert [(check.where, check.name.startswith(name)) for check in failed] == [("b (rank 3)", True)]


def _with_sums(rank: int, group: int, speed: float, expected: float | None = None) -> Measured:
    sums: dict[str, float | None] = {"bytes_per_second": speed, "expected": expected}
    return dataclasses.replace(GOOD, rank=rank, host="ab"[group], groups={"tensor": sums})


def test_a_group_that_is_slower_than_its_like_or_than_its_links_is_named() -> None:
    speeds = [1e9] * 6 + [4e8] * 2
    failed = [c for c in judge([_with_sums(r, r // 6, v) for r, v in enumerate(speeds)]) if not c.is_good]
    assert [(c.name, c.where) for c in failed] == [("speed of sums, tensor", "b (rank 6), b (rank 7)")]
    # All alike, and all far from what such links do.
    failed = [c for c in judge([_with_sums(r, r // 6, 1e9, 2e11) for r in range(8)]) if not c.is_good]
    assert [(c.name, "200" in c.found or "186" in c.found) for c in failed] == [("speed of sums, tensor", True)]
    assert all(c.is_good for c in judge([_with_sums(r, r // 6, 1e11, 2e11) for r in range(8)]))


def test_all_ranks_of_a_job_are_looked_at() -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    program = ["tools/checkpoint/doctor.py", "--json"]
    ranks = finish([Program(program, environment({"RANK": str(rank), **job}), ROOT) for rank in range(2)])
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    report = json.loads(ranks[0].stdout)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert "speed of sums" in [check["name"] for check in report["checks"]]
