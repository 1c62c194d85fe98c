# SPDX-License-Identifier: Apache-2.0
"""The ways of docs/architecture.md are those that the program goes: each list there is followed by a traced run.

    ## The way of a batch       one training step
    ## The way of a flag        a command line until the layer that reads the setting
    ## The way of a gradient    the same step, from the loss to the update
    ## The way of a weight into a checkpoint

A line of such a list is `file  function  what happens there`; the functions must be called for the first time in this
order. And one step of the smallest dense model passes a bounded number of files: what one has to read to follow it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megatron.training.flags.read import read_run_config
from megatron.training.run import Run
from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from tests.parallel.small_training import COMMON, training
from tests.support.source_code import ROOT

DOCUMENT = ROOT / "docs" / "architecture.md"
MAX_FILES_PER_STEP = 40

Call = tuple[str, str]
"""(file relative to the repository, qualified name of the function)."""


@contextlib.contextmanager
def traced() -> Iterator[list[Call]]:
    """The functions of this repository in the order in which they are first called, while the block runs."""
    calls: dict[Call, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            file = frame.f_code.co_filename[len(str(ROOT)) + 1 :]
            if file.startswith(("megatron/", "pretrain_gpt.py")):
                calls.setdefault((file, frame.f_code.co_qualname))

    found: list[Call] = []
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        found += calls


def documented(title: str) -> list[Call]:
    """The lines of the list below a heading of docs/architecture.md."""
    match = re.search(rf"^## {re.escape(title)}\n.*?```\n(.*?)```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert match, f"{DOCUMENT.name} has no list below '## {title}'"
    return [(words[0], words[1]) for words in map(str.split, match[1].splitlines()) if words]


def assert_followed(title: str, calls: list[Call]) -> None:
    """Each line's function was called, the first time later than those above it."""
    position = -1
    for file, function in documented(title):
        path = file if file == "pretrain_gpt.py" else f"megatron/{file}"
        assert (ROOT / path).is_file(), f"'{title}': there is no {path}"
        assert (path, function) in calls, f"'{title}': {path} {function} is not called"
        at = calls.index((path, function))
        assert at > position, f"'{title}': {path} {function} is called before the line above it"
        position = at


@contextlib.contextmanager
def smallest_run(*flags: str) -> Iterator[Run]:
    """A dense model of two layers on one process, one step done: what is built at the first step is there."""
    config, recipe = training(" ".join(["--num-layers 2 --micro-batch-size 2", *flags]), "1")
    with open_local_run(config, recipe, 0) as run:
        yield run


@functools.cache
def calls_of_a_step() -> list[Call]:
    """The second step: what is built once, at the first, is there."""
    with smallest_run() as run:
        batches = run.data.open("train", 0)
        run.hooks.on_train_start(run)
        for _ in range(2):
            run.hooks.on_step_start(run)
            with traced() as calls:
                result = train_step(run, batches)
            run.hooks.on_step_end(run, result)
    return calls


def test_a_step_passes_few_files() -> None:
    files = dict.fromkeys(file for file, _ in calls_of_a_step())
    assert len(files) <= MAX_FILES_PER_STEP, f"{len(files)} files: {', '.join(files)}"


def test_the_way_of_a_batch() -> None:
    assert_followed("The way of a batch", calls_of_a_step())


def test_the_way_of_a_gradient() -> None:
    assert_followed("The way of a gradient", calls_of_a_step())


def test_the_way_of_a_flag() -> None:
    flags = [*COMMON.split(), "--num-layers", "2"]
    with traced() as calls:
        read_run_config(flags, {"WORLD_SIZE": "1"})
        with smallest_run():
            pass
    assert_followed("The way of a flag", calls)


def test_the_way_of_a_weight_into_a_checkpoint(tmp_path: Path) -> None:
    from megatron.training.checkpoint.save import save_checkpoint

    with traced() as calls, smallest_run(f"--save {tmp_path / 'checkpoints'} --save-interval 1") as run:
        save_checkpoint(run)
    assert_followed("The way of a weight into a checkpoint", calls)


def test_a_wrong_line_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(f"{__name__}.DOCUMENT", tmp_path / "architecture.md")
    calls = [("megatron/core/mesh.py", "a"), ("megatron/core/mesh.py", "b")]
    for lines, problem in (
        ("core/mesh.py a x\ncore/mesh.py c x", "is not called"),
        ("core/mesh.py b x\ncore/mesh.py a x", "before the line above"),
        ("core/nowhere.py a x", "there is no"),
    ):
        (tmp_path / "architecture.md").write_text(f"## The way of x\n\nWords.\n\n```\n{lines}\n```\n")
        with pytest.raises(AssertionError, match=problem):
            assert_followed("The way of x", calls)
