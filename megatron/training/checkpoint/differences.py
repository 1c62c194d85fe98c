# SPDX-License-Identifier: Apache-2.0
"""Differences between the settings of a checkpoint and of this run, in the words of the command line.

What a difference means is said by the field's kind (megatron/core/setting.py). Shapes are compared tensor by tensor
when weights are loaded; which function the weights are for is only in the settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import get_settings
from megatron.core.errors import CheckpointError
from megatron.core.setting import Setting
from megatron.training.config.container import Fields, RunConfig
from megatron.training.config.run_groups import group_classes

ESCAPE = "--override-model-settings"


@dataclass(frozen=True)
class Change:
    """One setting that is not what it was."""

    setting: Setting
    then: Any
    now: Any
    is_written: bool
    """A user wrote it, for one of the two runs; otherwise it is a default or follows from other settings."""

    def __str__(self) -> str:
        return f"{self.setting.name} was {self.show(self.then)} in the checkpoint, is {self.show(self.now)} now"

    def show(self, value: Any) -> str:
        """A value of the setting as a person reads it."""
        if value is None:
            return "not given"
        if self.setting.is_switch:
            return "on" if value else "off"
        return self.setting.format_value(value)

    @property
    def is_flag(self) -> bool:
        """True if a user can write it."""
        return self.setting.name.startswith("--")


def find_changes(saved: Mapping[str, Any], config: RunConfig) -> list[Change]:
    """Settings whose value changed and has an effect, in one run or the other.

    saved: what `RunConfig.to_dict` gave, maybe in an earlier release; a flag that it did not know counts as its
    default, which leaves a model as it was. Raises ConfigError, TypeError or AttributeError for what are no settings.
    """
    known = {name for part in saved.values() if isinstance(part, dict) for name in part}
    changes = compare_settings(RunConfig.from_dict(saved), config)
    return [change for change in changes if change.is_flag or change.setting.dest in known]


def compare_settings(earlier: RunConfig, config: RunConfig) -> list[Change]:
    """The same of two configurations of this release."""
    values, earlier_values = config.to_dict(), earlier.to_dict()
    runs = [Fields(run, _find_written(run)) for run in (earlier, config)]
    changes = []
    for group, config_class in group_classes().items():
        for name, setting in get_settings(config_class).items():
            # A callable is in no document; a derived field that is missing may have been one.
            if name not in values[group] or name not in earlier_values[group]:
                continue
            then, now = earlier_values[group][name], values[group][name]
            change = Change(setting, then, now, any(name in run.given for run in runs))
            if then != now and any(_has_effect(setting, run) for run in runs):
                changes.append(change)
    return changes


def _find_written(run: RunConfig) -> set[str]:
    """Names of the settings that did not get their value by default."""
    flags = {setting.name: name for cls in group_classes().values() for name, setting in get_settings(cls).items()}
    return {flags[flag] for flag, source in run.sources.items() if source != "default" and flag in flags}


def _has_effect(setting: Setting, run: Fields) -> bool:
    return all(needs.met(run) for needs in setting.needs)


def refuse_another_function(changes: Sequence[Change], what: str, *, is_overridden: bool) -> None:
    """Raise CheckpointError where weights would compute something else than what they were trained to compute.

    what: the checkpoint, for the sentence. is_overridden: --override-model-settings was given.
    """
    refused = [change for change in changes if change.setting.kind == "function"]
    # Adapters start at zero: with them the weights of a model without compute the same. Others than were saved do not.
    adapters = [change for change in changes if change.setting.dest.startswith("lora_")]
    if any(change.setting.dest == "lora_rank" and change.then is None for change in adapters):
        refused = [change for change in refused if change not in adapters]
    else:
        refused += [change for change in adapters if change.setting.kind == "shape"]
    if not refused or is_overridden:
        return
    # What follows from a setting that a user wrote (the width of heads from their number) need not be said.
    told = _select_model_changes(changes)
    told = [change for change in told if change.is_written] or told or refused
    raise CheckpointError(
        f"{what} is of another model: {'; '.join(map(str, told))}; give the checkpoint's "
        f"{'value' if len(told) == 1 else 'values'}, or pass {ESCAPE} if its weights are to compute something else "
        "from now on"
    )


def describe_shape_differences(changes: Sequence[Change]) -> str:
    """`; settings: --num-layers was 4 in the checkpoint, is 2 now`, or nothing: what may explain other shapes."""
    found = _select_model_changes(changes)
    return f"; settings: {'; '.join(map(str, found))}" if found else ""


def _select_model_changes(changes: Sequence[Change]) -> list[Change]:
    """Flags that say what the model is."""
    return [
        change for change in changes if change.is_flag and change.setting.kind in ("shape", "function", "shorthand")
    ]


def list_changes(changes: Sequence[Change]) -> list[str]:
    """A line for each change of a flag, but for those that only show or keep something else."""
    return [str(change) for change in changes if change.setting.kind != "report" and change.is_flag]
