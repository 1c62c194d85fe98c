"""--dump-param-to-param-group-map: which optimizer group each parameter of the whole model is in."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.core.collectives import all_gather_object
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.errors import ConfigError
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection


def write_param_group_map(path: str, optimizer: MegatronOptimizer, groups: ProcessGroupCollection) -> None:
    """Write the JSON object. Every rank calls this; the stages' parameters are put together.

    Groups are numbered over the whole model: decayed parameters first, then by learning rate and update rule. Raises
    ConfigError on every rank where the file cannot be written.
    """
    by_stage = all_gather_object(optimizer.param_keys(), groups.pp)
    keys = {name: key for found in by_stage for name, key in found.items()}
    numbers = {key: number for number, key in enumerate(sorted(set(keys.values())))}
    text = json.dumps({name: numbers[key] for name, key in keys.items()}, indent=2) + "\n"

    def write() -> None:
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--dump-param-to-param-group-map {path} cannot be written ({error.strerror}); give another file"
            ) from error

    on_first_rank(groups.world, write)
