# SPDX-License-Identifier: Apache-2.0
"""Blends, splits, samples: what --data-path and --split mean, and what a sample holds."""

from __future__ import annotations

import gc
import hashlib
import json
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blend import parse_blend, parse_split, split_matrix
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    attention_mask,
    cumulative_lengths,
    position_ids,
    starts_after_eod,
)
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.errors import ConfigError, DataError


@dataclass
class Tokenizer:
    eod: int = 999
    pad: int | None = None
    vocab_size: int = 1000
    unique_identifiers: dict[str, Any] = field(default_factory=dict)


def write(prefix: Path, documents: list[list[int]]) -> str:
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for document in documents:
            builder.add_document(document, [len(document)] if document else [])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def counting(tmp_path: Path) -> str:
    """40 documents; the tokens of document k are 10k, 10k + 1, ..., and 999."""
    return write(tmp_path / "counting", [[*range(10 * k, 10 * k + 5 + k % 4), 999] for k in range(40)])


def build(cls: Any = GPTDataset, sizes: Any = (20, 0, 0), **options: Any) -> list[Any]:
    config = GPTDatasetConfig(**({"random_seed": 5, "sequence_length": 8, "tokenizer": Tokenizer()} | options))
    return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()


# ---- blend and split ----


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["a", "b", "c"], (["a", "b", "c"], None)),
        (["1", "a"], (["a"], [1.0])),
        (["0.3", "a", "7e-1", " b "], (["a", "b"], [0.3, 0.7])),
        (["1", "a", "3", "a"], (["a", "a"], [1.0, 3.0])),
        (["./7", "b"], (["./7", "b"], None)),
    ],
)
def test_blend(items: list[str], expected: Any) -> None:
    assert parse_blend(items) == expected


@pytest.mark.parametrize(
    "text", ["99,1,0", "'99,1,0'", '"99, 1, 0"', "990,10,0", "99/1/0", "99 1", "99,1", " 99 , 1 , 0 "]
)
def test_split_spellings(text: str) -> None:
    assert parse_split(text) == [0.99, 0.01, 0.0]


def test_split_ranges() -> None:
    assert split_matrix(parse_split("949,50,1")) == [(0.0, 0.949), (0.949, 0.999), (0.999, 1.0)]
    assert split_matrix(parse_split("100")) == [(0.0, 1.0), None, None]
    assert split_matrix(parse_split("0,1,1")) == [None, (0.0, 0.5), (0.5, 1.0)]


def test_split_cuts_documents(counting: str) -> None:
    train, valid, test = build(sizes=(9, 9, 9), blend=([counting], None), split="70,20,10")
    assert [len(np.unique(d.document_index)) for d in (train, valid, test)] == [28, 8, 4]
    assert sorted(np.unique(np.concatenate([d.document_index for d in (train, valid, test)]))) == list(range(40))


def test_blend_follows_weights(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / name, [[token] * 30] * 20) for name, token in (("a", 1), ("b", 2))]
    train, valid, test = build(sizes=(40, 8, 0), blend=(prefixes, [3.0, 1.0]), split="50,50,0")
    assert isinstance(train, BlendedDataset) and test is None
    tokens = [int(train[i]["tokens"][0]) for i in range(len(train))]
    assert (tokens.count(1), tokens.count(2)) == (30, 10)
    assert [int(valid[i]["dataset_id"]) for i in range(len(valid))].count(0) == 6
    assert train.locate(0).startswith(prefixes[int(train.dataset_index[0])])


def test_blend_without_weights_is_by_size(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / name, [[token] * 8] * count) for name, token, count in (("a", 1, 31), ("b", 2, 11))]
    everything = build(sizes=(None, 0, 0), blend=(prefixes, None), split="1,0,0")[0]
    assert np.bincount(everything.dataset_index).tolist() == [30, 10]
    some = build(sizes=(20, 0, 0), blend=(prefixes, None), split="1,0,0")[0]
    assert np.bincount(some.dataset_index).tolist() == [15, 5]
    assert len(build(sizes=(500, 0, 0), blend=(prefixes, None), split="1,0,0")[0]) == 40  # no more than there is


def test_blend_per_split(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / name, [[token] * 30] * 9) for name, token in (("a", 1), ("b", 2), ("c", 3)))
    blends = [([a, b], [1.0, 1.0]), ([c], [1.0]), None]
    train, valid, test = build(sizes=(10, 4, 4), blend_per_split=blends)
    assert {int(train[i]["tokens"][0]) for i in range(len(train))} == {1, 2}
    assert isinstance(valid, GPTDataset) and int(valid[0]["tokens"][0]) == 3 and test is None


