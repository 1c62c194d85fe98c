# SPDX-License-Identifier: Apache-2.0
"""Train on data of your own: sums such as `34+21=55`, with a loss on the answer only. See docs/data.md.

    python examples/custom_dataset.py --largest 99 <flags of pretrain_gpt.py>

With --dataloader-type external it hands over whole batches instead of samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.training.config.container import RunConfig  # noqa: E402
from megatron.training.flags.read import read_run_config  # noqa: E402
from megatron.training.launch.launch import add_world_size, leave, run_job  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

SIGNS = "0123456789+=."  # the token id of a sign is its place; "." fills up


class Sums:
    """A dataset is whatever has a length and gives sample i: the same one whenever it is asked."""

    def __init__(self, samples: int, seq_length: int, largest: int, seed: int) -> None:
        self.samples, self.seq_length, self.largest, self.seed = samples, seq_length, largest, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """tokens, labels, position_ids int64 [s]; loss_mask float32 [s], 1 where the label counts."""
        import torch

        # Drawn from the index alone: a resumed run, and any number of loader processes, see the same samples.
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        a, b = torch.randint(0, self.largest + 1, (2,), generator=random).tolist()
        text = f"{a}+{b}={a + b}"
        ids = torch.tensor([SIGNS.index(sign) for sign in text.ljust(self.seq_length + 1, ".")])
        places = torch.arange(self.seq_length)
        counts = (places >= text.index("=")) & (places < len(text))  # the answer, and that it ends
        return {"tokens": ids[:-1], "labels": ids[1:], "position_ids": places, "loss_mask": counts.float()}


class Batches:
    """For --dataloader-type external: yields the microbatches of this data-parallel rank."""

    def __init__(self, dataset: Sums, micro_batch_size: int) -> None:
        self.dataset, self.micro_batch_size, self.first = dataset, micro_batch_size, 0

    def start_at(self, consumed_samples: int) -> None:
        """Called before reading: the samples that all ranks have consumed, in this run and those it continues."""
        self.first = consumed_samples

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        import torch

        from megatron.core.process_groups_config import ProcessGroupCollection

        group = ProcessGroupCollection.current().dp
        # Replicas take microbatches in turn, as the trainer's own samplers do, so that consumed_samples means the same.
        offset, step = group.rank() * self.micro_batch_size, group.size() * self.micro_batch_size
        for start in range(self.first + offset, len(self.dataset) - self.micro_batch_size + 1, step):
            samples = [self.dataset[i] for i in range(start, start + self.micro_batch_size)]
            yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def datasets_provider(config: RunConfig, num_samples: Sequence[int | None]) -> list[Any]:
    """Training, validation and test data; None where no samples are wanted. A count of None: all there are."""
    assert config.data.seq_length is not None, "checked by read_run_config"
    sums: list[Any] = []
    # The split is the seed, so that training never sees a validation sample by the same draw.
    for seed, samples in enumerate(num_samples):
        wanted = 1000 if samples is None else samples
        sums.append(Sums(wanted, config.data.seq_length, config.extra["largest"], seed) if wanted else None)
    if config.data.dataloader_type == "external":
        # None, for a split without samples, stays None.
        sums = [data and Batches(data, config.training.micro_batch_size or 1) for data in sums]
    return sums


def extra_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this script, beside those of pretrain_gpt.py; their values are in `config.extra`."""
    parser.add_argument("--largest", type=int, default=9, help="largest number to add")


def main() -> int:
    config = read_run_config(sys.argv[1:], add_world_size(os.environ), extra_flags)
    from megatron.training.recipes.gpt import build_gpt_recipe
    from megatron.training.training import run_recipe

    build_datasets = functools.partial(datasets_provider, config)
    run_recipe(config, dataclasses.replace(build_gpt_recipe(config), build_datasets=build_datasets))
    return 0


if __name__ == "__main__":
    leave(run_job(main, os.environ))
