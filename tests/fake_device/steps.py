# SPDX-License-Identifier: Apache-2.0
"""Training steps on the fake device, each rank of a layout in turn. Imports torch: device.install() comes first."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import fused_collectives
from megatron.core.transformer.moe import grouped_products
from megatron.planner.step_memory import predict_step_memory
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.dry_run import share_evenly
from megatron.training.launch.initialize import Process, build_rank_grid, set_seeds
from megatron.training.launch.launch import Launch
from megatron.training.loop import train
from megatron.training.recipes.gpt import build_gpt_recipe, describe_gpt_workload
from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size
from megatron.training.run import Hook, Phase, Run, Step
from megatron.training.setup import setup
from megatron.training.verify.parity_layouts import parse_layout
from tests.fake_device import device
from tests.fake_device.recorder import Recorder, replace_operations

ITERATIONS, WATCHED = 3, 2
"""The first one meets groups and takes memory, the last one reads values for the log."""


@dataclass
class Seen:
    """What one rank did."""

    parameters: int
    """That it holds."""
    setup_peak_bytes: int
    live_bytes: int
    """After set-up."""
    step_peak_bytes: int
    planned_peak_bytes: float
    """By the formula of megatron/planner/step_memory.py."""
    peak_holders: dict[str, int]
    """Place in the program -> bytes made there that lived at the peak of the step."""
    kernels: dict[str, int]
    waits: dict[str, int]
    collectives: list[Any]
    """Name, ranks, elements and dtype of each, in order."""
    back_to_back: list[str]
    """The longest row of collectives that were started without a kernel between them."""
    copies: dict[str, int]
    """Between host and device, see Recorder.count_copies."""
    replays: tuple[int, int]
    """Of CUDA graphs, see Recorder.count_replays."""
    seconds: float
    """Of the computation's stream, by clock.py."""
    races: list[str]
    """See Recorder."""


def run_layout(text: str, flags: list[str], which: str = "all") -> list[Seen]:
    """What the ranks of a layout did, or one of each pipeline stage where which is `stages`; as on linked GPUs where
    it is `linked`."""
    replace_operations()
    # To try it takes values.
    fused_collectives._works = lambda fused, members: True  # type: ignore[assignment]
    fused_collectives._agree = lambda answer, members: answer  # type: ignore[assignment]
    fused_collectives.can_fuse_collectives = lambda group: which == "linked"  # type: ignore[assignment]
    # What an H200 answers; to try it takes values.
    grouped_products.grouped_mm_works = lambda widths, dtype, device: dtype == torch.bfloat16  # type: ignore[assignment]
    layout = parse_layout(text)
    own = f"--train-iters {ITERATIONS} --log-interval {ITERATIONS} --eval-iters 0 --num-workers 0".split()
    step = layout.world_size // layout.sizes["pp"] if which == "stages" else 1
    ranks = range(0, layout.world_size, step)
    return [_run_rank([*flags, *layout.flags, *own], rank, layout.world_size) for rank in ranks]


def _run_rank(flags: list[str], rank: int, world_size: int) -> Seen:
    """Set up and train as one rank, whose partners are imagined."""
    config = read_run_config(flags, {"WORLD_SIZE": str(world_size)})
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        groups = ProcessGroupCollection.build(build_rank_grid(config, world_size), rank)
        groups.set_current()
        return _watch(config, Process(Launch(rank, world_size, rank), torch.device("cuda", 0), groups))
    finally:
        ProcessGroupCollection.clear_current()
        if world_size > 1:
            dist.destroy_process_group()


def _watch(config: RunConfig, process: Process) -> Seen:
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        recorder = stack.enter_context(Recorder(functools.partial(share_evenly, config)))
        set_seeds(config.model.seed, process.groups)
        run = setup(config, process, build_gpt_recipe(config))
        run.data = Batches(run)  # type: ignore[assignment]
        watch = Watch(recorder, (recorder.peak_bytes, recorder.live_bytes))
        run.hooks.hooks.append(watch)  # type: ignore[attr-defined]
        train(run)
    assert watch.seen is not None, f"there was no iteration {WATCHED}"
    return watch.seen


class Watch(Hook):
    """Keeps what one iteration did. setup_bytes: the peak of set-up, and what it left."""

    phase = Phase.SAVE  # around everything that other hooks do

    def __init__(self, recorder: Recorder, setup_bytes: tuple[int, int]) -> None:
        self.recorder, self.setup_bytes = recorder, setup_bytes
        self.seen: Seen | None = None

    def wrap_step(self, step: Step) -> Step:
        """As Hook says."""

        def watched(run: Run, batches: Iterator[Any]) -> None:
            self.recorder.restart()
            begun = device.COMPUTATION.seconds
            step(run, batches)
            if run.progress.iteration == WATCHED:
                parameters = sum(weight.numel() for chunk in run.model for weight in chunk.module.parameters())
                recorder = self.recorder
                self.seen = Seen(
                    parameters, *self.setup_bytes, recorder.peak_bytes, plan_peak(run), dict(recorder.peak_holders),
                    dict(recorder.kernels),
                    dict(recorder.count_waits()), list(recorder.collectives), recorder.find_longest_row(),
                    recorder.count_copies(), recorder.count_replays(), device.COMPUTATION.seconds - begun,
                    recorder.races,
                )  # fmt: skip

        return watched


def plan_peak(run: Run) -> float:
    """What the formula says of this rank."""
    config = run.config
    workload = describe_gpt_workload(config, compute_padded_vocab_size(config, build_tokenizer(config)))
    stages = predict_step_memory(config.model, config.ddp, config.optimizer, workload)
    return stages[run.groups.pp.rank()].total


class Batches:
    """Microbatches without values, on the device."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def has(self, split: str) -> bool:
        """Only for training."""
        return split == "train"

    def open(self, split: str, consumed_samples: int, part: int = 0) -> Iterator[dict[str, Tensor]]:
        """As TrainingData does."""
        shape = (self.run.config.training.micro_batch_size, self.run.config.data.seq_length or 1)
        while True:
            batch = {
                name: torch.empty(shape, dtype=torch.int64, device=self.run.device)
                for name in ("tokens", "labels", "position_ids")
            }
            yield batch | {"loss_mask": torch.empty(shape, dtype=torch.float32, device=self.run.device)}

    def close(self) -> None:
        """Nothing is open."""
