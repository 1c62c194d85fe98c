# SPDX-License-Identifier: Apache-2.0
"""Hostile pickles, and the files of every reader of checkpoints in which they can be planted."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.saved_boxes import BoxReader
from megatron.core.errors import CheckpointError
from megatron.core.upstream_checkpoints.flat_files import read_flat_buffers
from megatron.core.upstream_checkpoints.names import read_upstream_tensors
from megatron.core.upstream_checkpoints.rank_files import open_legacy
from megatron.core.upstream_checkpoints.settings import read_upstream_settings
from megatron.core.upstream_checkpoints.stored_tensors import open_checkpoint
from megatron.hf.tensor_files import open_tensors
from tests.faults.test_checkpoint_damage import replace_metadata
from tests.support.small_checkpoints import ALONE, find, save, tensors
from tests.support.upstream_files import DistFiles

ITERATION = "iter_0000010"

# ---- pickles, written opcode by opcode: what they name need not exist here


def call(name: str, *arguments: Any) -> bytes:
    """module:function applied to numbers and texts."""
    module, _, function = name.partition(":")
    content = b"".join(pickle.dumps(argument, 2)[2:-1] for argument in arguments)
    return b"c" + f"{module}\n{function}\n".encode() + b"(" + content + b"tR"


def program(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


CALLS = """
    os:system posix:system nt:system os:unlink os:execv os:_exit os:popen subprocess:Popen subprocess:check_call
    builtins:eval builtins:exec builtins:open builtins:getattr builtins:__import__ __builtin__:eval builtins:print
    importlib:import_module shutil:rmtree pathlib:Path.unlink pathlib:Path pickle:loads _pickle:loads marshal:loads
    types:FunctionType functools:partial operator:attrgetter operator:methodcaller ctypes:CDLL
    socket:create_connection urllib.request:urlopen webbrowser:open pty:spawn runpy:run_path code:interact timeit:timeit
    torch:load torch.hub:load torch.jit:load torch.storage:_load_from_bytes torch._utils:_import_dotted_name
    torch.utils.cpp_extension:load_inline numpy:load logging.config:listen sys:exit megatron:eval megatronx.core:eval
""".split()


def payloads(canary: str) -> dict[str, bytes]:
    """Pickles that would delete the canary, or worse."""
    found = {name: program(call(name, canary)) for name in CALLS}
    unlink = call("os:unlink", canary)
    path = text(canary)
    found |= {
        "deep inside": program(b"}" + text("model") + b"}" + text("w") + b"]" + unlink + b"ass."),
        "as a key": program(b"}" + unlink + b"Ns"),
        "twice": program(call("builtins:eval", "1") + b"0" + unlink),
        "INST": b"(S'" + canary.encode() + b"'\nios\nunlink\n.",
        "OBJ": program(b"(cos\nunlink\n" + path + b"o"),
        "NEWOBJ": program(b"cos\nunlink\n" + path + b"\x85\x81"),
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06unlink\x93" + path + b"\x85R.",
        "EXT1": program(b"\x82\x01"),
        "EXT4": program(b"\x84\x01\x00\x00\x00"),
        "BUILD": program(b"cos\nenviron\n}" + path + path + b"sb"),
        "persistent": program(path + b"Q"),
    }
    return found


# ---- where they are planted: each writes files into a directory and returns what reads them


def archive(pickled: bytes, *, compression: int = zipfile.ZIP_STORED, more: dict[str, bytes] | None = None) -> bytes:
    """A file as of torch.save with this pickle in it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, content in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little", **(more or {})}.items():
            file.writestr(f"archive/{name}", content)
    return stream.getvalue()


def plant_own_table(root: Path, pickled: bytes) -> Callable[[], Any]:
    replace_metadata(save(root, 10), pickled)
    found = find(root)
    assert found is not None
    return lambda: serialization.load(tensors(), found, ALONE)


def plant_table(root: Path, pickled: bytes) -> Callable[[], Any]:
    (root / ITERATION).mkdir(parents=True)
    (root / ITERATION / ".metadata").write_bytes(pickled)
    return lambda: (read_upstream_settings(root, None), open_checkpoint(root))


