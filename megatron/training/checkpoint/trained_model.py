# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as something to use: its settings, its tokenizer and its model with the trained weights, on one process
or divided over several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.config_base import get_settings, restore
from megatron.core.device import current_device, is_cuda
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import model_state
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.mesh import size_problems
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.core.tensor_parallel.fp8_products import recall_fallbacks
from megatron.core.tensor_parallel.parameters import declare_vocabulary, list_global_names
from megatron.core.transformer.adapters import add_adapters
from megatron.core.upstream_checkpoints.diagnosis import explain_nothing
from megatron.training.checkpoint import adapter_saves
from megatron.training.checkpoint.documents import CONFIG
from megatron.training.checkpoint.run_tensors import build_sharded_fallbacks
from megatron.training.checkpoint.tokenizer_assets import use_saved_files
from megatron.training.config.container import RunConfig
from megatron.training.config.gpu_needs import replace_gpu_settings
from megatron.training.recipes.build import build_recipe
from megatron.training.recipes.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from megatron.core.tokenizers.base import Tokenizer
    from megatron.core.transformer.transformer_config import TransformerConfig


LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)  # fmt: skip
"""Fields of TransformerConfig that say how processes share a model that is used."""


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint in memory: its path, its settings, its recipe and its model, in evaluation mode."""

    path: Path
    config: RunConfig
    recipe: Recipe
    model: nn.Module

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with."""
        return self.recipe.tokenizer

    @property
    def max_sequence_length(self) -> int | None:
        """Positions that the model has; None where it has no table of them."""
        return self.recipe.max_sequence_length

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary, without padding."""
        return self.recipe.vocab_size


def read_trained_config(
    root: Path,
    iteration: int | None = None,
    *,
    bf16: bool = False,
    layout: Mapping[str, int] | None = None,
    ranks: int = 1,
) -> RunConfig:
    """The settings with which the model of a checkpoint is used by so many processes.

    layout: fields of LAYOUT and their values. By default it is the layout of the run that saved the checkpoint, if it
    had so many processes, or else tensor parallelism over all of them. Raises CheckpointError when there is no
    checkpoint of ours, ConfigError for a layout that does not fit the model or the processes.
    """
    return _read_config(_find(root, iteration, ProcessGroupCollection.single()).path, bf16, layout or {}, ranks)


def load_trained_model(
    root: Path,
    iteration: int | None = None,
    *,
    bf16: bool = False,
    layout: Mapping[str, int] | None = None,
    groups: ProcessGroupCollection | None = None,
) -> TrainedModel:
    """The model of a checkpoint directory (or of one `iter_...` directory): the latest, or the given iteration.

    It computes in float32, whatever it was trained in: rounding then never decides between two tokens, so a key-value
    cache changes nothing. bf16: half the memory, without that promise. The tokenizer's files are taken from the
    checkpoint where it has them. groups: of the processes that hold the model together, divided as layout says (see
    read_trained_config); all of them call this. Raises CheckpointError when there is no undamaged checkpoint of ours,
    ConfigError or DataError when its tokenizer's files are gone.
    """
    # Whatever layout the model was trained in: entries of a checkpoint are whole tensors to a loader.
    groups = groups or ProcessGroupCollection.single()
    found = _find(root, iteration, groups)
    config = _read_config(found.path, bf16, layout or {}, groups.world.size())
    device = current_device()
    if not is_cuda(device):
        replace_gpu_settings(config)  # the numbers are the same, and no kernel is requested here
    recipe = build_recipe(config)
    with torch.device(device):
        model = recipe.build_model(
            pre_process=groups.is_first_stage, post_process=groups.is_last_stage, pg_collection=groups
        )
    # Rows beyond the vocabulary are padding, whose number depends on the layout of the saving run.
    declare_vocabulary(model, recipe.vocab_size)
    parameters = ((parameter, get_placement(parameter, name)) for name, parameter in list_parameters(model))
    base = adapter_saves.find_base(found, groups.world)
    adapter_saves.load(model_state(parameters) | build_sharded_fallbacks([model]), found, base, groups.world)
    recall_fallbacks([model])
    return TrainedModel(found.path, config, recipe, model.eval())


def add_trained_adapters(trained: TrainedModel, root: Path, flag: str) -> None:
    """Give a model that is in memory the adapters of a checkpoint of --save-adapter-only.

    flag: what named the directory. Raises CheckpointError for a checkpoint without adapters, or with another
    model's.
    """
    core: Any = trained.model
    groups: ProcessGroupCollection = getattr(core, "pg_collection", None) or ProcessGroupCollection.single()
    found = _find(root, None, groups)
    base = adapter_saves.find_base(found, groups.world)
    if base is None:
        raise CheckpointError(f"{flag} {root} is no checkpoint of adapters alone; save it with --save-adapter-only")
    if base.path.resolve() != trained.path.resolve():
        raise CheckpointError(f"{flag} {root} has adapters of {base.path}, and the model is {trained.path}")
    ours = trained.config.model
    theirs = RunConfig.from_dict(serialization.read_document(found.path, CONFIG)).model
    values = {name: getattr(theirs if name.startswith("lora_") else ours, name) for name in get_settings(type(ours))}
    add_adapters(trained.model, restore(type(ours), values))
    placed = (
        (parameter, get_placement(parameter, name).renamed(name))
        for name, parameter in list_global_names(trained.model)
        if ".adapter." in name
    )
    serialization.load(model_state(placed), found, groups.world, may_have_more=True)
    # They come in training mode, with dropout.
    trained.model.eval()


def _find(root: Path, iteration: int | None, groups: ProcessGroupCollection) -> serialization.FoundCheckpoint:
    found = serialization.find(root, iteration, groups.world)
    if found is None:
        raise CheckpointError(f"--load {root} {explain_nothing(root)}")
    return found


def _read_config(path: Path, bf16: bool, layout: Mapping[str, int], ranks: int) -> RunConfig:
    """Return the checkpoint's settings, for these processes in this dtype, with its tokenizer files."""
    content = serialization.read_document(path, CONFIG)
    try:
        # Settings of another release may lack names, or have values of types that no longer fit.
        config = RunConfig.from_dict(content)
        model = config.model.on_one_process(bf16=bf16, fp16=False, params_dtype=None)
    except (ConfigError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / CONFIG}.json holds settings that this release cannot use: {error}") from error
    if ranks > 1 or layout:
        model = _divide(config.model, model, layout, ranks)
    return config.with_groups(model=model, tokenizer=use_saved_files(config.tokenizer, path), world_size=ranks)


