# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.optimizer.megatron_optimizer import DistributedOptimizer as DistributedOptimizer
from megatron.core.upstream.optimizers import Adam as Adam
