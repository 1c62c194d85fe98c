"""S1-S25: a kill at a named point of a save costs no more than the steps since the last one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import crash_points
from megatron.core.dist_checkpointing.crash_points import CRASH_POINTS, arm, reach
from megatron.core.errors import ConfigError
from tests.faults import crash_matrix
from tests.faults.crash_matrix import Beginning, Case
from tests.unit.tiny_training import train_tiny

SAMPLE = [
    Case("leftover-settled", 0), Case("shard-begun", 1), Case("earlier-moved-aside", 0)
]  # fmt: skip


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    return crash_matrix.begin(tmp_path_factory.mktemp("begin"))


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_S1_to_S25_two_ranks_go_on_after_a_kill(case: Case, beginning: Beginning, tmp_path: Path) -> None:
    assert case in crash_matrix.list_cases()
    crash_matrix.check(case, beginning, tmp_path / "case")


def test_the_documented_command_runs(
    beginning: Beginning, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crash_matrix, "begin", lambda directory: beginning)
    assert crash_matrix.main(["--point", "manifest-unflushed", "--point", "renamed"]) == 0
    assert "2 of 2 kills cost no more than the steps since the last save" in capsys.readouterr().out


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
    train_tiny("--save", root, "--save-interval", "3", "--train-iters", "3")
    train_tiny("--save", root, "--save-interval", "3", "--train-iters", "3")
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