def test_blend_with_more_threads_is_the_same(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / str(k), [[k + 1] * 30] * 9) for k in range(5)]
    weights = [1.0, 2.0, 3.0, 4.0, 5.0]
    one, four = (
        build(
            blend=(prefixes, weights), split="1", num_dataset_builder_threads=n, path_to_cache=str(tmp_path / str(n))
        )[0]
        for n in (1, 4)
    )
    np.testing.assert_array_equal(one.dataset_index, four.dataset_index)
    for i in range(len(one)):
        torch.testing.assert_close(one[i]["tokens"], four[i]["tokens"])


def test_surplus_keeps_a_blend_supplied(tmp_path: Path) -> None:
    """A dataset of a blend with too few samples is named; it is not read past its end."""
    prefixes = [write(tmp_path / name, [list(range(17))] * 6) for name in "ab"]
    datasets = build(sizes=(None, 0, 0), blend=(prefixes, None), split="1")[0].datasets
    with pytest.raises(
        DataError, match="takes 23 samples of it, it was built with 12; raise --mid-level-dataset-surplus"
    ):
        BlendedDataset(datasets, [1.0, 0.0001], 24, datasets[0].config)


def test_weights_need_sizes(counting: str) -> None:
    with pytest.raises(ConfigError, match="need a number of train samples"):
        build(sizes=(None, 0, 0), blend=([counting, counting], [1.0, 1.0]), split="1,0,0")


def test_not_built_on_this_rank(counting: str) -> None:
    config = GPTDatasetConfig(random_seed=1, sequence_length=8, blend=([counting], None), split="1")
    assert BlendedMegatronDatasetBuilder(GPTDataset, (5, 0, 0), lambda: False, config).build() == [None] * 3


def test_two_sources_of_data_are_refused(counting: str) -> None:
    blend = ([counting], None)
    for options in ({"blend": blend}, {"split": "1"}):
        with pytest.raises(ConfigError, match="drop --data-path and --split"):
            GPTDatasetConfig(random_seed=1, sequence_length=8, blend_per_split=[blend, None, None], **options)
    with pytest.raises(ConfigError, match="needs --split"):
        GPTDatasetConfig(random_seed=1, sequence_length=8, blend=blend)


# ---- samples ----


def test_samples_are_the_documents_end_to_end(counting: str) -> None:
    train = build(sizes=(None, 0, 0), blend=([counting], None), split="1")[0]
    stream = np.concatenate([train.dataset[int(k)] for k in train.document_index]).astype(np.int64)
    assert len(train) == (len(stream) - 1) // 8
    for i in range(len(train)):
        start = 8 * int(train.shuffle_index[i])
        sample = train[i]
        assert sample["tokens"].tolist() == stream[start : start + 8].tolist()
        assert sample["labels"].tolist() == stream[start + 1 : start + 9].tolist()
        assert sample["tokens"].dtype == sample["labels"].dtype == sample["position_ids"].dtype == torch.int64
        assert sample["loss_mask"].dtype == torch.float32 and sample["loss_mask"].tolist() == [1.0] * 8
        assert sample["position_ids"].tolist() == list(range(8))
        expected = torch.ones(8, 8).tril() == 0
        assert sample["attention_mask"].shape == (1, 8, 8) and (sample["attention_mask"][0] == expected).all()


def test_seed_and_length_determine_the_samples(counting: str) -> None:
    def tokens(**options: Any) -> Any:
        return torch.stack(
            [build(**({"blend": ([counting], None), "split": "1"} | options))[0][i]["tokens"] for i in range(5)]
        )

    assert torch.equal(tokens(), tokens())
    assert not torch.equal(tokens(), tokens(random_seed=6))
    assert tokens(sequence_length=4).shape == (5, 4)


@pytest.mark.parametrize("mmap", [True, False])
def test_both_ways_of_reading_give_the_same(counting: str, mmap: bool) -> None:
    train = build(blend=([counting], None), split="1", mmap_bin_files=mmap)[0]
    reference = build(blend=([counting], None), split="1")[0]
    assert train.dataset.mmap == mmap
    assert all(torch.equal(train[i]["tokens"], reference[i]["tokens"]) for i in range(len(train)))


