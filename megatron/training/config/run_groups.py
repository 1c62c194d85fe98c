# SPDX-License-Identifier: Apache-2.0
"""The groups of a run's settings, as rules between them read them; container.py adds the rules."""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass, field
from typing import Any

from megatron.core.config_base import CheckedConfig, get_settings
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.setting import Setting
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig, TokenizerConfig
from megatron.training.config.distillation import DistillationConfig
from megatron.training.config.distributed import DistributedInitConfig
from megatron.training.config.in_process import InProcessConfig
from megatron.training.config.logging import LoggerConfig
from megatron.training.config.model import GPTModelFlags
from megatron.training.config.preference import PreferenceConfig
from megatron.training.config.profiling import ProfilingConfig
from megatron.training.config.reliability import ReliabilityConfig
from megatron.training.config.scheduler import SchedulerConfig
from megatron.training.config.sites import SitesConfig
from megatron.training.config.training import TrainingConfig, ValidationConfig


@dataclass(frozen=True, kw_only=True)
class RunGroups:
    """The settings of a run, by group, and what follows from several of them; unchecked."""

    model: TransformerConfig
    gpt: GPTModelFlags = field(default_factory=GPTModelFlags)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    distributed: DistributedInitConfig = field(default_factory=DistributedInitConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    in_process: InProcessConfig = field(default_factory=InProcessConfig)
    sites: SitesConfig = field(default_factory=SitesConfig)
    world_size: int = 1
    sources: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def processes_per_copy(self) -> int:
        """Processes that share one copy of the model."""
        model = self.model
        return model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size

    @property
    def is_divisible(self) -> bool:
        """True where the copies of the model use all processes of the job, as many at each site."""
        return self.world_size % (self.processes_per_copy * self.sites.sites_of_job) == 0

    @property
    def site_size(self) -> int:
        """Processes of this site: all of the job, unless several sites divide them."""
        return self.world_size // self.sites.sites_of_job

    @property
    def site_replicas(self) -> int:
        """Processes of this site that hold the same part of the model and train on other samples."""
        # At least 1 also for a layout that does not fit, so that rules can still be asked about it.
        return max(1, self.site_size // self.processes_per_copy)

    @property
    def data_parallel_size(self) -> int:
        """The same of all sites together, which share every global batch."""
        return self.site_replicas * self.sites.diloco_replicas

    @property
    def packs_samples(self) -> bool:
        """True where the samples of a microbatch become one sequence, whose documents do not see one another."""
        return self.data.sft or self.preference.dpo or self.data.dataloader_inter_document_masking

    @property
    def ties_embeddings(self) -> bool:
        """True where the output layer is the embedding's weight."""
        return not self.gpt.untie_embeddings_and_output_weights

    @property
    def joins_norms(self) -> bool:
        """True where upstream's programs name norms as parts of the linear layers after them, as its Transformer Engine
        layers do; only with these does it have letters and gated delta nets."""
        letters, linear = self.model.hybrid_layer_pattern, self.model.linear_attention_freq
        return self.gpt.transformer_impl == "transformer_engine" or letters is not None or linear is not None

    def read(self, name: str) -> Any:
        """The value of a setting of any group."""
        return getattr(getattr(self, groups_of_fields()[name]), name)

    def say(self, name: str) -> str:
        """A setting of any group as a user writes it: `--micro-batch-size 2`, `--no-rope-fusion`."""
        return find_setting(name).spell(self.read(name))

    def flag(self, name: str) -> str:
        """The flag of a setting of any group: `--micro-batch-size`."""
        return find_setting(name).name


@functools.cache
def group_classes() -> dict[str, type[CheckedConfig]]:
    """Name of each group of RunGroups and its dataclass."""
    hints = typing.get_type_hints(RunGroups)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, CheckedConfig)}


@functools.cache
def list_settings() -> tuple[tuple[str, Setting], ...]:
    """The settings of all groups, hidden ones too, each with the name of its group."""
    classes = group_classes().items()
    return tuple((group, setting) for group, cls in classes for setting in get_settings(cls).values())


@functools.cache
def groups_of_fields() -> dict[str, str]:
    """Name of each setting and the group that declares it: the first one with a flag. Others that have the same name
    follow that one."""
    owners: dict[str, str] = {}
    for group, setting in sorted(list_settings(), key=lambda entry: entry[1].hidden):
        owners.setdefault(setting.dest, group)
    return owners


def find_setting(name: str) -> Setting:
    """The setting of this name, of the group that declares it."""
    return get_settings(group_classes()[groups_of_fields()[name]])[name]
