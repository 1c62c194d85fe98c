"""RunConfig: every setting of one run, grouped as the code uses them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.distributed import DistributedInitConfig
from megatron.training.config.logging import LoggerConfig
from megatron.training.config.model import GPTModelFlags
from megatron.training.config.profiling import ProfilingConfig
from megatron.training.config.scheduler import SchedulerConfig
from megatron.training.config.tokenizer import TokenizerConfig
from megatron.training.config.training import TrainingConfig
from megatron.training.config.validation import ValidationConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run after parsing, derivation and validation.

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
    data_parallel_size: int = 1
    sources: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

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
        everywhere = {
            name: value for part in content.values() if isinstance(part, dict) for name, value in part.items()
        }
        values: dict[str, Any] = {}
        for part in dataclasses.fields(cls):
            if part.name in groups:
                stored = everywhere | content.get(part.name, {})
                known = {f.name for f in dataclasses.fields(groups[part.name]) if f.name in stored}
                values[part.name] = groups[part.name](**{name: stored[name] for name in known})
            elif part.name in content:
                values[part.name] = content[part.name]
        values["notes"] = tuple(values.get("notes", ()))
        return cls(**values)


def group_classes() -> dict[str, type]:
    """Name of each group of RunConfig and its dataclass."""
    hints = typing.get_type_hints(RunConfig)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint) and isinstance(hint, type)}


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
