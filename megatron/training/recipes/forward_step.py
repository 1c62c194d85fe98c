# SPDX-License-Identifier: Apache-2.0
"""The forward step of a language model: the losses of a microbatch's tokens, and their sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel

LossOutput = tuple["Tensor", "Tensor", dict[str, "Tensor"]]


def forward_step(
    batches: Iterator[dict[str, Tensor]], model: DistributedDataParallel
) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
    """The model on this rank's tokens of the next microbatch: each token's loss [b, s], and how to reduce it."""
    output, batch = compute_token_losses(next(batches), model)
    return output, functools.partial(loss_func, batch["loss_mask"])


def compute_token_losses(
    batch: dict[str, Tensor], model: DistributedDataParallel, *, returns_logits: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's output on this rank's tokens of a microbatch, and these tokens' part of the batch.

    The output is each token's loss, [b, s] in float32, from the last stage on; packed samples are one of [1, b * s].
    returns_logits: logits [b, s, v / tp] in the place of losses.
    """
    packed_seq_params, cp_group = None, model.groups.cp
    if "cu_seqlens" in batch:
        from megatron.core.packed_seq_params import pack_batch

        batch, packed_seq_params = pack_batch(batch, model.groups.hybrid_cp)
        # With dynamic context parallelism every batch names the ranks that share it.
        cp_group = (packed_seq_params and packed_seq_params.cp_group) or cp_group
    if cp_group.size() > 1:
        from megatron.core.context_parallel.sharding import get_batch_on_this_cp_rank

        # Every rank reads full sequences and keeps its piece: nothing about the data is sent.
        batch = get_batch_on_this_cp_rank(batch, cp_group)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=None if returns_logits else batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed_seq_params,
    )
    return output, batch


def loss_func(loss_mask: Tensor, output: Tensor) -> LossOutput:
    """Loss of one microbatch: its sum over the tokens that count, their number, and both once more for the log.

    loss_mask, output: [b, s], output being each token's loss in float32.
    """
    import torch

    mask = loss_mask.flatten()
    # A sum, not a mean: dividing comes after the sums of all microbatches and ranks are known.
    loss_sum = (output.flatten() * mask).sum()
    num_tokens = mask.sum()
    # detach: the log must not keep the graph of the whole model alive.
    return loss_sum, num_tokens, {"lm loss": torch.stack([loss_sum.detach(), num_tokens])}
