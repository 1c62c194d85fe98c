# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer as MegatronOptimizer
from megatron.core.upstream.optimizers import SEPARATE_GRAD_NORM_GROUPS as SEPARATE_GRAD_NORM_GROUPS
