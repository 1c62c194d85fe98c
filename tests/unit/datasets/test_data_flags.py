# SPDX-License-Identifier: Apache-2.0
"""Every data flag does what it says, from the command line to the samples."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.sequence_counts import indexed_datasets_in, write_sequence_counts
from megatron.core.errors import ConfigError, DataError
from megatron.core.packed_seq_params import PackedSeqParams, pack_batch
from megatron.core.transformer.core_attention.interface import Visible
from megatron.training.recipes.gpt_data import build_gpt_datasets
from tests.support.run_flags import SMALLEST_RUN, run_config

RUN = SMALLEST_RUN.replace("--mock-data ", "")


@dataclass
class Tokenizer:
    eod: int = 63
    pad: int = -1
    vocab_size: int = 64
    unique_identifiers: dict[str, Any] = field(default_factory=dict)


def write(prefix: Path, token: int, documents: int = 40, length: int = 90) -> str:
    """Documents of one token each, ended by 63."""
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for _ in range(documents):
            builder.add_document([token] * (length - 1) + [63], [length])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def a(tmp_path: Path) -> str:
    return write(tmp_path / "a", 1)


@pytest.fixture
def b(tmp_path: Path) -> str:
    return write(tmp_path / "b", 2)


def datasets(flags: str, sizes: tuple[int | None, int | None, int | None] = (40, 8, 8), base: str = RUN) -> list[Any]:
    return list(build_gpt_datasets(run_config(flags, base), Tokenizer(), sizes))  # type: ignore[arg-type]


def sources(dataset: Any) -> list[int]:
    """How many samples come from documents of token 1 and of token 2."""
    firsts = [sorted(set(dataset[i]["tokens"].tolist()) - {63})[0] for i in range(len(dataset))]
    return [firsts.count(1), firsts.count(2)]


@pytest.mark.flags("--allow-ambiguous-pad-tokens")
def test_ambiguous_pad_tokens(a: str) -> None:
    for flag, expected in (("", 1), ("--allow-ambiguous-pad-tokens", 0)):
        config = run_config(f"--data-path {a} --split 1,0,0 {flag}", RUN)
        dataset = build_gpt_datasets(config, Tokenizer(pad=63), (40, 0, 0))[0]  # type: ignore[arg-type]
        ends = [dataset[i]["loss_mask"][dataset[i]["labels"] == 63].tolist() for i in range(4)]
        assert {value for values in ends for value in values} == {expected}


@pytest.mark.flags("--data-path")
def test_data_path_forms(a: str, b: str) -> None:
    single = datasets(f"--data-path {a} --split 90,5,5")[0]
    assert isinstance(single, GPTDataset) and single.dataset_path == a
    weighted = datasets(f"--data-path 1 {a} 3 {b} --split 90,5,5")[0]
    assert sources(weighted) == [10, 30]
    unweighted = datasets(f"--data-path {a} {b} --split 90,5,5")[0]
    assert isinstance(unweighted, BlendedDataset) and sources(unweighted) == [20, 20]


@pytest.mark.flags("--data-path")
def test_data_path_errors(a: str, b: str) -> None:
    with pytest.raises(ConfigError, match="--data-path"):
        datasets(f"--data-path 1 {a} {b}")
    with pytest.raises(ConfigError, match="--data-path.*weight of .* is nan"):
        datasets(f"--data-path nan {a} 1 {b}")
    with pytest.raises(DataError, match="no such file"):
        datasets(f"--data-path {a}-absent")


@pytest.mark.flags("--split")
def test_split(a: str) -> None:
    for text, documents in (("50,25,25", [20, 10, 10]), ("'90,5,5'", [36, 2, 2]), ("949,50,1", None)):
        wanted = (8, 8, 8) if documents else (8, 8, 0)
        built = datasets(f"--data-path {a} --split {text}", wanted)
        assert [d and len(d.indices) for d in built] == (documents or [38, 2, None])
    assert datasets(f"--data-path {a} --split 1,0,0")[1:] == [None, None]


@pytest.mark.flags("--split")
def test_split_has_a_default(a: str) -> None:
    train, valid, _ = datasets(f"--data-path {a}", (8, 8, 0))
    assert [len(train.indices), len(valid.indices)] == [39, 1]


@pytest.mark.flags("--split")
def test_split_without_documents_is_refused(a: str) -> None:
    with pytest.raises(DataError, match="no documents.*--split 999,1,0"):
        datasets(f"--data-path {a} --split 999,1,0")


@pytest.mark.flags("--train-data-path", "--valid-data-path", "--test-data-path")
def test_data_path_for_each_split(a: str, b: str) -> None:
    train, valid, test = datasets(f"--train-data-path 1 {a} 1 {b} --valid-data-path {b} --test-data-path {a}")
    assert [sources(train), sources(valid)[0], sources(test)[1]] == [[20, 20], 0, 0]
    assert valid.dataset_path == b and test.dataset_path == a and len(test.indices) == 40
    assert datasets(f"--train-data-path {a}", (8, 8, 8))[1:] == [None, None]


@pytest.mark.flags("--mock-data")
def test_mock_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built = datasets("--mock-data")
    assert all(isinstance(dataset, MockGPTDataset) for dataset in built)
    assert not list(tmp_path.iterdir())
    tokens, labels = built[0][0]["tokens"], built[0][0]["labels"]
    counting = (tokens != 62) & (tokens != 63) & (labels != 63)
    assert (labels[counting] == tokens[counting] + 1).all()


def test_a_run_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="no data to train on; give --data-path PREFIX, or --mock-data"):
        datasets("")


@pytest.mark.flags("--data-cache-path")
def test_data_cache_path(a: str, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    datasets(f"--data-path {a} --data-cache-path {chosen}", (8, 0, 0))
    assert len(list(chosen.glob("*.npy"))) == 3 and not (tmp_path / "cache").exists()


@pytest.mark.flags("--seq-length")
def test_seq_length(a: str) -> None:
    sample = datasets(f"--data-path {a} --seq-length 32", (8, 0, 0))[0][0]
    assert sample["tokens"].shape == sample["labels"].shape == (32,)


@pytest.mark.flags("--seed")
def test_seed_shuffles(a: str) -> None:
    first, again, other = (datasets(f"--data-path {a} --seed {s}", (8, 0, 0))[0].shuffle_index for s in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def with_end_of_document(dataset: Any) -> tuple[dict[str, Any], int]:
    """A sample in which a document ends, and where."""
    for i in range(len(dataset)):
        ends = (dataset[i]["tokens"][:-1] == 63).nonzero()
        if len(ends):
            return dataset[i], int(ends[0])
    raise AssertionError("no document ends")


@pytest.mark.flags("--reset-position-ids")
def test_reset_position_ids(a: str) -> None:
    plain, end = with_end_of_document(datasets(f"--data-path {a}", (40, 0, 0))[0])
    reset, _ = with_end_of_document(datasets(f"--data-path {a} --reset-position-ids", (40, 0, 0))[0])
    assert plain["position_ids"][end : end + 2].tolist() == [end, end + 1]
    assert reset["position_ids"][end : end + 2].tolist() == [end, 0]


@pytest.mark.flags("--reset-attention-mask")
def test_reset_attention_mask(a: str) -> None:
    plain, end = with_end_of_document(datasets(f"--data-path {a}", (40, 0, 0))[0])
    reset, _ = with_end_of_document(datasets(f"--data-path {a} --reset-attention-mask", (40, 0, 0))[0])
    assert reset["attention_mask"].shape == (1, 64, 64) and reset["attention_mask"][0, end + 1, end]
    assert "attention_mask" not in plain, "attention is causal by itself"


def test_on_a_gpu_bounds_hide_what_the_mask_hides(a: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a sample has no end of a document; not where something else counts from bounds."""
    masks = datasets(f"--data-path {a} --reset-attention-mask", (40, 0, 0))[0]
    monkeypatch.setattr("megatron.core.device.current_device", lambda: torch.device("cuda", 0))
    bounds = datasets(f"--data-path {a} --reset-attention-mask", (40, 0, 0))[0]
    starts = set()
    for index in range(40):
        theirs, ours = masks[index], bounds[index]
        assert ours.keys() == theirs.keys() - {"attention_mask"} | {"cu_seqlens", "max_seqlen"}
        documents = PackedSeqParams(cu_seqlens_q=ours["cu_seqlens"]).layout(64)
        first = Visible(documents=documents).find_first_seen(torch.arange(64)).unsqueeze(1)
        at = torch.arange(64)
        assert torch.equal((at > at.unsqueeze(1)) | (at < first), theirs["attention_mask"][0])
        starts.add(documents.bounds)
    assert len(starts) > 1
    for flags in ("--attention-chunk-size 8", "--attention-backend local", "--mtp-num-layers 1"):
        other = f"--data-path {a} --reset-attention-mask --position-embedding-type rope {flags}"
        assert "attention_mask" in datasets(other, (8, 0, 0))[0][0], flags


