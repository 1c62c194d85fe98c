# SPDX-License-Identifier: Apache-2.0
"""A run that would undo what --save holds is refused or told to start over; one that is finished touches nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.directory import MANIFEST_NAME
from megatron.core.errors import CheckpointError, ConfigError
from megatron.training.run import Run
from tests.support.tiny_training import differing, prepare, train_tiny

TRACKER = "latest_checkpointed_iteration.txt"


def saved(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir() if entry.name.startswith("iter_")}


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    # The name of a lock says how often the directory was locked.
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def begin_and_close(*flags: str | Path) -> Run:
    run = prepare(*flags)
    run.hooks.on_close(run)
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with iterations 2 and 4."""
    root = tmp_path_factory.mktemp("finished")
    train_tiny("--train-iters", "4", "--save", root, "--save-interval", "2", "--metrics-dir", root / "metrics")
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "saved"))


def test_a_run_that_would_undo_what_is_saved_is_refused(root: Path, tmp_path: Path) -> None:
    before = contents(root)
    other = tmp_path / "other"
    train_tiny("--train-iters", "1", "--save", other)
    sentence = f"--save {root} holds iteration 4, which this run, beginning with iteration 1, would undo"
    for flags in (
        ["--train-iters", "3"],
        ["--train-iters", "9", "--save-interval", "3"],
        ["--pretrained-checkpoint", other],
        ["--load", root, "--finetune"],
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)) as refused:
            prepare("--save", root, *flags)
        assert f"give --load {root} without" in str(refused.value) and "--start-over" in str(refused.value)
    assert contents(root) == before
    # What is not complete is undone by nobody, and evaluation saves nothing.
    begin_and_close("--save", root, "--skip-train", "--eval-iters", "1")
    for name in saved(root):
        (root / name / MANIFEST_NAME).unlink()
    begin_and_close("--save", root)


@pytest.mark.flags("--start-over")
def test_starting_over_keeps_what_is_there(root: Path) -> None:
    before = contents(root)
    flags = ("--save", root, "--save-interval", "1", "--keep-last", "1", "--start-over", "--seed", "5")
    begin_and_close(*flags, "--train-iters", "2")
    assert contents(root) == before
    train_tiny(*flags, "--train-iters", "2")
    assert (root / TRACKER).read_text() == "2"
    assert saved(root) == {"iter_0000002", "iter_0000002.earlier-1", "iter_0000004"}
    for name, (_, content) in before.items():
        if name.startswith("iter_"):
            assert (root / name.replace("iter_0000002/", "iter_0000002.earlier-1/")).read_bytes() == content
    # From the first save on it is the run that --load continues; the earlier one can be loaded by its directory.
    new = begin_and_close("--load", root, "--train-iters", "2", "--seed", "5")
    old = begin_and_close("--load", root / "iter_0000002.earlier-1", "--train-iters", "4")
    assert (new.progress.iteration, old.progress.iteration) == (2, 2) and differing(old, new)


@pytest.mark.flags("--start-over", "--keep-last")
@pytest.mark.parametrize("more", [(), ("--async-save",)], ids=["", "async"])
def test_runs_that_go_on_after_starting_over_keep_the_earlier_ones_checkpoints(
    root: Path, more: tuple[str, ...]
) -> None:
    flags = ("--save", root, "--save-interval", "1", "--keep-last", "2", "--seed", "5", *more)
    train_tiny(*flags, "--start-over", "--train-iters", "1")
    assert saved(root) == {"iter_0000001", "iter_0000002", "iter_0000004"}
    # 2 is saved anew, 4 is not reached: the earlier run's neither count nor go.
    flags = (*flags, "--load", root, "--lr-decay-iters", "6", "--override-opt-param-scheduler")
    train_tiny(*flags, "--train-iters", "3")
    assert saved(root) == {"iter_0000002", "iter_0000003", "iter_0000004", "iter_0000002.earlier-1"}
    train_tiny(*flags, "--train-iters", "6")
    assert saved(root) >= {"iter_0000005", "iter_0000006"} and "iter_0000003" not in saved(root)


def test_R23_a_finished_run_is_not_run_again(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(root)
    flags = ("--train-iters", "4", "--save", root, "--load", root, "--save-interval", "2", "--eval-iters", "1")
    train_tiny(*flags, "--metrics-dir", root / "metrics", "--log-progress")
    said = capsys.readouterr().out
    assert "nothing is left to do: iteration 4 of 4 is done; raise --train-iters to go on" in said
    assert "iterations 5 to" not in said and contents(root) == before
    train_tiny("--train-iters", "4", "--load", root, "--skip-train", "--eval-iters", "1")
    said = capsys.readouterr().out
    assert "no iteration is left" in said and "iterations 5 to" not in said and "nothing is left to do" not in said


def test_a_longer_run_goes_on_or_hears_what_to_give(root: Path) -> None:
    flags = ("--train-iters", "6", "--load", root, "--save", root)
    with pytest.raises(CheckpointError, match="give --lr-decay-iters 4, the checkpoint's"):
        prepare(*flags)
    assert train_tiny(*flags, "--lr-decay-iters", "4").progress.iteration == 6
