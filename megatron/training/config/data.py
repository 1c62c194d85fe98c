# SPDX-License-Identifier: Apache-2.0
"""Choice of the data to train on, its reading, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.datasets.blend import parse_blend, read_shares
from megatron.core.errors import ConfigError
from megatron.core.setting import Needs, PathText
from megatron.core.tokenizers.tokenizer_options import TokenizerOptions

# Every option without --fim-data has nothing to do, and a note says so.
_FILL_IN = Needs("--fim-data", lambda run: run.fim_data)
_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


@dataclass(kw_only=True)
class FillInTheMiddle(CheckedConfig):
    """Fill-in-the-middle: documents rearranged so that a model learns to fill gaps."""

    usual_kind = "numerics"

    fim_data: bool = False
    """Split documents in three and move the middle to the end, after a sentinel."""
    fim_rate: float = flag(0.5, minimum=0, maximum=1, needs=_FILL_IN)
    """Share of the documents that are rearranged (with --fim-split-sample: whose parts may be)."""
    fim_spm_rate: float = flag(0.5, minimum=0, maximum=1, needs=_FILL_IN)
    """Share of the rearranged documents that begin with the suffix instead of the prefix."""
    fim_split_sample: str | None = flag(None, needs=_FILL_IN)
    """Token at which a document falls into parts, such as the files of a repository, each rearranged by itself."""
    fim_fragment_rate: float | None = flag(None, minimum=0, maximum=1, needs=_FILL_IN)
    """Share of those parts that are rearranged; needed by --fim-split-sample."""
    fim_no_prefix: str | None = flag(None, needs=_FILL_IN)
    """A document that begins with this text is left as it is."""
    fim_prefix_token: str = flag("<fim_prefix>", needs=_FILL_IN)
    """Token before the prefix."""
    fim_middle_token: str = flag("<fim_middle>", needs=_FILL_IN)
    """Token before the middle."""
    fim_suffix_token: str = flag("<fim_suffix>", needs=_FILL_IN)
    """Token before the suffix."""
    fim_pad_token: str = flag("<fim_pad>", needs=_FILL_IN)
    """Token that fills up a sample that became shorter; it has no loss."""
    # Names of tokens, not ids: their ids are the tokenizer's affair.
    fim_eod_token: str = flag("<|endoftext|>", needs=_FILL_IN)
    """Token that ends a document."""


@dataclass(kw_only=True)
class DataConfig(FillInTheMiddle):
    """Datasets, splits, samples and the loader."""

    usual_kind = "numerics"

    data_path: list[PathText] | None = flag(None, nargs="*")
    """Dataset prefixes (the path without .bin/.idx), or weights and prefixes in turn: 0.7 a 0.3 b."""
    train_data_path: list[PathText] | None = flag(None, nargs="*")
    """Training datasets, written as --data-path; instead of --data-path and --split."""
    valid_data_path: list[PathText] | None = flag(None, nargs="*")
    """Validation datasets, written as --data-path."""
    test_data_path: list[PathText] | None = flag(None, nargs="*")
    """Test datasets, written as --data-path."""
    data_args_path: PathText | None = None
    """A file that holds what would stand after --data-path, for blends too long for a command line."""
    per_split_data_args_path: PathText | None = None
    """A JSON file {"train": ..., "valid": ..., "test": ...}: what would stand after --train-data-path and so on, each
    as a list or as one text; null for no data."""
    split: str | None = None
    """Fractions of training, validation and test documents, such as 99,1,0; "969, 30, 1" with only --data-path."""
    mock_data: bool = False
    """Synthetic sequences instead of files."""
    seq_length: int | None = flag(None, minimum=1, unit="tokens")
    """Tokens per training sequence."""
    # kind "kernel": where indices are stored, or how files are read, never changes a number.
    data_cache_path: PathText | None = flag(None, kind="kernel")
    """Directory of the sample indices; `cache/GPTDataset_indices` next to the data when not given, or memory where that
    cannot be written."""
    mmap_bin_files: bool = flag(True, off_names=("--no-mmap-bin-files",), kind="kernel")
    """Map .bin files into memory instead of reading from them."""
    dataloader_fast_cache_load: bool = flag(False, kind="kernel")
    """Take the sample indices in --data-cache-path as they are, without reading them for their checksums; they must
    have been built (tools/build_dataset_cache.py). For jobs of many processes on shared storage."""
    dataloader_defer_npy_index_mmap: bool = flag(False, kind="kernel")
    """With --dataloader-fast-cache-load: open each file of sample indices when it is first used."""
    per_dataset_sequences_path: PathText | None = flag(None, kind="kernel")
    """With --dataloader-fast-cache-load: a JSON file of what the index file of each dataset says, so that none is
    opened before the first sample. tools/build_dataset_cache.py writes it."""
    object_storage_cache_path: PathText | None = flag(None, kind="kernel")
    """Local directory for copies of the index files of datasets in object storage, such as s3://bucket/prefix; the
    sample indices go there, too, unless --data-cache-path says otherwise."""
    enable_msc: bool = flag(False, kind="kernel")
    """Allow msc://profile/prefix among the data paths: object storage through the multi-storage client, a package that
    brings this protocol to fsspec."""
    num_workers: int = flag(2, minimum=0, kind="kernel")
    """Loader processes per rank; 0 loads in the training process."""
    dataloader_type: str | None = flag(None, choices=("single", "cyclic", "external"))
    """single: the sample order of the dataset, once; cyclic: reshuffled every epoch; external: batches come as they are
    from the data that your script provides; single when not given."""
    reset_position_ids: bool = False
    """Positions start again after each end-of-document token."""
    reset_attention_mask: bool = False
    """Tokens do not attend to earlier documents of their sequence."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""
    allow_ambiguous_pad_tokens: bool = False
    """If a tokenizer pads with its end-of-document token, take that token for padding: no loss on it. Otherwise it
    is an end of document, which the model learns to write."""
    create_attention_mask_in_dataloader: bool = flag(True, off_names=("--no-create-attention-mask-in-dataloader",))
    """The loader may make the masks that --reset-attention-mask needs. A mask that is only causal is never stored:
    attention is causal by itself."""
    dataloader_inter_document_masking: bool = False
    """Tokens do not attend to other documents of their sequence, and positions start again at each; the bounds are the
    documents' in the file, with or without an end-of-document token between them. The loader passes the bounds instead
    of a mask, and attention runs document by document."""
    drop_last_partial_validation_sequence: bool = True
    """Validation tokens that do not fill a last sequence are left out; otherwise that sequence is filled with padding,
    which has no loss."""
    sft: bool = False
    """Instruction tuning: --data-path names JSONL files of conversations, which the tokenizer's chat template turns
    into text. They are packed into sequences, do not see one another, and have loss on the assistant's answers only."""
    skip_bad_conversations: bool = flag(False, needs=Needs("--sft or --dpo", lambda run: run.sft or run.dpo))
    """Pass over lines of --sft and --dpo that cannot be used, and count them; otherwise the first one ends the run with
    a sentence."""
    num_dataset_builder_threads: int = flag(1, minimum=1, kind="kernel")
    """Threads that build the indices of a blend's datasets."""
    mid_level_dataset_surplus: float = flag(0.005, minimum=0, maximum=1)
    """Share of extra samples built for each dataset of a blend, so that rounding never runs short."""

    def derive(self) -> None:
        """Defaults that depend on other fields."""
        super().derive()
        # Upstream's default. It means something for one blend only; data per split are not split.
        if self.split is None and (self.data_path or self.data_args_path):
            self.split = "969, 30, 1"
        if self.dataloader_type is None:
            self.dataloader_type = "single"

    def rules(self) -> Iterator[str]:
        """One source of data, and options that fit it."""
        yield from self._source_problems()
        yield from self._share_problems()
        yield from self._document_problems()
        yield from self._conversation_problems()
        yield from self._cache_problems()

    def _source_problems(self) -> Iterator[str]:
        """Blends, lists of blends in a file, blends per split, or synthetic data."""
        blended = [name for name in ("data_path", "data_args_path") if getattr(self, name)]
        per_split = [name for name in _PATHS[1:] if getattr(self, name)]
        # The three paths per split are one source.
        sources = blended + [name for name in ("per_split_data_args_path",) if self.per_split_data_args_path]
        sources += per_split[:1] + (["mock_data"] if self.mock_data else [])
        if len(sources) > 1:
            yield f"{' and '.join(map(self.flag, sources))} are different sources of data; keep one"
        if self.split is not None and not blended and per_split:
            yield (
                f"{self.say('split')} says nothing about {self.flag(per_split[0])}, which names each split's data; "
                "leave it out"
            )
        if self.split is not None and not blended and self.per_split_data_args_path:
            yield (
                f"{self.say('split')} says nothing about --per-split-data-args-path, which names the splits; "
                "leave it out"
            )
        for name in _PATHS:
            # nargs="*" lets a flag stand alone, which is what an empty shell variable leaves.
            if getattr(self, name) == []:
                yield f"{self.flag(name)} is given without a path; name a dataset prefix, or leave it out"

    def _share_problems(self) -> Iterator[str]:
        """The numbers among the texts: shares of the splits, weights of the blends."""
        checks: list[tuple[Callable[[Any, str], Any], Any, str]] = []
        if self.split is not None:
            checks.append((read_shares, self.split, "--split"))
        for name in _PATHS:
            # Empty texts are complained about elsewhere.
            if (items := getattr(self, name)) and all(items):
                checks.append((parse_blend, items, self.flag(name)))
        for check, value, name in checks:
            try:
                check(value, name)
            except ConfigError as error:
                yield from error.problems

    def _document_problems(self) -> Iterator[str]:
        """Check how documents are cut, rearranged and kept apart."""
        if self.fim_data and self.fim_split_sample is not None and self.fim_fragment_rate is None:
            yield (
                f"{self.say('fim_split_sample')} needs --fim-fragment-rate, the share of the parts that are rearranged"
            )
        if self.fim_data and self.dataloader_inter_document_masking:
            yield (
                "--fim-data moves the ends of documents, which --dataloader-inter-document-masking takes from the "
                "file; use --reset-position-ids --reset-attention-mask, which look for the end-of-document token"
            )
        if self.fim_data and self.mock_data:
            yield "--fim-data rearranges the text of documents, --mock-data has none; give --data-path"
        if self.reset_attention_mask and not self.create_attention_mask_in_dataloader:
            yield (
                "--reset-attention-mask needs the loader's masks, which --no-create-attention-mask-in-dataloader "
                "forbids; drop one of the two"
            )
        if self.dataloader_inter_document_masking and self.reset_attention_mask:
            yield "--dataloader-inter-document-masking and --reset-attention-mask say the same in two ways; keep one"

    def _conversation_problems(self) -> Iterator[str]:
        """--sft reads conversations instead of documents."""
        if not self.sft:
            return
        if self.mock_data:
            yield "--sft needs conversations, --mock-data has none; give JSONL files with --data-path"
        if self.fim_data:
            yield "--sft and --fim-data are different kinds of data; keep one"
        # Conversations of a sample never see one another: these would ask for what happens anyway, or for the opposite.
        apart = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "dataloader_inter_document_masking")
        for name in apart:
            if getattr(self, name):
                yield (
                    f"{self.say(name)} says nothing about --sft, where conversations are always kept apart; leave it "
                    "out"
                )

    def _cache_problems(self) -> Iterator[str]:
        """Sample indices that are used as they are."""
        if self.dataloader_fast_cache_load and not self.data_cache_path:
            yield "--dataloader-fast-cache-load needs --data-cache-path, the directory where the indices were built"
        if self.dataloader_defer_npy_index_mmap and not self.dataloader_fast_cache_load:
            yield (
                "--dataloader-defer-npy-index-mmap needs --dataloader-fast-cache-load: without it all indices are read "
                "for their checksums; give both"
            )
        if self.per_dataset_sequences_path and not self.dataloader_fast_cache_load:
            yield (
                f"{self.say('per_dataset_sequences_path')} needs --dataloader-fast-cache-load: indices are built and "
                "compared from the index files themselves; give both"
            )
        if self.per_dataset_sequences_path and (self.sft or self.mock_data):
            yield f"{self.say('per_dataset_sequences_path')} says nothing about --sft and --mock-data; leave it out"
        if self.dataloader_defer_npy_index_mmap and self.sft:
            yield "--dataloader-defer-npy-index-mmap says nothing about --sft, which opens all indices; leave it out"


@dataclass(kw_only=True)
class TokenizerConfig(TokenizerOptions):
    """Size of the vocabulary."""

    padded_vocab_size: int | None = flag(None, minimum=1, unit="tokens", kind="shape")
    """Rows of the embedding; computed from the vocabulary when not given."""
    pad_vocab_size: bool = flag(True, kind="shape")
    """Pad the vocabulary to a multiple of --make-vocab-size-divisible-by on each tensor-parallel rank."""
