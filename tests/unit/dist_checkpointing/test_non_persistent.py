# SPDX-License-Identifier: Apache-2.0
"""--non-persistent-save-interval: frequent checkpoints of which the newest stays, and which of both kinds is loaded."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.directory import remove_checkpoint
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock, Holder
from megatron.core.dist_checkpointing.non_persistent import find_newest
from megatron.core.errors import CheckpointError, ConfigError, TemporaryError
from megatron.core.process_groups_config import SingleRankGroup
from megatron.core.upstream_checkpoints.diagnosis import diagnose
from megatron.training.checkpoint.save_directories import prepare_save
from megatron.training.flags.read import read_run_config
from tests.functional.pretrain_runs import TINY, run
from tests.support.tiny_training import differing, prepare, train_tiny

LOCAL = ("--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "local",
         "--non-persistent-local-ckpt-dir", "{save}")  # fmt: skip
OFTEN = ("--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "global")
TRACKER = "latest_checkpointed_iteration.txt"


def saving(root: Path, interval: int = 3) -> tuple[str | Path, ...]:
    return ("--save", root, "--save-interval", str(interval), *OFTEN)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("iter_*"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Persistent checkpoints of iterations 3 and 6, and of the others the one of 5."""
    root = tmp_path_factory.mktemp("finished") / "checkpoints"
    train_tiny(*saving(root))
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """The same as the run leaves it when it is killed in iteration 6."""
    copied = shutil.copytree(finished, tmp_path / "checkpoints")
    remove_checkpoint(copied, 6)
    (copied / TRACKER).write_text("3")
    return copied


@pytest.mark.flags("--non-persistent-save-interval", "--non-persistent-ckpt-type")
def test_only_the_newest_stays(finished: Path) -> None:
    assert names(finished) == ["iter_0000003", "iter_0000006"]
    assert names(finished / "non_persistent") == ["iter_0000005"]
    assert (finished / "non_persistent" / TRACKER).read_text() == "5"


def test_a_killed_run_goes_on_from_it(root: Path) -> None:
    found = prepare("--load", root)
    assert (found.progress.iteration, found.loaded_from) == (5, root / "non_persistent" / "iter_0000005")
    resumed = train_tiny(*saving(root), "--load", root)
    assert differing(resumed, train_tiny()) == []
    assert names(root) == ["iter_0000003", "iter_0000006"]


def test_the_end_of_a_run_is_saved_for_good(root: Path) -> None:
    """The last iteration of this run is one that was saved before, and does not stay."""
    schedule = ("--train-iters", "5", "--use-checkpoint-opt_param-scheduler")
    train_tiny("--load", root, "--save", root, *OFTEN, "--save-retain-interval", "6", *schedule)
    assert names(root) == ["iter_0000005"], "and the one before is not kept"


