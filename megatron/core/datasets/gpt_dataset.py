# SPDX-License-Identifier: Apache-2.0
"""GPT samples: documents laid end to end, cut into sequences, served in an order that depends only on the seed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from megatron.core.datasets.blend import DataSplit
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig, DatasetTokenizer
from megatron.core.datasets.index_builders import (
    EpochPlan,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron.core.datasets.index_cache import Arrays, IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.sequence_counts import UnopenedDataset
from megatron.core.errors import ConfigError, DataError
from megatron.core.host_memory import require_host_memory

Array = npt.NDArray[Any]
Sample = dict[str, Any]

_NO_PAD = -1  # equals no token id


@dataclass(kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings by which documents become GPT samples."""

    reset_position_ids: bool = False
    """Positions start again after each end-of-document token."""
    reset_attention_mask: bool = False
    """Tokens do not see earlier documents of their sample."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""
    create_attention_mask: bool = True
    """Samples carry an attention mask; without it the model masks causally by itself."""
    bounds_instead_of_mask: bool = False
    """With reset_attention_mask samples carry the bounds of their documents (cu_seqlens, max_seqlen), which hide the
    same as a mask does."""
    drop_last_partial_validation_sequence: bool = True
    """No validation sample from the tokens left over at the end; otherwise it is padded."""
    add_extra_token_to_sequence: bool = True
    """Read one token more than a sample's length, so that every input has its label."""
    inter_document_masking: bool = False
    """Samples carry the bounds of their documents (cu_seqlens, max_seqlen), and positions start again at each."""

    allow_ambiguous_pad_tokens: bool = False
    """Tokens of the padding's id are padding also where that is the end-of-document token's."""
    skip_bad_conversations: bool = False
    """Lines of conversations or pairs that cannot be used are counted and passed over."""

    context_parallel_size: int = 1
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    """Upstream's fields, by which it pads samples of hybrid_context_parallel; other samples are the same on any
    layout."""
    hybrid_context_parallel: bool = False
    """Refused: a run's sampler deals out documents of different lengths (--hybrid-context-parallel)."""

    def __post_init__(self) -> None:
        if self.hybrid_context_parallel:
            raise ConfigError(
                "GPTDatasetConfig(hybrid_context_parallel=True): samples are whole documents, which the sampler of "
                "--hybrid-context-parallel deals out; leave it out"
            )
        super().__post_init__()
        needs_eod = self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss
        if needs_eod and (self.tokenizer is None or self.tokenizer.eod is None):
            raise ConfigError(
                "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need a tokenizer with an "
                "end-of-document token; choose another --tokenizer-type or drop them"
            )