def _divide(
    saved: TransformerConfig, whole: TransformerConfig, layout: Mapping[str, int], ranks: int
) -> TransformerConfig:
    """The model over so many processes: as `layout` says, else as it was saved, else by tensor parallelism."""
    kept = {name: getattr(saved, name) for name in LAYOUT}
    options = [dict(layout)] if layout else [kept, {"tensor_model_parallel_size": ranks}]
    sizes = next((each for each in options if not list(_list_size_problems(each, ranks))), options[-1])
    problems = [*_list_size_problems(sizes, ranks)]
    # The ranks of a group of tensor parallelism read a share of the tokens each before experts get theirs.
    sizes["sequence_parallel"] = sizes.get("tensor_model_parallel_size", 1) > 1 and whole.num_moe_experts is not None
    values = {name: getattr(whole, name) for name in get_settings(type(whole))}
    model = restore(type(whole), values | sizes)
    problems += model.problems()
    if problems:
        raise ConfigError(problems)
    return model


def _list_size_problems(layout: Mapping[str, int | None], ranks: int) -> Iterator[str]:
    tp, pp, ep = (layout.get(name) or 1 for name in LAYOUT[:3])
    etp = layout.get(LAYOUT[3]) or tp
    problems = size_problems(ranks, {"tp": tp, "pp": pp, "ep": ep, "etp": etp, "cp": 1})
    yield from problems
    used = pp * max(tp, ep * etp)
    if not problems and used != ranks:
        # Copies of the model would all do the same work.
        yield (
            f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --expert-model-parallel-size {ep} "
            f"use {used} of {ranks} processes; start {used}, or give a layout of {ranks}"
        )
