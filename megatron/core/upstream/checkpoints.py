# SPDX-License-Identifier: Apache-2.0
"""Upstream's names around distributed checkpoints; saving and loading is dist_checkpointing.save and load."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization, state_dicts
from megatron.core.dist_checkpointing.directory import COMMON_NAME
from megatron.core.dist_checkpointing.durable import replace_file
from megatron.core.dist_checkpointing.finding import find_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.process_groups_config import Group
from megatron.core.taken_arguments import take_arguments

_CONFIG_FILE = "metadata.json"
COMMON_STATE_FNAME = COMMON_NAME
"""Upstream's file of what is no tensor."""


@dataclass
class CheckpointingConfig:
    """In which format a checkpoint is: the content of its metadata.json."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """The format of the checkpoint in a directory; None where there is none."""
    if not (Path(checkpoint_dir) / _CONFIG_FILE).exists():
        return None
    content = serialization.read_document(Path(checkpoint_dir), "metadata")
    names = {field.name for field in dataclasses.fields(CheckpointingConfig)}
    if not isinstance(content, dict) or "sharded_backend" not in content:
        raise CheckpointError(f"{checkpoint_dir}/{_CONFIG_FILE} does not name a sharded_backend")
    return CheckpointingConfig(**{name: value for name, value in content.items() if name in names})


def save_config(config: CheckpointingConfig, checkpoint_dir: str | Path) -> None:
    """Write metadata.json. dist_checkpointing.save does so by itself."""
    replace_file(Path(checkpoint_dir) / _CONFIG_FILE, json.dumps(dataclasses.asdict(config)).encode())


def save_common(common_state_dict: Mapping[str, Any], checkpoint_dir: str | Path) -> None:
    """Write what is no tensor (numbers, texts, lists, dictionaries) to common.json."""
    content = json.dumps(common_state_dict, indent=1) + "\n"
    replace_file(Path(checkpoint_dir) / f"{state_dicts.COMMON}.json", content.encode())


def load_common(checkpoint_dir: str | Path) -> dict[str, Any]:
    """The content of common.json. Raises CheckpointError."""
    return dict(serialization.read_document(Path(checkpoint_dir), state_dicts.COMMON))


def verify_checkpoint(checkpoint_dir: str | Path) -> None:
    """Raise CheckpointError unless the directory holds a complete checkpoint whose files have their checksums."""
    if find_checkpoint(Path(checkpoint_dir)) is None:
        raise CheckpointError(f"{checkpoint_dir} holds no checkpoint")


class TorchDistLoadShardedStrategy:
    """The one way to load, as an object. cache_metadata, checkpoint_name: of upstream's signature."""

    backend = "torch_dist"

    def __init__(self, cache_metadata: bool = False, checkpoint_name: str | None = None) -> None:
        self.cache_metadata, self.checkpoint_name = cache_metadata, checkpoint_name

    def load(self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
        """As dist_checkpointing.load."""
        return state_dicts.load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """As dist_checkpointing.load_tensors_metadata."""
        return state_dicts.load_tensors_metadata(checkpoint_dir)


class FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy):
    """Upstream's way to read each tensor once and pass it on. Here every process reads what it holds and no more, so
    that nothing is left to share: it loads as the strategy inside."""

    @take_arguments(
        "strategy parallelization_group do_cache_distribution exchange_algo per_rank_object_load=... "
        "pg_cache_path=None pg_cache_create=False",
        "nothing is shared out, and so nothing kept",
    )
    def __init__(
        self,
        strategy: TorchDistLoadShardedStrategy,
        parallelization_group: Group | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        super().__init__()
        self.base_strategy, self.parallelization_group = strategy, parallelization_group

    def load(self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
        """As the strategy inside."""
        return self.base_strategy.load(sharded_state_dict, checkpoint_dir)


class StrictHandling(enum.Enum):
    """Treatment of keys that a checkpoint holds beyond the requested ones; the values of `strict`."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"


class TorchDistSaveShardedStrategy:
    """The one way to save, as an object. backend, version: "torch_dist" and 1. Others: of upstream's signature; the
    writers' number is the processes', and their work is shared in any case. Attributes that a program sets stay."""

    @take_arguments(
        "backend version keep_only_main_replica thread_count cached_metadata separation_hint cpu_shm_mode=None"
    )
    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
    ) -> None:
        _check_backend(backend, version)
        self.backend, self.version, self.thread_count = backend, version, thread_count
        self.use_cached_ckpt_structure = cached_metadata

    def save(self, sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | Path) -> None:
        """As dist_checkpointing.save."""
        state_dicts.save(sharded_state_dict, checkpoint_dir)


class FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy):
    """Upstream's way to share the writing among replicas, which is so here with any strategy."""

    @take_arguments(
        "strategy parallelization_group do_cache_distribution backend='torch_dist' version=1 "
        "validate_access_integrity=... pg_cache_path=None pg_cache_create=False",
        "nothing is shared out, and so nothing kept",
    )
    def __init__(
        self,
        strategy: TorchDistSaveShardedStrategy,
        parallelization_group: Group | None = None,
        do_cache_distribution: bool = False,
    ) -> None:
        super().__init__(thread_count=strategy.thread_count)
        self.base_strategy, self.parallelization_group = strategy, parallelization_group
        self.do_cache_distribution = do_cache_distribution


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> TorchDistSaveShardedStrategy:
    """The way to save, for save(sharded_strategy=...). Raises ConfigError for another backend."""
    return TorchDistSaveShardedStrategy(backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> TorchDistLoadShardedStrategy:
    """The way to load what is in a directory, for load(sharded_strategy=...)."""
    return TorchDistLoadShardedStrategy()


def _check_backend(backend: str, version: int) -> None:
    if (backend, version) != ("torch_dist", 1):
        raise ConfigError(f"checkpoints have one format here, torch_dist 1; found {backend} {version}")
