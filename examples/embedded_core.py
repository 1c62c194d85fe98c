# SPDX-License-Identifier: Apache-2.0
"""Layers of megatron.core in a platform that has its own model, data, loop and process groups.

    python examples/embedded_core.py
    torchrun --nproc-per-node 2 examples/embedded_core.py --tensor-parallel 2
    torchrun --nproc-per-node 4 examples/embedded_core.py --tensor-parallel 2

The platform is played by plain PyTorch: a classifier of sequences, a DataLoader, torch's DistributedDataParallel and
AdamW, and a DeviceMesh. Only the encoder's layers come from the library, and are divided over the mesh's tensor-
parallel ranks. The losses are the same for every number of processes, up to rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.mesh import RankGrid  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.parallel_state import leave_job  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection, SingleRankGroup  # noqa: E402
from megatron.core.tensor_parallel.parameters import initialise_parameters  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

BATCH, LENGTH, VOCABULARY, CLASSES = 8, 12, 40, 3


def map_groups(mesh: DeviceMesh | None) -> ProcessGroupCollection:
    """The platform's groups under the library's names. mesh: axes dp and tp; None for one process.

    A layer asks for the group of its tensor-parallel ranks and, to draw dropout, for its place in the grid; groups of
    axes that the platform does not use have one member.
    """
    if mesh is None:
        return ProcessGroupCollection.single()
    tp, dp = mesh["tp"], mesh["dp"]
    grid = RankGrid(mesh.size(), tp=tp.size())
    alone = SingleRankGroup(torch.distributed.get_rank())
    # A group of one has no communicator: collectives over it are left out.
    of_tp = tp.get_group() if tp.size() > 1 else alone
    of_dp = dp.get_group() if dp.size() > 1 else alone
    world = torch.distributed.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    return dataclasses.replace(
        ProcessGroupCollection.pretend(grid, torch.distributed.get_rank()),
        tp=of_tp, mp=of_tp, tp_cp=of_tp, dp=of_dp, dp_cp=of_dp, pp=alone, cp=alone, world=world,
    )  # fmt: skip


class Classifier(nn.Module):
    """The platform's model: its own embedding and head around layers of the library."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__()
        width = config.hidden_size
        assert width is not None
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.encoder = TransformerBlock(config, get_gpt_layer_local_spec(), pg_collection=groups)
        self.head = nn.Linear(width, CLASSES)
        # The library's parameters are declared first and filled here, as functions of seed and name: the shards of
        # any number of ranks are cut from the same weights.
        initialise_parameters(self.encoder, seed=config.seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [b, s] -> logits [b, classes]."""
        hidden = self.embedding(tokens).transpose(0, 1)  # layers take [s, b, h]
        return self.head(self.encoder(hidden.contiguous())[-1])


def build_data(seed: int) -> TensorDataset:
    """Sequences, and as their class what the sum of their tokens leaves when divided by the number of classes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (40 * BATCH, LENGTH), generator=generator)
    return TensorDataset(tokens, tokens[:, -1] % CLASSES)


def train(model: nn.Module, mesh: DeviceMesh | None, steps: int) -> list[float]:
    """The platform's loop; returns the loss of each step, the mean over all replicas."""
    replicas, replica = (mesh["dp"].size(), mesh["dp"].get_local_rank()) if mesh is not None else (1, 0)
    share = BATCH // replicas
    # Tensor-parallel ranks of a replica read the same samples.
    ours = [
        list(range(first + replica * share, first + (replica + 1) * share)) for first in range(0, steps * BATCH, BATCH)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for tokens, labels in DataLoader(build_data(0), batch_sampler=ours):
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        if mesh is not None and replicas > 1:
            torch.distributed.all_reduce(shown, group=mesh["dp"].get_group())
            shown /= replicas
        losses.append(shown.item())
    return losses


def main() -> None:
    """Join the others, build the model, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share each layer (1)")
    parser.add_argument("--steps", type=int, default=20, help="steps of training, at most 40 (20)")
    flags = parser.parse_args()
    mesh, world_size = None, int(os.environ.get("WORLD_SIZE", "1"))
    if BATCH % max(1, world_size // flags.tensor_parallel) or world_size % flags.tensor_parallel:
        parser.error(f"{world_size} processes are not a divisor of {BATCH} replicas of {flags.tensor_parallel} ranks")
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
        shape = (world_size // flags.tensor_parallel, flags.tensor_parallel)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=flags.tensor_parallel,
    )  # fmt: skip
    # The platform's own weights: the same on every rank.
    torch.manual_seed(1)
    model: nn.Module = Classifier(config, map_groups(mesh))
    if mesh is not None and mesh["dp"].size() > 1:
        # Replicas of the same shard average gradients; what tensor-parallel ranks hold whole is alike already.
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    losses = train(model, mesh, flags.steps)
    if int(os.environ.get("RANK", "0")) == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
    leave_job()
