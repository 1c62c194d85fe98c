# SPDX-License-Identifier: Apache-2.0
"""What we save in upstream's formats has the keys, shapes, number formats, boxes and key trees of upstream's own
checkpoints of the same runs, and going on from it is going on from upstream's.

The listings in data/ckpt say of every object its type, and of tensors their shapes; values are upstream's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from megatron.core.dist_checkpointing.safe_pickle import read_metadata, read_restricted
from megatron.core.dist_checkpointing.saved_boxes import BoxReader
from tests.golden.test_train_curves import DATA, assert_same_step, command_line, lay_out, rows, train

_LONG = 8
"""Sequences beyond this length are one entry in a listing."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("golden"))


def read_listing(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "ckpt" / f"{name}.json").read_text())
    return found


def describe(value: Any) -> Any:
    """The types of everything in a value, and the shapes of tensors."""
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)} {value.dtype}"
    if isinstance(value, list | tuple) and len(value) <= _LONG:
        return [describe(item) for item in value]
    # The reader has no array: it keeps what would have made one.
    name = type(value).__name__.replace("_reconstruct", "ndarray")
    return f"{name}[{len(value)}] of {type(value[0]).__name__}" if isinstance(value, list | tuple) else name


def types_of(listed: Any) -> Any:
    """The same of what a listing says, which names values as well."""
    if isinstance(listed, dict):
        return {key: types_of(item) for key, item in listed.items()}
    if isinstance(listed, list):
        return [types_of(item) for item in listed]
    return listed if listed.startswith("Tensor[") else listed.partition(":")[0]


def save_run(case: str, processes: int, reference: Path, tmp_path: Path, *flags: str) -> Path:
    """Train the reference's run for ten iterations and save it."""
    arguments = [*command_line(case, reference, tmp_path), "--save", str(tmp_path / "saved"), "--exit-interval", "10"]
    train(processes, [*arguments, *flags])
    return tmp_path / "saved"


def assert_goes_on(saved: Path, case: str, processes: int, reference: Path, tmp_path: Path, *flags: str) -> None:
    """Load what was saved with --load alone, and follow upstream's curve."""
    text = (DATA / f"train_{case}" / "args.txt").read_text()
    arguments = text.replace("GOLDEN", str(reference)).replace("CACHE_DIR", str(tmp_path / "cache")).split()
    report = ["--metrics-dir", str(tmp_path / "resumed"), "--exit-interval", "15"]
    train(processes, [*arguments, "--load", str(saved), *report, *flags])
    expected = [row for row in rows(DATA / f"train_{case}" / "metrics_rank0.jsonl") if 10 < row["iteration"] <= 15]
    for ours, theirs in zip(rows(tmp_path / "resumed" / "metrics.jsonl"), expected, strict=True):
        assert_same_step(ours, theirs)


