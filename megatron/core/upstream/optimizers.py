# SPDX-License-Identifier: Apache-2.0
"""Upstream's ways to an optimizer other than get_megatron_optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.errors import ConfigError
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

AdamOptimizerConfig = SGDOptimizerConfig = OptimizerConfig
"""Upstream's former classes for each rule."""
Adam = CPUAdam = torch.optim.Adam
"""Replaced by programs around the making of an optimizer. Nothing reads them: rules are update_rules.py."""
param_group_identifier_keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Keys that tell upstream's groups of parameters apart."""
SEPARATE_GRAD_NORM_GROUPS: tuple[str, ...] = ()
"""Groups of parameters whose gradient norms are logged apart: none."""


def get_megatron_muon_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: Any = None,
    use_gloo_process_groups: bool = True,
    layer_wise_distributed_optimizer: bool = False,
    pg_collection: ProcessGroupCollection | None = None,
) -> MegatronOptimizer:
    """get_megatron_optimizer for Muon. use_gloo_process_groups: of upstream's signature. Raises ConfigError unless
    config.optimizer is muon, for layer_wise_distributed_optimizer, and for config_overrides."""
    if config.optimizer != "muon":
        raise ConfigError(f"get_megatron_muon_optimizer() needs config.optimizer muon; found {config.optimizer}")
    if layer_wise_distributed_optimizer or config_overrides:
        raise ConfigError(
            "layer_wise_distributed_optimizer and config_overrides are not supported for Muon; leave them out, and "
            "divide the state by DistributedDataParallelConfig(use_distributed_optimizer=True)"
        )
    return get_megatron_optimizer(config, model_chunks, pg_collection=pg_collection)
