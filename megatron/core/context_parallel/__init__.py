# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: ranks that share each sequence. `sharding.py` cuts it, `planning.py` shares out conversations;
attention across the pieces is in `transformer/core_attention`.

Names of upstream, imported when they are asked for; inside megatron/ import the defining module.
"""

from __future__ import annotations

from megatron.core.lazy_names import load_when_used

_DEFINED_IN = {
    "get_batch_on_this_cp_rank": "sharding",
}
__all__ = list(_DEFINED_IN)
__getattr__ = load_when_used(__name__, _DEFINED_IN)
