# SPDX-License-Identifier: Apache-2.0
"""A comparison of our model's logits with Hugging Face transformers' on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import model_state
from megatron.core.errors import CheckpointError
from megatron.core.optional_deps import available, require
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.core.tensor_parallel.parameters import declare_vocabulary
from megatron.hf.adapters import AdaptedCheckpoint
from megatron.hf.checkpoints import OpenCheckpoint
from megatron.hf.entries import count_values, list_entries
from megatron.training.recipes.families import FAMILIES, find_family
from megatron.training.recipes.family import Family
from megatron.training.recipes.gpt import build_gpt_model
from megatron.training.recipes.hf_config import read_model_fields

TOLERANCE = 1e-4
"""Largest difference, as a share of the largest logit: float32 in many layers, added in another order."""
_LARGEST_MODEL = 1_000_000_000
_TOKENS = 24


def compare_logits(theirs: Path, ours: Path, families: Sequence[Family] = FAMILIES) -> str:
    """Logits of random tokens, both models in float32 on the CPU; returns the sentence to print.

    theirs: a Hugging Face directory; ours: a directory of checkpoints. Where transformers is not installed or does not
    know the model, or the model is too large to be in memory twice, the sentence says that nothing was compared.
    Raises CheckpointError where the logits differ.
    """
    if not available("transformers"):
        return "not verified: logits, as the Python package transformers is not installed"
    checkpoint = OpenCheckpoint(ours)
    fields = read_model_fields(theirs / "config.json")
    vocab_size = int(fields["vocab_size"])
    config = checkpoint.read_config()
    values = count_values(list_entries(find_family(fields["model_type"], families), config, vocab_size))
    if values > _LARGEST_MODEL:
        size = f"{values / 1e9:.1f} billion parameters twice in float32"
        return f"not verified: logits, which would take {size}"
    ids = torch.randint(vocab_size, (2, _TOKENS), generator=torch.Generator().manual_seed(1))
    try:
        expected = _compute_theirs(theirs, ids, families)
    except Exception as error:  # of transformers: a release that does not know the model raises almost anything
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return f"not verified: logits, as transformers cannot load {theirs} ({first_line})"
    with torch.no_grad():
        found = _load(checkpoint, vocab_size)(ids, torch.arange(_TOKENS).expand_as(ids))
    largest, difference = expected.abs().max().item(), (found - expected).abs().max().item()
    # A comparison with NaN is false, so NaN counts as different here.
    if not difference <= TOLERANCE * max(1.0, largest):
        raise CheckpointError(
            f"the weights are equal, and the logits of random tokens, up to {largest:.3g}, differ by {difference:.2e}: "
            "this program and transformers compute this model differently"
        )
    return f"logits of {ids.numel()} random tokens, up to {largest:.3g}, differ by at most {difference:.1e}"


def find_their_class(directory: Path, families: Sequence[Family] = FAMILIES) -> Any:
    """Return the class of transformers for the model of a directory."""
    transformers = require("transformers", needed_by="comparing logits")
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    # Some classes (Mistral Small 4's) are there, and not in that table.
    return getattr(transformers, find_family(config.model_type, families).model_class)


def _compute_theirs(directory: Path, ids: Tensor, families: Sequence[Family]) -> Tensor:
    transformers = require("transformers", needed_by="comparing logits")
    # Its bar would stand between our lines.
    transformers.utils.logging.disable_progress_bar()
    model = find_their_class(directory, families).from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    )
    with torch.no_grad():
        return cast(Tensor, model.eval()(input_ids=ids, use_cache=False).logits)


def _load(checkpoint: OpenCheckpoint, vocab_size: int) -> nn.Module:
    """The model in float32 with its weights, adapters merged into them as they are rounded, without its tokenizer."""
    saved = checkpoint.read_config()
    config = saved.with_groups(model=saved.model.without_adapters())
    config = config.with_groups(
        model=config.model.on_one_process(bf16=False, fp16=False, params_dtype=None, perform_initialization=False)
    )
    groups = ProcessGroupCollection.single()
    model = build_gpt_model(config, vocab_size, pg_collection=groups)
    declare_vocabulary(model, vocab_size)
    if saved.model.lora_rank is not None:
        read = AdaptedCheckpoint(checkpoint, saved, vocab_size).read
        for name, parameter in list_parameters(model):
            parameter.data.copy_(read(get_placement(parameter, name).name))
        return model.eval()
    parameters = ((parameter, get_placement(parameter, name)) for name, parameter in list_parameters(model))
    serialization.load(model_state(parameters), checkpoint.found, groups.world)
    return model.eval()
