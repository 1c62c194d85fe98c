# SPDX-License-Identifier: Apache-2.0
"""S1-S30: kills and failing disks cost no more than the steps since the last save; samples of crash_matrix.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import crash_points
from megatron.core.dist_checkpointing.crash_points import CRASH_POINTS, arm, hand_over, reach, take_over
from megatron.core.errors import ConfigError
from tests.faults import crash_matrix, failing_calls, killed_at_points, killed_at_random
from tests.faults.killed_at_points import Beginning, Case
from tests.faults.killed_at_random import Whole
from tests.support.tiny_training import train_tiny

SAMPLE = [
    Case("leftover-settled", 0),
    Case("shard-begun", 1),
    Case("earlier-moved-aside", 0),
    Case("snapshot-taken", 1, "thread"),
    Case("shard-begun", 0, "process"),
    Case("shard-begun", 1, "torch"),
    Case("tracker-flushed", 0, "non-persistent"),
]


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    return killed_at_points.begin(tmp_path_factory.mktemp("begin"))


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_S1_to_S25_S30_two_ranks_go_on_after_a_kill(case: Case, beginning: Beginning, tmp_path: Path) -> None:
    assert case in killed_at_points.list_cases()
    killed_at_points.check(case, beginning, tmp_path / "case")


def test_the_documented_command_runs(
    beginning: Beginning, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(killed_at_points, "begin", lambda directory: beginning)
    assert crash_matrix.main(["--way", "sync", "--point", "manifest-unflushed", "--point", "renamed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "---- crash points" and lines[1].startswith("1/2, ") and lines[1].endswith(": holds")
    assert lines[-1].startswith("crash points: 2 of 2 hold (")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return killed_at_random.train_whole(tmp_path_factory.mktemp("random") / "whole")


# Together a hundred kills.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_S26_kills_at_random_moments(seed: int, whole: Whole, tmp_path: Path) -> None:
    verdicts = list(killed_at_random.play(whole, tmp_path, seed, kills=25, ways=["sync", "thread"]))
    assert len(verdicts) == 25 and [verdict for verdict in verdicts if verdict.problem] == []


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, failing_calls.COMPILERS)), reason=f"needs one of {', '.join(failing_calls.COMPILERS)}"
)


@needs_compiler
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("way", "step"), [("sync", 10), ("thread", 30)])
def test_S27_S28_training_goes_on_whichever_call_of_a_save_fails(tmp_path: Path, way: str, step: int) -> None:
    faults = [fault for fault in failing_calls.FAULTS if fault != "SIGKILL"]
    verdicts = list(failing_calls.play(tmp_path, ways=[way], faults=faults, step=step, first=3))
    assert [verdict for verdict in verdicts if verdict.problem] == []
    assert len(verdicts) >= 10


@needs_compiler
@pytest.mark.timeout(900)
def test_S1_to_S25_killed_in_any_call(tmp_path: Path) -> None:
    play = failing_calls.play(tmp_path, ways=["sync"], faults=["SIGKILL"], step=15, first=4, resume_each=3)
    verdicts = list(play)
    assert [verdict for verdict in verdicts if verdict.problem] == []
    assert all(any(f"rank {rank}" in verdict.case for verdict in verdicts) for rank in (0, 1))


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What this process is armed for; it is disarmed at the end."""
    armed: dict[str, int] = {}
    monkeypatch.setattr(crash_points, "_ARMED", armed)
    return armed


def test_every_point_is_come_by(tmp_path: Path, armed: dict[str, int]) -> None:
    often = 1_000_000
    armed |= dict.fromkeys(CRASH_POINTS, often)
    root = tmp_path / "run"
    (root / "iter_0000009.tmp-0123abcd").mkdir(parents=True)
    train_tiny("--save", root, "--save-interval", "2", "--save-retain-interval", "100")
    shutil.rmtree(root / "iter_0000006")
    train_tiny("--save", root, "--save-interval", "1", "--train-iters", "3")
    again = ("--save", root, "--load", root, "--ckpt-step", "2", "--save-interval", "1", "--train-iters", "3")
    train_tiny(*again)
    train_tiny(*again, "--async-save")
    assert [point for point, left in armed.items() if left == often] == []
    assert len(CRASH_POINTS) >= 25


def test_only_the_named_rank_and_time_are_armed(monkeypatch: pytest.MonkeyPatch, armed: dict[str, int]) -> None:
    kills: list[int] = []
    monkeypatch.setattr("os.kill", lambda process, signal: kills.append(signal))
    arm("renamed:1:2", rank=0)
    assert armed == {}
    arm("renamed:1:2", rank=1)
    arm("save-done", rank=1)
    reach("renamed")
    reach("rename-flushed")
    assert kills == []
    reach("renamed")
    assert kills == [9]
    reach("save-done")
    assert kills == [9, 9]


def test_a_process_that_writes_for_a_rank_takes_its_points_over_once(armed: dict[str, int]) -> None:
    arm("shard-begun:0:3", rank=0)
    arm("renamed:0", rank=0)
    text = hand_over()
    assert armed == {"renamed": 1} and hand_over() == ""
    armed.clear()
    take_over(text)
    assert armed == {"shard-begun": 3}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nowhere", "there is no such point; choose from leftovers-next, "),
        ("renamed:x", "is not POINT, POINT:RANK or POINT:RANK:TIME"),
        ("renamed:0:1:2", "is not POINT, POINT:RANK or POINT:RANK:TIME"),
        ("renamed:-1", "is not POINT, POINT:RANK or POINT:RANK:TIME"),
    ],
)
def test_unusable_points_are_refused(text: str, sentence: str, armed: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"MEGATRON_CRASH_POINT '{text}'.*{sentence}"):
        arm(text, rank=0)
    assert armed == {}
