# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of ours as upstream's `torch` files of the ranks of a layout, one rank after the other: only weights.

release/mp_rank_00_001/model_optim_rng.pt       of a model that was never trained; else iter_0001000/...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from megatron.core.dist_checkpointing.agreement import on_every_rank
from megatron.core.dist_checkpointing.directory import TRACKER_NAME, iteration_directory
from megatron.core.dist_checkpointing.durable import storage_errors, write_file
from megatron.core.errors import ConfigError
from megatron.core.mesh import RankGrid
from megatron.core.placement import get_placement
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.core.tensor_parallel.parameters import declare_vocabulary
from megatron.core.upstream_checkpoints.common_state import RELEASE
from megatron.core.upstream_checkpoints.rank_file import FILE_NAME
from megatron.core.upstream_checkpoints.write_rank_files import (
    RankTensor,
    arrange,
    build_models,
    name_rank_directory,
    write_torch_file,
)
from megatron.hf.checkpoints import ALONE, OpenCheckpoint, fresh_directory
from megatron.training.checkpoint.to_upstream import CHECKPOINT_VERSION, build_args
from megatron.training.config.container import RunConfig
from megatron.training.recipes.gpt import build_gpt_model
from megatron.training.recipes.vocabulary import compute_padded_vocab_size
from megatron.training.run import Progress

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class _Vocabulary:
    """Attributes that padding asks of a tokenizer."""

    vocab_size: int


def write_rank_files(
    checkpoint: OpenCheckpoint, output: Path, tensor_ranks: int, stages: int, group: Group = ALONE
) -> Path:
    """Write the weights into a new directory of checkpoints `output`, for this layout; returns `output`.

    One rank's weights are in memory at a time; each process of `group` writes the files of some ranks. Raises
    ConfigError for a layout that the model cannot have, CheckpointError or StorageError on all; `output` then does not
    exist.
    """
    saved = checkpoint.read_config()
    config = _divide(saved, tensor_ranks, stages)
    vocab_size = checkpoint.read_shape(_EMBEDDING)[0]
    rows = compute_padded_vocab_size(config, cast(Any, _Vocabulary(vocab_size)))
    iteration = checkpoint.found.manifest.iteration
    grid = RankGrid(tensor_ranks * stages, tp=tensor_ranks, pp=stages)

    def write(temporary: Path) -> None:
        # What was never trained is a release.
        directory = iteration_directory(temporary, iteration) if iteration else temporary / RELEASE
        for rank in range(grid.world_size)[group.rank() :: group.size()]:
            groups = ProcessGroupCollection.pretend(grid, rank)
            name = name_rank_directory(groups.tp.rank(), groups.pp.rank() if stages > 1 else None, None)
            tensors = list(_read_rank(checkpoint, config, rows, vocab_size, groups))
            fused = config.joins_norms
            chunk = arrange(tensors, fused=fused, grouped=config.model.moe_grouped_gemm)
            content: dict[str, Any] = {
                "args": build_args(config, Progress(0, iteration=iteration), rows),
                "checkpoint_version": CHECKPOINT_VERSION,
                "iteration": iteration,
                **build_models([chunk]),
            }
            write_torch_file(directory / name / FILE_NAME, content)
        if group.rank() == 0:
            write_file(temporary / TRACKER_NAME, str(iteration or RELEASE).encode())

    with fresh_directory(output, group=group) as temporary, storage_errors(f"writing {output}"):
        on_every_rank(group, lambda: write(temporary))
    return output


def _divide(config: RunConfig, tensor_ranks: int, stages: int) -> RunConfig:
    """The settings of a run of this layout. Raises ConfigError where the model cannot have it."""
    model = config.model.on_one_process(
        tensor_model_parallel_size=tensor_ranks, pipeline_model_parallel_size=stages,
        pipeline_dtype=config.model.params_dtype, init_model_with_meta_device=True,
    )  # fmt: skip
    if problems := list(model.problems()):
        raise ConfigError(problems)
    return config.with_groups(model=model, world_size=tensor_ranks * stages)


def _read_rank(
    checkpoint: OpenCheckpoint, config: RunConfig, rows: int, vocab_size: int, groups: ProcessGroupCollection
) -> Iterator[RankTensor]:
    """Yield the shards of one rank, in the model's order."""
    with torch.device("meta"):
        model = build_gpt_model(
            config, rows, pre_process=groups.is_first_stage, post_process=groups.is_last_stage, pg_collection=groups
        )
    declare_vocabulary(model, vocab_size)
    for name, parameter in list_parameters(model):
        placement = get_placement(parameter, name)
        shard = placement.take(checkpoint.read(placement.name))
        # A copy: a view would keep the full tensor in memory.
        yield RankTensor(name, shard.clone(), {}, None, read_plan(config.model).find(placement.name))


def note_rank_files(checkpoint: OpenCheckpoint) -> str | None:
    """Return what of the checkpoint the files will not have; None where that is nothing."""
    if checkpoint.has_optimizer:
        return (
            "the optimizer's state is left out; pretrain_gpt.py --load DIR --ckpt-convert-format torch keeps it, in "
            "the layout that it runs in"
        )
    return None
