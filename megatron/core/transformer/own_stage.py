# SPDX-License-Identifier: Apache-2.0
"""This process's stage of the pipeline, for callers that pass all, some or none of what identifies it."""

from __future__ import annotations

from typing import Any

from megatron.core.mesh import VirtualStages
from megatron.core.plan.stages import build_virtual_stages, fit_virtual_stages
from megatron.core.process_groups_config import ProcessGroupCollection


def find_own_stage(
    config: Any,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> tuple[VirtualStages, int]:
    """Find the pipeline and the virtual stage in it. The groups are those given, else the current ones.

    pp_rank: the process of the pipeline, this one when None. Programs that make their groups have no current ones, and
    need none here where only the config decides: with one stage, or with pp_rank. Elsewhere they get the error of
    `ProcessGroupCollection.current()`.
    """
    shape = build_virtual_stages(config)
    is_decided = shape.stages == 1 or pp_rank is not None
    if pg_collection is not None or ProcessGroupCollection.has_current() or not is_decided:
        pp = (pg_collection if pg_collection is not None else ProcessGroupCollection.current()).pp
        # A rank of another pipeline than this process's, as converters ask for it, is one of the config's.
        if pp_rank is None or pp_rank < pp.size() or shape.stages == 1:
            shape = fit_virtual_stages(config, pp)
        rank = pp.rank() if pp_rank is None else pp_rank
    else:
        rank = pp_rank or 0
    return shape, shape.index(rank, vp_stage or 0)
