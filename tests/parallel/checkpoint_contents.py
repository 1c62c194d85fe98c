# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, read by torch alone: for comparing checkpoints of different layouts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing.safe_pickle import read_metadata


def saved(root: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint but the random numbers, whole."""
    path = root / f"iter_{iteration:07d}"
    known = read_metadata(path / ".metadata").state_dict_metadata
    tensors = {
        key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for key, entry in known.items()
        if not key.startswith("rng_state")
    }
    dcp.load(tensors, checkpoint_id=str(path), no_dist=True)
    return tensors


def assert_bit_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """The same tensors, optimizer state among them."""
    assert first.keys() == second.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in first)
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key
