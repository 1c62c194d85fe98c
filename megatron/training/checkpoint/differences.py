"""How the settings of a checkpoint differ from those of this run, in the words of the command line."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from megatron.core.config_base import get_settings
from megatron.core.errors import ConfigError
from megatron.core.setting import FieldKind
from megatron.training.config.container import RunConfig, group_classes


def describe_shape_differences(saved: dict[str, Any], config: RunConfig) -> str:
    """`; settings: --num-layers is 4 in the checkpoint, 2 in this run`, or nothing: what may explain other tensor
    shapes."""
    return _join_differences("settings", _list_differences(saved, config, ("shape",)))


def describe_trajectory_differences(saved: dict[str, Any], config: RunConfig) -> str:
    """`; settings that changed: ...`, or nothing: what makes the resumed run another one than the saved."""
    return _join_differences("settings that changed", _list_differences(saved, config, ("shape", "numerics")))


def _list_differences(saved: dict[str, Any], config: RunConfig, kinds: Container[FieldKind | None]) -> list[str]:
    """A sentence for every flag of these kinds whose value changed."""
    try:
        then = RunConfig.from_dict(saved).flag_values()
    except (ConfigError, TypeError, AttributeError):
        return []  # settings of another release: nothing to compare
    now = config.flag_values()
    settings = [setting for cls in group_classes().values() for setting in get_settings(cls).values()]
    # Only kinds that change the weights' shapes or the numbers: another --log-interval is no news.
    flags = [setting.name for setting in settings if setting.kind in kinds and setting.name.startswith("--")]
    return [
        f"{flag} is {then[flag]} in the checkpoint, {now[flag]} in this run"
        for flag in flags
        if flag in then and flag in now and then[flag] != now[flag]
    ]


def _join_differences(title: str, differences: list[str]) -> str:
    return f"; {title}: {'; '.join(differences)}" if differences else ""
