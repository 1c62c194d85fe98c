# SPDX-License-Identifier: Apache-2.0
"""A rank's view of a layout's process groups, without processes."""

from __future__ import annotations

import math

from megatron.core.mesh import RankGrid
from megatron.core.process_groups_config import ProcessGroupCollection


def pretend(rank: int = 0, **sizes: int) -> ProcessGroupCollection:
    """pretend(1, tp=2): the second of two tensor-parallel ranks; dp is what the sizes make of it."""
    axes = {axis: size for axis, size in sizes.items() if axis != "dp"}
    return ProcessGroupCollection.pretend(RankGrid(math.prod(sizes.values()), **axes), rank)