@pytest.mark.flags("--dataloader-inter-document-masking")
def test_inter_document_masking(a: str) -> None:
    sample = datasets(f"--data-path {a} --dataloader-inter-document-masking", (40, 0, 0))[0][1]
    start = int(sample["cu_seqlens"][1])  # documents of 90 tokens, samples of 64
    assert 0 < start < 64 and sample["cu_seqlens"][2] == 64
    assert sample["position_ids"].tolist() == [*range(start), *range(64 - start)]
    assert "attention_mask" not in sample
    assert "cu_seqlens" not in datasets(f"--data-path {a}", (40, 0, 0))[0][1]
    with pytest.raises(ConfigError, match="and --reset-attention-mask say the same"):
        run_config("--mock-data --dataloader-inter-document-masking --reset-attention-mask", RUN)


@pytest.mark.flags("--eod-mask-loss")
def test_eod_mask_loss(a: str) -> None:
    plain, end = with_end_of_document(datasets(f"--data-path {a}", (40, 0, 0))[0])
    masked, _ = with_end_of_document(datasets(f"--data-path {a} --eod-mask-loss", (40, 0, 0))[0])
    assert plain["loss_mask"].sum() == 64
    assert masked["loss_mask"][end] == 0 and masked["loss_mask"].sum() == 63


