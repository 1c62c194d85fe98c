# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is loaded, and what is left in the directory, whatever state it is in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import manifest
from megatron.core.dist_checkpointing.directory import (
    TRACKER_NAME,
    list_superseded,
    remove_checkpoint,
    settle_leftovers,
)
from megatron.core.errors import CheckpointError
from tests.support.small_checkpoints import content, find, save


def found_value(root: Path) -> float:
    found = find(root)
    assert found is not None
    return content(found)


def test_newest_by_tracker(tmp_path: Path) -> None:
    assert find(tmp_path) is None and find(tmp_path / "absent") is None
    save(tmp_path, 10)
    save(tmp_path, 20)
    found = find(tmp_path)
    assert found is not None and found.manifest.iteration == 20 and found.skipped == []
    (tmp_path / TRACKER_NAME).write_text("10\n")
    assert found_value(tmp_path) == 10, "a user may go back by writing the tracker"
    step = find(tmp_path, 20)
    assert step is not None and content(step) == 20
    inside = find(tmp_path / "iter_0000020")
    assert inside is not None and content(inside) == 20


@pytest.mark.parametrize(
    "text", [b"", b"garbage", b"-10", b"1_0", b"\xef\xbb\xbf10", "١٠".encode(), b"9" * 20, b"1\x000", b"30", b"release"]
)
def test_L1_garbage_tracker(tmp_path: Path, text: bytes) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / TRACKER_NAME).write_bytes(text)
    found = find(tmp_path)
    assert found is not None and content(found) == 20
    assert len(found.skipped) == 1 and TRACKER_NAME in found.skipped[0]


def test_L1_tracker_that_is_no_file(tmp_path: Path) -> None:
    save(tmp_path, 10)
    tracker = tmp_path / TRACKER_NAME
    tracker.unlink()
    assert found_value(tmp_path) == 10
    tracker.mkdir()
    assert found_value(tmp_path) == 10
    tracker.rmdir()
    tracker.symlink_to(tracker.name)
    assert found_value(tmp_path) == 10
    tracker.unlink()
    os.mkfifo(tracker)
    assert found_value(tmp_path) == 10


def test_L3_a_pipe_in_place_of_a_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read: it is no regular file"):
        find(tmp_path)


def test_L2_tracker_names_missing_or_incomplete_directory(tmp_path: Path) -> None:
    save(tmp_path, 10)
    shutil.rmtree(save(tmp_path, 20))
    found = find(tmp_path)
    assert found is not None and content(found) == 10 and "iter_0000020" in found.skipped[0]
    (tmp_path / "iter_0000020").mkdir()
    assert found_value(tmp_path) == 10
    shutil.rmtree(tmp_path / "iter_0000010")
    with pytest.raises(CheckpointError, match="no checkpoint in .* can be loaded: .*iter_0000020 holds no manifest"):
        find(tmp_path)


def test_tracker_without_any_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / TRACKER_NAME).write_text("10")
    with pytest.raises(CheckpointError, match="can be loaded"):
        find(tmp_path)


def test_L4_directory_under_another_number(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20).rename(tmp_path / "iter_0000030")
    found = find(tmp_path)
    assert found is not None and content(found) == 10 and "holds iteration 20" in " ".join(found.skipped)


def test_S33_saving_an_iteration_again(tmp_path: Path) -> None:
    save(tmp_path, 10, value=1)
    save(tmp_path, 10, value=2)
    assert found_value(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", TRACKER_NAME]


def test_leftovers_are_removed_and_foreign_files_are_not(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "iter_0000020.tmp-0123abcd" / "tokenizer").mkdir(parents=True)
    (tmp_path / f"{TRACKER_NAME}.tmp-0123abcd").write_text("20")
    foreign = ["notes.txt", "iter_0000020.tmp", "iter_0000020.tmp-backup", "tensorboard"]
    for name in foreign:
        (tmp_path / name).mkdir()
    assert len(settle_leftovers(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["iter_0000010", TRACKER_NAME, *foreign])
    assert found_value(tmp_path) == 10


def test_interrupted_between_rename_and_tracker(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / TRACKER_NAME).write_text("10")
    (tmp_path / f"{TRACKER_NAME}.tmp-0123abcd").write_text("20")
    assert found_value(tmp_path) == 20
    assert "finished the save of iteration 20" in settle_leftovers(tmp_path)[0]
    assert (tmp_path / TRACKER_NAME).read_text() == "20" and found_value(tmp_path) == 20


def test_interrupted_while_an_iteration_was_replaced(tmp_path: Path) -> None:
    save(tmp_path, 10).rename(tmp_path / "iter_0000010.old-0123abcd")
    assert "put iter_0000010 back" in settle_leftovers(tmp_path)[0]
    assert found_value(tmp_path) == 10


def test_S34_links_to_checkpoints_are_neither_followed_nor_counted(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for iteration in (10, 20, 30, 40):
        save(root, iteration)
    shutil.move(root / "iter_0000020", elsewhere)
    (root / "iter_0000020").symlink_to(elsewhere)
    (root / "iter_0000030" / "state.json").unlink()
    assert list_superseded(root, 40, 1) == [10] and list_superseded(root, 40, 2) == []
    assert list_superseded(root, 30, 1) == [], "the one beyond does not count"
    remove_checkpoint(root, 20)
    assert (root / "iter_0000020").is_symlink() and (elsewhere / "manifest.json").exists()
    # A save that comes to the same iteration takes the link's name; what a crash has left of it goes at the next start.
    save(root, 20, 21)
    assert not list(root.glob("*.old-*")) and (elsewhere / "manifest.json").exists()
    (root / "iter_0000020.old-0123abcd").symlink_to(elsewhere)
    assert settle_leftovers(root) == ["removed iter_0000020.old-0123abcd of an interrupted save"]
    found = find(root, 20)
    assert found is not None and content(found) == 21 and (elsewhere / "manifest.json").exists()


def test_L17_a_checkpoint_that_another_run_removes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    compute_checksums = manifest.compute_checksums

    def remove_and_read(*arguments: Any) -> list[int]:
        shutil.rmtree(newest, ignore_errors=True)
        return compute_checksums(*arguments)

    monkeypatch.setattr(manifest, "compute_checksums", remove_and_read)
    found = find(tmp_path)
    assert found is not None and content(found) == 10
    assert len(found.skipped) == 1 and str(newest) in found.skipped[0] and "is missing" in found.skipped[0]


@pytest.mark.parametrize("name", ["with space", "line\nbreak", "größe", "-x", "'quoted\"", "n" * 255])
def test_S38_names_and_rights_of_directories(tmp_path: Path, name: str) -> None:
    before = os.umask(0o077)
    try:
        for iteration in (10, 20):
            path = save(tmp_path / name, iteration)
    finally:
        os.umask(before)
    assert [entry.stat().st_mode & 0o077 for entry in (path, *path.iterdir())] == [0] * 7
    assert found_value(tmp_path / name) == 20
    (tmp_path / name / TRACKER_NAME).write_text("30")
    found = find(tmp_path / name)
    assert found is not None and content(found) == 20 and name in found.skipped[0]
