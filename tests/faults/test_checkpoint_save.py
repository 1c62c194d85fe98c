# SPDX-License-Identifier: Apache-2.0
"""S1-S28: a save that is killed, or that the disk does not take, leaves the old checkpoint or the new one."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import directory, torch_dist
from megatron.core.dist_checkpointing.async_save import AsyncSaver
from megatron.core.dist_checkpointing.directory import settle_leftovers
from megatron.core.errors import StorageError
from tests.support.small_checkpoints import ALONE, content, find, save, tensors

DURABLE_CALLS = (
    (os, "mkdir"),
    (os, "open"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (directory.shutil, "rmtree"),
)
"""Ways in which a save changes the disk; the others are writes to shards. Before the N-th call comes the fault."""


def before_call(number: int, action: Callable[[], None], patch: Callable[[Any, str, Any], None]) -> list[str]:
    """Arrange for `action` before the durable call of this number; the list grows by the name of each call."""
    calls: list[str] = []

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                action()
            return original(*args, **kwargs)

        return wrapper

    class CountingFile(io.FileIO):
        write = counting("write", io.FileIO.write)

    for owner, name in DURABLE_CALLS:
        patch(owner, name, counting(name, getattr(owner, name)))
    patch(torch_dist.io, "FileIO", CountingFile)
    return calls


def save_beside(root: Path, iteration: int, value: float) -> None:
    """Save on a thread, as --async-save does."""
    saver = AsyncSaver(None)
    documents = {"state": {"iteration": iteration, "value": value}}
    saver.start(tensors(value), root, iteration, documents=documents, group=ALONE)
    saver.wait()


def killed_while_saving(root: Path, iteration: int, value: float, number: int, how: Callable[..., Any] = save) -> bool:
    """Save in a forked process that kills itself before its N-th durable call; False when it had no so many."""
    process = os.fork()
    if process == 0:
        try:
            before_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL), setattr)
            how(root, iteration, value)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@pytest.mark.parametrize(
    ("iteration", "how"),
    [(20, save), (10, save), (10, save_beside)],
    ids=["new iteration", "S33 iteration saved before", "the same beside training"],
)
def test_S1_to_S25_killed_at_every_point(tmp_path: Path, iteration: int, how: Callable[..., Any]) -> None:
    number, outcomes = 0, []
    save(tmp_path / "before", 10, value=1)
    while True:
        number += 1
        root = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        if not killed_while_saving(root, iteration, 2, number, how):
            break
        done = settle_leftovers(root)
        found = find(root)
        assert found is not None and found.skipped == [], (number, done)
        outcomes.append(content(found))
        assert not [path for path in root.iterdir() if "-" in path.name], f"leftovers after {number}"
        if number % 5 == 0:
            save(root, 30)
            again = find(root)
            assert again is not None and content(again) == 30
    assert number > 20, "the points were not reached"
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}, "old before the commit, new after it"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_S27_S28_storage_that_fails_at_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    call, failed = 0, 0
    save(tmp_path / "before", 10)
    while True:
        call += 1
        root = shutil.copytree(tmp_path / "before", tmp_path / str(call))

        def fail() -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patches:
            calls = before_call(call, fail, patches.setattr)
            try:
                save(root, 20)
            except StorageError as error:
                assert os.strerror(number) in str(error) and str(root) in str(error)
                failed += 1
        found = find(root)
        assert found is not None and content(found) in (10, 20)
        assert not list(root.glob("*.tmp-*")) or found.manifest.iteration == 20
        if len(calls) < call:
            break
    assert failed > 10


def test_S27_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.tiny_training import train_tiny

    opened = 0

    class FullAtFirst(io.FileIO):
        def __init__(self, *arguments: Any) -> None:
            nonlocal opened
            opened += 1
            super().__init__(*arguments)

        def write(self, data: Any) -> int:
            if opened == 1 and self.tell() + len(data) > 20_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr(torch_dist.io, "FileIO", FullAtFirst)
    run = train_tiny("--save", tmp_path, "--save-interval", "2")
    assert run.progress.finished
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: iteration 2 was not saved: ")
    assert "No space left on device" in errors[0] and str(tmp_path) in errors[0]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006"]


def test_S27_the_last_checkpoint_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.tiny_training import train_tiny

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch_dist.io, "FileIO", Full)
    with pytest.raises(StorageError, match="No space left on device"):
        train_tiny("--save", tmp_path, "--save-interval", "100")
    assert [path.name for path in tmp_path.iterdir()] == ["failures.jsonl"], "no half of a checkpoint"
