# SPDX-License-Identifier: Apache-2.0
"""L1, L13-L15: files that mean harm, given to everything that reads a checkpoint: nothing in them runs, nothing outside
is written or read, no memory is taken beyond what the files are long, and each ends in one sentence."""

from __future__ import annotations

import functools
import io
import itertools
import json
import shutil
import struct
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.safe_pickle import StandIn, read_restricted
from megatron.core.errors import CheckpointError
from megatron.core.upstream_checkpoints.common_state import find_upstream_checkpoint
from megatron.core.upstream_checkpoints.diagnosis import diagnose
from megatron.core.upstream_checkpoints.rank_file import find_legacy_file
from megatron.core.upstream_checkpoints.rank_files import open_legacy
from megatron.core.upstream_checkpoints.settings import read_upstream_settings
from megatron.hf.tensor_files import open_tensors
from tests.faults import hostile_files
from tests.faults.hostile_files import (
    CALLS,
    ITERATION,
    PLACES,
    archive,
    assert_refused,
    call,
    describe,
    payloads,
    plant_common_file,
    plant_rank_file,
    program,
    read_weight,
    reader,
    text,
    write_entry,
)
from tests.faults.test_checkpoint_damage import rewrite_manifest
from tests.support.small_checkpoints import find, save
from tests.support.upstream_files import DistFiles


