"""Which data to train on, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag


@dataclass(kw_only=True)
class FillInTheMiddle:
    """Fill-in-the-middle: documents rearranged so that a model learns to fill gaps."""

    fim_data: bool = False
    """Cut documents in three and put the middle behind a sentinel at the end."""
    fim_rate: float = flag(0.5, minimum=0, maximum=1)
    """Share of the documents that are rearranged (with --fim-split-sample: whose parts may be)."""
    fim_spm_rate: float = flag(0.5, minimum=0, maximum=1)
    """Share of the rearranged documents that begin with the suffix instead of the prefix."""
    fim_split_sample: str | None = None
    """Token at which a document falls into parts, such as the files of a repository, each rearranged by itself."""
    fim_fragment_rate: float | None = flag(None, minimum=0, maximum=1)
    """Share of those parts that are rearranged; needed by --fim-split-sample."""
    fim_no_prefix: str | None = None
    """A document that begins with this text is left as it is."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that fills up a sample that became shorter; it has no loss."""
    fim_eod_token: str = "<|endoftext|>"
    """Token that ends a document."""


@dataclass(kw_only=True)
class DataConfig(FillInTheMiddle):
    """Datasets, splits, samples and the loader."""

    data_path: list[str] | None = flag(None, nargs="*")
    """Dataset prefixes (the path without .bin/.idx), or weights and prefixes in turn: 0.7 a 0.3 b."""
    train_data_path: list[str] | None = flag(None, nargs="*")
    """Training datasets, written as --data-path; instead of --data-path and --split."""
    valid_data_path: list[str] | None = flag(None, nargs="*")
    """Validation datasets, written as --data-path."""
    test_data_path: list[str] | None = flag(None, nargs="*")
    """Test datasets, written as --data-path."""
    data_args_path: str | None = None
    """A file that holds what would stand after --data-path, for blends too long for a command line."""
    per_split_data_args_path: str | None = None
    """A JSON file {"train": ..., "valid": ..., "test": ...}: what would stand after --train-data-path and so on, each
    as a list or as one text; null for no data."""
    split: str | None = None
    """Shares of training, validation and test documents, such as 99,1,0; "969, 30, 1" with --data-path alone."""
    mock_data: bool = False
    """Synthetic sequences instead of files."""
    seq_length: int | None = flag(None, minimum=1, unit="tokens")
    """Tokens per training sequence."""
    data_cache_path: str | None = None
    """Directory of the sample indices; `cache/GPTDataset_indices` beside the data when not given, and in memory where
    that cannot be written."""
    mmap_bin_files: bool = flag(True, off_names=("--no-mmap-bin-files",))
    """Map .bin files into memory instead of reading from them."""
    dataloader_fast_cache_load: bool = False
    """Take the sample indices in --data-cache-path as they are, without reading them for their checksums; they must
    have been built (tools/build_dataset_cache.py). For jobs of many processes on shared storage."""
    dataloader_defer_npy_index_mmap: bool = False
    """With --dataloader-fast-cache-load: open each file of sample indices when it is first used."""
    per_dataset_sequences_path: str | None = None
    """With --dataloader-fast-cache-load: a JSON file of what the index file of each dataset says, so that none is
    opened before the first sample. tools/build_dataset_cache.py writes it."""
    object_storage_cache_path: str | None = None
    """Local directory for copies of the index files of datasets in object storage, such as s3://bucket/prefix; the
    sample indices go there, too, unless --data-cache-path says otherwise."""
    enable_msc: bool = False
    """Allow msc://profile/prefix among the data paths: object storage through the multi-storage client, a package that
    brings this protocol to fsspec."""
    num_workers: int = flag(2, minimum=0)
    """Loader processes per rank; 0 loads in the training process."""
    dataloader_type: str | None = flag(None, choices=("single", "cyclic", "external"))
    """single: the sample order of the dataset, once; cyclic: reshuffled every epoch; external: batches come as they are
    from the data that a script of your own provides; single when not given."""
    reset_position_ids: bool = False
    """Positions start again after each end-of-document token."""
    reset_attention_mask: bool = False
    """Tokens do not attend to earlier documents of their sequence."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""
    allow_ambiguous_pad_tokens: bool = False
    """Where a tokenizer pads with its end-of-document token, take that token for padding: no loss on it. Otherwise it
    is an end of document, which the model learns to write."""
    create_attention_mask_in_dataloader: bool = flag(True, off_names=("--no-create-attention-mask-in-dataloader",))
    """The loader may make the masks that --reset-attention-mask needs. A mask that is only causal is never stored:
    attention is causal by itself."""
    dataloader_inter_document_masking: bool = False
    """Tokens do not attend to other documents of their sequence, and positions start again at each; the bounds are
    those of the documents in the file, whether or not an end-of-document token stands between them. The loader hands
    over the bounds instead of a mask, and attention runs document by document."""
    drop_last_partial_validation_sequence: bool = True
    """Validation tokens that do not fill a last sequence are left out; otherwise that sequence is filled with padding,
    which has no loss."""
    sft: bool = False
    """Instruction tuning: --data-path names JSONL files of conversations, which the tokenizer's chat template turns
    into text. They are packed into sequences, do not see one another, and have loss on the assistant's answers only."""
    num_dataset_builder_threads: int = flag(1, minimum=1)
    """Threads that build the indices of a blend's datasets."""
    mid_level_dataset_surplus: float = flag(0.005, minimum=0, maximum=1)
    """Share of extra samples built for each dataset of a blend, so that rounding never runs short."""
