# SPDX-License-Identifier: Apache-2.0
"""The settings of the run that wrote a checkpoint of upstream's, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.upstream_checkpoints.common_state import find_upstream_checkpoint, read_common_state
from megatron.core.upstream_checkpoints.rank_file import find_legacy_file, read_rank_file


def read_upstream_settings(root: Path, iteration: int | None) -> tuple[Path, dict[str, Any]] | None:
    """(the checkpoint's directory, its settings by the names of upstream's argparse); None where there is none.

    Raises CheckpointError for a checkpoint that is damaged.
    """
    path = find_upstream_checkpoint(root, iteration, or_ours=True)
    if path is not None:
        return path, dict(read_common_state(path, read_metadata(path / METADATA_NAME)).args)
    file = find_legacy_file(root, iteration)
    if file is None:
        return None
    return file.parent.parent, dict(read_rank_file(file).common.args)
