# SPDX-License-Identifier: Apache-2.0
"""RunConfig: every setting of one run, grouped as the code uses them."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from megatron.core.config_base import CheckedConfig, get_settings, restore, unchecked
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig, TokenizerConfig
from megatron.training.config.distributed import DistributedInitConfig
from megatron.training.config.layout_relations import LAYOUT_RELATIONS
from megatron.training.config.logging import LoggerConfig
from megatron.training.config.model import GPTModelFlags
from megatron.training.config.model_relations import MODEL_RELATIONS
from megatron.training.config.profiling import ProfilingConfig
from megatron.training.config.relations import RELATIONS, combinations_to_come, derive_across_groups
from megatron.training.config.scheduler import SchedulerConfig
from megatron.training.config.training import TrainingConfig, ValidationConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run. Making one fills in what follows across groups and raises ConfigError with every problem.

    `sources` says for each flag (its first spelling) where its value came from: default, file, environment,
    checkpoint or command line. `notes` are sentences for the user that the first rank prints. `extra` holds the flags
    that a user's own script added.
    """

    model: TransformerConfig
    gpt: GPTModelFlags = field(default_factory=GPTModelFlags)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    distributed: DistributedInitConfig = field(default_factory=DistributedInitConfig)
    world_size: int = 1
    sources: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Deriving comes first: rules judge what the run will use, not what was left out.
        derive_across_groups(self)
        problems = list(self.problems())
        if problems:
            raise ConfigError(problems)

    def problems(self) -> Iterator[str]:
        """A sentence for everything that stands against settings of different groups together.

        Groups have judged their own settings when they were made.
        """
        # Layout first: a layout that does not fit explains most of what the others would say.
        for relation in (*LAYOUT_RELATIONS, *MODEL_RELATIONS, *RELATIONS):
            yield from relation(self)
        yield from combinations_to_come(self)

    @property
    def processes_per_copy(self) -> int:
        """Processes that share one copy of the model."""
        model = self.model
        return model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size

    @property
    def is_divisible(self) -> bool:
        """Whether the copies of the model use all processes of the job."""
        return self.world_size % self.processes_per_copy == 0

    @property
    def data_parallel_size(self) -> int:
        """Processes that hold the same part of the model and train on other samples."""
        # At least 1 also for a layout that does not fit, so that rules can still be asked about it.
        return max(1, self.world_size // self.processes_per_copy)

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output layer is the embedding's weight."""
        return not self.gpt.untie_embeddings_and_output_weights

    @property
    def joins_norms(self) -> bool:
        """Whether upstream's programs name norms as parts of the linear layers behind them, as its Transformer Engine
        layers do."""
        return self.gpt.transformer_impl == "transformer_engine"

    def say(self, name: str) -> str:
        """A setting of any group as a user writes it: `--micro-batch-size 2`, `--no-rope-fusion`."""
        group = groups_of_fields()[name]
        return get_settings(group_classes()[group])[name].spell(getattr(getattr(self, group), name))

    def flag(self, name: str) -> str:
        """The flag of a setting of any group: `--micro-batch-size`."""
        return get_settings(group_classes()[groups_of_fields()[name]])[name].name

    def flag_values(self) -> dict[str, Any]:
        """Flag -> value of every setting, in the form of `to_dict`; what must be equal on all ranks of a job."""
        plain, classes = self.to_dict(), group_classes()
        return {
            get_settings(classes[group])[name].name: value for group in classes for name, value in plain[group].items()
        }

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
            # A value that stands in its own group wins over one of the same name elsewhere.
            values[name] = restore(config_class, everywhere | content.get(name, {}))
        values["notes"] = tuple(content.get("notes", ()))
        return unchecked(cls, values)


class Fields:
    """All settings of a run by name, for the conditions that fields state (`Needs`), and which of them were written."""

    def __init__(self, run: RunConfig, given: Set[str]) -> None:
        self.run, self.given, self.world_size = run, given, run.world_size

    def __getattr__(self, name: str) -> Any:
        group = groups_of_fields().get(name)
        if group is None:
            raise AttributeError(name)
        return getattr(getattr(self.run, group), name)


@functools.cache
def group_classes() -> dict[str, type[CheckedConfig]]:
    """Name of each group of RunConfig and its dataclass."""
    hints = typing.get_type_hints(RunConfig)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, CheckedConfig)}


@functools.cache
def groups_of_fields() -> dict[str, str]:
    """Name of each setting and the group that declares it."""
    declared = ((name, group) for group, config_class in group_classes().items() for name in get_settings(config_class))
    owners: dict[str, str] = {}
    for name, group in declared:
        # The first group declares it: others that have the same name follow that one.
        owners.setdefault(name, group)
    return owners


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
