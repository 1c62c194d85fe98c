# SPDX-License-Identifier: Apache-2.0
"""Upstream's names at upstream's places: golden/data/public_names.tsv lists them with their parameters.

A name resolves, with upstream's parameter names, or its ImportError says what to use instead. What the names do is
tested in test_upstream_core.py and beside what they name.
"""

from __future__ import annotations

import csv
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import UnsupportedError
from megatron.core.upstream.table import CORE_NAMES
from megatron.training.upstream.table import TRAINING_NAMES

ROWS = list(csv.DictReader((Path(__file__).parents[2] / "golden/data/public_names.tsv").open(), delimiter="\t"))
OTHER_PARAMETERS = {
    "GPTFIMDataset": "MegatronDataset's six, in upstream's order",
    "MegatronOptimizer": "made by get_megatron_optimizer, never by its constructor",
    "MegatronTokenizerText": "an abstract class",
    "MockGPTDataset": "the same six in the same order; the first and the third are called as those of GPTDataset",
    "pretrain": "upstream's signature before it took a container of configs; all are given by name",
}
"""Names whose parameters differ from upstream's in more than being fewer, and why."""
DEFINED = CORE_NAMES.defined | TRAINING_NAMES.defined
ABSENT = {**CORE_NAMES.absent, **TRAINING_NAMES.absent}
PLACEHOLDERS = {
    "_async_calls_queue", "_batched_p2p_ops", "_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"
}  # fmt: skip
"""Private names that programs only set or compare with None."""


def absent(module: str, name: str) -> bool:
    parts = f"{module}.{name}".split(".")
    return any(".".join(parts[:length]) in ABSENT for length in range(2, len(parts) + 1))


def resolve(module: str, name: str) -> Any:
    loaded = importlib.import_module(module)
    try:
        return getattr(loaded, name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['module']}.{row['name']}")