@pytest.mark.parametrize("pad", [None, 0, 999])
def test_partial_validation_sample_is_padded(tmp_path: Path, pad: int | None) -> None:
    """Padding has no loss and an id the embedding has, whatever the tokenizer says; a real end keeps its loss."""
    prefix = write(tmp_path / "short", [[*range(1, 11), 999]])
    options: dict[str, Any] = {"blend": ([prefix], None), "split": "0,1,0", "tokenizer": Tokenizer(pad=pad)}
    valid = build(sizes=(0, None, 0), drop_last_partial_validation_sequence=False, **options)[1]
    assert len(valid) == 2
    partial = next(sample for sample in (valid[0], valid[1]) if int(sample["tokens"][0]) == 9)
    assert partial["tokens"].tolist() == [9, 10, 999, 0, 0, 0, 0, 0]
    assert partial["labels"].tolist() == [10, 999, 0, 0, 0, 0, 0, 0]
    assert partial["loss_mask"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert len(build(sizes=(0, None, 0), **options)[1]) == 1


def test_padding_in_the_data_has_no_loss(tmp_path: Path) -> None:
    prefix = write(tmp_path / "padded", [[1, 2, 3, 7, 7, 4, 5, 6, 8]])
    sample = build(sizes=(1, 0, 0), blend=([prefix], None), split="1", tokenizer=Tokenizer(pad=7))[0][0]
    assert sample["labels"].tolist() == [2, 3, 0, 0, 4, 5, 6, 8]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 0, 1, 1, 1, 1]


def test_an_end_of_document_that_is_also_the_padding(tmp_path: Path) -> None:
    """It is learnt, unless it is declared to be padding; the model sees it as the token that it is."""
    prefix = write(tmp_path / "padded", [[1, 2, 3, 999, 4, 5, 6, 7, 8]])
    for allowed, expected in ((False, 1), (True, 0)):
        options: dict[str, Any] = {"tokenizer": Tokenizer(pad=999), "allow_ambiguous_pad_tokens": allowed}
        sample = build(sizes=(1, 0, 0), blend=([prefix], None), split="1", **options)[0][0]
        assert sample["tokens"].tolist() == [1, 2, 3, 999, 4, 5, 6, 7]
        assert sample["loss_mask"].tolist() == [1, 1, expected, 1, 1, 1, 1, 1]


def test_no_sample_counts_for_nothing(counting: str) -> None:
    train = build(blend=([counting], None), split="1")[0]
    assert train[None]["loss_mask"].sum() == 0 and train[None]["tokens"].shape == (8,)


def test_options_per_sample(counting: str) -> None:
    options: dict[str, Any] = {"blend": ([counting], None), "split": "1"}
    plain = build(**options)[0]
    i = next(i for i in range(len(plain)) if 999 in plain[i]["tokens"][1:-1])
    end = plain[i]["tokens"].tolist().index(999)
    positions = build(**options, reset_position_ids=True)[0][i]["position_ids"]
    assert positions.tolist()[: end + 3] == [*range(end + 1), 0, 1][: end + 3]
    mask = build(**options, reset_attention_mask=True)[0][i]["attention_mask"][0]
    assert mask[end + 1, : end + 1].all() and not mask[end + 1, end + 1] and not mask[end, : end + 1].any()
    loss = build(**options, eod_mask_loss=True)[0][i]["loss_mask"]
    assert loss[end] == 0 and loss[end - 1] == 1
    assert "attention_mask" not in build(**options, create_attention_mask=False)[0][i]
    # The shared tensors of plain samples were not changed by any of this.
    assert plain[i]["position_ids"].tolist() == list(range(8)) and not plain[i]["attention_mask"][0, 7].any()


def test_options_need_a_tokenizer(counting: str) -> None:
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
            build(blend=([counting], None), split="1", tokenizer=None, **{name: True})


def test_loader_processes_read_the_same(counting: str) -> None:
    train = build(blend=([counting, counting], [1.0, 2.0]), split="1")[0]
    for context in ("fork", "spawn") if torch.cuda.is_available() else ("fork",):
        loader = DataLoader(train, batch_size=4, num_workers=2, multiprocessing_context=context)
        loaded = torch.cat([batch["tokens"] for batch in loader])
        assert torch.equal(loaded, torch.stack([train[i]["tokens"] for i in range(len(train))]))


@pytest.mark.parametrize("chosen", [True, False])
def test_cache_directory(counting: str, tmp_path: Path, chosen: bool) -> None:
    train = build(blend=([counting], None), split="1", path_to_cache=str(tmp_path / "mine") if chosen else None)[0]
    directory = tmp_path / "mine" if chosen else tmp_path / "cache" / "GPTDataset_indices"
    assert len(list(directory.glob("*-GPTDataset-train-*.npy"))) == 3
    assert next(directory.glob("*-description.txt")).read_text() == train.unique_description


def test_description_of_a_blend_is_plain_json(counting: str) -> None:
    """Its text is what the cache is found by, so it must stay what json.dumps makes of all of it."""
    blend = build(blend=([counting, counting], [1.0, 2.0]), split="1")[0]
    description = json.loads(blend.unique_description)
    assert blend.unique_description == json.dumps(description, indent=4)
    assert description["datasets"] == [json.loads(dataset.unique_description) for dataset in blend.datasets]
    assert list(description) == ["class", "datasets", "split", "weights", "size"]


