# SPDX-License-Identifier: Apache-2.0
"""For scripts written against upstream: all settings in one namespace. Nothing inside uses it; RunConfig is clearer."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.config_base import get_settings
from megatron.core.errors import ConfigError
from megatron.core.setting import explain_refusal
from megatron.core.tensor_parallel.parameters import parameter_dtype
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import group_classes, groups_of_fields
from megatron.training.flags.changed_settings import follow_changes, is_default
from megatron.training.flags.flag import formers_by_name, table_flags, upstream_settings
from megatron.training.flags.parser import ExtraFlags, drop_unknown
from megatron.training.flags.read import read_run_config

# Put here by a table of upstream's names; declared for type checkers.
parse_and_validate_args: Any
validate_args: Any

# Upstream's name of a setting -> the field that holds it here.
_UPSTREAM_NAMES = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "check_for_nan_in_loss_and_grad": "check_for_nan_in_grad",
    "ddp_average_in_collective": "average_in_collective",
    "ddp_bucket_size": "bucket_size",
    "ddp_num_buckets": "num_buckets",
    "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
    "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
    "num_experts": "num_moe_experts",
    "use_transformer_engine_op_fuser": "compile",
}


def parse_args(
    extra_args_provider: ExtraFlags | None = None,
    ignore_unknown_args: bool = False,
    *,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Namespace:
    """The settings of the command line, derived and checked, as attributes with upstream's names.

    ignore_unknown_args: ignore unknown flags. argv: sys.argv when None. environ: give os.environ,
    so that layouts are checked for WORLD_SIZE processes; without it `validate_args` does so for args.world_size. What
    only our loop needs, such as --train-iters, may be missing. The RunConfig they come from is the attribute
    `run_config`. Raises ConfigError with every problem.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if ignore_unknown_args:
        words = drop_unknown(words, extra_args_provider)
    args = as_namespace(read_run_config(words, environ or {}, extra_args_provider, trains=False))
    from megatron.training.launch.initialize import read_place

    args.rank, size, args.local_rank = read_place()
    args.world_size = args.world_size if environ else max(size, args.world_size)
    return args


def as_namespace(config: RunConfig) -> Namespace:
    """Return every setting of a run as an attribute, including a script's flags, and upstream's settings that have no
    meaning here, with its defaults."""
    values: dict[str, Any] = {flag.dest: flag.default for flag in table_flags()} | upstream_settings()
    values |= {"rank": 0, "local_rank": 0, "iteration": 0, "consumed_train_samples": 0, "consumed_valid_samples": 0}
    # Read by programs: the former name of use_gloo_process_groups, and a count that load_checkpoint() returns.
    values |= {"enable_gloo_process_groups": True, "num_floating_point_operations_so_far": 0}
    values |= _list_values(config)
    return Namespace(
        **values | config.extra,
        world_size=config.world_size,
        data_parallel_size=config.data_parallel_size,
        run_config=config,
        _parsed=_list_values(config),
    )


def _list_values(config: RunConfig) -> dict[str, Any]:
    # Groups may share a name (both the model and the optimizer know bf16); one of them declares it.
    values = {name: getattr(getattr(config, group), name) for name, group in groups_of_fields().items()}
    # Where nobody gave it, it follows from bf16 and fp16, and from what a script makes of these later.
    values["params_dtype"] = parameter_dtype(config.model)
    # Programs ask for Transformer Engine's spec, and with it for its names of weights, where this says so.
    if is_default(config, "transformer_impl"):
        values["transformer_impl"] = "transformer_engine"
    return values | {name: values[field] for name, field in _UPSTREAM_NAMES.items()}


def make_run_config(args: Namespace, *, checked: bool = False) -> RunConfig:
    """The settings of `args` as a script has left them. checked: also their relations (ConfigError with every problem);
    the values of each group are always judged where one has changed."""
    config: RunConfig = args.run_config
    changes = {}
    # A script may also have changed a group in place: what it did not change in `args` comes from that group.
    for name, old in args._parsed.items():
        value = getattr(args, name, old)
        value = str(value) if isinstance(value, Path) else value
        # Compared by type, too: 1 == True.
        if type(value) is not type(old) or value != old:
            changes[_UPSTREAM_NAMES.get(name, name)] = value
    changed = set(changes) | ({"world_size"} if args.world_size != config.world_size else set())
    changes |= follow_changes(config, changes, changed)
    groups: dict[str, Any] = {}
    for group, config_class in group_classes().items():
        own = {name: value for name, value in changes.items() if name in get_settings(config_class)}
        if own:
            current = getattr(config, group)
            values = {field.name: getattr(current, field.name) for field in dataclasses.fields(current)}
            groups[group] = config_class(**values | own)
    made = config
    if changed:
        told = {config.flag(name): "script" for name in changed & groups_of_fields().keys()}
        made = config.with_groups(**groups, world_size=args.world_size, sources=config.sources | told)
        from megatron.training.config.relations import derive_across_groups

        derive_across_groups(made)
    if checked and (problems := list(made.problems(trains=False))):
        raise ConfigError(problems)
    return made


def update_args(args: Namespace, config: RunConfig) -> None:
    """Let the namespace say what these settings say."""
    values = _list_values(config)
    vars(args).update(values, run_config=config, data_parallel_size=config.data_parallel_size, _parsed=values)


def refuse_missing_features(args: Namespace) -> None:
    """Raise ConfigError for settings of upstream's that a script has set and that would need what does not exist."""
    problems = []
    for flag in table_flags():
        value = getattr(args, flag.dest, flag.default)
        refused = explain_refusal(flag, value, f"args.{flag.dest} {value}")
        if refused is not None:
            problems.append(refused[1])
    for name, default in upstream_settings().items():
        former = formers_by_name().get(f"--{name.replace('_', '-')}")
        value = getattr(args, name, default)
        if value != default and (former is None or former.is_refused):
            text = f": {former.text}" if former is not None else ""
            problems.append(f"args.{name} {value} is not supported{text}; leave it at {default}")
    if problems:
        raise ConfigError(problems)


def core_transformer_config_from_args(
    args: Namespace, config_class: type[TransformerConfig] = TransformerConfig
) -> TransformerConfig:
    """The layers' configuration, with whatever a script has changed in `args` since they were parsed."""
    fields = [field.name for field in dataclasses.fields(config_class) if field.init]
    values = {name: getattr(args, name) for name in fields if hasattr(args, name)}
    config: RunConfig | None = getattr(args, "run_config", None)
    for name, field in _UPSTREAM_NAMES.items():
        # Under either name a script may have changed it; ours counts where both were.
        if field in values and config is not None and values[field] == getattr(config.model, field):
            values[field] = getattr(args, name, values[field])
    # It follows from bf16 and fp16 as they are now, unless somebody has given it.
    if config is not None and values.get("params_dtype") == args._parsed["params_dtype"]:
        values["params_dtype"] = config.model.params_dtype
    return config_class(**values)
