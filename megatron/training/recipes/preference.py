# SPDX-License-Identifier: Apache-2.0
"""The forward step of --dpo: log-probabilities of pairs of answers, and the loss of their differences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.datasets.preference_dataset import CHOSEN
from megatron.core.post_training.preference_loss import PreferenceLoss
from megatron.core.post_training.segments import sum_segments
from megatron.core.process_groups_config import Group
from megatron.training.config.preference import PREFERENCE_VALUES, PreferenceConfig
from megatron.training.recipes.forward_step import LossOutput, compute_token_losses

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel

References = Mapping[int, tuple[float, float]]
"""Number of a pair -> the reference model's log-probabilities of its chosen and its rejected answer."""


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a microbatch. b: their number."""

    numbers: Tensor
    """int64 [b]: by which references are found."""
    segments: Tensor
    """int64, in the shape of this rank's tokens: 2 i and 2 i + 1 for tokens of pair i's answers, else -1."""
    lengths: Tensor
    """Tokens of the answers, float32 [b, 2]; 0 for a sample that fills up a batch."""
    sequence: Group
    """The ranks that share the tokens."""

    def compute_log_probs(self, losses: Tensor) -> Tensor:
        """The answers' log-probabilities, float32 [b, 2], from the tokens' losses."""
        sums = sum_segments(-losses.float(), self.segments, self.lengths.numel(), self.sequence)
        return sums.view(self.lengths.shape)


class PreferenceStep:
    """The forward step on pairs of answers."""

    def __init__(self, config: PreferenceConfig) -> None:
        self.needs_references = not config.dpo_reference_free
        self._loss = PreferenceLoss(
            beta=config.dpo_beta,
            kind=config.dpo_loss,
            label_smoothing=config.dpo_label_smoothing,
            margin=config.dpo_margin,
            is_length_normalized=config.dpo_length_normalized,
        )
        self.references: References = {}
        self._known: tuple[Tensor, Tensor] | None = None
        """Numbers of pairs in order, int64 [n], and their references, float32 [n, 2]."""

    def set_references(self, references: References, device: torch.device | str = "cpu") -> None:
        """Take the reference model's log-probabilities of all pairs that may come. device: the model's."""
        self.references = references
        numbers = sorted(references)
        values = torch.tensor([references[number] for number in numbers], dtype=torch.float32, device=device)
        self._known = torch.tensor(numbers, dtype=torch.int64, device=device), values.view(-1, 2)

    def __call__(
        self, batches: Iterator[dict[str, Tensor]], model: DistributedDataParallel
    ) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
        output, pairs = self._run(batches, model)
        return output, functools.partial(self._reduce, pairs)

    def measure(self, batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """A forward step that only reports: numbers of pairs, log-probabilities and lengths of their answers."""
        output, pairs = self._run(batches, model)

        def report(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            found = pairs.compute_log_probs(losses)
            return (
                found.sum(),
                pairs.lengths.sum(),
                {"numbers": pairs.numbers, "log_probs": found, "lengths": pairs.lengths},
            )

        return output, report

    def _run(self, batches: Iterator[dict[str, Tensor]], model: DistributedDataParallel) -> tuple[Tensor, _Pairs]:
        batch = dict(next(batches))
        answers, numbers = batch.pop("answers"), batch.pop("pair").flatten()
        rows = torch.arange(len(answers), device=answers.device).unsqueeze(1)
        batch["segments"] = torch.where(answers > 0, 2 * rows + answers - CHOSEN, -1)
        lengths = torch.stack([(answers == CHOSEN).sum(1), (answers > CHOSEN).sum(1)], dim=1).float()
        output, own = compute_token_losses(batch, model)
        return output, _Pairs(numbers, own["segments"], lengths, model.groups.cp)

    def _reduce(self, pairs: _Pairs, output: Tensor) -> LossOutput:
        """Loss of one microbatch: its sum over the pairs, their number, and both with other sums for the log.

        Ranks that share the pairs' tokens all have the whole loss, and gradients of the tokens that they have; each
        counts its share of the pairs.
        """
        references = self._find_references(pairs.numbers) if self.needs_references else None
        found = self._loss(pairs.compute_log_probs(output), references, pairs.lengths)
        # A sample that fills up a batch is no pair.
        counts = (pairs.lengths.amin(1) > 0).float()
        number = counts.sum()
        margin = found.chosen_reward - found.rejected_reward
        values = (found.loss, found.chosen_reward, found.rejected_reward, margin, (margin > 0).float())
        sums = (torch.stack([(value.detach() * counts).sum(), number]) for value in values)
        logged = dict(zip(PREFERENCE_VALUES, sums, strict=True))
        return (found.loss * counts).sum(), number / pairs.sequence.size(), logged

    def _find_references(self, numbers: Tensor) -> Tensor:
        assert self._known is not None, "set before the first step"
        known, values = self._known
        # On the device, which the host then need not wait for; every pair is known (references.py).
        return values[torch.searchsorted(known, numbers)]