def test_a_persistent_checkpoint_that_came_later_is_newer(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run has gone back to iteration 3 and is killed after it has saved iteration 4."""
    train_tiny(*saving(root, 4), "--load", root, "--ckpt-step", "3", "--exit-interval", "4")
    assert names(root / "non_persistent") == ["iter_0000005"], "of the run before"
    assert prepare("--load", root).progress.iteration == 4
    assert "warning" not in capsys.readouterr().err


def test_a_checkpoint_of_a_run_that_went_back_is_newer_than_a_later_iteration(finished: Path, tmp_path: Path) -> None:
    root = shutil.copytree(finished, tmp_path / "checkpoints")
    train_tiny(*saving(root, 100), "--load", root, "--ckpt-step", "3", "--exit-interval", "5")
    remove_checkpoint(root, 5)
    (root / TRACKER).write_text("6")
    assert prepare("--load", root).progress.iteration == 4
    assert find_newest(root, root / "non_persistent", 6).path == root / "iter_0000006"


def test_damage_of_one_leaves_the_other(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = root / "non_persistent"
    (root / "iter_0000003" / "state.json").write_text("{}")
    assert prepare("--load", root).progress.iteration == 5
    assert find_newest(root, other, 5).path == other / "iter_0000005"
    (root / "iter_0000003" / "manifest.json").unlink()
    assert prepare("--load", root).progress.iteration == 5
    (other / "iter_0000005" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded: .*iter_0000005.*iter_0000003"):
        prepare("--load", root)


def test_the_damaged_newest_one_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "non_persistent" / "iter_0000005" / "state.json").write_text("{}")
    assert prepare("--load", root).progress.iteration == 3
    assert "iter_0000003, because " in capsys.readouterr().err


def test_a_diagnosis_knows_them(root: Path) -> None:
    found = diagnose(root)
    assert found.chosen == root / "non_persistent" / "iter_0000005" and found.findings == []
    assert [condition.iteration for condition in found.checkpoints] == [5, 3]
    (found.chosen / "state.json").write_text("{}")
    found = diagnose(root)
    assert found.chosen == root / "iter_0000003"
    assert [finding.level for finding in found.findings] == ["problem"]


def test_beside_a_checkpoint_of_upstreams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run goes on from one, and is killed before it has saved a persistent one of its own."""
    train_tiny("--save", tmp_path, "--ckpt-format", "torch", "--exit-interval", "3")
    (tmp_path / "iter_0000003" / "manifest.json").unlink()
    train_tiny(*saving(tmp_path, 100), "--load", tmp_path)
    remove_checkpoint(tmp_path, 6)
    (tmp_path / TRACKER).write_text("3")
    assert prepare("--load", tmp_path).progress.iteration == 5
    (tmp_path / "non_persistent" / "iter_0000005" / "state.json").write_text("{}")
    assert prepare("--load", tmp_path).progress.iteration == 3
    assert "loading an earlier checkpoint" in capsys.readouterr().err


def test_another_runs_checkpoints_stay(root: Path) -> None:
    """A run that does not continue from there removes its own ones alone."""
    train_tiny(*saving(root, 100), "--train-iters", "9", "--non-persistent-save-interval", "2", "--start-over")
    assert names(root / "non_persistent") == ["iter_0000005", "iter_0000008"]
    assert names(root) == ["iter_0000003", "iter_0000009"]


@pytest.mark.flags("--non-persistent-global-ckpt-dir")
def test_a_directory_of_its_own(tmp_path: Path, root: Path) -> None:
    own = ("--non-persistent-global-ckpt-dir", tmp_path / "fast")
    train_tiny(*saving(tmp_path / "slow"), *own, "--async-save")
    assert names(tmp_path / "fast") == ["iter_0000005"] and names(tmp_path / "slow") == ["iter_0000003", "iter_0000006"]
    assert not list(tmp_path.glob("*/*.lock"))
    remove_checkpoint(tmp_path / "slow", 6)
    (tmp_path / "slow" / TRACKER).write_text("3")
    assert prepare("--load", tmp_path / "slow").progress.iteration == 3
    assert prepare("--load", tmp_path / "slow", *own).progress.iteration == 5


def test_another_run_has_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fast").mkdir()
    lock = DirectoryLock(tmp_path / "fast", print)
    monkeypatch.setattr(Holder, "is_gone", lambda self: False)
    with pytest.raises(TemporaryError, match="fast"):
        prepare(*saving(tmp_path / "slow"), "--non-persistent-global-ckpt-dir", tmp_path / "fast")
    assert not list((tmp_path / "slow").glob("*.lock")), "and --save is free again"
    lock.release()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--non-persistent-save-interval", "1"], "needs --non-persistent-ckpt-type global"),
        ([*OFTEN, "--non-persistent-global-ckpt-dir", "{save}/../save"], "is also --save; give it a directory"),
        ([*OFTEN, "--non-persistent-global-ckpt-dir", "{save}/a/b"], "cannot be made"),
        ([*LOCAL, "--replication"], "--replication needs --replication-jump, the distance between ranks"),
        (
            [*LOCAL, "--replication", "--replication-jump", "2"],
            "--replication-jump 2 x --replication-factor 2 is no divisor of the 1 ranks, which keep copies in sets of "
            "2; leave --replication out",
        ),
        ([*LOCAL, "--replication", "--replication-jump", "1", "--replication-factor", "1"], "--replication-factor 1"),
    ],
)
def test_what_is_refused(flags: list[str], sentence: str, tmp_path: Path) -> None:
    given = [flag.format(save=tmp_path / "save") for flag in flags]
    with pytest.raises(ConfigError, match=sentence):
        prepare("--save", tmp_path / "save", *given)


@pytest.mark.parametrize(
    ("point", "expected"), [("checkpoint-complete", 1), ("renamed", 2), ("tracker-replaced", 2), ("old-unmarked", 2)]
)
def test_a_kill_at_a_point_of_the_second_save_costs_no_more_than_the_steps_since_the_last(
    point: str, expected: int, tmp_path: Path
) -> None:
    flags = [*TINY, *OFTEN, "--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt"]
    time = 1 if point == "old-unmarked" else 2
    assert run(flags, MEGATRON_CRASH_POINT=f"{point}:0:{time}").returncode == -signal.SIGKILL
    found = find_newest(tmp_path / "ckpt", tmp_path / "ckpt" / "non_persistent")
    assert found is not None and found.manifest.iteration == expected
    settings = read_run_config([str(flag) for flag in flags], {}).checkpoint
    for lock in prepare_save(settings, SingleRankGroup()):
        lock.release()
    assert names(tmp_path / "ckpt" / "non_persistent")[-1:] == [f"iter_{expected:07d}"]
    assert not list((tmp_path / "ckpt").rglob("*.tmp-*"))
