# SPDX-License-Identifier: Apache-2.0
"""From the settings of a run to its GPT datasets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.errors import ConfigError, DataError
from megatron.training.config.container import RunConfig
from megatron.training.config.data import DataConfig
from megatron.training.recipes.recipe import SampleCounts
from megatron.training.recipes.vocabulary import compute_vocab_size

if TYPE_CHECKING:
    import torch

    from megatron.core.datasets.blend import Blend
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.megatron_dataset import MegatronDataset
    from megatron.core.tokenizers.base import Tokenizer

_SPLITS = ("train", "valid", "test")


def build_gpt_datasets(config: RunConfig, tokenizer: Tokenizer, num_samples: SampleCounts) -> Sequence[Any]:
    """Training, validation and test data with at least `num_samples` samples; None where there are none.

    With --multiple-validation-sets the second entry is a list of datasets.
    Raises ConfigError for a blend that cannot be read, DataError for unusable files.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    if config.data.dataloader_type == "external":
        raise ConfigError(
            "--dataloader-type external needs a script that provides the batches (see docs/data.md), which this one "
            "does not; use single or cyclic"
        )
    dataset_class, dataset_config = choose_dataset(config, tokenizer)
    # lambda: True: every rank builds its datasets; the cache lets only the first one compute the indices.
    train, *others = BlendedMegatronDatasetBuilder(dataset_class, num_samples, lambda: True, dataset_config).build()
    if config.distillation.logits_load_dir is not None and train is not None:
        from megatron.training.recipes.distillation import attach_teacher

        vocab_size = compute_vocab_size(config, tokenizer)
        train = attach_teacher(config.distillation, train, dataset_config.sequence_length, vocab_size)
    return [train, *others]


def choose_dataset(config: RunConfig, tokenizer: Tokenizer) -> tuple[type[MegatronDataset], GPTDatasetConfig]:
    """The class of dataset that the settings ask for, and its settings."""
    from megatron.core.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.core.datasets.preference_dataset import PreferenceDataset
    from megatron.core.datasets.sequence_counts import read_sequence_counts
    from megatron.core.datasets.sft_dataset import SFTDataset
    from megatron.core.device import current_device

    data = config.data
    blend, per_split = read_blends(data)
    # Before any path is touched.
    _check_protocols(data, [entry for entry in (blend, *(per_split or ())) if entry is not None])
    if blend is None and per_split is None and not data.mock_data:
        # Never train on made-up tokens unless requested.
        raise ConfigError(
            "there is no data to train on; give --data-path PREFIX, or --mock-data to try the settings out"
        )
    assert data.seq_length is not None, "checked by read_run_config"
    counts = None
    # Without the fast cache the index files are opened anyway, and what they say counts.
    if data.per_dataset_sequences_path is not None and data.dataloader_fast_cache_load:
        counts = read_sequence_counts(data.per_dataset_sequences_path)
    settings: dict[str, Any] = {
        "sequence_counts": counts,
        "random_seed": config.model.seed,
        "sequence_length": data.seq_length,
        "blend": blend,
        "blend_per_split": per_split,
        "split": None if per_split else data.split,
        "path_to_cache": data.data_cache_path,
        "fast_cache_load": data.dataloader_fast_cache_load,
        "defer_npy_index_mmap": data.dataloader_defer_npy_index_mmap,
        "mmap_bin_files": data.mmap_bin_files,
        "object_storage_cache_path": data.object_storage_cache_path,
        "num_dataset_builder_threads": data.num_dataset_builder_threads,
        "mid_level_dataset_surplus": data.mid_level_dataset_surplus,
        "multiple_validation_sets": config.validation.multiple_validation_sets,
        "tokenizer": tokenizer,
        "reset_position_ids": data.reset_position_ids,
        "reset_attention_mask": data.reset_attention_mask,
        "eod_mask_loss": data.eod_mask_loss,
        # A mask that is only causal would say what attention does by itself, quicker.
        "create_attention_mask": data.reset_attention_mask and data.create_attention_mask_in_dataloader,
        "bounds_instead_of_mask": takes_bounds_for_masks(config, current_device()),
        "inter_document_masking": data.dataloader_inter_document_masking,
        "allow_ambiguous_pad_tokens": data.allow_ambiguous_pad_tokens,
        "drop_last_partial_validation_sequence": data.drop_last_partial_validation_sequence,
        "skip_bad_conversations": data.skip_bad_conversations,
    }
    if config.preference.dpo:
        return PreferenceDataset, GPTDatasetConfig(**settings)
    if data.sft:
        return SFTDataset, GPTDatasetConfig(**settings)
    if data.fim_data:
        return GPTFIMDataset, GPTFIMDatasetConfig(**settings, **_read_fill_in_the_middle_settings(data))
    return MockGPTDataset if data.mock_data else GPTDataset, GPTDatasetConfig(**settings)


