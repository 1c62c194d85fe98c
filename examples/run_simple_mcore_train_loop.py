# SPDX-License-Identifier: Apache-2.0
"""The library without the trainer: a tiny GPT in a training loop of your own, with Megatron-LM's names.

    python examples/run_simple_mcore_train_loop.py
    torchrun --nproc-per-node 2 examples/run_simple_mcore_train_loop.py --tensor-model-parallel-size 2
    torchrun --nproc-per-node 4 examples/run_simple_mcore_train_loop.py --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --save /tmp/tiny --load /tmp/earlier

Processes that tensor and pipeline parallelism leave over are replicas, which share each batch of eight samples. The
losses are the same for every layout, up to rounding: weights depend on the seed and their names, batches on the seed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Adam
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.datasets.utils import compile_helpers  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.tokenizers import MegatronTokenizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

SEQUENCE_LENGTH = 64
BATCH_SIZE = 8


def initialize_distributed(tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1) -> torch.device:
    """Join the other processes, if torchrun started any, and make the process groups; returns this one's device."""
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    use_cuda = torch.cuda.is_available() and os.environ.get("MEGATRON_DEVICE") != "cpu"
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    # Without torchrun there is one process, which needs no process group: collectives over one rank are left out.
    if "WORLD_SIZE" in os.environ:
        backend = "nccl" if use_cuda else "gloo"
        torch.distributed.init_process_group(backend, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size, pipeline_model_parallel_size)
    return device


def build_model() -> GPTModel:
    """This process's part of a GPT of two layers. Without dropout, whose draws would depend on the layout."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=100,
        max_sequence_length=SEQUENCE_LENGTH,
        # The first stage has the embedding, the last one the output layer and the loss.
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def build_batches() -> Iterator[dict[str, torch.Tensor]]:
    """Microbatches of random tokens: of every eight samples, those of this replica."""
    # This call does nothing here: loops that are written for upstream have it.
    compile_helpers()
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE_LENGTH,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=SEQUENCE_LENGTH),
    )
    train, _, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, [1000, None, None], lambda: True, config).build()
    replica = parallel_state.get_data_parallel_rank()
    # Replicas share the batch, so that every layout trains on the same eight samples in a step.
    share = BATCH_SIZE // parallel_state.get_data_parallel_world_size()
    ours = [range(first, first + share) for first in range(replica * share, len(train) - BATCH_SIZE, BATCH_SIZE)]
    return iter(DataLoader(train, batch_sampler=[list(numbers) for numbers in ours]))


def forward_step_func(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """The model on one microbatch, and what makes a loss of its output on the last stage."""

    def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses, mask = output.float().flatten(), loss_mask.flatten()
        loss = (losses * mask).sum() / mask.sum()
        return loss, {"lm loss": loss}

    device = next(model.parameters()).device
    batch = {name: values.to(device) for name, values in next(data_iterator).items()}
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def train(model: DistributedDataParallel, iterations: int) -> None:
    """Some steps of Adam; the first process prints the losses."""
    batches = build_batches()
    optimizer = Adam(model.parameters(), lr=3e-3)
    forward_backward = get_forward_backward_func()
    for iteration in range(iterations):
        # Gradients are added up in flat buffers over the microbatches of a step, so these begin at zero.
        model.zero_grad_buffer()
        losses = forward_backward(
            forward_step_func=forward_step_func,
            data_iterator=batches,
            model=model,
            num_microbatches=1,
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=BATCH_SIZE // parallel_state.get_data_parallel_world_size(),
            decoder_seq_length=SEQUENCE_LENGTH,
            forward_only=False,
        )
        # The mean over the replicas; also the sum of gradients that tensor- and pipeline-parallel ranks hold in part.
        finalize_model_grads([model])
        for parameter in model.parameters():
            # Gradients lie in the flat buffers of the wrapper; an optimizer of torch's looks for them here.
            parameter.grad = parameter.main_grad  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        show_loss(iteration, losses)


def show_loss(iteration: int, losses: list[dict[str, torch.Tensor]]) -> None:
    """The mean over the replicas of what their last stages found."""
    if not parallel_state.is_pipeline_last_stage():
        return
    loss = torch.stack([entry["lm loss"] for entry in losses]).mean()
    if parallel_state.get_data_parallel_world_size() > 1:
        torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        loss /= parallel_state.get_data_parallel_world_size()
    if parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
        print(f"iteration {iteration}: lm loss {loss.item():.6f}", flush=True)


def save_distributed_checkpoint(checkpoint_path: str, model: DistributedDataParallel) -> None:
    """All processes write one checkpoint, which every layout can load."""
    sharded_state_dict = model.sharded_state_dict(prefix="")
    dist_checkpointing.save(sharded_state_dict=sharded_state_dict, checkpoint_dir=checkpoint_path)


def load_distributed_checkpoint(checkpoint_path: str, model: DistributedDataParallel) -> None:
    """Fill the model from a checkpoint of whatever layout."""
    sharded_state_dict = model.sharded_state_dict(prefix="")
    checkpoint = dist_checkpointing.load(sharded_state_dict=sharded_state_dict, checkpoint_dir=checkpoint_path)
    model.load_state_dict(checkpoint)


def main() -> None:
    """Build, load, train, save."""
    parser = argparse.ArgumentParser(description="A training loop of one's own on megatron.core.")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--save", help="directory of the checkpoint to write; it must not exist")
    parser.add_argument("--load", help="directory of a checkpoint to begin with")
    flags = parser.parse_args()

    device = initialize_distributed(flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size)
    model_parallel_cuda_manual_seed(123)
    gpt_model = build_model().to(device)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    model = DistributedDataParallel(config=gpt_model.config, ddp_config=ddp_config, module=gpt_model)
    if flags.load:
        load_distributed_checkpoint(flags.load, model)
    train(model, flags.iterations)
    if flags.save:
        save_distributed_checkpoint(flags.save, model)


if __name__ == "__main__":
    main()
    parallel_state.leave_job()
