# SPDX-License-Identifier: Apache-2.0
"""The largest form of a preset that fits into this device, by the planner's formula of a step's memory.

A form is a number of layers and what of them is computed again. All layers with nothing computed again is the largest
one; then comes more computing, then half of the layers, and so on.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence

import torch

from benchmarks.training import Preset, build_flags
from megatron.core.errors import ConfigError, MemoryShortageError, format_bytes
from megatron.planner.step_memory import find_fullest, predict_step_memory
from megatron.training.flags.read import read_run_config
from megatron.training.launch.launch import add_world_size
from megatron.training.launch.memory_limits import read_total_memory
from megatron.training.recipes.gpt import describe_gpt_workload
from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
WAYS = {
    "nothing recomputed": "",
    "norms recomputed": "--recompute-granularity selective --recompute-modules layernorm",
    "MLPs recomputed": "--recompute-granularity selective --recompute-modules mlp",
    "layers recomputed": FULL,
}
"""What is computed again -> its flags; the fastest first."""
_USABLE_SHARE = 0.96
"""Of the memory, beside gaps between the allocator's tensors..."""
_CONTEXT_BYTES = 1 << 30
"""...and what CUDA and libraries take for themselves."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A preset as it is trained, and the bytes that the formula says it takes."""

    preset: Preset
    way: str
    planned_bytes: float

    @property
    def flags(self) -> str:
        """Beside those of the preset."""
        return WAYS[self.way]

    def describe(self) -> str:
        """For the table: `16 layers, micro-batches of 2, norms recomputed, 76.9 GB by the formula`."""
        preset = self.preset
        return (
            f"{preset.sizes.layers} layers, micro-batches of {preset.micro_batch}, {self.way}, "
            f"{self.planned_bytes / 2**30:.1f} GiB by the formula"
        )


def predict_bytes(flags: Sequence[str]) -> float:
    """Bytes that a step of pretrain_gpt.py with these flags takes."""
    config = read_run_config(list(flags), add_world_size(os.environ))
    workload = describe_gpt_workload(config, compute_padded_vocab_size(config, build_tokenizer(config)))
    return find_fullest(predict_step_memory(config.model, config.ddp, config.optimizer, workload)).total


def list_fitting_forms(preset: Preset, dtype: torch.dtype, variants: Sequence[str]) -> list[Form]:
    """Forms of the preset that fit with the flags of each variant, the largest first. Raises MemoryShortageError where
    none does."""
    total, whose = read_total_memory()
    usable = _USABLE_SHARE * total - _CONTEXT_BYTES
    needed, found = 0.0, []
    for smaller, way in _list_forms(preset):
        words = [f"{WAYS[way]} {variant}".split() for variant in variants]
        try:
            needed = max(predict_bytes(build_flags(smaller, dtype, 1, more)) for more in words)
        except ConfigError:  # what is recomputed, a variant may want to keep elsewhere
            continue
        if needed <= usable:
            found.append(Form(smaller, way, needed))
        # What still needs less is for a formula that was wrong; a few such forms suffice.
        if len(found) == len(WAYS):
            break
    if not found:
        raise MemoryShortageError(
            f"{preset.text}: the smallest form takes {format_bytes(needed)}, and {whose} {format_bytes(total)}"
        )
    return found


def _list_forms(preset: Preset) -> Iterator[tuple[Preset, str]]:
    layers = preset.sizes.layers
    while layers:
        for way in WAYS:
            yield dataclasses.replace(preset, sizes=dataclasses.replace(preset.sizes, layers=layers)), way
        layers //= 2
