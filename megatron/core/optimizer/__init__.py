# SPDX-License-Identifier: Apache-2.0
"""The optimizer: update rules over flat buffers, clipping, main parameters. Names load when first used (PEP 562)."""

from __future__ import annotations

from megatron.core.lazy_names import load_when_used

_NAMES = {
    # Upstream chains optimizers; one of ours is a chain by itself.
    "ChainedOptimizer": "megatron_optimizer",
    "DistributedOptimizer": "megatron_optimizer",
    "get_megatron_optimizer": "megatron_optimizer",
    "MegatronOptimizer": "megatron_optimizer",
    "OptimizerConfig": "optimizer_config",
    "ParamGroupOverride": "param_overrides",
    "ParamKey": "param_overrides",
    "UpdateResult": "megatron_optimizer",
}

__all__ = list(_NAMES)  # noqa: PLE0605
__getattr__ = load_when_used(__name__, _NAMES)
