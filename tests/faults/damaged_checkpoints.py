# SPDX-License-Identifier: Apache-2.0
"""Damage to a directory of checkpoints: single bits and truncations of all its files, and kinds of damage with names.

A directory has the iterations 2, 4 and 6 of a run of two ranks. Whatever is damaged must be found before any of it is
used: the newest good checkpoint is loaded instead, and a sentence names what was passed over.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.agreement import on_every_rank, on_first_rank
from megatron.core.dist_checkpointing.directory import TRACKER_NAME, iteration_directory
from megatron.core.dist_checkpointing.finding import find_checkpoint
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.errors import MegatronError
from megatron.training.checkpoint.restore import load_checkpoint
from megatron.training.loop import train
from megatron.training.run import Run
from megatron.training.verify.parity import open_local_run
from tests.faults.verdicts import Verdict
from tests.functional.pretrain_runs import ROOT
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import own_rank, training
from tests.support.tiny_training import values

OLDEST, BEFORE, NEWEST = 2, 4, 6
_TOKENIZER = ROOT / "tests" / "golden" / "data" / "tok" / "hf_bpe1k"
_FLAGS = f"""--tokenizer-type HuggingFaceTokenizer --tokenizer-model {_TOKENIZER} --vocab-size 1000 --num-layers 2
    --train-iters {NEWEST} --lr-warmup-iters 0"""
_ORDINARY_USER = 65534


def make_directory(root: Path) -> None:
    """The undamaged directory, saved by two ranks."""
    run_distributed(_train, 2, str(root))


def _train(root: str) -> None:
    config, recipe = training(f"{_FLAGS} --save {root} --save-interval 2", "tp2")
    with open_local_run(config, recipe, own_rank(config)) as run:
        train(run)


# ---- bits and lengths


def count_files(root: Path) -> int:
    """Files that flip() damages in turn."""
    return len(_list_files(root))


def _list_files(root: Path) -> list[Path]:
    newest = iteration_directory(root, NEWEST)
    return [root / TRACKER_NAME, *sorted(path for path in newest.rglob("*") if path.is_file())]


def flip(root: Path, seed: int, cases: int) -> Iterator[Verdict]:
    """Damage one file after the other of the newest checkpoint, and the tracker: a bit in three of four cases, the
    length in the fourth. The directory is as before after each case."""
    pick = random.Random(seed)
    files = _list_files(root)
    contents = {path: path.read_bytes() for path in files}
    for case in range(cases):
        path = files[case % len(files)]
        whole = contents[path]
        if case // len(files) % 4 == 3:
            length = pick.randrange(len(whole))
            what, damaged = f"cut to {length} of {len(whole)} bytes", whole[:length]
        else:
            bit = pick.randrange(8 * len(whole))
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            what, damaged = f"bit {bit} of {8 * len(whole)} flipped", bytes(changed)
        path.write_bytes(damaged)
        yield Verdict(f"{path.relative_to(root)} {what}", _judge_flip(root, path))
        path.write_bytes(whole)
    undamaged = find_checkpoint(root)
    assert undamaged is not None and undamaged.skipped == []


def _judge_flip(root: Path, damaged: Path) -> str:
    found = find_checkpoint(root)
    if found is None:
        return "no checkpoint was found"
    if damaged.name == TRACKER_NAME:
        # The number may still be one, of whichever good checkpoint; only going back must not pass in silence.
        is_told = len(found.skipped) == 1 and TRACKER_NAME in found.skipped[0]
        return "" if is_told or (found.manifest.iteration == NEWEST and not found.skipped) else f"{found} in silence"
    if found.manifest.iteration != BEFORE:
        return f"iteration {found.manifest.iteration} was loaded instead of {BEFORE}"
    is_named = len(found.skipped) == 1 and damaged.name in found.skipped[0] and "\n" not in found.skipped[0]
    return "" if is_named else f"it was not named: {found.skipped}"


# ---- kinds


class Kind(NamedTuple):
    """A kind of damage."""

    damage: Callable[[Path], Any]
    """Does it to a directory of checkpoints."""
    names: str
    """What the sentence about it must name; nothing where the newest is as good as before."""
    loaded: int = BEFORE
    """The iteration that is loaded."""


def _of(name: str, damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """The same damage to a file of the newest checkpoint."""
    return lambda root: damage(iteration_directory(root, NEWEST) / name)


def _zero_block(path: Path) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes(512) + content[middle + 512 :])


def _punch_hole(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _swap(root: Path) -> None:
    ours, theirs = (iteration_directory(root, number) / "__1_0.distcp" for number in (BEFORE, NEWEST))
    aside = root / "aside"
    ours.rename(aside)
    theirs.rename(ours)
    aside.rename(theirs)


def _copy_from_before(name: str) -> Callable[[Path], Any]:
    return lambda root: shutil.copy(iteration_directory(root, BEFORE) / name, iteration_directory(root, NEWEST) / name)


def _rename_tensors(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"decoder.", b"encoder."))


def _flip_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _copy_halfway(path: Path) -> None:
    # The name that rsync gives a file while it comes.
    path.rename(path.with_name(f".{path.name}.Xq81bC"))


def _write_future_manifest(path: Path) -> None:
    inner = json.loads(path.read_text())["content"] | {"format_version": 2}
    crc32 = zlib.crc32(json.dumps(inner).encode())
    path.write_text(json.dumps({"crc32": crc32, "content": inner}, indent=1) + "\n")


def _rename_newest(name: str) -> Callable[[Path], Any]:
    return lambda root: iteration_directory(root, NEWEST).rename(root / name)


def _copy_newest(name: str) -> Callable[[Path], Any]:
    return lambda root: shutil.copytree(iteration_directory(root, NEWEST), root / name)


def _replace_newest(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def replace(root: Path) -> None:
        newest = iteration_directory(root, NEWEST)
        shutil.rmtree(newest)
        make(newest)

    return replace


def _on_tracker(damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda root: damage(root / TRACKER_NAME)


_NEWEST_NAME = iteration_directory(Path(), NEWEST).name
_SHARD = "__1_0.distcp"

KINDS: dict[str, Kind] = {
    "a rank's file missing": Kind(_of(_SHARD, Path.unlink), f"{_SHARD} is missing"),
    "a rank's file empty": Kind(_of(_SHARD, lambda path: path.write_bytes(b"")), _SHARD),
    "a rank's file cut in half": Kind(_of(_SHARD, lambda path: os.truncate(path, path.stat().st_size // 2)), _SHARD),
    "a rank's file one byte longer": Kind(_of(_SHARD, lambda path: os.truncate(path, path.stat().st_size + 1)), _SHARD),
    "a block of zeros": Kind(_of("__0_0.distcp", _zero_block), "__0_0.distcp is damaged"),
    "a hole": Kind(_of("__0_0.distcp", _punch_hole), "__0_0.distcp is damaged"),
    "a rank's file of the iteration before": Kind(_copy_from_before(_SHARD), _SHARD),
    "files of two iterations swapped": Kind(_swap, _SHARD, loaded=OLDEST),
    "the table of contents of another model": Kind(_of(".metadata", _rename_tensors), ".metadata is damaged"),
    "no table of contents": Kind(_of(".metadata", Path.unlink), ".metadata is missing"),
    "no manifest": Kind(_of(MANIFEST_NAME, Path.unlink), f"{_NEWEST_NAME} holds no {MANIFEST_NAME}"),
    "the manifest of the iteration before": Kind(_copy_from_before(MANIFEST_NAME), "holds iteration 4"),
    "a manifest of a future format": Kind(_of(MANIFEST_NAME, _write_future_manifest), "version 2 of the format"),
    "a document in another encoding": Kind(
        _of("state.json", lambda path: path.write_text(path.read_text(), encoding="utf-16")), "state.json"
    ),
    "a tokenizer's file missing": Kind(_of("tokenizer/tokenizer.json", Path.unlink), "tokenizer.json is missing"),
    "a tokenizer's directory missing": Kind(_of("tokenizer", shutil.rmtree), "tokenizer.json is missing"),
    "a file that may not be read": Kind(_of("rng.json", lambda path: path.chmod(0)), "rng.json cannot be read"),
    "a directory that may not be read": Kind(_of("", lambda path: path.chmod(0)), _NEWEST_NAME),
    "a loop of links": Kind(
        _of("config.json", lambda path: _replace(path, lambda name: name.symlink_to(name.name))), "config.json"
    ),
    "a pipe in place of a file": Kind(_of(_SHARD, lambda path: _replace(path, os.mkfifo)), f"{_SHARD} is no regular"),
    "a pipe in place of the manifest": Kind(_of(MANIFEST_NAME, lambda path: _replace(path, os.mkfifo)), MANIFEST_NAME),
    "a directory in place of a file": Kind(_of("state.json", lambda path: _replace(path, Path.mkdir)), "state.json"),
    "a copy that rsync was interrupted at": Kind(_of(_SHARD, _copy_halfway), f"{_SHARD} is missing"),
    "an empty directory": Kind(_replace_newest(Path.mkdir), f"{_NEWEST_NAME} holds no"),
    "a file in place of the directory": Kind(_replace_newest(Path.touch), _NEWEST_NAME),
    "a link that leads nowhere": Kind(_replace_newest(lambda path: path.symlink_to("nowhere")), _NEWEST_NAME),
    "the directory under another number": Kind(_rename_newest("iter_0000007"), "holds iteration 6"),
    "the directory under another name": Kind(_rename_newest("iter_0000006.bak"), f"{_NEWEST_NAME}, which"),
    "the tracker names none that exists": Kind(_on_tracker(lambda path: path.write_text("9")), TRACKER_NAME, NEWEST),
    "the tracker holds garbage": Kind(_on_tracker(lambda path: path.write_bytes(b"\xff\0")), TRACKER_NAME, NEWEST),
    "the tracker is empty": Kind(_on_tracker(lambda path: path.write_bytes(b"")), TRACKER_NAME, NEWEST),
    "the tracker is missing": Kind(_on_tracker(Path.unlink), TRACKER_NAME, NEWEST),
    "the tracker is a directory": Kind(_on_tracker(lambda p: _replace(p, Path.mkdir)), TRACKER_NAME, NEWEST),
    "the tracker is one of before": Kind(_on_tracker(lambda path: path.write_text("4")), TRACKER_NAME),
    "a file too many": Kind(_of("notes.txt", lambda path: path.write_text("mine")), "", NEWEST),
    "a copy under a name in capitals": Kind(_copy_newest("ITER_0000008"), "", NEWEST),
    "a copy under a longer number": Kind(_copy_newest("iter_000000006"), "", NEWEST),
    "a copy under a later number": Kind(_copy_newest("iter_0000008"), "iter_0000008 is newer", NEWEST),
    **{
        f"a bit of {name}": Kind(_of(name, _flip_middle), f"{name} is damaged")
        for name in (".metadata", _SHARD, MANIFEST_NAME, "state.json", "tensors.json", "tokenizer/tokenizer.json")
    },
}


def play_kinds(undamaged: str, directory: str, layout: str, names: list[str]) -> list[Verdict]:
    """Damage copies of the directory in these ways, and load each of them into a run of this layout; all processes of
    it call this."""
    before = os.getcwd()
    os.chdir(undamaged)
    config, recipe = training(f"{_FLAGS} --load . --no-load-rng", layout)
    try:
        with open_local_run(config, recipe, own_rank(config)) as run:
            expected = {iteration: _load(run, iteration)[1] for iteration in (OLDEST, BEFORE, NEWEST)}
            assert len({str(content) for content in expected.values()}) == 3
            found = []
            for number, name in enumerate(names):
                root = Path(directory) / f"{number}"
                on_first_rank(run.groups.world, functools.partial(_damage_copy, undamaged, root, KINDS[name]))
                judge = functools.partial(_judge_kind, run, KINDS[name], root, expected)
                problems = on_every_rank(run.groups.world, judge)
                found.append(Verdict(f"{name}, {run.groups.world.size()} ranks", "; ".join(filter(None, problems))))
            return found
    finally:
        os.chdir(before)


def _damage_copy(undamaged: str, root: Path, kind: Kind) -> None:
    shutil.copytree(undamaged, root)
    kind.damage(root)


def _judge_kind(run: Run, kind: Kind, root: Path, expected: dict[int, dict[str, float]]) -> str:
    os.chdir(root)
    try:
        with _ordinary_user():
            warnings, content = _load(run)
    except MegatronError as error:
        return f"refused: {error}"
    if run.progress.iteration != kind.loaded:
        return f"iteration {run.progress.iteration} is loaded instead of {kind.loaded}"
    if content != expected[kind.loaded]:
        return "other values are loaded"
    if run.groups.world.rank():
        return "" if not warnings else f"not only the first rank speaks: {warnings}"
    is_named = len(warnings) == 1 and warnings[0].startswith("warning: loading ") and kind.names in warnings[0]
    return "" if is_named or not (kind.names or warnings) else f"{kind.names!r} is not what is said: {warnings}"


def _load(run: Run, iteration: int | None = None) -> tuple[list[str], dict[str, float]]:
    """Load into the run what lies in the current directory; what was warned of, and a sum of each tensor."""
    for chunk in run.model:
        for parameter in chunk.module.parameters():
            parameter.data.fill_(float("nan"))
    run.progress.iteration = -1
    run.config.checkpoint.ckpt_step = iteration
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        load_checkpoint(run)
    # Sums of the bits, so that equal sums are equal values for any practical purpose.
    content = {name: float(zlib.crc32(tensor.contiguous().view(torch.uint8).numpy())) for name, tensor in values(run)}
    return errors.getvalue().splitlines(), content


@contextlib.contextmanager
def _ordinary_user() -> Iterator[None]:
    """Where this process may read and write everything, be a user who may not."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(_ORDINARY_USER)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
