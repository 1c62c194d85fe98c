# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model trained by the library, whose weights are handed back while training goes on.

    python examples/programs/sync_weights.py --model Llama-3.1-8B
    torchrun --nproc-per-node 2 examples/programs/sync_weights.py --model Llama-3.1-8B

A rollout engine, or a Hugging Face model as here, gets every tensor under its own name from `export_weights`, whole,
one by one, without a file in between; what it then computes is what the trained model computes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.hf import AutoBridge  # noqa: E402

LENGTH = 16


def train_a_little(model: DistributedDataParallel, tokens: Tensor, steps: int) -> list[float]:
    """Some steps of Adam on the same tokens [b, LENGTH + 1]; returns the losses."""
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.0), [model])
    positions = torch.arange(LENGTH).expand(len(tokens), -1)
    losses = []
    for _ in range(steps):
        model.zero_grad_buffer()
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    """Load, train, hand the weights over, compare."""
    parser = argparse.ArgumentParser(description="Hand the weights of a model in training to a Hugging Face model.")
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("--steps", type=int, default=3)
    flags = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel()
    from transformers import AutoModelForCausalLM

    bridge = AutoBridge.from_hf_pretrained(flags.model)
    inner: Any = bridge.to_megatron()
    model = DistributedDataParallel(inner.config, DistributedDataParallelConfig(), inner)
    engine = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()

    draws = torch.Generator().manual_seed(mpu.get_data_parallel_rank())
    tokens = torch.randint(engine.config.vocab_size, (4, LENGTH + 1), generator=draws)
    losses = train_a_little(model, tokens, flags.steps)
    # All ranks take part, and get the whole tensors.
    missing, unexpected = engine.load_state_dict(dict(bridge.export_weights([model])), strict=False)
    assert not unexpected, unexpected

    inner.eval()
    with torch.no_grad():
        ours = inner(tokens[:, :-1], torch.arange(LENGTH).expand(4, -1), None).float()
        theirs = engine(tokens[:, :-1]).logits
    apart = float((ours[..., : theirs.shape[-1]] - theirs).abs().max())
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"losses {' '.join(f'{loss:.4f}' for loss in losses)}; logits apart by {apart:.1e}; left out: {missing}")


if __name__ == "__main__":
    main()
    mpu.leave_job()
