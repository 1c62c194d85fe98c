# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.optimizer.megatron_optimizer import ChainedOptimizer as ChainedOptimizer, DistributedOptimizer as DistributedOptimizer, MegatronOptimizer as MegatronOptimizer, UpdateResult as UpdateResult, get_megatron_optimizer as get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as OptimizerConfig
from megatron.core.optimizer.param_overrides import ParamGroupOverride as ParamGroupOverride, ParamKey as ParamKey
from megatron.core.upstream.optimizers import Adam as Adam, AdamOptimizerConfig as AdamOptimizerConfig, CPUAdam as CPUAdam, SGDOptimizerConfig as SGDOptimizerConfig, param_group_identifier_keys as param_group_identifier_keys
from typing import Any, NoReturn
def _get_param_groups(*args: Any, **kwargs: Any) -> NoReturn: ...
__all__ = ['ChainedOptimizer', 'DistributedOptimizer', 'MegatronOptimizer', 'OptimizerConfig', 'ParamGroupOverride', 'ParamKey', 'UpdateResult', 'get_megatron_optimizer']
