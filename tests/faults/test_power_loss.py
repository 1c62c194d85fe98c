# SPDX-License-Identifier: Apache-2.0
"""S39: when the power fails during a save, what was not flushed may be lost, and the old checkpoint or the new one
loads.

A save is watched: which names each directory has and what each file holds before and after every call that changes the
disk, and which of them have been flushed (fsync). From that follow the states that a file system may be in after a
power cut at any of these moments: of a file the content that was flushed, a part of the present one or all of it; of
the directory of checkpoints the names as of any moment since it was flushed; of a checkpoint's directory each or not.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron.core.dist_checkpointing import directory
from megatron.core.dist_checkpointing.directory import TRACKER_NAME, settle_leftovers
from megatron.core.dist_checkpointing.serialization import read_document
from tests.support.small_checkpoints import find, save

CHANGES = ((os, "mkdir"), (os, "fsync"), (os, "rename"), (os, "replace"), (directory.shutil, "rmtree"))
STATES_PER_MOMENT = 30


class Moment(NamedTuple):
    """The disk after a call."""

    names: dict[int, dict[str, int]]
    """Number of a directory -> name -> number of the file or directory."""
    contents: dict[int, bytes]
    """Number of a file -> content."""
    flushed: int | None
    """The file or directory that this call has flushed."""


def look(root: Path, flushed: int | None) -> Moment:
    names: dict[int, dict[str, int]] = {}
    contents: dict[int, bytes] = {}
    for path in [root, *root.rglob("*")]:
        number = path.stat().st_ino
        if path.is_dir():
            names[number] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            contents[number] = path.read_bytes()
    return Moment(names, contents, flushed)


def watch(root: Path, patch: Callable[[Any, str, Any], None]) -> list[Moment]:
    """Note every call of this process that changes the disk; the list grows with them."""
    moments = [look(root, None)]

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            moments.append(look(root, None))
            result = original(*args, **kwargs)
            moments.append(look(root, os.fstat(args[0]).st_ino if name == "fsync" else None))
            return result

        return wrapper

    for owner, name in CHANGES:
        patch(owner, name, noting(name, getattr(owner, name)))
    return moments


def draw_state(moments: list[Moment], flushed_at: dict[int, int], pick: random.Random) -> dict[str, bytes | None]:
    """What may be there after a power cut after the last of the moments: path -> content, None for a directory."""
    state: dict[str, bytes | None] = {}

    last, top = moments[-1], next(iter(moments[0].names))

    def visit(number: int, place: str) -> None:
        # What has never been flushed may not be there at all; what has is at least as it was then.
        since = moments[flushed_at[number] :] if number in flushed_at else moments
        if any(number in moment.names for moment in moments):
            state[place] = None
            for name, entry in draw_names([moment.names.get(number, {}) for moment in since]).items():
                visit(entry, f"{place}/{name}")
            return
        flushed = since[0].contents[number] if number in flushed_at else b""
        present = last.contents.get(number, flushed)
        part = present[: pick.randint(0, len(present))] if present != flushed else flushed
        state[place] = pick.choice([flushed, present, part])

    def draw_names(candidates: list[dict[str, int]]) -> dict[str, int]:
        if top in flushed_at and candidates[0] is moments[flushed_at[top]].names.get(top):
            return pick.choice(candidates)
        every = {name: entry for names in candidates for name, entry in names.items()}
        return {name: entry for name, entry in every.items() if name in candidates[0] or pick.random() < 0.7}

    visit(top, ".")
    return state


def build(root: Path, state: dict[str, bytes | None]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for place, held in state.items():
        path = root / place
        if held is None:
            path.mkdir()
        else:
            path.write_bytes(held)


def load_state(root: Path, state: dict[str, bytes | None]) -> float:
    """Start anew in this state; the value of the checkpoint that is found."""
    build(root, state)
    settle_leftovers(root)
    found = find(root)
    assert found is not None, sorted(state)
    value = float(read_document(found.path, "state")["value"])
    assert value in (1, 2) and not [path for path in root.iterdir() if "-" in path.name], sorted(state)
    return value


@pytest.mark.parametrize("iteration", [20, 10], ids=["new iteration", "saved before"])
def test_S39_any_state_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
    root, after = tmp_path / "root", tmp_path / "after"
    save(root, 10, value=1)
    (tmp_path / "vocabulary").write_text("a b c")
    with monkeypatch.context() as patches:
        moments = watch(root, patches.setattr)
        save(root, iteration, value=2, attachments={"tokenizer/vocabulary": tmp_path / "vocabulary"})
    # What an earlier save has left is on the device, the names among it.
    flushed_at = dict.fromkeys((*moments[0].names, *moments[0].contents), 0)
    pick = random.Random(7)
    known: dict[frozenset[tuple[str, bytes | None]], float] = {}
    loaded = set()
    for end in range(1, len(moments)):
        if (flushed := moments[end].flushed) is not None:
            flushed_at[flushed] = end
        loaded.clear()
        for _ in range(STATES_PER_MOMENT):
            state = draw_state(moments[: end + 1], flushed_at, pick)
            key = frozenset(state.items())
            if key not in known:
                known[key] = load_state(after, state)
            loaded.add(known[key])
        assert end > 1 or loaded == {1}
    assert len(moments) > 12 and len(known) > 100
    # The last flush is that of the directory after the tracker got its content: from then on nothing is lost.
    load_state(after, state)
    assert loaded == {2} and (after / TRACKER_NAME).read_text() == str(iteration)