@pytest.mark.flags("--no-create-attention-mask-in-dataloader")
def test_no_attention_mask(a: str) -> None:
    assert "attention_mask" in datasets(f"--data-path {a} --reset-attention-mask", (8, 0, 0))[0][0]
    with pytest.raises(ConfigError, match="which --no-create-attention-mask-in-dataloader forbids; drop one"):
        run_config("--mock-data --reset-attention-mask --no-create-attention-mask-in-dataloader", RUN)


@pytest.mark.flags("--no-mmap-bin-files")
def test_no_mmap_bin_files(a: str) -> None:
    mapped = datasets(f"--data-path {a}", (8, 0, 0))[0]
    read = datasets(f"--data-path {a} --no-mmap-bin-files", (8, 0, 0))[0]
    assert mapped.dataset._bin._mapped is not None and read.dataset._bin._mapped is None
    assert torch.equal(mapped[0]["tokens"], read[0]["tokens"])


@pytest.mark.flags("--mid-level-dataset-surplus")
def test_mid_level_dataset_surplus(a: str, b: str) -> None:
    for share, expected in ((0, 20), (0.5, 30)):
        train = datasets(f"--data-path 1 {a} 1 {b} --mid-level-dataset-surplus {share}", (40, 0, 0))[0]
        assert [part.num_samples for part in train.datasets] == [expected] * 2