def takes_bounds_for_masks(config: RunConfig, device: torch.device) -> bool:
    """Return whether --reset-attention-mask becomes the bounds of documents: on a GPU, whose kernels skip what bounds
    hide and compute what a mask hides, and where a run with bounds is the same in everything else."""
    from megatron.core.device import is_cpu

    model, is_one_sequence = config.model, (config.training.micro_batch_size or 1) == 1
    return (
        not is_cpu(device)
        and model.attention_backend in ("auto", "flash")
        # Samples become one packed sequence, which later stages do not expect, and losses of sequences would see.
        and (is_one_sequence or (model.pipeline_model_parallel_size == 1 and model.num_moe_experts is None))
        # They count from the beginning of a document where there are bounds.
        and model.mtp_num_layers is None
        and model.attention_chunk_size is None
        and model.attn_temperature_scale is None
    )


def read_blends(data: DataConfig) -> tuple[Blend | None, list[Blend | None] | None]:
    """(one blend to be split, or None; a blend for each split, or None). Reads the files that hold them, if any."""
    from megatron.core.datasets.blend import parse_blend

    if data.mock_data:
        return None, None
    if data.data_args_path is not None:
        return parse_blend(_read_text(data.data_args_path, "--data-args-path").split(), "--data-args-path"), None
    if data.data_path is not None:
        return parse_blend(data.data_path), None
    if data.per_split_data_args_path is not None:
        return None, _read_blends_of_splits(data.per_split_data_args_path)
    per_split = [
        None if paths is None else parse_blend(paths, flag)
        for flag, paths in (
            ("--train-data-path", data.train_data_path),
            ("--valid-data-path", data.valid_data_path),
            ("--test-data-path", data.test_data_path),
        )
    ]
    return None, per_split if any(per_split) else None


def _check_protocols(data: DataConfig, blends: Sequence[Blend]) -> None:
    """Allow msc:// only where it was requested: the multi-storage client reads credentials from its profiles' files."""
    found = next((prefix for prefixes, _ in blends for prefix in prefixes if prefix.startswith("msc://")), None)
    if found is not None and not data.enable_msc:
        raise ConfigError(f"{found} is read through the multi-storage client; add --enable-msc to allow that")


def _read_blends_of_splits(path: str) -> list[Blend | None]:
    from megatron.core.datasets.blend import parse_blend

    flag = "--per-split-data-args-path"
    try:
        content = json.loads(_read_text(path, flag))
    except ValueError as error:
        raise ConfigError(f"{flag} {path}: not JSON: {error}") from error
    if not isinstance(content, dict) or set(content) - set(_SPLITS):
        raise ConfigError(
            f'{flag} {path}: expected an object {{"train": ..., "valid": ..., "test": ...}}, found '
            f"{'the keys ' + ', '.join(content) if isinstance(content, dict) else type(content).__name__}"
        )
    blends: list[Blend | None] = []
    for split in _SPLITS:
        items = content.get(split) or []
        # Upstream's files hold either form.
        if isinstance(items, str):
            items = items.split()
        if not isinstance(items, list) or not all(isinstance(item, str | int | float) for item in items):
            raise ConfigError(f"{flag} {path}: {split} is not a list of prefixes, or of weights and prefixes in turn")
        blends.append(parse_blend([str(item) for item in items], f"{flag} {path}: {split}") if items else None)
    if not any(blends):
        raise ConfigError(f"{flag} {path}: names no dataset; give prefixes under train, valid or test")
    return blends


def _read_text(path: str, flag: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
        raise DataError(f"{flag} {path}: {reason}; give a file that can be read") from error


def _read_fill_in_the_middle_settings(data: DataConfig) -> dict[str, Any]:
    """Return the settings that GPTFIMDatasetConfig has in addition to GPTDatasetConfig's."""
    roles = ("prefix", "middle", "suffix", "pad", "eod")
    return {
        "fim_rate": data.fim_rate,
        "fim_spm_rate": data.fim_spm_rate,
        "fim_split_sample": data.fim_split_sample,
        "fim_fragment_rate": data.fim_fragment_rate,
        "fim_no_prefix": data.fim_no_prefix,
        "fim_extra_tokens": {role: getattr(data, f"fim_{role}_token") for role in roles},
    }