class GPTDataset(MegatronDataset):
    """Samples of `sequence_length` tokens; the constructor takes MegatronDataset's arguments.

    dataset[i] -> tokens, labels, position_ids int64 [s], loss_mask float32 [s], and as configured
    attention_mask bool [1, s, s] (True: masked), cu_seqlens int32 [s + 1] with max_seqlen int32.
    """

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: IndexedDataset | MockTokens,
        dataset_path: str | None,
        indexed_indices: npt.NDArray[np.int32],
        num_samples: int | None,
        index_split: DataSplit,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self._length = config.sequence_length
        self._extra = int(config.add_extra_token_to_sequence)
        self._eod = None if config.tokenizer is None else config.tokenizer.eod
        self._pad = _padding_id(config.tokenizer, config.allow_ambiguous_pad_tokens)
        cache = IndexCache(
            self.cache_directory(),
            f"{type(self).__name__}-{index_split.name}",
            self.unique_description,
            ("document_index", "sample_index", "shuffle_index"),
            config.cache_policy,
        )
        self._arrays = cache.load_or_build(self._build_indices)

    @functools.cached_property
    def document_index(self) -> Array:
        """int32 [epochs * documents]: the documents in the order in which their tokens are laid end to end."""
        return self._arrays["document_index"]

    @functools.cached_property
    def sample_index(self) -> Array:
        """int32 or int64 [samples + 1, 2]: where samples start, as (position in document_index, token offset)."""
        return self._arrays["sample_index"]

    @functools.cached_property
    def shuffle_index(self) -> Array:
        """uint32 or int64 [samples]: which sample is served as number i."""
        return self._arrays["shuffle_index"]

    def describe(self) -> dict[str, Any]:
        """The base description, and the two options that change which tokens make a sample."""
        return super().describe() | {
            "drop_last_partial_sequence": self._drops_last_partial(),
            "add_extra_token_to_sequence": self.config.add_extra_token_to_sequence,
        }

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> Any:
        """Open the .bin/.idx pair of a prefix; at the first sample if its counts are known."""
        assert dataset_path is not None, "mock data has no files"
        opening = functools.partial(
            _open_integers, dataset_path, config.mmap_bin_files, config.object_storage_cache_path
        )
        if config.sequence_counts is None:
            return opening()
        counts = config.sequence_counts.get(dataset_path)
        if counts is None:
            raise DataError(
                f"{dataset_path}: the file of --per-dataset-sequences-path says nothing about it; write it anew with "
                "tools/build_dataset_cache.py and the flags of this run"
            )
        return UnopenedDataset(dataset_path, counts, opening)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Sequences: each non-empty document is one."""
        return len(low_level_dataset)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int | None) -> Sample:
        text, document_starts = self._read(0 if index is None else index)
        tokens = text[: self._length]
        if self._extra:
            labels = text[1:].copy()
        else:
            labels = np.append(text[1:], self._pad)

        loss_mask = (labels != self._pad).astype(np.float32)
        if self.config.eod_mask_loss:
            loss_mask[tokens == self._eod] = 0.0
        if index is None:
            loss_mask[:] = 0.0
        sample = self._positions_and_masks(tokens, document_starts)
        # Padding is not a token: any id the embedding has will do, as its loss is masked.
        # Where padding shares the id of end of document (allowed on request), the token itself stays in place.
        if self._pad != self._eod:
            tokens[tokens == self._pad] = 0
            labels[labels == self._pad] = 0
        sample["tokens"] = torch.from_numpy(tokens)
        sample["labels"] = torch.from_numpy(labels)
        sample["loss_mask"] = torch.from_numpy(loss_mask)
        return sample

    def locate(self, index: int) -> str:
        """Return where sample `index` starts, for messages."""
        position, offset = self.sample_index[int(self.shuffle_index[index])].tolist()
        return f"{self.dataset_path or 'mock data'}, document {self.document_index[position]} from token {offset}"

    def _read(self, index: int) -> tuple[Array, list[int]]:
        """The tokens of sample `index`, int64 [sequence_length + extra], and where in them further documents start."""
        row = int(self.shuffle_index[index])
        (first, offset), (last, end) = self.sample_index[row : row + 2].tolist()
        text = np.empty(self._length + self._extra, dtype=np.int64)
        filled = 0
        starts: list[int] = []
        for position in range(first, last + 1):
            stop = end + self._extra if position == last else None
            # A sample may begin in the middle of one document and end in another; only the tokens it needs are read.
            part = self.dataset.get(int(self.document_index[position]), offset, None if stop is None else stop - offset)
            # A document that starts with the extra token lies wholly beyond the inputs, and an empty one has no start.
            if 0 < filled < self._length and len(part):
                starts.append(filled)
            text[filled : filled + len(part)] = part
            filled += len(part)
            offset = 0
        text[filled:] = self._pad
        return text, starts

    def _positions_and_masks(self, tokens: Array, document_starts: list[int]) -> Sample:
        config = self.config
        after_eod: Array | list[int] = []
        if config.reset_position_ids or config.reset_attention_mask:
            after_eod = starts_after_eod(tokens, cast(int, self._eod))
        in_file = document_starts if config.inter_document_masking else []
        sample: Sample = {}
        if config.inter_document_masking:
            _add_bounds(sample, self._length, document_starts)
        if config.reset_position_ids or config.inter_document_masking:
            starts = _union(after_eod if config.reset_position_ids else [], in_file)
            sample["position_ids"] = torch.from_numpy(position_ids(self._length, starts))
        else:
            sample["position_ids"] = _plain_position_ids(self._length)
        if config.create_attention_mask and config.reset_attention_mask and config.bounds_instead_of_mask:
            _add_bounds(sample, self._length, after_eod)
        elif config.create_attention_mask:
            starts = _union(after_eod if config.reset_attention_mask else [], in_file)
            resets = len(starts) > 0
            # A mask is s^2 bytes: the plain causal one is built once and shared.
            mask = torch.from_numpy(attention_mask(self._length, starts)) if resets else _causal_mask(self._length)
            sample["attention_mask"] = mask
        return sample

    def _build_indices(self) -> Arrays:
        lengths, documents = self.dataset.sequence_lengths, self.indices
        tokens_per_epoch = int(self.of_documents(lengths).sum(dtype=np.int64))
        extra = self._extra
        if tokens_per_epoch <= extra or (self.num_samples is None and tokens_per_epoch < self._length + extra):
            raise DataError(
                f"{self.dataset_path or 'mock data'}: the {self.index_split.name} split has {len(documents)} "
                f"documents with {tokens_per_epoch} tokens, too few for one sample of {self._length + extra} tokens; "
                "give this split a larger share with --split, or more data"
            )
        plan = plan_epochs(tokens_per_epoch, self.num_samples, self._length, extra)
        # A document's number has 4 bytes, a sample's place at least 8, and its place in the shuffled order 4.
        num_samples = self.num_samples or 0
        require_host_memory(
            4 * plan.num_epochs * len(documents) + 12 * num_samples,
            f"{self.dataset_path or 'mock data'}: the indices of {num_samples} samples ({plan.num_epochs} epochs)",
            "ask for fewer with --train-iters, --train-samples or --global-batch-size",
        )
        return self._lay_out(plan)

    def _lay_out(self, plan: EpochPlan) -> Arrays:
        """The indices of so many epochs."""
        drops = self._drops_last_partial()
        return _lay_out(
            self.dataset.sequence_lengths, self.indices, plan, self.config.random_seed, self._length, self._extra, drops
        )

    def _drops_last_partial(self) -> bool:
        return self.index_split is not DataSplit.valid or self.config.drop_last_partial_validation_sequence


def _lay_out(
    lengths: Array, documents: Array, plan: EpochPlan, seed: int, sequence_length: int, extra: int, drops_last: bool
) -> Arrays:
    # One stream for documents and samples, drawn in this order, as upstream draws it.
    random = np.random.RandomState(seed)
    document_index = build_document_index(documents, plan, random)
    sample_index = build_sample_index(
        lengths, document_index, sequence_length, drop_last_partial=drops_last, add_extra_token=bool(extra)
    )
    total = len(sample_index) - 1
    first_part = plan.samples_before_last_epoch if plan.separate_last_epoch else total
    shuffle_index = build_shuffle_index(first_part, total, random)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


# The indices of one epoch take a tenth of a second or more, and no file keeps them: programs that train several times
# (comparing layouts, trying out settings) would build the same ones again and again.
@functools.lru_cache(maxsize=4)
def _lay_out_once(
    lengths: bytes, documents: bytes, plan: EpochPlan, seed: int, sequence_length: int, extra: int, drops_last: bool
) -> Arrays:
    """_lay_out() of int32 values; read-only, as they are shared."""
    of_documents, numbers = np.frombuffer(lengths, dtype=np.int32), np.frombuffer(documents, dtype=np.int32)
    arrays = _lay_out(of_documents, numbers, plan, seed, sequence_length, extra, drops_last)
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


class MockGPTDataset(GPTDataset):
    """GPT samples from counting documents: deterministic, without files."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> Any:
        """Documents that count up from 1 and end with the end-of-document token."""
        if config.tokenizer is None:
            raise ConfigError("--mock-data needs a tokenizer; give --tokenizer-type NullTokenizer --vocab-size N")
        eod, vocab_size = config.tokenizer.eod, config.tokenizer.vocab_size
        return MockTokens(vocab_size - 1 if eod is None else eod, vocab_size)

    def _lay_out(self, plan: EpochPlan) -> Arrays:
        # Many epochs may be gigabytes: they are not kept.
        if plan.num_epochs > 1:
            return super()._lay_out(plan)
        lengths, documents = self.dataset.sequence_lengths.astype(np.int32), self.indices.astype(np.int32)
        drops = self._drops_last_partial()
        return _lay_out_once(
            lengths.tobytes(), documents.tobytes(), plan, self.config.random_seed, self._length, self._extra, drops
        )