@pytest.mark.parametrize("place", PLACES)
def test_L13_nothing_in_a_pickle_runs(place: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("alive")
    for number, (name, pickled) in enumerate(payloads(str(canary)).items()):
        root = tmp_path / str(number)
        sentence = assert_refused(tmp_path, PLACES[place](root, pickled), f"{place}: {name}")
        assert "weights_only" not in sentence, "torch's advice is to run it"
        # Names of Python 2 are told as those of today.
        assert name not in CALLS or ("refused class" in sentence and f".{name.partition(':')[2]}" in sentence)
        shutil.rmtree(root)
    assert canary.read_text() == "alive"


def test_L13_classes_of_upstream_s_are_never_looked_up() -> None:
    """They get stand-ins, whatever they are called with, and are not imported."""
    for name in ("megatron.core.rerun_state_machine:RerunMode", "megatron.training.nowhere:system", "_io:BytesIO"):
        found = read_restricted(io.BytesIO(archive(program(call(name, "a")))), "a file")
        assert isinstance(found, StandIn) and found.values == ("a",)


# ---- memory and time


def nest(depth: int) -> bytes:
    return b"]" * depth + b"a" * (depth - 1)


def double(times: int) -> bytes:
    """A list of two lists of two lists ..., each of them the same: 2 ** times items in a few bytes."""
    return b"](K\x01K\x02e" + b"".join(
        b"q" + bytes([n]) + b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(times)
    )


def settings(value: bytes) -> bytes:
    """Upstream's settings with this value among them."""
    return program(b"}" + text("args") + call("argparse:Namespace") + b"}" + text("a") + value + b"sbs")


BOMBS: dict[str, bytes] = {
    "object number": program(b"Nr\xff\xff\xff\x03"),
    "object number in text": program(b"Np99999999\n"),
    "bytearray": program(call("builtins:bytearray", 1 << 31)),
    "deep": program(nest(200_000)),
    "long text": program(b"\x8d" + struct.pack("<Q", 1 << 40) + b"a"),
    "long bytes": program(b"\x96" + struct.pack("<Q", 1 << 40) + b"a"),
    "long integer": program(b"\x8b" + struct.pack("<I", 1 << 30) + b"a"),
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "cut off": program(b"}" + text("a" * 50))[:20],
    "nothing": b"",
    "a text": program(text("hello")),
    "a number": program(b"K\x01"),
    "storage": program(call("torch.storage:UntypedStorage", 1 << 50)),
    "tensor": program(call("torch:FloatTensor", 1 << 50)),
}


@pytest.mark.parametrize("place", PLACES)
def test_L14_pickles_that_ask_for_memory(place: str, tmp_path: Path) -> None:
    for number, (name, pickled) in enumerate(BOMBS.items()):
        assert_refused(tmp_path, PLACES[place](tmp_path / str(number), pickled), f"{place}: {name}")
        shutil.rmtree(tmp_path / str(number))


@functools.cache
def swelling_archives() -> dict[str, bytes]:
    """100 MB of zeros in 100 KB, as the pickle, as values, and as a file beside them."""
    zeros = bytes(100 << 20)
    return {
        "data.pkl": archive(zeros, compression=zipfile.ZIP_DEFLATED),
        "values": archive(program(b"}"), compression=zipfile.ZIP_DEFLATED, more={"data/0": zeros}),
        "byteorder": archive(program(b"}"), compression=zipfile.ZIP_DEFLATED, more={"byteorder": zeros}),
    }


@pytest.mark.parametrize("place", [place for place in PLACES if "metadata" not in place])
def test_L14_archives_that_swell(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (name, content) in enumerate(swelling_archives().items()):
        monkeypatch.setattr(hostile_files, "archive", lambda *_, content=content, **__: content)
        load = PLACES[place](tmp_path / str(number), b"")
        assert_refused(tmp_path, load, f"{place}: {name}")


@pytest.mark.parametrize(
    "value", [double(60), nest(50_000), b"\x8b" + struct.pack("<I", 100_000) + b"\x7f" * 100_000, b"(K\x01" * 0 + b"]"]
)
def test_L14_settings_that_never_end(value: bytes, tmp_path: Path) -> None:
    """They are left out, or the file is refused; nobody looks at 2 ** 60 items."""
    load = plant_common_file(tmp_path / "root", settings(value))
    try:
        load()
    except CheckpointError as error:
        assert "cannot be" in str(error)


def test_L14_huge_tensors_in_small_files(tmp_path: Path) -> None:
    """Shapes of 2 ** 60 values, where the file holds a few."""
    small = archive(b"", more={"data/0": bytes(16)})
    index = MetadataIndex("weight", torch.Size([0]))
    cases: dict[str, tuple[TensorStorageMetadata, dict[str, Any]]] = {
        "shape": (describe((1 << 60,)), {}),
        "shape of three": (describe((1 << 20, 1 << 20, 1 << 20)), {}),
        "negative": (describe((-4,)), {}),
        "box beyond": (describe((4,), (1 << 60,)), {}),
        "length": (describe((1 << 60,)), {"length": 1 << 63}),
        "offset": (describe((4,)), {"offset": -1}),
        "offset beyond": (describe((4,)), {"offset": 1 << 70}),
        "length below": (describe((4,)), {"length": -1}),
        "text": (describe((4,)), {"length": "4"}),
        "outside": (describe((4,)), {"relative_path": "../../canary"}),
        "absolute": (describe((4,)), {"relative_path": "/etc/passwd"}),
        "above": (describe((4,)), {"relative_path": ".."}),
        "NUL": (describe((4,)), {"relative_path": "a\0b"}),
        "no text": (describe((4,)), {"relative_path": 7}),
    }
    for number, (name, (entry, place)) in enumerate(cases.items()):
        root = tmp_path / str(number)
        write_entry(root / ITERATION, {"weight": entry}, index, small, **place)
        assert_refused(tmp_path, lambda root=root: reader(root).read_whole("weight"), name)
        assert_refused(tmp_path, lambda root=root: read_weight(root), name)


def test_L14_one_value_as_a_million(tmp_path: Path) -> None:
    """torch stores an expanded tensor as one value; written out it has any length."""
    huge = torch.ones(1).expand(1 << 40)
    path = tmp_path / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save({"model": {"a": huge}}, path)
    assert "the file holds fewer values" in assert_refused(tmp_path, lambda: open_legacy(path), "weights")
    torch.save({"model": {"a": torch.ones(1)}, "optimizer": {"optimizer": {"param_groups": []}}}, path)
    torch.save({0: {"f": {"param": huge}}}, path.with_name("distrib_optim.pt"))
    assert "fewer values" in assert_refused(tmp_path, lambda: open_legacy(path, with_optimizer=True), "state")
    torch.save({"a": huge}, tmp_path / "pytorch_model.bin")
    assert "fewer values" in assert_refused(tmp_path, lambda: open_tensors(tmp_path), "Hugging Face")


# ---- paths and texts

TRACKERS = {
    "path": b"../../../etc", "absolute": b"/etc", "empty": b"", "negative": b"-1", "underscore": b"1_0",
    "BOM": b"\xef\xbb\xbf10",
    "arabic": "١٠".encode(), "20 digits": b"1" * 20, "5000 digits": b"1" * 5000, "NUL": b"10\0", "lines": b"10\n11",
    "binary": bytes(range(256)), "long": b" " * (1 << 20) + b"10", "release path": b"release/../..",
}  # fmt: skip


@pytest.mark.parametrize("name", TRACKERS)
def test_L1_trackers_that_lead_elsewhere(name: str, tmp_path: Path) -> None:
    """The newest checkpoint in the directory is taken, or none; never one elsewhere."""
    root = tmp_path / "a" / "b" / "root"
    plant_rank_file(root, program(b"}" + text("model") + b"}ss"[:2] + b"s"))
    torch.save({"model": {"a": torch.ones(1)}}, root / ITERATION / "mp_rank_00" / "model_optim_rng.pt")
    DistFiles(tmp_path / "etc").finish()
    (root / "latest_checkpointed_iteration.txt").write_bytes(TRACKERS[name])
    found = find_legacy_file(root)
    assert found is not None and found.is_relative_to(root)
    assert find_upstream_checkpoint(root) is None
    assert diagnose(root).root == root


@pytest.mark.parametrize("kind", ["a directory", "a loop", "a link to nowhere"])
def test_L1_trackers_that_are_no_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "latest_checkpointed_iteration.txt"
    if kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to(path.name if kind == "a loop" else "nowhere")
    assert find_upstream_checkpoint(tmp_path) is None
    assert find_legacy_file(tmp_path) is None
    save(tmp_path / "another", 10).rename(tmp_path / ITERATION)
    assert find(tmp_path) is not None


OUTSIDE = [
    "../x",
    "/etc/passwd",
    "a/../../x",
    "..",
    ".",
    "",
    "a\0b",
    "a//b",
    "./a",
    "a/./b",
    "tokenizer/..",
    "C:\\x/../../y",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_L15_names_in_a_manifest(name: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("secret")
    rewrite_manifest(save(tmp_path / "root", 10), files={name: {"bytes": 6, "crc32": 0}})
    assert_refused(tmp_path, lambda: find(tmp_path / "root"), name)


@pytest.mark.parametrize(
    "record", [{"bytes": 1 << 80, "crc32": 0}, {"bytes": -1, "crc32": 0}, {"bytes": "1"}, [], None]
)
def test_L15_sizes_in_a_manifest(record: Any, tmp_path: Path) -> None:
    rewrite_manifest(save(tmp_path, 10), files={"state.json": record})
    assert_refused(tmp_path, lambda: find(tmp_path), str(record))


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"1" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"NaN", b"{}", b'""']
)
def test_L14_documents_that_are_none(content: bytes, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 10)
    (checkpoint / "manifest.json").write_bytes(content)
    assert_refused(tmp_path, lambda: find(tmp_path), "manifest.json")
    if content not in (b"{}", b'""', b"NaN"):
        (checkpoint / "state.json").write_bytes(content)
        assert_refused(tmp_path, lambda: serialization.read_document(checkpoint, "state"), "state.json")


INDEXES = [
    {"weight_map": {"a": "../model.safetensors"}}, {"weight_map": {"a": "/etc/passwd"}}, {"weight_map": {"a": ".."}},
    {"weight_map": {"a": ""}}, {"weight_map": {"a": "b\0c"}}, {"weight_map": {"a": 7}}, {"weight_map": []}, {}, [],
    {"weight_map": {"a": "sub/../../model.safetensors"}},
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=json.dumps)
@pytest.mark.parametrize("stem", ["model.safetensors", "pytorch_model.bin"])
def test_L15_an_index_of_hugging_face_that_leads_elsewhere(stem: str, index: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    root = tmp_path / "root"
    root.mkdir()
    (root / f"{stem}.index.json").write_text(json.dumps(index))
    assert_refused(tmp_path, lambda: open_tensors(root), str(index))


HEADERS: dict[str, Any] = {
    "huge": {"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}},
    "negative": {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
    "two negative": {"a": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}},
    "backwards": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}},
    "text": {"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}},
    "float": {"a": {"dtype": "F32", "shape": [1e300], "data_offsets": [0, 4]}},
    "code": {"a": {"dtype": "os.system", "shape": [1], "data_offsets": [0, 4]}},
    "list": [1],
    "number": {"a": 1},
    "infinite": {"a": {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 4]}},
    "no offsets": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_L14_headers_of_safetensors(name: str, tmp_path: Path) -> None:
    header = json.dumps(HEADERS[name]).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert_refused(tmp_path, lambda: open_tensors(tmp_path), name)


@pytest.mark.parametrize("start", [struct.pack("<Q", 1 << 63), struct.pack("<Q", (1 << 64) - 1), b"\0", b""])
def test_L14_safetensors_that_are_cut_off(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(start)
    assert_refused(tmp_path, lambda: open_tensors(tmp_path), repr(start))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000)
    assert_refused(tmp_path, lambda: open_tensors(tmp_path), "deep")


def test_L13_counts_of_upstream_s_that_are_none(tmp_path: Path) -> None:
    """Iterations and updates of any size and kind end in a sentence, or are taken for what they are."""
    for number, (key, value) in enumerate(
        itertools.product(("iteration", "optimizer"), (-1, 1 << 70, 10**5000, "x", [], 1e400))
    ):
        root = tmp_path / str(number)
        DistFiles(root / ITERATION).finish()
        content = {"args": Namespace(), key: value if key == "iteration" else {"param_groups": [{"step": value}]}}
        torch.save(content, root / ITERATION / "common.pt")
        assert_refused(root, lambda root=root: read_upstream_settings(root, None), f"{key} {str(type(value))}")
