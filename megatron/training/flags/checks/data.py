"""Validation sets and fill-in-the-middle."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.flags.settings import Settings


def validation_sets_are_separate(s: Settings) -> Iterator[str]:
    names = s.validation_set_names
    if names and not s.multiple_validation_sets:
        yield f"{s.say('validation_set_names')} needs --multiple-validation-sets, which keeps the sets apart"
    if names and len(set(names)) < len(names):
        yield f"{s.say('validation_set_names')} names a set twice; give each one a name of its own"


def split_is_for_one_source(s: Settings) -> Iterator[str]:
    if s.per_split_data_args_path and "split" in s.given:
        yield f"{s.say('split')} says nothing about --per-split-data-args-path, which names the splits; leave it out"


def fragments_have_a_rate(s: Settings) -> Iterator[str]:
    if s.fim_data and s.fim_split_sample is not None and s.fim_fragment_rate is None:
        yield f"{s.say('fim_split_sample')} needs --fim-fragment-rate, the share of the parts that are rearranged"


def documents_are_marked_once(s: Settings) -> Iterator[str]:
    if s.fim_data and s.dataloader_inter_document_masking:
        yield (
            "--fim-data moves the ends of documents, which --dataloader-inter-document-masking takes from the file; "
            "use --reset-position-ids --reset-attention-mask, which look for the end-of-document token"
        )
    if s.fim_data and s.mock_data:
        yield "--fim-data rearranges the text of documents, --mock-data has none; give --data-path"


def conversations_are_not_documents(s: Settings) -> Iterator[str]:
    if s.sft and s.mock_data:
        yield "--sft needs conversations, --mock-data has none; give JSONL files with --data-path"
    if s.sft and s.fim_data:
        yield "--sft and --fim-data are different kinds of data; keep one"
    for dest in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "dataloader_inter_document_masking"):
        if s.sft and getattr(s, dest):
            yield f"{s.say(dest)} says nothing about --sft, where conversations are always kept apart; leave it out"


def masks_are_made_where_needed(s: Settings) -> Iterator[str]:
    if s.reset_attention_mask and not s.create_attention_mask_in_dataloader:
        yield (
            "--reset-attention-mask needs the loader's masks, which --no-create-attention-mask-in-dataloader forbids; "
            "drop one of the two"
        )


def trusted_caches_are_named(s: Settings) -> Iterator[str]:
    if s.dataloader_fast_cache_load and not s.data_cache_path:
        yield "--dataloader-fast-cache-load needs --data-cache-path, the directory where the indices were built"
    if s.dataloader_defer_npy_index_mmap and not s.dataloader_fast_cache_load:
        yield (
            "--dataloader-defer-npy-index-mmap needs --dataloader-fast-cache-load: without it all indices are read "
            "for their checksums; give both"
        )
    if s.per_dataset_sequences_path and not s.dataloader_fast_cache_load:
        yield (
            f"{s.say('per_dataset_sequences_path')} needs --dataloader-fast-cache-load: indices are built and compared "
            "from the index files themselves; give both"
        )
    if s.per_dataset_sequences_path and (s.sft or s.mock_data):
        yield f"{s.say('per_dataset_sequences_path')} says nothing about --sft and --mock-data; leave it out"
    if s.dataloader_defer_npy_index_mmap and s.sft:
        yield "--dataloader-defer-npy-index-mmap says nothing about --sft, which opens all indices; leave it out"


CHECKS = (
    validation_sets_are_separate,
    split_is_for_one_source,
    fragments_have_a_rate,
    documents_are_marked_once,
    conversations_are_not_documents,
    masks_are_made_where_needed,
    trusted_caches_are_named,
)
