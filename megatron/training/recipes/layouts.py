# SPDX-License-Identifier: Apache-2.0
"""Layouts of the presets' models over GPUs, for `--preset-layout`.

The smallest sensible number of GPUs for each, and for large models some more. Each is accepted by the rules of a run,
and fits 80 GB by formula, with a tenth left free: tests/unit/training/recipes/test_preset_layouts.py. What is fast on a
given network was not measured: these are the rules of docs/choosing_a_layout.md, applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PresetLayout:
    """A division over so many GPUs, or any multiple of them, which adds data-parallel replicas."""

    gpus: int
    seq_length: int
    """Of the longest sequences that fit."""
    tp: int = 1
    pp: int = 1
    layers_per_chunk: int | None = None
    """--num-layers-per-virtual-pipeline-stage."""
    cp: int = 1
    ep: int = 1
    micro_batch_size: int = 1
    """Sequences of a micro-batch that fit."""
    more: str = ""
    """Further flags: how layers fall to stages, what is recomputed."""

    def build_flags(self) -> list[str]:
        """The flags of the layout, each with its values."""
        sizes = {"tensor-model": self.tp, "pipeline-model": self.pp, "context": self.cp}
        flags = [f"--{axis}-parallel-size {size}" for axis, size in sizes.items() if size > 1]
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        if self.tp > 1:
            flags.append("--sequence-parallel")
        if self.layers_per_chunk is not None:
            flags.append(f"--num-layers-per-virtual-pipeline-stage {self.layers_per_chunk}")
        if self.ep > 1:
            flags += [f"--expert-model-parallel-size {self.ep}", "--expert-tensor-parallel-size 1"]
        return [*flags, self.more] if self.more else flags


_K = 1024
_EVEN_ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
"""126 layers and the two ends fill 16 stages evenly."""
LAYOUTS: Mapping[str, Sequence[PresetLayout]] = {
    "gpt3-125m": [PresetLayout(8, 2 * _K, micro_batch_size=8)],
    "gpt3-350m": [PresetLayout(8, 2 * _K, micro_batch_size=8)],
    "gpt3-760m": [PresetLayout(8, 2 * _K, micro_batch_size=4)],
    "gpt3-1.3b": [PresetLayout(8, 2 * _K, micro_batch_size=4)],
    "gpt3-2.7b": [PresetLayout(8, 2 * _K, micro_batch_size=2)],
    "gpt3-6.7b": [PresetLayout(8, 2 * _K, tp=2, micro_batch_size=2)],
    "gpt3-13b": [PresetLayout(16, 2 * _K, tp=2), PresetLayout(64, 2 * _K, tp=4, micro_batch_size=2)],
    "gpt3-175b": [
        PresetLayout(128, 2 * _K, tp=8, pp=8, layers_per_chunk=3),
        PresetLayout(512, 2 * _K, tp=8, pp=16, layers_per_chunk=3),
    ],
    "llama2-7b": [PresetLayout(8, 4 * _K, tp=2)],
    "llama2-13b": [PresetLayout(8, 4 * _K, tp=2), PresetLayout(16, 4 * _K, tp=4)],
    "llama2-70b": [PresetLayout(32, 4 * _K, tp=8, pp=2, layers_per_chunk=5)],
    "llama3-8b": [PresetLayout(8, 8 * _K, tp=2)],
    "llama3-70b": [
        PresetLayout(32, 8 * _K, tp=8, pp=4, layers_per_chunk=5),
        PresetLayout(64, 8 * _K, tp=8, pp=2, layers_per_chunk=10),
    ],
    "llama3.1-405b": [PresetLayout(512, 8 * _K, tp=8, pp=16, cp=2, more=_EVEN_ENDS)],
    "mixtral-8x7b": [
        PresetLayout(32, 4 * _K, tp=2, pp=2, layers_per_chunk=8, ep=8),
        PresetLayout(64, 4 * _K, tp=2, pp=4, layers_per_chunk=4, ep=8),
    ],
    "mixtral-8x22b": [PresetLayout(128, 4 * _K, tp=2, pp=8, layers_per_chunk=1, ep=8)],
    "qwen3-8b": [PresetLayout(8, 4 * _K, tp=2)],
    "qwen3-30b-a3b": [
        PresetLayout(16, 4 * _K, pp=2, layers_per_chunk=6, ep=8),
        PresetLayout(32, 4 * _K, tp=2, pp=2, layers_per_chunk=6, ep=8),
    ],
    "gpt-oss-20b": [PresetLayout(16, 4 * _K, ep=8)],
    "llama4-scout": [PresetLayout(64, 8 * _K, tp=4, pp=4, layers_per_chunk=3, ep=16)],
    "llama4-maverick": [PresetLayout(256, 8 * _K, tp=4, pp=8, layers_per_chunk=3, ep=32)],
    "deepseek-v2-lite": [PresetLayout(8, 4 * _K, ep=8)],
    "deepseek-v3": [
        PresetLayout(
            1024, 4 * _K, tp=2, pp=16, ep=64,
            more="--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2 "
            "--recompute-granularity selective --recompute-modules core_attn mla_up_proj",
        ),
    ],
}  # fmt: skip
"""Preset -> layouts, from fewer to more GPUs."""


def choose_layout(preset: str, gpus: int) -> PresetLayout | None:
    """The layout for the most GPUs that divide these; None where there is none."""
    fitting = [layout for layout in LAYOUTS.get(preset, ()) if gpus % layout.gpus == 0]
    return fitting[-1] if fitting else None
