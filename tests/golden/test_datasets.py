# SPDX-License-Identifier: Apache-2.0
"""Datasets equal the reference's, index by index and sample by sample (cases p1 to p10 and the raw index functions)."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blending_order import build_blending_indices, build_exhaustive_blending_indices
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.index_builders import (
    build_sample_index,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

CASES = (
    "p1_basic p2_epochs4 p3_partial_valid p4_null_int32 p5_sizes_none p6_no_extra_token p7_interdoc p8_blend_weights \
p9_blend_noweights p10_per_split".split()
)
LARGE = "hf_full_eod"  # only the index of this dataset is kept in the repository
ITEM_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen", "dataset_id")


@dataclass
class Tokenizer:
    eod: int
    vocab_size: int
    pad: int | None = None
    unique_identifiers: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def preprocess_dir(golden_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token files of the cases; the tokens of the large one are zeros where the reference data is absent."""
    directory = tmp_path_factory.mktemp("golden") / "preprocess"
    shutil.copytree(golden_data / "preprocess", directory)
    index = np.fromfile(golden_data / "preprocess" / LARGE / "out_text_document.idx", dtype=np.uint8)
    count = int(index[18:26].view("<u8")[0])
    tokens = int(index[34 : 34 + 4 * count].view("<i4").sum())
    with open(directory / LARGE / "out_text_document.bin", "wb") as file:
        file.truncate(2 * tokens)
    return directory


def config_of(case: dict[str, Any], preprocess: Path, cache: Path, **changes: Any) -> GPTDatasetConfig:
    def blend(value: Any) -> Any:
        if value is None:
            return None
        prefixes, weights = value
        return [str(preprocess / prefix.removeprefix("public/")) for prefix in prefixes], weights

    per_split = case.get("blend_per_split")
    options = {
        "random_seed": case.get("seed", 1234),
        "sequence_length": case["seq"],
        "blend": blend(case.get("blend")),
        "blend_per_split": None if per_split is None else [blend(value) for value in per_split],
        "split": case.get("split"),
        "path_to_cache": str(cache),
        "tokenizer": Tokenizer(case["eod"], case["tokenizer_vocab_size"], case["pad_token_id_used"]),
        "create_attention_mask": False,
    }
    for name in ("drop_last_partial_validation_sequence", "add_extra_token_to_sequence", "inter_document_masking"):
        if name in case:
            options[name] = case[name]
    return GPTDatasetConfig(**(options | changes))


def build(case: dict[str, Any], config: GPTDatasetConfig) -> list[Any]:
    return BlendedMegatronDatasetBuilder(GPTDataset, case["sizes"], lambda: True, config).build()


def assert_same(ours: Any, reference: np.ndarray, what: str) -> None:
    assert ours.dtype == reference.dtype, what
    np.testing.assert_array_equal(ours, reference, err_msg=what)


def assert_indices(dataset: GPTDataset, reference: Any, name: str) -> None:
    for index in ("document_index", "sample_index", "shuffle_index"):
        assert_same(getattr(dataset, index), reference[f"{name}.{index}"], f"{name}.{index}")
    wanted = int(reference[f"{name}.num_samples"][0])
    assert (-1 if dataset.num_samples is None else dataset.num_samples) == wanted, name
    assert len(dataset) == int(reference[f"{name}.len"][0]), name


def assert_items(dataset: Any, reference: Any, name: str, skip: set[int]) -> None:
    for row, index in enumerate(reference[f"{name}.idx"].tolist()):
        item = dataset[index]
        if item.get("dataset_id") in skip:
            continue
        for key in ITEM_KEYS:
            if f"{name}.{key}" in reference:
                np.testing.assert_array_equal(
                    item[key], reference[f"{name}.{key}"][row], err_msg=f"{name} {index} {key}"
                )


@pytest.mark.parametrize("name", CASES)
def test_dataset_case(name: str, golden_data: Path, preprocess_dir: Path, tmp_path: Path) -> None:
    case = json.loads((golden_data / "datasets" / "configs.json").read_text())[name]
    reference = np.load(golden_data / "datasets" / f"{name}.npz")
    config = config_of(case, preprocess_dir, tmp_path)
    large = {i for i, prefix in enumerate((config.blend or ([], None))[0]) if LARGE in prefix}
    for again in ("built", "from the cache"):
        built = dict(zip(("train", "valid", "test"), build(case, config), strict=True))
        for split, dataset in built.items():
            if dataset is None:
                assert not any(key.startswith(split) for key in reference), f"{split} {again}"
                continue
            parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
            names = [f"{split}.mid{i}" for i in range(len(parts))] if isinstance(dataset, BlendedDataset) else [split]
            for part, part_name in zip(parts, names, strict=True):
                assert_indices(part, reference, part_name)
            if isinstance(dataset, BlendedDataset):
                assert_same(dataset.dataset_index, reference[f"{split}.dataset_index"], split)
                assert_same(dataset.dataset_sample_index, reference[f"{split}.dataset_sample_index"], split)
                weights = np.asarray(dataset.weights) / sum(dataset.weights)
                np.testing.assert_allclose(weights, reference[f"{split}.weights"], rtol=1e-15)
            assert_items(dataset, reference, f"{split}.items", large)


def test_items_of_the_large_dataset(golden_data: Path, golden_dir: Path, tmp_path: Path) -> None:
    case = json.loads((golden_data / "datasets" / "configs.json").read_text())["p8_blend_weights"]
    reference = np.load(golden_data / "datasets" / "p8_blend_weights.npz")
    for split, dataset in zip(
        ("train", "valid"), build(case, config_of(case, golden_dir / "preprocess", tmp_path))[:2], strict=True
    ):
        assert_items(dataset, reference, f"{split}.items", set())