def plant_common_file(root: Path, pickled: bytes) -> Callable[[], Any]:
    DistFiles(root / ITERATION).finish()
    (root / ITERATION / "common.pt").write_bytes(archive(pickled))
    return lambda: read_upstream_settings(root, None)


def plant_object(key: str, read: Callable[[Path], Any]) -> Callable[[Path, bytes], Callable[[], Any]]:
    def plant(root: Path, pickled: bytes) -> Callable[[], Any]:
        write_entry(root / ITERATION, {key: BytesStorageMetadata()}, MetadataIndex(key), archive(pickled))
        return lambda: read(root)

    return plant


def write_entry(path: Path, entries: dict[str, Any], index: MetadataIndex, content: bytes, **place: Any) -> None:
    """A checkpoint of torch's whose table of contents has these entries, and one of them in its file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "__0_0.distcp").write_bytes(content)
    info = _StorageInfo(**({"relative_path": "__0_0.distcp", "offset": 0, "length": len(content)} | place))
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data={index: info})))


def describe(shape: tuple[int, ...], chunk: tuple[int, ...] | None = None) -> TensorStorageMetadata:
    boxes = [ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(chunk or shape))]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), boxes)


def reader(root: Path) -> BoxReader:
    return BoxReader(root / ITERATION, read_metadata(root / ITERATION / ".metadata"))


def read_weight(root: Path) -> None:
    """By a run, and by tools."""
    with pytest.raises(CheckpointError):
        reader(root).read_whole("weight")
    wanted = {"weight": ShardedTensor.whole("weight", torch.zeros(4))}
    read_upstream_tensors(root / ITERATION, wanted, ALONE)


def plant_shard(root: Path, pickled: bytes) -> Callable[[], Any]:
    entry, index = describe((4,)), MetadataIndex("weight", torch.Size([0]))
    write_entry(root / ITERATION, {"weight": entry}, index, archive(pickled, more={"data/0": bytes(16)}))
    return lambda: read_weight(root)


def plant_rank_file(root: Path, pickled: bytes) -> Callable[[], Any]:
    path = root / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(archive(pickled))
    return lambda: (open_checkpoint(root), open_legacy(path))


def plant_flat_file(root: Path, pickled: bytes) -> Callable[[], Any]:
    path = root / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    optimizer = {"optimizer": {"param_groups": [{"step": 1}]}}
    torch.save({"model": {"a": torch.ones(1)}, "args": Namespace(), "optimizer": optimizer}, path)
    path.with_name("distrib_optim.pt").write_bytes(archive(pickled))
    return lambda: open_legacy(path, with_optimizer=True)


def plant_hugging_face(root: Path, pickled: bytes) -> Callable[[], Any]:
    root.mkdir(parents=True)
    (root / "pytorch_model.bin").write_bytes(archive(pickled))
    return lambda: open_tensors(root)


FLAT = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
PLACES: dict[str, Callable[[Path, bytes], Callable[[], Any]]] = {
    ".metadata of ours": plant_own_table,
    ".metadata": plant_table,
    "common.pt": plant_common_file,
    "common_state": plant_object("common_state/shard_0_1", lambda root: read_upstream_settings(root, None)),
    "param_state": plant_object(FLAT, lambda root: read_flat_buffers(reader(root))),
    "__0_0.distcp": plant_shard,
    "model_optim_rng.pt": plant_rank_file,
    "distrib_optim.pt": plant_flat_file,
    "pytorch_model.bin": plant_hugging_face,
}


def list_files(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in root.rglob("*") if path.is_file()}


def read_peak_bytes() -> int:
    """The most memory that this process had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def assert_refused(root: Path, load: Callable[[], Any], what: str) -> str:
    """One sentence, no file more or less, and hardly any memory."""
    before = list_files(root)
    forget_peak()
    memory = read_peak_bytes()
    try:
        load()
    except CheckpointError as error:
        sentence = str(error)
    else:
        raise AssertionError(f"{what} was taken")
    assert list_files(root) == before, what
    assert "\n" not in sentence and 20 < len(sentence) < 1000, f"{what}: {sentence}"
    assert read_peak_bytes() - memory < 40 << 20, f"{what}: {sentence}"
    return sentence
