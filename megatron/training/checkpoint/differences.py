"""How the settings of a checkpoint differ from those of this run, in the words of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.errors import ConfigError
from megatron.training.config.container import RunConfig
from megatron.training.launch.initialize import comparable_flags

_SHAPE_FLAGS = (
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups",
    "--kv-channels", "--swiglu", "--normalization", "--disable-bias-linear", "--add-bias-linear", "--add-qkv-bias",
    "--qk-layernorm", "--qk-norm-scope", "--norm-placement", "--geglu", "--quick-geglu", "--position-embedding-type",
    "--max-position-embeddings", "--num-experts", "--moe-layer-freq", "--moe-ffn-hidden-size",
    "--moe-shared-expert-intermediate-size",
    "--untie-embeddings-and-output-weights", "--vocab-size", "--make-vocab-size-divisible-by", "--tokenizer-type",
    "--tokenizer-model",
)  # fmt: skip
_TRAJECTORY_GROUPS = ("model", "gpt", "optimizer", "scheduler", "data")
_TRAJECTORY_FLAGS = ("--micro-batch-size", "--global-batch-size", "--tokenizer-type", "--vocab-size")
_HARMLESS_FLAGS = (
    "--num-workers", "--data-cache-path", "--num-dataset-builder-threads", "--use-cpu-initialization",
    "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler",
)  # fmt: skip


def shape_differences(saved: dict[str, Any], config: RunConfig) -> str:
    """`; settings: --num-layers is 4 in the checkpoint, 2 in this run`, or nothing: what may explain other tensor
    shapes."""
    return _listed("settings", _differences(saved, config, _SHAPE_FLAGS))


def trajectory_differences(saved: dict[str, Any], config: RunConfig) -> str:
    """`; settings that changed: ...`, or nothing: what makes the resumed run another one than the saved."""
    plain = config.to_dict()
    names = {name.replace("_", "-") for group in _TRAJECTORY_GROUPS for name in plain[group]}
    flags = [f"--{name}" for name in sorted(names)] + list(_TRAJECTORY_FLAGS)
    return _listed("settings that changed", _differences(saved, config, [f for f in flags if f not in _HARMLESS_FLAGS]))


def _differences(saved: dict[str, Any], config: RunConfig, flags: Iterable[str]) -> list[str]:
    try:
        then = comparable_flags(RunConfig.from_dict(saved))
    except (ConfigError, TypeError, AttributeError):
        return []  # settings of another release: nothing to compare
    now = comparable_flags(config)
    return [
        f"{flag} is {then[flag]} in the checkpoint, {now[flag]} in this run"
        for flag in dict.fromkeys(flags)
        if flag in then and flag in now and then[flag] != now[flag]
    ]


def _listed(title: str, differences: list[str]) -> str:
    return f"; {title}: {'; '.join(differences)}" if differences else ""
