# SPDX-License-Identifier: Apache-2.0
"""Sentences for the log on what computes mixers with a state, and on what context-parallel ranks send for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.pieces import weigh_exchange
from megatron.core.ssm.state_mixer import StateMixer, get_state_mixer_spec
from megatron.core.tensor_parallel.parameters import parameter_dtype
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


def describe_mixers(
    config: TransformerConfig,
    mixers: Sequence[type[StateMixer]],
    groups: ProcessGroupCollection,
    tokens: int,
    sequences: int,
) -> dict[str, str]:
    """Return operation -> implementation. mixers: kinds of them; tokens: of a whole sequence; sequences:
    of a microbatch."""
    # Names and choice come from what layers would build, so that the log cannot say something else than what runs.
    with FakeTensorMode(), torch.no_grad():
        built = {
            mixer.title: build_module(get_state_mixer_spec(mixer), config=config, layer_number=1, pg_collection=groups)
            for mixer in mixers
        }
        found = {
            "states": {name: mixer.states.name for name, mixer in built.items()},
            "convolution of mixers": {name: mixer.conv1d.backend_name for name, mixer in built.items()},
        }
        if groups.cp.size() > 1:
            ranks = groups.cp.size()
            shape, dtype = (max(1, tokens // (2 * ranks)), 2 * sequences), parameter_dtype(config)
            found["states over context-parallel ranks"] = {
                name: weigh_exchange(mixer.sketch_inputs(*shape, dtype), ranks).describe()
                for name, mixer in built.items()
            }
    return {what: _say_once(names) for what, names in found.items() if names}


def _say_once(names: Mapping[str, str]) -> str:
    """Return what kinds have in common once, else each kind's."""
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return "; ".join(f"{name}: {said}" for name, said in names.items())
