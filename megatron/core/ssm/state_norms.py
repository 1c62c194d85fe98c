# SPDX-License-Identifier: Apache-2.0
"""Norms of the states that sequences end with, layer by layer, for the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.state_mixer import StateMixer
from megatron.core.tensor_parallel.parameters import find_global_name


class StateNorm(NamedTuple):
    """L2 norms of one layer's states, all heads of a sequence together."""

    mean: float
    """Over the sequences of the step."""
    largest: float


def list_state_mixers(model: nn.Module) -> Iterator[tuple[str, StateMixer]]:
    """Yield the mixers with a state of a chunk, and their names in the whole model."""
    for path, part in model.named_modules():
        if isinstance(part, StateMixer):
            yield find_global_name(model, path), part


def compute_state_norms(chunks: Sequence[nn.Module], groups: ProcessGroupCollection) -> dict[str, StateNorm]:
    """Take from each mixer with `notes_states` what it kept in a step, and return the norms by its name, on all ranks.

    Waits for the device; every rank takes part.
    """
    own: dict[str, list[float]] = {}
    for name, mixer in (found for chunk in chunks for found in list_state_mixers(chunk)):
        if mixer.state_squares:
            squares = torch.cat(mixer.state_squares)
            mixer.state_squares.clear()
            all_reduce(squares, groups.tp)  # other heads of the same sequences
            own[name] = squares.sqrt().tolist()
    gathered: dict[str, list[float]] = {}
    for of_stage in all_gather_object(own, groups.pp):
        gathered |= of_stage
    merged: dict[str, list[float]] = {}
    for of_replica in all_gather_object(gathered, groups.dp_cp):
        for name, norms in of_replica.items():
            merged.setdefault(name, []).extend(norms)
    return {name: StateNorm(sum(norms) / len(norms), max(norms)) for name, norms in merged.items()}