@pytest.mark.parametrize("name", CASES)
def test_description_has_the_reference_values(
    name: str, golden_data: Path, preprocess_dir: Path, tmp_path: Path
) -> None:
    case = json.loads((golden_data / "datasets" / "configs.json").read_text())[name]
    built = dict(zip(("train", "valid", "test"), build(case, config_of(case, preprocess_dir, tmp_path)), strict=True))
    for split, descriptions in case["cache"].items():
        for wanted in (json.loads(entry["description"]) for entry in descriptions):
            ours = json.loads(built[split].unique_description)
            pairs = (
                list(zip(ours["datasets"], wanted["datasets"], strict=True))
                if "datasets" in wanted
                else [(ours, wanted)]
            )
            for mine, theirs in pairs:
                for key in theirs.keys() - {"dataset_path", "tokenizer"}:
                    assert mine[key] == theirs[key], (split, key)


@pytest.mark.parametrize("name", ["p1_basic", "p4_null_int32"])
@pytest.mark.parametrize(("pos", "attn", "eodloss"), list(itertools.product((0, 1), repeat=3)))
def test_masks_and_positions(
    name: str, pos: int, attn: int, eodloss: int, golden_data: Path, preprocess_dir: Path, tmp_path: Path
) -> None:
    case = json.loads((golden_data / "datasets" / "configs.json").read_text())[name]
    reference = np.load(golden_data / "datasets" / f"{name}.npz")
    config = config_of(
        case,
        preprocess_dir,
        tmp_path,
        reset_position_ids=bool(pos),
        reset_attention_mask=bool(attn),
        eod_mask_loss=bool(eodloss),
        create_attention_mask=True,
    )
    train = build(case, config)[0]
    key = f"flags_pos{pos}_attn{attn}_eodloss{eodloss}"
    assert_items(train, reference, key, set())
    masks = np.stack([train[int(i)]["attention_mask"].numpy() for i in reference[f"{key}.idx"]])
    assert masks.shape == tuple(reference[f"{key}.attention_mask_shape"])
    packed = np.packbits(masks.reshape(len(masks), -1), axis=1)
    np.testing.assert_array_equal(packed, reference[f"{key}.attention_mask_packbits"])


@pytest.fixture(scope="module")
def raw_helpers(golden_data: Path) -> Any:
    return np.load(golden_data / "datasets" / "raw_helpers.npz")


@pytest.mark.parametrize("k", range(16))
def test_sample_index(k: int, raw_helpers: Any) -> None:
    sequence_length, _, _, drop_last, add_extra = raw_helpers[f"si{k}.params"].tolist()
    ours = build_sample_index(
        raw_helpers[f"si{k}.sizes"],
        raw_helpers[f"si{k}.document_index"],
        sequence_length,
        drop_last_partial=bool(drop_last),
        add_extra_token=bool(add_extra),
    )
    assert_same(ours, raw_helpers[f"si{k}.sample_index"], f"si{k}")


@pytest.mark.parametrize("k", range(6))
def test_blending_indices(k: int, raw_helpers: Any) -> None:
    reference = raw_helpers[f"blend{k}.dataset_index"]
    dataset_index, sample_index = build_blending_indices(raw_helpers[f"blend{k}.w"], len(reference))
    assert_same(dataset_index, reference, f"blend{k}")
    assert_same(sample_index, raw_helpers[f"blend{k}.dataset_sample_index"], f"blend{k}")


@pytest.mark.parametrize("k", range(3))
def test_exhaustive_blending_indices(k: int, raw_helpers: Any) -> None:
    dataset_index, sample_index = build_exhaustive_blending_indices(raw_helpers[f"exh{k}.w"])
    assert_same(dataset_index, raw_helpers[f"exh{k}.dataset_index"], f"exh{k}")
    assert_same(sample_index, raw_helpers[f"exh{k}.dataset_sample_index"], f"exh{k}")


@pytest.mark.parametrize("case", ["hf_small_2keys", "gpt2_small_eod", "null_100k_eod"])
def test_rewritten_files_are_byte_identical(case: str, golden_data: Path, tmp_path: Path) -> None:
    """Read a reference dataset, empty documents and all, write it again: the same bytes."""
    source = golden_data / "preprocess" / case / "out_text_document"
    dataset = IndexedDataset(str(source))
    with IndexedDatasetBuilder(str(tmp_path / "again.bin"), dtype=dataset.dtype) as builder:
        for begin, end in itertools.pairwise(dataset.document_indices.tolist()):
            for i in range(begin, end):
                builder.add_item(dataset[i])
            builder.end_document()
        builder.finalize(str(tmp_path / "again.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"again{suffix}").read_bytes() == Path(f"{source}{suffix}").read_bytes()


def test_merged_parts_are_byte_identical_to_the_reference_merge(
    golden_data: Path, golden_dir: Path, tmp_path: Path
) -> None:
    parts = [str(golden_data / "preprocess" / "hf_small_part2" / f"out_{i}_text_document") for i in (0, 1)]
    with IndexedDatasetBuilder(str(tmp_path / "merged.bin"), dtype=IndexedDataset(parts[0]).dtype) as builder:
        for part in parts:
            builder.add_index(part)
        builder.finalize(str(tmp_path / "merged.idx"))
    for suffix in (".bin", ".idx"):
        reference = golden_dir / "preprocess" / "hf_small_part2" / f"out_text_document{suffix}"
        assert (tmp_path / f"merged{suffix}").read_bytes() == reference.read_bytes()