def test_a_name_resolves_or_says_what_to_use_instead(row: dict[str, str]) -> None:
    module, name = row["module"], row["name"]
    if absent(module, name):
        with pytest.raises(ImportError, match=r"does not exist here: [-\w]+"):
            resolve(module, name)
        return
    found = resolve(module, name)
    if name in CORE_NAMES.refused.get(module, {}):
        with pytest.raises(UnsupportedError, match=r"has nothing behind it here: [-\w]+"):
            found()
        return
    if not row["parameters"] or name in OTHER_PARAMETERS:
        return
    upstreams = row["parameters"].split(", ")
    parameter = inspect.Parameter
    ours = [
        given
        for given in inspect.signature(found).parameters.values()
        if given.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    names = [given.name for given in ours]
    assert [given.name for given in ours if given.name not in upstreams and given.default is parameter.empty] == []
    positional = [given.name for given in ours if given.kind != parameter.KEYWORD_ONLY]
    assert [name for name in positional if name in upstreams] == [name for name in upstreams if name in positional]
    assert set(upstreams) - set(names) == set()


def test_a_function_with_its_modules_name_is_the_function_whatever_was_imported_before() -> None:
    importlib.import_module("megatron.core.distributed.finalize_model_grads")
    from megatron.core.distributed import finalize_model_grads

    assert inspect.isfunction(finalize_model_grads)


def test_most_names_resolve() -> None:
    assert sum(not absent(row["module"], row["name"]) for row in ROWS) >= 150


def test_everything_in_the_table_is_defined_where_it_says() -> None:
    for module, names in DEFINED.items():
        loaded = importlib.import_module(module)
        for name in names:
            assert hasattr(loaded, name), f"{module}.{name}"
            assert name in PLACEHOLDERS or getattr(loaded, name) is not None, f"{module}.{name}"


def test_sentences_end_without_a_full_stop_and_names_are_not_both_here_and_absent() -> None:
    for name, sentence in ABSENT.items():
        assert not sentence.endswith("."), name
        assert name not in DEFINED and name.rpartition(".")[2] not in DEFINED.get(name.rpartition(".")[0], {})


def test_a_module_that_no_table_knows_is_missing_as_anywhere() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'megatron.core.no_such_thing'"):
        importlib.import_module("megatron.core.no_such_thing")
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module("megatron.core.utils").no_such_name  # noqa: B018
    assert CORE_NAMES.find_spec("json", None) is None


PROMISED: dict[str, list[str]] = {
    "megatron.core": [
        "DistributedDataParallel",
        "ModelParallelConfig",
        "Timers",
        "mpu",
        "parallel_state",
        "tensor_parallel",
    ],
    "megatron.core.process_groups_config": ["ProcessGroupCollection"],
    "megatron.core.enums": ["ModelType"],
    "megatron.core.timers": ["Timers"],
    "megatron.core.model_parallel_config": ["ModelParallelConfig"],
    "megatron.core.num_microbatches_calculator": [],
    "megatron.core.optimizer_param_scheduler": ["OptimizerParamScheduler"],
    "megatron.core.parallel_state": [
        "destroy_model_parallel",
        "get_context_parallel_group",
        "get_context_parallel_rank",
        "get_context_parallel_world_size",
        "get_data_parallel_group",
        "get_data_parallel_rank",
        "get_data_parallel_world_size",
        "get_embedding_group",
        "get_expert_data_parallel_group",
        "get_expert_model_parallel_group",
        "get_expert_model_parallel_rank",
        "get_expert_model_parallel_world_size",
        "get_expert_tensor_parallel_group",
        "get_model_parallel_group",
        "get_pipeline_model_parallel_group",
        "get_pipeline_model_parallel_rank",
        "get_pipeline_model_parallel_world_size",
        "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_src_rank",
        "get_tensor_model_parallel_world_size",
        "initialize_model_parallel",
        "is_pipeline_first_stage",
        "is_pipeline_last_stage",
        "model_parallel_is_initialized",
    ],
    "megatron.core.tensor_parallel": [
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "copy_to_tensor_model_parallel_region",
        "gather_from_sequence_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "get_cuda_rng_tracker",
        "model_parallel_cuda_manual_seed",
        "reduce_from_tensor_model_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "scatter_to_sequence_parallel_region",
        "scatter_to_tensor_model_parallel_region",
        "vocab_parallel_cross_entropy",
    ],
    "megatron.core.tensor_parallel.random": ["model_parallel_cuda_manual_seed"],
    "megatron.core.transformer": ["TransformerConfig"],
    "megatron.core.transformer.transformer_config": ["TransformerConfig"],
    "megatron.core.transformer.module": ["MegatronModule"],
    "megatron.core.transformer.spec_utils": ["ModuleSpec", "build_module"],
    "megatron.core.transformer.enums": ["AttnBackend", "AttnMaskType"],
    "megatron.core.models.gpt": ["GPTModel"],
    "megatron.core.models.gpt.gpt_model": ["GPTModel"],
    "megatron.core.models.gpt.gpt_layer_specs": ["get_gpt_layer_local_spec"],
    "megatron.core.pipeline_parallel": ["get_forward_backward_func"],
    "megatron.core.distributed": ["DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"],
    "megatron.core.optimizer": ["OptimizerConfig", "get_megatron_optimizer"],
    "megatron.core.datasets.blended_megatron_dataset_builder": ["BlendedMegatronDatasetBuilder"],
    "megatron.core.datasets.gpt_dataset": ["GPTDataset", "GPTDatasetConfig", "MockGPTDataset"],
    "megatron.core.datasets.indexed_dataset": ["IndexedDataset", "IndexedDatasetBuilder"],
    "megatron.core.dist_checkpointing": ["load", "save"],
    "megatron.training": ["get_args", "get_timers", "get_tokenizer", "pretrain", "print_rank_0"],
    "megatron.training.global_vars": ["get_args", "get_timers", "get_tokenizer"],
}


@pytest.mark.parametrize("module", PROMISED)
def test_promised_names_can_be_imported(module: str) -> None:
    loaded = importlib.import_module(module)
    missing = [name for name in PROMISED[module] if getattr(loaded, name, None) is None]
    assert missing == []
