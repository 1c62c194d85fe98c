# SPDX-License-Identifier: Apache-2.0
"""For scripts written against upstream: all settings in one namespace. Nothing inside uses it; RunConfig is clearer."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import group_classes
from megatron.training.flags.parser import ExtraFlags
from megatron.training.flags.read import read_run_config

# Upstream's name of a setting -> the field that holds it here.
_UPSTREAM_NAMES = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "check_for_nan_in_loss_and_grad": "check_for_nan_in_grad",
    "ddp_bucket_size": "bucket_size",
    "num_experts": "num_moe_experts",
}


def parse_args(
    extra_args_provider: ExtraFlags | None = None,
    ignore_unknown_args: bool = False,
    *,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Namespace:
    """The settings of the command line, derived and checked, as attributes with upstream's names.

    argv: sys.argv when None. environ: give os.environ, so that layouts are checked for WORLD_SIZE processes.
    The RunConfig they come from is the attribute `run_config`. Raises ConfigError with every problem.
    """
    if ignore_unknown_args:
        raise ConfigError("parse_args() ignores no flags; declare your own through extra_args_provider")
    return as_namespace(read_run_config(sys.argv[1:] if argv is None else argv, environ or {}, extra_args_provider))


def as_namespace(config: RunConfig) -> Namespace:
    """Every setting of a run as an attribute; flags of a script's own, too."""
    values: dict[str, Any] = {}
    for group in group_classes():
        settings = getattr(config, group)
        # Groups may share a name (both the model and the optimizer know bf16); the first group, the model, wins.
        values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)} | values
    values |= {name: values[field] for name, field in _UPSTREAM_NAMES.items()}
    return Namespace(
        **values | config.extra,
        world_size=config.world_size,
        data_parallel_size=config.data_parallel_size,
        run_config=config,
        _parsed_checkpoint=dataclasses.replace(config.checkpoint),
    )


def core_transformer_config_from_args(
    args: Namespace, config_class: type[TransformerConfig] = TransformerConfig
) -> TransformerConfig:
    """The layers' configuration, with whatever a script has changed in `args` since they were parsed."""
    fields = [field.name for field in dataclasses.fields(config_class) if field.init]
    return config_class(**{name: getattr(args, name) for name in fields if hasattr(args, name)})