class MockTokens:
    """100,000 documents of 1 to 4095 tokens: 1, 2, 3, ..., end of document.

    A vocabulary too small to count that far counts round, leaving out 0 and the end-of-document token.
    """

    num_documents = 100_000
    longest = 4096

    def __init__(self, eod: int, vocab_size: int) -> None:
        self.eod = eod
        random = np.random.default_rng(seed=0)
        self.sequence_lengths = random.integers(1, self.longest, size=self.num_documents, dtype=np.int32)
        ids = np.arange(1, self.longest, dtype=np.int64)
        if vocab_size < self.longest:
            usable = [i for i in range(1, vocab_size) if i != eod] or [0]
            # 0 is left out because it is often padding, and end of document must be only at the end.
            ids = np.resize(np.asarray(usable, dtype=np.int64), self.longest - 1)
        self._counting = ids

    def __len__(self) -> int:
        return self.num_documents

    def fingerprint(self) -> dict[str, Any]:
        """Stands in the description where files have their size and digest."""
        return {"mock_documents": self.num_documents}

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Array:
        """Tokens [offset, offset + length) of document `index`."""
        document_length = int(self.sequence_lengths[index])
        end = document_length if length is None else offset + length
        tokens = self._counting[offset:end].copy()
        if end == document_length and len(tokens):
            tokens[-1] = self.eod
        return tokens


