# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.context_parallel.sharding import get_batch_on_this_cp_rank as get_batch_on_this_cp_rank
__all__ = ['get_batch_on_this_cp_rank']
