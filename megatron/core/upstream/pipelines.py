# SPDX-License-Identifier: Apache-2.0
"""Upstream's questions about pipelines: first and last chunks, shapes between stages, tables and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.enums import LayerType
from megatron.core.errors import ConfigError
from megatron.core.plan.stages import parse_layout
from megatron.core.process_groups_config import Group, ProcessGroupCollection


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether a chunk is the first of its process; None counts as the only one."""
    return vp_size is None or vp_size == 1 or vp_stage in (None, 0)


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether a chunk is the last of its process; None counts as the only one."""
    return vp_size is None or vp_size == 1 or vp_stage in (None, vp_size - 1)


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order of the interleaved schedule's forwards: a group of microbatches through all
    chunks, then the next."""
    group = microbatch_group_size_per_vp_stage
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group)
        for chunk in range(num_model_chunks)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    config: Any,
    tp_group: Group | None = None,
    cp_group: Group | None = None,
) -> list[tuple[int, ...]]:
    """Return what stages hand on, [(s, b, h)] of this rank's tokens; [()] where lengths vary. decoder_seq_length: in
    place of seq_length."""
    if getattr(config, "variable_seq_lengths", False):
        return [()]
    groups = ProcessGroupCollection.current() if tp_group is None or cp_group is None else None
    tp = tp_group if tp_group is not None or groups is None else groups.tp
    cp = cp_group if cp_group is not None or groups is None else groups.cp
    assert tp is not None and cp is not None
    length = (decoder_seq_length or seq_length) // cp.size()
    return [(length // tp.size() if config.sequence_parallel else length, micro_batch_size, config.hidden_size)]


_LETTERS = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m", LayerType.loss: "L"}


class PipelineParallelLayerLayout:
    """A written layout, `Et*3|(tt|)*2,tL`, as an object: which layers each stage and chunk has."""

    def __init__(self, layout: str | Sequence[Sequence[Any]], pipeline_model_parallel_size: int) -> None:
        """layout: or lists of layers, by kind or its name, one for each stage. Raises ConfigError."""
        self.input_data = layout
        stages = parse_layout(layout) if isinstance(layout, str) else [_write_stage(stage) for stage in layout]
        if not stages or len(stages) % pipeline_model_parallel_size:
            raise ConfigError(
                f"--pipeline-model-parallel-layout {layout!r} has {len(stages)} stages; it must have a multiple of "
                f"{pipeline_model_parallel_size}, of the letters E t m L"
            )
        self.pipeline_model_parallel_size = pipeline_model_parallel_size
        self.virtual_pipeline_model_parallel_size = len(stages) // pipeline_model_parallel_size
        kinds = {letter: kind for kind, letter in _LETTERS.items()}
        self.layout = [
            [
                [kinds[letter] for letter in stages[chunk * pipeline_model_parallel_size + rank]]
                for chunk in range(self.virtual_pipeline_model_parallel_size)
            ]
            for rank in range(pipeline_model_parallel_size)
        ]
        """[rank][chunk] -> its layers in order."""

    @staticmethod
    def from_str(layout: str, pipeline_model_parallel_size: int) -> PipelineParallelLayerLayout:
        """The layout that a text says."""
        return PipelineParallelLayerLayout(layout, pipeline_model_parallel_size)

    @staticmethod
    def get_num_stages_from_str(layout: str) -> int:
        """Stages that a text says, the chunks of all ranks."""
        return len(parse_layout(layout))

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of this kind on earlier stages. pp_rank: this process's when None."""
        rank, chunk = self._place(vp_stage, pp_rank)
        earlier = [(v, r) for v in range(chunk + 1) for r in range(self.pipeline_model_parallel_size)]
        return sum(self.layout[r][v].count(layer_type) for v, r in earlier if (v, r) < (chunk, rank))

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of this kind on a stage."""
        return len(self.get_layer_id_list(layer_type, vp_stage, pp_rank))

    def get_layer_id_list(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> list[int]:
        """Numbers, counted from 0 among the layers of this kind, of a stage's layers."""
        rank, chunk = self._place(vp_stage, pp_rank)
        first = self.get_layer_offset(layer_type, chunk, rank)
        return list(range(first, first + self.layout[rank][chunk].count(layer_type)))

    def _place(self, vp_stage: int | None, pp_rank: int | None) -> tuple[int, int]:
        if pp_rank is None:  # one stage needs no groups
            pp_rank = ProcessGroupCollection.current().pp.rank() if self.pipeline_model_parallel_size > 1 else 0
        return pp_rank, vp_stage or 0


def _write_stage(stage: Sequence[Any]) -> str:
    try:
        return "".join(_LETTERS[LayerType[getattr(layer, "name", layer)]] for layer in stage)
    except KeyError as error:
        raise ConfigError(f"a layout has embedding, decoder, mtp and loss layers; found {error}") from error
