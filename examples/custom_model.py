# SPDX-License-Identifier: Apache-2.0
"""An architecture of your own, in plain torch: a recurrent network on the trainer of pretrain_gpt.py.

    python examples/custom_model.py --residual <flags of pretrain_gpt.py>

Data, batches, data parallelism, optimizer, schedule, checkpoints and logs are the trainer's. See docs/models.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.training.config.container import RunConfig  # noqa: E402
from megatron.training.flags.read import read_run_config  # noqa: E402
from megatron.training.launch.launch import add_world_size, leave, run_job  # noqa: E402


def model_provider(config: RunConfig, vocab_size: int, pre_process: bool = True, post_process: bool = True) -> Any:
    """The whole model: it has the embedding and the output layer."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    width = config.model.hidden_size

    # Inside the function, so that torch is imported only after the flags were read.
    class RecurrentModel(nn.Module):
        """Embedding, gated recurrent units (Cho et al., 2014), output layer."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, width)
            self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(config.model.num_layers))
            self.output_layer = nn.Linear(width, vocab_size)

        # GPT's forward step also hands over positions, masks and the loss mask, which this network does not need.
        def forward(self, tokens: Tensor, *_: Any, labels: Tensor, **__: Any) -> Tensor:
            """tokens, labels int64 [b, s] -> loss of each token, float32 [b, s]."""
            hidden = self.embedding(tokens)  # [b, s, h]
            for layer in self.layers:
                output, _state = layer(hidden)
                hidden = hidden + output if config.extra["residual"] else output
            logits = self.output_layer(hidden).float()  # [b, s, v]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)

    # The optimizer keeps main parameters in float32 where the model's are bfloat16.
    return RecurrentModel().to(torch.bfloat16 if config.model.bf16 else torch.float32)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this script beside those of pretrain_gpt.py."""
    parser.add_argument("--residual", action="store_true", help="Add the input of each layer to its output.")


def main() -> int:
    """Read the flags, then train."""
    config = read_run_config(sys.argv[1:], add_world_size(os.environ), add_flags)
    from megatron.training.recipes.gpt import build_gpt_recipe
    from megatron.training.training import run_recipe

    gpt = build_gpt_recipe(config)  # its tokens, data, forward step and loss serve this model, too
    recipe = dataclasses.replace(
        gpt,
        build_model=functools.partial(model_provider, config, gpt.padded_vocab_size),
        parallel_axes=(),  # layers cannot lie on several pipeline stages, nor sequences on several processes
        max_sequence_length=None,
    )
    run_recipe(config, recipe)
    return 0


if __name__ == "__main__":
    leave(run_job(main, os.environ))