@pytest.mark.flags("--num-dataset-builder-threads")
def test_num_dataset_builder_threads(a: str, b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads both datasets of a blend are under way at once; with one they never are."""
    meeting, patience_seconds = threading.Barrier(2), 20.0
    real = GPTDataset._build_indices

    def meet(self: GPTDataset) -> Any:
        meeting.wait(patience_seconds)
        return real(self)

    monkeypatch.setattr(GPTDataset, "_build_indices", meet)
    assert len(datasets(f"--data-path 1 {a} 1 {b} --num-dataset-builder-threads 2", (40, 0, 0))[0]) == 40
    patience_seconds = 0.2
    with pytest.raises(threading.BrokenBarrierError):
        datasets(f"--data-path 1 {a} 1 {b} --seed 7 --num-dataset-builder-threads 1", (40, 0, 0))


@pytest.mark.flags("--data-args-path")
def test_data_args_path(a: str, b: str, tmp_path: Path) -> None:
    (tmp_path / "blend.txt").write_text(f"1 {a}\n3 {b}\n")
    assert sources(datasets(f"--data-args-path {tmp_path / 'blend.txt'} --split 90,5,5")[0]) == [10, 30]
    assert len(datasets(f"--data-args-path {tmp_path / 'blend.txt'}", (8, 8, 0))) == 3, "the split has its default"
    with pytest.raises(DataError, match="--data-args-path .*absent: No such file"):
        datasets(f"--data-args-path {tmp_path / 'absent'}")
    (tmp_path / "blend.txt").write_text(f"1 {a} {b}")
    with pytest.raises(ConfigError, match="--data-args-path has 3 entries"):
        datasets(f"--data-args-path {tmp_path / 'blend.txt'}")


@pytest.mark.flags("--per-split-data-args-path")
def test_per_split_data_args_path(a: str, b: str, tmp_path: Path) -> None:
    path = tmp_path / "blends.json"
    path.write_text(json.dumps({"train": f"1 {a} 3 {b}", "valid": [b], "test": None}))
    train, valid, test = datasets(f"--per-split-data-args-path {path}")
    assert sources(train) == [10, 30] and valid.dataset_path == b and test is None
    path.write_text(json.dumps({"train": [1, a, 1.5, b]}))
    assert sources(datasets(f"--per-split-data-args-path {path}")[0]) == [16, 24]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "found list"),
        ('{"training": []}', "found the keys training"),
        ('{"train": {"a": 1}}', "train is not a list of prefixes"),
        ('{"train": ["nan", "a"]}', "the weight of a is nan"),
        ("{}", "names no dataset"),
    ],
)
def test_per_split_data_args_path_errors(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "blends.json").write_text(text)
    with pytest.raises(ConfigError, match=f"--per-split-data-args-path .*blends.json.*{complaint}"):
        datasets(f"--per-split-data-args-path {tmp_path / 'blends.json'}")
    with pytest.raises(ConfigError, match="--split 1,1,1 says nothing about --per-split-data-args-path"):
        datasets(f"--per-split-data-args-path {tmp_path / 'blends.json'} --split 1,1,1")


@pytest.mark.flags("--multiple-validation-sets")
def test_multiple_validation_sets(a: str, b: str) -> None:
    train, valid, test = datasets(f"--data-path 1 {a} 3 {b} --split 50,50,0 --multiple-validation-sets", (40, 8, 0))
    assert sources(train) == [10, 30] and test is None
    assert [part.dataset_path for part in valid] == [a, b] and all(len(part) >= 8 for part in valid)
    flags = f"--train-data-path {a} --valid-data-path {b} {a} {b} --multiple-validation-sets"
    assert [part.dataset_path for part in datasets(flags)[1]] == [b, a, b]
    assert isinstance(datasets("--mock-data --multiple-validation-sets")[1], list)
    with pytest.raises(ConfigError, match="--multiple-validation-sets .* weights say nothing"):
        datasets(f"--train-data-path {a} --valid-data-path 1 {a} 2 {b} --multiple-validation-sets")


def without_end_of_document(prefix: Path) -> str:
    """Documents of 10 tokens, each of its own number, that no token separates."""
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for number in range(40):
            builder.add_document([number + 1] * 10, [10])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.flags("--dataloader-inter-document-masking")
def test_document_bounds_come_from_the_file(tmp_path: Path) -> None:
    """Bounds come from the file, not from end-of-document tokens; a query sees its own document's past only."""
    prefix = without_end_of_document(tmp_path / "plain")
    flags = f"--data-path {prefix} --split 1,0,0 --seq-length 25"
    plain, masked = (datasets(flags + more, (8, 0, 0))[0] for more in ("", " --dataloader-inter-document-masking"))
    for i in range(8):
        sample = masked[i]
        assert torch.equal(sample["tokens"], plain[i]["tokens"])
        tokens, places = sample["tokens"], torch.arange(25)
        expected = (tokens[:, None] == tokens[None, :]) & (places[None, :] <= places[:, None])
        batch = {name: value[None] for name, value in sample.items()}
        _, packed = pack_batch(batch)
        assert packed is not None and "attention_mask" not in sample
        starts = packed.layout(25).starts
        assert torch.equal((starts[:, None] <= places[None, :]) & (places[None, :] <= places[:, None]), expected)
        firsts = {int(token): int((tokens == token).nonzero()[0]) for token in tokens}
        assert sample["position_ids"].tolist() == [int(p) - firsts[int(t)] for p, t in zip(places, tokens, strict=True)]
        longest = max(int((tokens == token).sum()) for token in firsts)
        assert int(sample["max_seqlen"]) == longest
    assert plain[0]["position_ids"].tolist() == list(range(25)) and "cu_seqlens" not in plain[0]


def test_a_batch_without_bounds_is_causal() -> None:
    assert pack_batch({"tokens": torch.zeros(1, 4, dtype=torch.int64)})[1] is None


@pytest.mark.flags("--no-drop-last-partial-validation-sequence")
def test_partial_last_validation_sequence(a: str) -> None:
    """20 documents of 90 tokens are 28 sequences of 64 tokens, and 7 tokens with a label."""
    flags = f"--train-data-path {a} --valid-data-path {a}"
    without = datasets(flags, (8, None, 0))[1]
    train, last, _ = datasets(f"{flags} --no-drop-last-partial-validation-sequence", (8, None, 0))
    assert (len(without), len(last), len(train)) == (56, 57, 57 - 1)
    filled = [last[i] for i in range(57) if last[i]["loss_mask"].sum() < 64]
    assert [int(sample["loss_mask"].sum()) for sample in filled] == [40 * 90 - 56 * 64 - 1]


@pytest.mark.flags("--dataloader-type")
def test_gpt_data_is_not_external(a: str) -> None:
    with pytest.raises(ConfigError, match="--dataloader-type external needs a script that provides the batches"):
        datasets(f"--data-path {a} --dataloader-type external")


@pytest.mark.flags("--dataloader-fast-cache-load", "--data-cache-path")
def test_trusted_indices_are_neither_built_nor_compared(a: str, b: str, tmp_path: Path) -> None:
    flags = f"--data-path 1 {a} 2 {b} --split 1,0,0 --data-cache-path {tmp_path / 'cache'}"
    with pytest.raises(
        DataError, match="--dataloader-fast-cache-load: .* is missing or damaged; build the indices with"
    ):
        datasets(f"{flags} --dataloader-fast-cache-load", (40, 0, 0))
    built = datasets(flags, (40, 0, 0))[0]
    fast = datasets(f"{flags} --dataloader-fast-cache-load", (40, 0, 0))[0]
    assert all(torch.equal(fast[i]["tokens"], built[i]["tokens"]) for i in range(40))
    for file in (tmp_path / "cache").glob("*checksums.json"):
        file.write_text("{}")
    again = datasets(f"{flags} --dataloader-fast-cache-load", (40, 0, 0))[0]
    assert len(again) == len(built), "checksums were not looked at"
    with pytest.raises(ConfigError, match="--dataloader-fast-cache-load needs --data-cache-path"):
        run_config("--mock-data --dataloader-fast-cache-load", RUN)


@pytest.mark.flags("--dataloader-defer-npy-index-mmap")
def test_deferred_indices_are_opened_at_the_first_sample(a: str, b: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    flags = f"--data-path 1 {a} 2 {b} --split 1,0,0 --data-cache-path {cache}"
    built = datasets(flags, (40, 0, 0))[0]
    fast = f"{flags} --dataloader-fast-cache-load"
    deferred = datasets(f"{fast} --dataloader-defer-npy-index-mmap", (40, 0, 0))[0]
    assert torch.equal(deferred[3]["tokens"], built[3]["tokens"])
    waiting = datasets(f"{fast} --dataloader-defer-npy-index-mmap", (40, 0, 0))[0]
    for file in cache.glob("*.npy"):
        file.write_bytes(b"")
    with pytest.raises(DataError, match="npy is missing or damaged"):
        waiting[3]
    assert torch.equal(deferred[3]["tokens"], built[3]["tokens"])
    with pytest.raises(DataError, match="is missing or damaged"):
        datasets(fast, (40, 0, 0))
    with pytest.raises(ConfigError, match="--dataloader-defer-npy-index-mmap needs --dataloader-fast-cache-load"):
        run_config("--mock-data --dataloader-defer-npy-index-mmap", RUN)


@pytest.mark.flags("--per-dataset-sequences-path")
def test_datasets_are_opened_at_the_first_sample(a: str, b: str, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    flags = f"--data-path 1 {a} 2 {b} --split 1,0,0 --data-cache-path {tmp_path / 'cache'}"
    built = datasets(flags, (40, 0, 0))[0]
    write_sequence_counts(str(counts), indexed_datasets_in([built, None]))
    fast = f"{flags} --dataloader-fast-cache-load --per-dataset-sequences-path {counts}"
    blended = datasets(fast, (40, 0, 0))[0]
    assert not any("opened" in vars(part.dataset) for part in blended.datasets)
    assert all(torch.equal(blended[i]["tokens"], built[i]["tokens"]) for i in range(len(built)))
    counts.write_text(json.dumps({a: [40, 40]}))
    with pytest.raises(DataError, match="is not what tools/build_dataset_cache.py writes"):
        datasets(fast, (40, 0, 0))
    counts.write_text("{}")
    with pytest.raises(DataError, match="the file of --per-dataset-sequences-path says nothing about it"):
        datasets(fast, (40, 0, 0))
    with pytest.raises(ConfigError, match="--per-dataset-sequences-path x needs --dataloader-fast-cache-load"):
        run_config(f"{flags} --per-dataset-sequences-path x", RUN)