def _open_integers(path_prefix: str, mmap: bool, index_directory: str | None) -> IndexedDataset:
    dataset = IndexedDataset(path_prefix, mmap=mmap, index_directory=index_directory)
    if dataset.dtype.kind not in "iu":
        raise DataError(f"{path_prefix}.idx: token type at byte 17 is {dataset.dtype.name}, expected an integer type")
    return dataset


def _union(first: Array | list[int], second: Array | list[int]) -> Array:
    """Sorted places that are in either."""
    if len(first) == 0 or len(second) == 0:
        return np.asarray(first if len(first) else second, dtype=np.int64)
    return np.union1d(np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64))


def _padding_id(tokenizer: DatasetTokenizer | None, allow_ambiguous: bool) -> int:
    """The id that marks padding; none where the tokenizer has none or uses its end-of-document token for both.

    Tokens of that id in the data count as padding too; an end of document must not, unless that is allowed.
    """
    if tokenizer is None or tokenizer.pad is None or (tokenizer.pad == tokenizer.eod and not allow_ambiguous):
        return _NO_PAD
    return tokenizer.pad


@functools.lru_cache(maxsize=4)
def _plain_position_ids(length: int) -> torch.Tensor:
    """Shared by all samples without restarts: collating copies it."""
    return torch.from_numpy(position_ids(length))


@functools.lru_cache(maxsize=2)
def _causal_mask(length: int) -> torch.Tensor:
    """Shared by all samples without restarts: collating copies it."""
    return torch.from_numpy(attention_mask(length))


# ---- what belongs to the tokens of one sample: their positions, what they may see


def position_ids(length: int, document_starts: Sequence[int] | Array = ()) -> Array:
    """int64 [length]: 0, 1, 2, ..., and again from 0 at every start of a document."""
    positions = np.arange(length, dtype=np.int64)
    if len(document_starts) == 0:
        return positions
    starts = np.zeros(length, dtype=np.int64)
    # The running maximum of the last start, subtracted from the plain positions.
    starts[document_starts] = document_starts
    return positions - np.maximum.accumulate(starts)


def attention_mask(length: int, document_starts: Sequence[int] | Array = ()) -> Array:
    """bool [1, length, length], True where query (row) must not see key (column): later tokens, earlier documents."""
    masked = np.triu(np.ones((length, length), dtype=bool), k=1)
    for start in document_starts:
        masked[start:, :start] = True
    return masked[None]


def starts_after_eod(tokens: Array, eod: int) -> Array:
    """Positions at which a document starts because the token before them ends one."""
    starts = np.flatnonzero(tokens == eod) + 1
    return starts[starts < len(tokens)]


def _add_bounds(sample: Sample, length: int, document_starts: Sequence[int] | Array) -> None:
    bounds, longest = cumulative_lengths(length, document_starts)
    sample["cu_seqlens"] = torch.from_numpy(bounds)
    sample["max_seqlen"] = torch.tensor(longest, dtype=torch.int32)


def cumulative_lengths(length: int, document_starts: Sequence[int] | Array) -> tuple[Array, int]:
    """Document bounds for variable-length attention: (int32 [length + 1] padded with `length`, longest document)."""
    # Padded with `length` to a fixed size, so that samples can be stacked; empty documents at the end change nothing.
    bounds = np.full(length + 1, length, dtype=np.int32)
    bounds[0] = 0
    bounds[1 : len(document_starts) + 1] = document_starts
    return bounds, int(np.diff(bounds).max())
