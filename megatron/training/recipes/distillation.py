# SPDX-License-Identifier: Apache-2.0
"""The forward steps of distillation: a student's, with a teacher's likeliest tokens, and the teacher's, which finds
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor
from megatron.core.context_parallel.sharding import to_sequence_order
from megatron.core.datasets.teacher_logits import DistillationDataset, TeacherLogits
from megatron.core.errors import ConfigError
from megatron.core.post_training.distillation_loss import compute_kept_divergence, drop_unlikely, find_likeliest
from megatron.core.post_training.log_probs import compute_log_probs
from megatron.core.process_groups_config import Group
from megatron.training.config.distillation import DistillationConfig
from megatron.training.recipes.forward_step import LossOutput, compute_token_losses, forward_step

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel

DIVERGENCE = "kd loss"


def attach_teacher(config: DistillationConfig, dataset: Any, sequence_length: int, vocab_size: int) -> Any:
    """The training data with the teacher's tokens. Raises ConfigError for logits of another shape or vocabulary."""
    logits = TeacherLogits(Path(config.logits_load_dir or ""))
    for name, said, ours in (
        ("sequence_length", "--seq-length", sequence_length),
        ("vocab_size", "a vocabulary (--tokenizer-model) of", vocab_size),
    ):
        found = logits.manifest[name]
        if found != ours:
            raise ConfigError(
                f"--logits-load-dir {config.logits_load_dir} was written with {said} {found}, and the student has "
                f"{ours}; give the student the same, or write the logits again"
            )
    return DistillationDataset(dataset, logits, may_lack=config.logits_load_ignore_errors)


class StudentStep:
    """The forward step with a teacher's tokens; a language model's where a batch has none, as in evaluation."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    def __call__(
        self, batches: Iterator[dict[str, Tensor]], model: DistributedDataParallel
    ) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
        batch = next(batches)
        if "teacher_tokens" not in batch:
            return forward_step(iter([batch]), model)
        logits, own = compute_token_losses(batch, model, returns_logits=True)

        def reduce(logits: Tensor) -> LossOutput:
            teacher = own["teacher_log_probs"]
            tokens = torch.cat([own["labels"].unsqueeze(-1), own["teacher_tokens"]], dim=-1)
            found, _ = compute_log_probs(logits, tokens, model.groups.tp)
            losses, divergence = -found[..., 0], compute_kept_divergence(teacher, found[..., 1:])
            # Where the teacher has nothing to say, the text alone teaches.
            is_taught = (teacher > -torch.inf).any(-1)
            share = self._alpha * is_taught
            mask = own["loss_mask"]
            loss, number = (((1 - share) * losses + share * divergence) * mask).sum(), mask.sum()
            logged = {"lm loss": ((losses.detach() * mask).sum(), number)}
            logged[DIVERGENCE] = ((divergence.detach() * mask).sum(), (mask * is_taught).sum())
            return loss, number, {name: torch.stack(pair) for name, pair in logged.items()}

        return logits, reduce


class TeacherStep:
    """A forward step that only reports: keys of samples, and the likeliest tokens at each of their places."""

    def __init__(self, config: DistillationConfig, vocab_size: int) -> None:
        self._config, self._vocab_size = config, vocab_size

    def __call__(
        self, batches: Iterator[dict[str, Tensor]], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        batch = dict(next(batches))
        keys, shape = batch.pop("key").flatten(), batch["tokens"].shape
        logits, _ = compute_token_losses(batch, model, returns_logits=True)
        config = self._config
        assert config.logits_save_top_k is not None, "checked by the config"

        def report(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            tokens, values = find_likeliest(logits, config.logits_save_top_k or 1, self._vocab_size, model.groups.tp)
            if config.logits_save_top_p is not None:
                values = drop_unlikely(values, config.logits_save_top_p, config.logits_save_top_p_min_k)
            tokens, values = (_join(part, model.groups.cp).view(*shape, -1) for part in (tokens, values))
            return values.sum(), keys.new_ones(()), {"keys": keys, "tokens": tokens, "values": values}

        return logits, report


def _join(part: Tensor, sequence: Group) -> Tensor:
    """[b, s / cp, k] of each rank -> [b, s, k] in the order of the sequence."""
    if sequence.size() == 1:
        return part
    own = part.transpose(0, 1).contiguous()
    joined = own.new_empty(own.shape[0] * sequence.size(), *own.shape[1:])
    all_gather_into_tensor(joined, own, sequence)
    return to_sequence_order(joined, sequence.size()).transpose(0, 1)
