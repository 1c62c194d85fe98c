"""Pretrain a GPT model: `python pretrain_gpt.py --help`, `torchrun pretrain_gpt.py …`, `srun python pretrain_gpt.py …`.

This file holds what is particular to GPT: the model, the datasets, the loss. The rest is `megatron.training.pretrain`.
torch is imported only after the flags have been read, so that help and mistakes answer at once.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.launch import leave, run_job, with_world_size

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tokenizers.base import Tokenizer
    from megatron.training.run import Run

LossOutput = tuple["Tensor", "Tensor", dict[str, "Tensor"]]


def model_provider(
    config: RunConfig,
    padded_vocab_size: int,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """One pipeline chunk of the GPT model that the settings describe."""
    from megatron.training.recipes.gpt import build_gpt_model

    return build_gpt_model(
        config,
        padded_vocab_size,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def train_valid_test_datasets_provider(
    config: RunConfig, tokenizer: Tokenizer, num_samples: tuple[int, int | None, int]
) -> Sequence[Any]:
    """Training, validation and test data with at least `num_samples` samples each; None where there is none."""
    from megatron.training.recipes.gpt_data import build_gpt_datasets

    return build_gpt_datasets(config, tokenizer, num_samples)


def loss_func(loss_mask: Tensor, output: Tensor) -> LossOutput:
    """Loss of one microbatch: its sum over the tokens that count, their number, and both once more for the log.

    loss_mask, output: [b, s], output being each token's loss in float32.
    """
    import torch

    mask = loss_mask.flatten()
    loss_sum = (output.flatten() * mask).sum()
    num_tokens = mask.sum()
    return loss_sum, num_tokens, {"lm loss": torch.stack([loss_sum.detach(), num_tokens])}


def forward_step(
    batches: Iterator[dict[str, Tensor]], model: DistributedDataParallel
) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
    """The model on this rank's tokens of the next microbatch: each token's loss, and how to reduce it."""
    from megatron.core.context_parallel.sharding import get_batch_on_this_cp_rank
    from megatron.core.packed_seq_params import pack_batch

    batch, packed_seq_params = pack_batch(next(batches), model.groups.hybrid_cp)
    own_group = None if packed_seq_params is None else packed_seq_params.cp_group
    batch = get_batch_on_this_cp_rank(batch, own_group or model.groups.cp)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed_seq_params,
    )
    return output, functools.partial(loss_func, batch["loss_mask"])


def train(config: RunConfig) -> Run:
    """The whole run that the settings describe."""
    from megatron.core.enums import ModelType
    from megatron.training.recipes.gpt import padded_vocab_size_of, tokenizer_of
    from megatron.training.training import pretrain

    tokenizer = tokenizer_of(config)
    return pretrain(
        functools.partial(train_valid_test_datasets_provider, config, tokenizer),
        functools.partial(model_provider, config, padded_vocab_size_of(config, tokenizer)),
        ModelType.encoder_or_decoder,
        forward_step,
        run_config=config,
        tokenizer=tokenizer,
    )


def main() -> int:
    """Read the flags, then train."""
    train(read_run_config(sys.argv[1:], with_world_size(os.environ)))
    return 0


if __name__ == "__main__":
    leave(run_job(main, os.environ))
