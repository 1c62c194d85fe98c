# SPDX-License-Identifier: Apache-2.0
"""Their config.json and our settings: both directions read the table of families, and nothing else.

The way back is proven each time: the config.json that is written must give the settings it was made from, or the model
is refused with what would get lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.core.config_base import get_settings
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.hf.inverse_settings import has_fixed_flags, invert_flags
from megatron.training.checkpoint.differences import Change, compare_settings
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import group_classes
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.families import FAMILIES
from megatron.training.recipes.family import Family
from megatron.training.recipes.gpt import build_gpt_model
from megatron.training.recipes.hf_config import LENGTH, PREDICTION, find_family_of, list_model_flags

# What a run needs that no model says; a run that starts from the result has its flags.
_RUN_FLAGS = "--micro-batch-size 1 --train-iters 1 --lr 1e-5"
# Our settings do not name them, and what transformers assumes for them may be beyond the vocabulary.
_UNNAMED_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_PRECISION = {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}


def read_settings(
    source: Mapping[str, Any],
    where: Path,
    dtype: torch.dtype,
    *,
    tensor_ranks: int = 1,
    stages: int = 1,
    families: Sequence[Family] = FAMILIES,
) -> RunConfig:
    """Return the settings of a model, in this dtype, on one process.

    source: the fields of the config.json `where`. tensor_ranks, stages: a layout that the model must be able to have.
    Raises ConfigError or CheckpointError for a model that cannot be built, and for a layout that cannot be.
    """
    flags = list_model_flags(source, where, families)
    length = flags[flags.index(LENGTH) + 1]
    argv = [*flags, *_RUN_FLAGS.split(), "--mock-data", "--seq-length", length]
    argv += _PRECISION.get(dtype, [])
    if tensor_ranks * stages > 1:
        layout = ["--tensor-model-parallel-size", str(tensor_ranks), "--pipeline-model-parallel-size", str(stages)]
        read_run_config([*argv, *layout], {"WORLD_SIZE": str(tensor_ranks * stages)})
    return read_run_config(argv, {})


def build_empty_model(config: RunConfig, vocab_size: int, *, with_adapters: bool = False) -> nn.Module:
    """Build the full model without values (device `meta`): names and shapes of our parameters. with_adapters: including
    the adapters of --lora-rank, for which no family has a row."""
    settings = config.model.on_one_process(init_model_with_meta_device=True)
    if not with_adapters:
        settings = settings.without_adapters()
    with torch.device("meta"):
        return build_gpt_model(
            config.with_groups(model=settings), vocab_size, pg_collection=ProcessGroupCollection.single()
        )


def build_config_json(
    config: RunConfig,
    vocab_size: int,
    dtype: torch.dtype,
    carried: Mapping[str, Any] | None = None,
    families: Sequence[Family] = FAMILIES,
) -> tuple[Family, dict[str, Any]]:
    """The family that our settings belong to, and the config.json of the model.

    carried: the fields of the config.json that the model once came from, kept where they still describe it.
    Raises ConfigError when no family computes what the settings say.
    """
    number_format = str(dtype).removeprefix("torch.")
    if carried is not None:
        # Weights were dequantised when they were read, and are not quantised again.
        carried = {name: value for name, value in carried.items() if name != "quantization_config"}
        # Of the two names of the dtype, all releases understand the older one.
        kept = {**carried, "vocab_size": vocab_size, "dtype" if "dtype" in carried else "torch_dtype": number_format}
        family = find_family_of(carried, Path("config.json"), families)
        # As long as it says what the model is, nothing in it needs another form.
        if _find_losses(family, kept, config, dtype, families) == []:
            return family, kept
    lost: dict[str, list[Change]] = {}
    # Reading settings again takes its time: first the families that may be the one.
    for family in sorted(families, key=lambda family: not has_fixed_flags(family, config)):
        fields = invert_flags(family, config)
        if fields is None:
            continue
        document = {
            "architectures": [family.model_class], **_UNNAMED_TOKENS, "model_type": family.model_type,
            "vocab_size": vocab_size, "torch_dtype": number_format, **fields,
        }  # fmt: skip
        losses = _find_losses(family, document, config, dtype, families)
        if losses is None:
            continue
        if not losses:
            return family, document
        lost[family.name] = losses
    closest = min(lost, key=lambda name: len(lost[name])) if lost else None
    raise ConfigError(
        "no model of Hugging Face transformers that is known here computes what these settings say"
        + (f"; the closest is {closest}, which has {_describe_losses(lost[closest])}" if closest else "")
    )


def _find_losses(
    family: Family,
    document: Mapping[str, Any],
    config: RunConfig,
    dtype: torch.dtype,
    families: Sequence[Family],
) -> list[Change] | None:
    """From our settings to those that a config.json gives, in what concerns the model; None where it gives none."""
    if config.model.mtp_num_layers is None:
        # What the field says is not always in the files (keep_stored_prediction), and not in this model.
        document = {name: value for name, value in document.items() if name != PREDICTION}
    try:
        again = read_settings(document, Path("config.json"), dtype, families=families)
    except (ConfigError, CheckpointError):
        return None
    # The tokenizer is carried along, and padding rows are not: what is compared is the network.
    network = {name for group in ("model", "gpt") for name in get_settings(group_classes()[group])}
    network.discard("make_vocab_size_divisible_by")
    return [
        change
        for change in compare_settings(config, again)
        if change.setting.dest in network and change.setting.kind in ("shape", "function")
    ]


def _describe_losses(losses: Sequence[Change]) -> str:
    """`--normalization RMSNorm (here LayerNorm), activation_func silu (here gelu)`."""
    return ", ".join(
        f"{change.setting.name} {change.show(change.now)} (here {change.show(change.then)})" for change in losses
    )
