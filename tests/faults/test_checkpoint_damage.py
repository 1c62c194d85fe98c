# SPDX-License-Identifier: Apache-2.0
"""L3-L5, L13, L15, L18: a checkpoint with any byte changed is not used, and nothing in it is ever run."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    record_file,
    verify_files,
)
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.errors import CheckpointError
from megatron.core.upstream_checkpoints.rank_file import read_rank_file
from tests.support.small_checkpoints import ALONE, content, find, save, tensors
from tests.support.tiny_training import prepare, train_tiny

FILES = (".metadata", "__0_0.distcp", "manifest.json", "metadata.json", "state.json", "tensors.json")


def flip_bit(path: Path, bit: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one byte longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "first bit": lambda path: flip_bit(path, 0),
    "last bit": lambda path: flip_bit(path, 8 * path.stat().st_size - 1),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a directory": lambda path: (path.unlink(), path.mkdir())[0],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_L3_damaged_file_is_named_and_the_previous_checkpoint_loaded(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    assert sorted(path.name for path in newest.iterdir()) == sorted(FILES)
    DAMAGE[damage](newest / name)
    found = find(tmp_path)
    assert found is not None and content(found) == 10
    assert len(found.skipped) == 1 and name in found.skipped[0]
    with pytest.raises(CheckpointError, match=name):
        find(tmp_path, 20)


def test_L3_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 10)
    sizes = [(checkpoint / name, 8 * (checkpoint / name).stat().st_size) for name in FILES]
    pick = random.Random(7)
    for path, bits in sizes:
        for bit in pick.sample(range(bits), 60):
            flip_bit(path, bit)
            with pytest.raises(CheckpointError):
                find(tmp_path)
            flip_bit(path, bit)
    assert find(tmp_path) is not None


def test_L3_a_pipe_in_the_place_of_an_empty_file(tmp_path: Path) -> None:
    """It is as long, and whoever reads it waits for ever."""
    (tmp_path / "empty").touch()
    manifest = Manifest(10, "run", 1, {"empty": record_file(tmp_path / "empty")})
    verify_files(tmp_path, manifest)
    (tmp_path / "empty").unlink()
    os.mkfifo(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="empty is no regular file"):
        verify_files(tmp_path, manifest)


def test_L4_file_of_another_save(tmp_path: Path) -> None:
    old, new = save(tmp_path, 10), save(tmp_path, 20)
    shutil.copy(old / "__0_0.distcp", new / "__0_0.distcp")
    found = find(tmp_path)
    assert found is not None and content(found) == 10


def test_L5_extra_files_are_ignored(tmp_path: Path) -> None:
    (save(tmp_path, 10) / "notes.txt").write_text("mine")
    found = find(tmp_path)
    assert found is not None and content(found) == 10


def rewrite_manifest(checkpoint: Path, **changes: Any) -> None:
    """Change the manifest and give it a fitting checksum, as someone who means harm would."""
    document = json.loads((checkpoint / MANIFEST_NAME).read_text())
    inner = document["content"] | changes
    crc32 = zlib.crc32(json.dumps(inner).encode())
    (checkpoint / MANIFEST_NAME).write_text(json.dumps({"crc32": crc32, "content": inner}, indent=1) + "\n")


def test_L18_format_of_the_future(tmp_path: Path) -> None:
    rewrite_manifest(save(tmp_path, 10), format_version=2)
    with pytest.raises(CheckpointError, match="version 2 of the format; this program reads version 1"):
        find(tmp_path)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "tokenizer/../../x"])
def test_L15_manifest_that_names_files_outside(tmp_path: Path, name: str) -> None:
    rewrite_manifest(save(tmp_path, 10), files={name: {"bytes": 1, "crc32": 1}})
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        find(tmp_path)


def test_L15_table_of_contents_that_names_files_outside(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "ckpt", 10)
    shutil.copy(checkpoint / "__0_0.distcp", tmp_path / "elsewhere")
    metadata = read_metadata(checkpoint / ".metadata")
    for info in metadata.storage_data.values():
        info.relative_path = "../../elsewhere"
    replace_metadata(checkpoint, pickle.dumps(metadata))
    found = find(tmp_path / "ckpt")
    assert found is not None
    with pytest.raises(CheckpointError, match="outside"):
        serialization.load(tensors(), found, ALONE)


def replace_metadata(checkpoint: Path, pickled: bytes) -> None:
    """Put another `.metadata` there, with a manifest that agrees."""
    (checkpoint / ".metadata").write_bytes(pickled)
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, ".metadata": record_file(checkpoint / ".metadata")}
    (checkpoint / MANIFEST_NAME).unlink()
    Manifest(manifest.iteration, manifest.run_id, manifest.world_size, files).write(checkpoint)


class Gadget:
    """Pickles to a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def gadgets(canary: Path) -> dict[str, Any]:
    """Objects that delete the canary when they are unpickled, or would do worse."""
    import os
    import subprocess

    code = f"import os; os.unlink({str(canary)!r})"
    return {
        "os.unlink": Gadget(os.unlink, str(canary)),
        "os.system": Gadget(os.system, f"rm {canary}"),
        "subprocess": Gadget(subprocess.check_call, ["rm", str(canary)]),
        "eval": Gadget(eval, code.partition("; ")[2]),
        "exec": Gadget(exec, code),
        "shutil.rmtree": Gadget(shutil.rmtree, str(canary.parent)),
        "nested": {"a": [{"b": (Gadget(os.unlink, str(canary)),)}]},
        "getattr": Gadget(getattr, Path(canary), "unlink"),
        "Path.unlink": Gadget(Path.unlink, canary),
        "torch.load": Gadget(torch.load, str(canary)),
    }


