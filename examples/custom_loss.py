# SPDX-License-Identifier: Apache-2.0
"""A loss, a flag and a curve of one's own, in upstream's style: the focal loss (Lin et al., 2017).

    python examples/custom_loss.py --focal-gamma 2 <flags of pretrain_gpt.py>

Tokens that the model already predicts well count less: (1 - p)^gamma times their loss, p being their probability. With
--tensorboard-dir the mean probability is drawn after each evaluation. Works in every layout.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt  # noqa: E402
from megatron.training.launch.launch import leave, run_job  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, nn


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags of this script; get_args() has their values."""
    parser.add_argument("--focal-gamma", type=float, default=0.0, help="0: the usual loss")
    return parser


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, pg_collection: Any = None
) -> nn.Module:
    """One pipeline chunk of the GPT model that the flags describe."""
    from megatron.training import get_args

    args = get_args()
    return pretrain_gpt.model_provider(
        args.run_config, args.padded_vocab_size, pre_process, post_process, vp_stage, pg_collection
    )


def datasets_provider(num_samples: tuple[int, int | None, int]) -> Sequence[Any]:
    """The data that the flags name."""
    from megatron.training import get_args, get_tokenizer

    return pretrain_gpt.train_valid_test_datasets_provider(get_args().run_config, get_tokenizer(), num_samples)


def loss_func(loss_mask: Tensor, output: Tensor, non_loss_data: bool = False) -> Any:
    """Sum of the focal losses, number of tokens, and both once more for the log. output: [b, s], each token's loss.

    non_loss_data: instead, the mean probability of the right token.
    """
    import torch

    from megatron.training import get_args

    losses, mask = output.flatten(), loss_mask.flatten()
    # The usual loss of a token is -log p.
    probability = torch.exp(-losses)
    if non_loss_data:
        return float((probability * mask).sum() / mask.sum().clamp(min=1))
    loss_sum = ((1 - probability) ** get_args().focal_gamma * losses * mask).sum()
    return loss_sum, mask.sum(), {"focal loss": torch.stack([loss_sum.detach(), mask.sum()])}


def forward_step(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """The model on the next microbatch; pretrain_gpt.py says how, this script what the loss is."""
    from megatron.training import get_timers

    # Appears below the progress line with --timing-log-level 2.
    with get_timers()("focal-forward", log_level=2):
        output, usual = pretrain_gpt.forward_step(batches, model)
    # GPT's forward step returns functools.partial(loss_func, loss_mask); the mask is taken from there.
    (loss_mask,) = usual.args  # type: ignore[attr-defined]
    return output, functools.partial(loss_func, loss_mask)


def draw_probability(data: Sequence[float], iteration: int, writer: Any) -> None:
    """data: of each microbatch what loss_func returned for non_loss_data."""
    writer.add_scalar("probability of the right token", sum(data) / len(data), iteration)


def main() -> int:
    """Read the flags and train."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        draw_probability,
        extra_args_provider=add_flags,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    return 0


if __name__ == "__main__":
    leave(run_job(main, os.environ))