def test_an_index_is_digested_once_for_all_splits(counting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digests: list[Any] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *arguments: digests.append(1) or digest(*arguments))
    built = build(sizes=(4, 2, 2), blend=([counting], None), split="50,25,25")
    assert all(part is not None for part in built) and len(digests) == 1


# ---- masks and positions against the definition, token by token ----


@pytest.mark.parametrize("seed", range(20))
def test_masks_and_positions_by_definition(seed: int) -> None:
    random = np.random.RandomState(seed)
    length = int(random.randint(1, 20))
    tokens = random.randint(0, 4, size=length)
    document = np.concatenate([[0], np.cumsum(tokens == 0)[:-1]])  # the document of each token
    starts = starts_after_eod(tokens, 0)
    firsts = [int(np.argmax(document == d)) for d in document]
    assert position_ids(length, starts).tolist() == [i - first for i, first in enumerate(firsts)]
    mask = attention_mask(length, starts)[0]
    for query in range(length):
        for key in range(length):
            assert mask[query, key] == (key > query or document[key] != document[query])
    bounds, longest = cumulative_lengths(length, starts)
    assert bounds.tolist() == [0, *starts.tolist()] + [length] * (length - len(starts))
    assert longest == np.bincount(document).max()


# ---- mock data ----


def test_mock_data_is_deterministic_and_needs_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer(eod=4999, vocab_size=5000)
    first = build(MockGPTDataset, sizes=(30, 6, 6), tokenizer=tokenizer, sequence_length=64)
    gpt_dataset._lay_out_once.cache_clear()
    again = build(MockGPTDataset, sizes=(30, 6, 6), tokenizer=tokenizer, sequence_length=64)
    assert list(tmp_path.iterdir()) == []
    for ours, theirs in zip(first, again, strict=True):
        assert all(torch.equal(ours[i]["tokens"], theirs[i]["tokens"]) for i in range(6))
    for i in range(30):
        tokens, labels = first[0][i]["tokens"], first[0][i]["labels"]
        inside = (tokens != 4999) & (labels != 4999)
        assert (labels[inside] == tokens[inside] + 1).all()
        assert (labels[tokens == 4999] == 1).all()
    assert not set(first[0].document_index.tolist()) & set(first[1].document_index.tolist())


def test_the_same_mock_indices_are_built_once_in_a_process() -> None:
    names = ("document_index", "sample_index", "shuffle_index")

    def get(**options: Any) -> list[Any]:
        data = build(MockGPTDataset, **({"sequence_length": 512} | options))[0]
        return [getattr(data, name) for name in names]

    first, again = get(), get(sizes=(30, 0, 0))
    assert all(ours is theirs and not ours.flags.writeable for ours, theirs in zip(first, again, strict=True))
    for options in ({"sequence_length": 1024}, {"random_seed": 6}):
        others = get(**options)
        gpt_dataset._lay_out_once.cache_clear()
        assert all(map(np.array_equal, others, get(**options)))
        assert not all(map(np.array_equal, others, first))
    # More samples than an epoch has: another order, which is not kept.
    epochs = [get(sequence_length=4096, sizes=(60_000, 0, 0)) for _ in range(2)]
    assert all(map(np.array_equal, *epochs)) and not any(ours is theirs for ours, theirs in zip(*epochs, strict=True))
    assert len(epochs[0][0]) > len(first[0])


@pytest.mark.parametrize(("vocab_size", "eod"), [(128, 127), (128, 0), (2, 1), (1, 0)])
def test_mock_data_stays_inside_a_small_vocabulary(vocab_size: int, eod: int) -> None:
    tokenizer = Tokenizer(eod=eod, vocab_size=vocab_size)
    train = build(MockGPTDataset, tokenizer=tokenizer, sequence_length=256)[0]
    tokens = torch.stack([train[i]["tokens"] for i in range(20)])
    assert int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size
    if vocab_size == 128:
        assert len(tokens.unique()) >= 126
        lengths = [int(n) for n in train.dataset.sequence_lengths[:50]]
        for k, length in enumerate(lengths):
            document = train.dataset.get(k)
            assert len(document) == length and (document == eod).nonzero()[0].tolist() == [length - 1]


def test_no_sample_leaves_anything_behind(tmp_path: Path) -> None:
    """A loader process serves samples for weeks."""
    prefixes = [write(tmp_path / name, [[7] * 30] * 20) for name in "ab"]
    dataset = build(sizes=(3000, 0, 0), blend=(prefixes, [3.0, 1.0]), split="1,0,0", inter_document_masking=True)[0]

    def held_after_a_pass() -> int:
        for i in range(3000):
            dataset[i]
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        held = [held_after_a_pass() for _ in range(4)]
    finally:
        tracemalloc.stop()
    # What a pass leaves, every pass leaves; the interpreter's own caches grow now and then.
    assert min(after - before for before, after in zip(held, held[1:], strict=False)) < 3000
