# SPDX-License-Identifier: Apache-2.0
"""RunConfig: every setting of one run, grouped as the code uses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import restore, unchecked
from megatron.core.errors import ConfigError
from megatron.training.config.layout_relations import LAYOUT_RELATIONS
from megatron.training.config.model_relations import MODEL_RELATIONS
from megatron.training.config.relations import LOOP_RELATIONS, RELATIONS, derive_across_groups
from megatron.training.config.run_groups import RunGroups, group_classes, groups_of_fields, list_settings


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunGroups):
    """The settings of a run. Making one fills in what follows across groups and raises ConfigError with every problem.

    `sources` says for each flag (its first spelling) where its value came from: default, file, environment,
    checkpoint or command line. `notes` are sentences for the user that the first rank prints. `extra` holds the flags
    that a user's script added.
    """

    def __post_init__(self) -> None:
        # Deriving comes first: rules judge what the run will use, not what was left out.
        derive_across_groups(self)
        problems = list(self.problems())
        if problems:
            raise ConfigError(problems)

    def problems(self, *, trains: bool = True) -> Iterator[str]:
        """Yield a sentence for every conflict between settings of different groups.

        Groups checked their settings when they were made. trains: our loop is to train with them.
        """
        # Layout first: a layout that does not fit explains most of what the others would say.
        for relation in (*LAYOUT_RELATIONS, *MODEL_RELATIONS, *RELATIONS):
            if trains or relation not in LOOP_RELATIONS:
                yield from relation(self)

    def flag_values(self) -> dict[str, Any]:
        """Flag -> value of every setting, in the form of `to_dict`; what must be equal on all ranks of a job."""
        plain = self.to_dict()
        settings = ((plain[group], setting) for group, setting in list_settings())
        return {setting.name: values[setting.dest] for values, setting in settings if setting.dest in values}

    def with_groups(self, **groups: Any) -> RunConfig:
        """A copy with other groups in place of some. It is not checked: for settings of an earlier run, which were."""
        # Unchecked: settings of a checkpoint describe another job, whose number of processes this one need not have.
        return unchecked(RunConfig, {part.name: getattr(self, part.name) for part in dataclasses.fields(self)} | groups)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able copy: numbers, texts, lists and dictionaries only. Callables, set by code, are left out."""
        content = {}
        for part in dataclasses.fields(self):
            value = getattr(self, part.name)
            content[part.name] = _plain_fields(value) if dataclasses.is_dataclass(value) else _plain(value)
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunConfig:
        """The inverse of `to_dict`, also for what earlier versions wrote, whose fields may stand in another group now.

        Unknown names, as a later version may write, are ignored.
        """
        groups = group_classes()
        # Fields move between groups from release to release; by name they are still found.
        everywhere = {
            name: value for part in content.values() if isinstance(part, dict) for name, value in part.items()
        }
        values: dict[str, Any] = {name: content[name] for name in ("world_size", "sources", "extra") if name in content}
        for name, config_class in groups.items():
            # A value in its group wins over one of the same name elsewhere.
            values[name] = restore(config_class, everywhere | content.get(name, {}))
        values["notes"] = tuple(content.get("notes", ()))
        return unchecked(cls, values)


class Fields:
    """All settings of a run by name, for the conditions that fields state (`Needs`), and which of them were written."""

    def __init__(self, run: RunConfig, given: Set[str]) -> None:
        self.run, self.given, self.world_size = run, given, run.world_size

    def __getattr__(self, name: str) -> Any:
        if name not in groups_of_fields():
            raise AttributeError(name)
        return self.run.read(name)


def _plain_fields(config: Any) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {name: _plain(value) for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if _is_plain(item)}
    return value