@pytest.mark.parametrize("name", list(gadgets(Path("/nonexistent/canary"))))
def test_L13_malicious_table_of_contents_is_refused(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary" / "file"
    canary.parent.mkdir()
    canary.write_text("alive")
    checkpoint = save(tmp_path / "ckpt", 10)
    replace_metadata(checkpoint, pickle.dumps(gadgets(canary)[name]))
    found = find(tmp_path / "ckpt")
    assert found is not None
    with pytest.raises(CheckpointError, match="refused class"):
        serialization.load(tensors(), found, ALONE)
    assert canary.read_text() == "alive"


@pytest.mark.parametrize(
    "pickled", [b"", b"garbage", pickle.dumps({"a": 1}), b"\x80\x04\x8e" + b"\xff" * 8, b"\x82\x01."]
)
def test_L13_table_of_contents_that_is_none(tmp_path: Path, pickled: bytes) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(pickled)
    with pytest.raises(CheckpointError, match="metadata"):
        read_metadata(path)


class _EarlyPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, obj: object) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_a_table_of_contents_of_an_early_python_3_11_is_read(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "ckpt", 10)
    expected = read_metadata(checkpoint / ".metadata")
    stream = io.BytesIO()
    _EarlyPickler(stream).dump(expected)
    assert b"getattr" in stream.getvalue()
    (tmp_path / "early").write_bytes(stream.getvalue())
    assert read_metadata(tmp_path / "early") == expected
    # Nothing else is looked up like this.
    for arguments in ((type(expected), "__init__"), (torch.Size, "numel"), (_MEM_FORMAT_ENCODING, "mro")):
        content = pickle.dumps(_Gadget(getattr, arguments))
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(CheckpointError, match="refused class builtins.getattr"):
            read_metadata(tmp_path / "bad")


class _Gadget:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("name", list(gadgets(Path("/nonexistent/canary"))))
def test_L13_malicious_torch_file_is_refused(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary" / "file"
    canary.parent.mkdir()
    canary.write_text("alive")
    path = tmp_path / "model_optim_rng.pt"
    torch.save({"model": {"weight": torch.ones(2)}, "args": gadgets(canary)[name]}, path)
    with pytest.raises(CheckpointError, match="refused class|cannot be loaded"):
        read_rank_file(path)
    assert canary.read_text() == "alive"


ODD_FIELDS: list[tuple[str, list[Any], Any]] = [
    # document, where in it, what is put there; ... takes the field away
    ("state", [], [1]),
    ("state", ["progress"], None),
    ("state", ["progress", "iteration"], "2"),
    ("state", ["progress", "consumed_train_samples"], -1),
    ("state", ["optimizer"], ...),
    ("state", ["optimizer", "step_count"], 1.5),
    ("state", ["optimizer", "grad_scaler"], 1),
    ("state", ["scheduler"], None),
    ("state", ["scheduler", "num_steps"], ...),
    ("state", ["hooks"], 1),
    ("rng", [], "x"),
    ("rng", ["layout"], {"tp": None}),
    ("rng", ["ranks"], {}),
    ("rng", ["ranks", 0], None),
    ("rng", ["ranks", 0, "torch"], ...),
    ("rng", ["ranks", 0, "python", 1], [1]),
    ("rng", ["ranks", 0, "numpy", 1, 7], 2**32),
    ("tensors", [], []),
    ("tensors", ["valid_rows"], {"embedding.word_embeddings.weight": "all"}),
]


def test_documents_that_fit_their_manifest_and_say_something_odd_are_refused_in_one_sentence(tmp_path: Path) -> None:
    checkpoint = tmp_path / "iter_0000002"
    train_tiny("--save", tmp_path, "--exit-interval", "2")
    records = json.loads((checkpoint / MANIFEST_NAME).read_text())["content"]["files"]
    for name, place, value in ODD_FIELDS:
        path = checkpoint / f"{name}.json"
        written = path.read_bytes()
        whole = {"": json.loads(written)}
        *above, last = ["", *place]
        part: Any = whole
        for step in above:
            part = part[step]
        part.pop(last) if value is ... else part.__setitem__(last, value)
        path.write_text(json.dumps(whole[""]))
        rewrite_manifest(checkpoint, files=records | {path.name: record_file(path)._asdict()})
        with pytest.raises(CheckpointError, match=f"{path} is not as (this program writes it|it was written): "):
            prepare("--load", tmp_path)
        path.write_bytes(written)
    rewrite_manifest(checkpoint, files=records)
    assert prepare("--load", tmp_path).progress.iteration == 2
