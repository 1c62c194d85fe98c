# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as something to use: its settings, its tokenizer and its model with the trained weights, on one
process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron.core.device import current_device, is_cuda
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.diagnosis import explain_other_content
from megatron.core.dist_checkpointing.mapping import model_state
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.paths import explain_no_directory
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.core.tensor_parallel.fp8_products import recall_fallbacks
from megatron.core.tensor_parallel.parameters import declare_vocabulary
from megatron.training.checkpoint.run_tensors import build_sharded_fallbacks
from megatron.training.checkpoint.save_and_load import CONFIG
from megatron.training.checkpoint.tokenizer_assets import use_saved_files
from megatron.training.config.container import RunConfig
from megatron.training.config.gpu_needs import replace_gpu_settings
from megatron.training.recipes.build import build_recipe
from megatron.training.recipes.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from megatron.core.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint in memory: where it lies, its settings, its recipe and its model, in evaluation mode."""

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


def load_trained_model(root: Path, iteration: int | None = None, *, bf16: bool = False) -> TrainedModel:
    """The model of a checkpoint directory (or of one `iter_...` directory): the latest, or the given iteration.

    It computes in float32, whatever it was trained in: rounding then never decides between two tokens, so a key-value
    cache changes nothing. bf16: half the memory, without that promise. The tokenizer's files are taken from the
    checkpoint where it has them. Raises CheckpointError when there is no undamaged checkpoint of ours, ConfigError or
    DataError when its tokenizer's files are gone.
    """
    # Whatever layout the model was trained in: entries of a checkpoint are whole tensors to a loader.
    groups = ProcessGroupCollection.single()
    found = serialization.find(root, iteration, groups.world)
    if found is None:
        what = explain_no_directory(root) or "; ".join(explain_other_content(root) or ["holds no checkpoint"])
        raise CheckpointError(f"--load {root} {what}")
    config = _read_config(found.path, bf16)
    device = current_device()
    if not is_cuda(device):
        replace_gpu_settings(config)  # the numbers are the same, and nobody asks for a kernel here
    recipe = build_recipe(config)
    with torch.device(device):
        model = recipe.build_model(pre_process=True, post_process=True, pg_collection=groups)
    # Rows beyond the vocabulary are padding, whose number depends on the layout of the saving run.
    declare_vocabulary(model, recipe.vocab_size)
    parameters = ((parameter, get_placement(parameter, name)) for name, parameter in list_parameters(model))
    serialization.load(model_state(parameters) | build_sharded_fallbacks([model]), found, groups.world)
    recall_fallbacks([model])
    return TrainedModel(found.path, config, recipe, model.eval())


def _read_config(path: Path, bf16: bool) -> RunConfig:
    """The checkpoint's settings, for one process in this number format, with the tokenizer files it carries."""
    content = serialization.read_document(path, CONFIG)
    try:
        # Settings of another release may lack names, or have values of types that no longer fit.
        config = RunConfig.from_dict(content)
        model = config.model.on_one_process(bf16=bf16, fp16=False, params_dtype=None)
    except (ConfigError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / CONFIG}.json holds settings that this release cannot use: {error}") from error
    return config.with_groups(model=model, tokenizer=use_saved_files(config.tokenizer, path))
