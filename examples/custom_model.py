"""An architecture of your own, in plain torch: a recurrent network on the trainer of pretrain_gpt.py.

    python examples/custom_model.py --residual <flags of pretrain_gpt.py>

Data, batches, data parallelism, optimizer, schedule, checkpoints and logs are the trainer's. See docs/models.md.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt  # noqa: E402
from megatron.core.errors import ConfigError  # noqa: E402
from megatron.training.config.container import RunConfig  # noqa: E402
from megatron.training.flags.read import read_run_config  # noqa: E402
from megatron.training.launch.launch import leave, run_job, with_world_size  # noqa: E402


def model_provider(config: RunConfig, vocab_size: int, pre_process: bool = True, post_process: bool = True) -> Any:
    """The whole model; its layers cannot lie on several pipeline stages, nor its sequences on several processes."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    if not (pre_process and post_process) or config.model.context_parallel_size > 1:
        raise ConfigError("this model is whole: no --pipeline-model-parallel-size or --context-parallel-size above 1")
    width = config.model.hidden_size

    class RecurrentModel(nn.Module):
        """Embedding, gated recurrent units (Cho et al., 2014), output layer."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, width)
            self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(config.model.num_layers))
            self.output_layer = nn.Linear(width, vocab_size)

        def forward(self, tokens: Tensor, *_: Any, labels: Tensor, **__: Any) -> Tensor:
            """tokens, labels int64 [b, s] -> loss of each token, float32 [b, s]."""
            hidden = self.embedding(tokens)  # [b, s, h]
            for layer in self.layers:
                output, _state = layer(hidden)
                hidden = hidden + output if config.extra["residual"] else output
            logits = self.output_layer(hidden).float()  # [b, s, v]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)

    return RecurrentModel().to(torch.bfloat16 if config.model.bf16 else torch.float32)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this script beside those of pretrain_gpt.py."""
    parser.add_argument("--residual", action="store_true", help="Add the input of each layer to its output.")


def main() -> int:
    """Read the flags, then train."""
    config = read_run_config(sys.argv[1:], with_world_size(os.environ), add_flags)
    from megatron.core.enums import ModelType
    from megatron.training.recipes.gpt import padded_vocab_size_of, tokenizer_of
    from megatron.training.training import pretrain

    tokenizer = tokenizer_of(config)
    pretrain(
        functools.partial(pretrain_gpt.train_valid_test_datasets_provider, config, tokenizer),
        functools.partial(model_provider, config, padded_vocab_size_of(config, tokenizer)),
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        run_config=config,
        tokenizer=tokenizer,
    )
    return 0


if __name__ == "__main__":
    leave(run_job(main, os.environ))
