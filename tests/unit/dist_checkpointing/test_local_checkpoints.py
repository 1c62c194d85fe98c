# SPDX-License-Identifier: Apache-2.0
"""--non-persistent-ckpt-type local in one process; several: tests/parallel/test_local_checkpoints.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.directory import remove_checkpoint
from megatron.core.errors import ConfigError
from tests.support.tiny_training import differing, prepare, train_tiny

OFTEN = ("--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "local")
TRACKER = "latest_checkpointed_iteration.txt"


def flags(place: Path, interval: int = 3) -> tuple[str | Path, ...]:
    own = ("--non-persistent-local-ckpt-dir", place / "fast")
    return ("--save", place / "save", "--load", place / "save", "--save-interval", str(interval), *OFTEN, *own)


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("fast/save-*/rank_00000/iter_*"))


@pytest.mark.flags("--non-persistent-ckpt-type", "--non-persistent-local-ckpt-dir")
def test_a_killed_run_goes_on_from_it(tmp_path: Path) -> None:
    train_tiny(*flags(tmp_path), "--async-save")
    assert names(tmp_path) == ["iter_0000005"] and not (tmp_path / "save" / "non_persistent").exists()
    assert not list(tmp_path.rglob("*.lock"))
    assert prepare("--load", tmp_path / "save", *flags(tmp_path)[-2:]).progress.iteration == 6, "it is newer"
    # As the run leaves it when it is killed in iteration 6.
    remove_checkpoint(tmp_path / "save", 6)
    (tmp_path / "save" / TRACKER).write_text("3")
    own = flags(tmp_path)[-2:]
    for others in (("--ckpt-step", "3"), ("--no-load-optim",), ("--no-load-rng",)):
        assert prepare("--load", tmp_path / "save", *own, *others).progress.iteration == 3
    assert prepare("--load", tmp_path / "save").progress.iteration == 3
    resumed = train_tiny(*flags(tmp_path))
    assert resumed.loaded_from is not None and resumed.loaded_from.parent.name == "rank_00000"
    assert differing(resumed, train_tiny()) == []
    assert sorted(path.name for path in (tmp_path / "save").glob("iter_*")) == ["iter_0000003", "iter_0000006"]


def test_damage_and_a_new_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_tiny(*flags(tmp_path), "--exit-interval", "5")
    remove_checkpoint(tmp_path / "save", 5)
    (tmp_path / "save" / TRACKER).write_text("3")
    part = next(tmp_path.glob("fast/save-*/rank_00000/iter_0000004"))
    assert prepare(*flags(tmp_path)[2:4], *flags(tmp_path)[-2:]).progress.iteration == 4
    (part / "state.json").write_text("{}")
    assert prepare(*flags(tmp_path)[2:4], *flags(tmp_path)[-2:]).progress.iteration == 3
    assert "local checkpoint of iteration 4 cannot be loaded" in capsys.readouterr().err
    # Who has removed what is in --save wants to begin anew.
    shutil.rmtree(tmp_path / "save")
    assert train_tiny(*flags(tmp_path)).loaded_from is None
    assert names(tmp_path) == ["iter_0000005"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([], "needs --non-persistent-local-ckpt-dir"),
        (["--non-persistent-local-ckpt-dir", "{place}", "--no-save-optim"], "saves all state; leave one of them out"),
        (["--non-persistent-local-ckpt-dir", "{place}/a/b"], "cannot be made"),
        (["--non-persistent-local-ckpt-dir", "s3://a"], "is in object storage"),
    ],
)
def test_what_is_refused(more: list[str], sentence: str, tmp_path: Path) -> None:
    given = [flag.format(place=tmp_path) for flag in more]
    with pytest.raises(ConfigError, match=sentence):
        prepare("--save", tmp_path / "save", *OFTEN, *given)
