# SPDX-License-Identifier: Apache-2.0
"""Recipe: everything that depends on the kind of model, so that the trainer itself knows none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.dist_checkpointing.validation import KeyReport
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer
    from megatron.core.process_groups_config import Group, ProcessGroupCollection
    from megatron.core.tokenizers.base import Tokenizer
    from megatron.planner.memory import Workload
    from megatron.training.config.container import RunConfig

SampleCounts = tuple[int | None, int | None, int | None]
"""Training, validation and test samples; None: all there are, once."""

# Sequence parallelism is missing on purpose: it follows the tensor-parallel ranks. So is data parallelism, which every
# model can have.
_FLAG_OF_AXIS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


def count_no_flops(chunks: Sequence[nn.Module]) -> float | None:
    """For a model whose arithmetic is not known."""
    return None


def describe_nothing(
    chunks: Sequence[nn.Module], groups: ProcessGroupCollection, device: torch.device
) -> Mapping[str, str]:
    """For a model whose operations have one implementation."""
    return {}


class ForeignModel(Protocol):
    """A model in another program's files: what it is, and its weights on demand."""

    @property
    def config(self) -> RunConfig:
        """Our settings of it."""

    @property
    def notes(self) -> Sequence[str]:
        """Parts that are left out."""

    def load(self, tensors: ShardedStateDict, group: Group, *, may_lack: bool, may_have_more: bool) -> KeyReport:
        """Fill the tensors of all members of the group, each of which reads no more than its parts; returns what was
        tolerated (`validation.judge_wanted`). Raises CheckpointError on every member."""


class ForeignAdapters(Protocol):
    """Adapters in another program's files."""

    def load(self, tensors: ShardedStateDict) -> None:
        """Fill the tensors that belong to adapters. Raises CheckpointError."""


class ForeignFiles(Protocol):
    """Reads and writes another program's model files: --load hf:DIR and --save-hf. `megatron.hf` has the one for
    Hugging Face directories; training itself knows only this project's format and upstream's."""

    def open(self, directory: Path, config: RunConfig) -> ForeignModel:
        """Look at a directory whose weights a run with this config is to take. Raises CheckpointError, ConfigError."""

    def open_adapter(self, directory: Path, config: RunConfig, vocab_size: int) -> ForeignAdapters:
        """Look at a directory with adapters of --lora-rank. Raises CheckpointError, ConfigError."""

    def list_attachments(self, config: RunConfig) -> Mapping[str, Path]:
        """Name in the run's checkpoints -> file of the model it started from that they carry along."""

    def prepare_save(self, config: RunConfig, vocab_size: int, directory: Path) -> None:
        """Before training: raise ConfigError where this model cannot be written, or not there."""

    def save(
        self, config: RunConfig, vocab_size: int, tensors: ShardedStateDict, group: Group, directory: Path
    ) -> None:
        """Write the model whose parameters the members of the group hold; every member calls this. Raises StorageError
        on every member."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One kind of model with the settings of one run: its tokens, its chunks, its data, its forward step.

    `build_gpt_recipe` makes GPT's. Another kind of model replaces what differs:
    `dataclasses.replace(build_gpt_recipe(config), build_model=..., count_flops_per_token=count_no_flops)`; see
    docs/models.md.
    """

    tokenizer: Tokenizer
    vocab_size: int
    """Tokens without padding."""
    padded_vocab_size: int
    """Token ids that the data may have are below this: rows of the embedding, for a model that has one."""
    build_model: Callable[..., nn.Module]
    """(pre_process, post_process[, vp_stage][, pg_collection]) -> one pipeline chunk on torch's default device; the two
    booleans say whether it has the embedding and the output layer."""
    build_datasets: Callable[[Any], Sequence[Any]]
    """(SampleCounts) -> training, validation and test data, None where there is none; the second may be a list. With
    --full-validation the number of validation samples is None: all there are, once."""
    forward_step: Callable[..., Any]
    """(iterator over microbatches, chunk) -> (output, loss function), as Executor.run expects."""
    parallel_axes: tuple[str, ...] = tuple(_FLAG_OF_AXIS)
    """The axes that may have more than one process; data-parallel replicas are always possible."""
    max_sequence_length: int | None = None
    """Positions that the model has a table for, in tokens; None where it takes sequences of any length."""
    count_flops_per_token: Callable[[Sequence[nn.Module]], float | None] = count_no_flops
    """(this rank's chunks) -> floating-point operations of the whole model for one token, forward and backward; None
    where they are not known: then throughput and MFU are not reported."""
    workload: Workload | None = None
    """Facts that the planner's formulas for memory need in addition to the configs; None for a model that they do not
    describe: then nothing is estimated when memory runs out."""
    describe_operations: Callable[[Sequence[nn.Module], ProcessGroupCollection, torch.device], Mapping[str, str]] = (
        describe_nothing
    )
    """(chunks, groups, device) -> operation and its implementation, for the beginning of the log."""
    build_optimizer: Callable[[RunConfig, Sequence[nn.Module], ProcessGroupCollection], MegatronOptimizer] | None = None
    """(settings, wrapped chunks, groups) -> the optimizer; as the flags say when None."""
    build_scheduler: Callable[[RunConfig, Any], Any] | None = None
    """(settings, optimizer) -> what sets its learning rates; as the flags say when None."""
    process_non_loss_data: Callable[[Any, int, Any], Any] | None = None
    """(data, iteration, TensorBoard writer), called on the first rank after each evaluation."""
    foreign_files: ForeignFiles | None = None
    """Object that reads --load hf:DIR and writes --save-hf; where there is none, both are refused."""
    collect_non_loss_data: Callable[[Any], Any] | None = None
    """(chunks) -> that data; what the loss function returns with non_loss_data=True when None."""

    def check_layout(self, config: ModelParallelConfig) -> None:
        """Raises ConfigError where the settings divide the model over an axis that it cannot be divided over."""
        # Without this check a model that knows no groups would train wrong copies of itself, silently.
        for axis, field in _FLAG_OF_AXIS.items():
            size = getattr(config, field)
            if size > 1 and axis not in self.parallel_axes:
                flag = f"--{field.replace('_', '-')}"
                raise ConfigError(f"this model cannot be divided: {flag} is {size}; leave it at 1")