def without_manifest(root: Path) -> list[str]:
    """The files, by path; ours adds its manifest, the ledger and the run's summary to upstream's."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"
                  and path.name not in ("manifest.json", "summary.txt", "ledger.jsonl"))  # fmt: skip


@pytest.mark.flags("--ckpt-format")
def test_torch_on_one_process(reference: Path, tmp_path: Path) -> None:
    listing = read_listing("b_iter10_torch")
    saved = save_run("b", 1, reference, tmp_path, "--ckpt-format", "torch")
    assert without_manifest(saved) == [name for name, _ in listing["files"]]
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "10"
    file = saved / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    content = read_restricted(file, str(file))
    assert describe(content) == types_of(listing["model_optim_rng.pt"])
    assert list(content["model"]) == list(listing["model_optim_rng.pt"]["model"]), "the order of upstream's modules"
    assert content["num_floating_point_operations_so_far"] == 17270046720.0
    assert content["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.0009728616793536588, rel=1e-12)
    assert_goes_on(saved, "b", 1, reference, tmp_path)


def read_objects(path: Path) -> dict[str, Any]:
    """Every pickled object of a torch_dist checkpoint by key, and the types of what is in it."""
    metadata = read_metadata(path / ".metadata")
    reader = BoxReader(path, metadata)
    keys = [key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    return {key: describe(reader.read_object(key)) for key in keys}


def list_tensors(path: Path) -> dict[str, Any]:
    """The table of contents as a listing has it, boxes sorted."""
    table = read_metadata(path / ".metadata").state_dict_metadata
    return {
        key: {
            "global_shape": list(entry.size),
            "dtype": str(entry.properties.dtype),
            "chunks": sorted([list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks),
        }
        for key, entry in table.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def sort_boxes(listed: dict[str, Any]) -> dict[str, Any]:
    return {key: {**entry, "chunks": sorted(entry["chunks"])} for key, entry in listed.items()}


@pytest.mark.parametrize(("case", "name"), [("b", "b_iter10_torch_dist"), ("c", "c_torch_dist")])
def test_torch_dist_on_one_process(case: str, name: str, reference: Path, tmp_path: Path) -> None:
    listing = read_listing(name)
    saved = save_run(case, 1, reference, tmp_path, "--ckpt-format", "upstream_torch_dist")
    assert without_manifest(saved) == sorted(name for name, _ in listing["files"])
    path = saved / "iter_0000010"
    assert list_tensors(path) == sort_boxes(listing["tensors"])
    assert read_objects(path) == types_of(listing["bytes_contents"])
    assert json.loads((path / "metadata.json").read_text()) == listing["metadata.json"]
    assert_goes_on(saved, case, 1, reference, tmp_path)


@pytest.mark.flags("--ckpt-format")
def test_torch_dist_with_a_distributed_optimizer(reference: Path, tmp_path: Path) -> None:
    """Its default: each rank's state in flat buckets."""
    listing = read_listing("b_dp2_distopt_torch_dist")
    saved = save_run("b_dp2_distopt", 2, reference, tmp_path, "--ckpt-format", "upstream_torch_dist")
    assert without_manifest(saved) == sorted(name for name, _ in listing["files"])
    path = saved / "iter_0000010"
    assert list_tensors(path) == sort_boxes(listing["tensors"])
    assert read_objects(path) == types_of(listing["bytes_contents"])
    reader = BoxReader(path, read_metadata(path / ".metadata"))
    for name in ("per_bucket_numel", "per_bucket_numel_unpadded"):
        key = f"optimizer.distributed.dp_group_idx_0.{name}/shard_0_1"
        ((sizes,),) = reader.read_object(key)
        ((listed,),) = listing["bytes_contents"][key]
        assert {str(key): [f"int: {size}" for size in bucket] for key, bucket in sizes.items()} == listed
    assert_goes_on(saved, "b", 1, reference, tmp_path)


@pytest.mark.flags("--dist-ckpt-optim-fully-reshardable")
def test_torch_dist_with_a_distributed_optimizer_for_any_layout(reference: Path, tmp_path: Path) -> None:
    """What is said beside the tensors is what is said with upstream's default, but for the place of the parameter
    groups; the tensors are those without a distributed optimizer."""
    listing, whole = read_listing("b_dp2_distopt_torch_dist"), read_listing("b_iter10_torch_dist")
    flags = ("--ckpt-format", "upstream_torch_dist", "--dist-ckpt-optim-fully-reshardable")
    saved = save_run("b_dp2_distopt", 2, reference, tmp_path, *flags)
    path = saved / "iter_0000010"
    found = list_tensors(path)
    for key, entry in whole["tensors"].items():
        assert (found[key]["global_shape"], found[key]["dtype"]) == (entry["global_shape"], entry["dtype"]), key
    main = {key: entry for key, entry in found.items() if key.startswith("optimizer.state.fp32_param.")}
    assert {key.removeprefix("optimizer.state.fp32_param.") for key in main} == {
        key for key in whole["tensors"] if not key.startswith("optimizer.")
    }
    assert found.keys() == whole["tensors"].keys() | main.keys()
    objects = read_objects(path)
    groups = objects["common_state/shard_0_1"][0]["optimizer"].pop("optimizer")
    listed = types_of(listing["bytes_contents"])
    assert groups == listed.pop("optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1")[0]
    objects["common_state/shard_0_1"][0]["content_metadata"].pop("distrib_optim_fully_reshardable_mem_efficient")
    assert objects == {key: entry for key, entry in listed.items() if not key.startswith("optimizer.")}
    assert_goes_on(saved, "b", 1, reference, tmp_path)


def test_torch_on_two_tensor_parallel_ranks(reference: Path, tmp_path: Path) -> None:
    listing = read_listing("b_tp2_torch")
    saved = save_run("b_tp2", 2, reference, tmp_path, "--ckpt-format", "torch")
    assert without_manifest(saved) == [name for name, _ in listing["files"]]
    for rank in range(2):
        file = saved / "iter_0000010" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        assert describe(read_restricted(file, str(file))) == types_of(listing["model_optim_rng.pt"])
