#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""How much of the time that gradients and parameters travel is hidden behind computation.

    OMP_NUM_THREADS=1 python benchmarks/overlap.py                     # 2 processes, an artificial link
    OMP_NUM_THREADS=1 python benchmarks/overlap.py --link-share 0.8    # a slower link

Two replicas with the distributed optimizer train the same model twice in turn, with and without --overlap-grad-reduce
--overlap-param-gather. Between them lies an artificial link: it carries one collective after the other, and one of n
bytes is over n / rate seconds after its turn has come, or when gloo is done, if that is later. The rate is chosen so
that all gradients take `--link-share` of the time that backward takes, and all parameters the same share of forward.

Exposed is the time that a process stands and waits for the link. Hidden is 1 - exposed with overlap / exposed without.
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import print_conditions
from megatron.core.distributed import bucket as bucket_module
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.mesh import RankGrid
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.launch.local_job import run_locally

PROCESSES, LAYERS, HIDDEN, SEQUENCE, BATCH, VOCABULARY = 2, 8, 192, 128, 12, 512
MODES = ("plain", "overlapped")
KINDS = ("gradients", "parameters")


@dataclass
class Link:
    """Carries one collective after the other. rate: bytes per second for each kind; None: as fast as gloo."""

    rate: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(KINDS))
    free_at: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    # Clock and sleep can be replaced, so that a test of this file need not wait.
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], object] = time.sleep

    def carry(self, kind: str, tensor: Tensor, work: Any) -> Travel:
        """Put a collective that has started on the link."""
        size = tensor.numel() * tensor.itemsize
        self.bytes[kind] += size
        rate = self.rate[kind]
        if rate is not None:
            # A collective begins when the link is free, and not before it is asked for.
            self.free_at = max(self.free_at, self.clock()) + size / rate
        return Travel(self, kind, work, self.free_at)

    def delayed(self, kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Return the collective, going over the link."""

        def carried(tensor: Tensor, *arguments: Any, async_op: bool = False) -> Travel | None:
            travel = self.carry(kind, tensor, collective(tensor, *arguments, async_op=True))
            if async_op:
                return travel
            travel.wait()
            return None

        return carried


@dataclass
class Travel:
    """A collective under way over the artificial link."""

    link: Link
    kind: str
    work: Any
    arrives_at: float

    def wait(self) -> None:
        """The real collective is not counted: on one machine it competes with computation for the processors."""
        self.work.wait()
        # Only what is left when somebody waits is exposed; the rest went by beside computation.
        remaining = self.arrives_at - self.link.clock()
        if remaining > 0:
            self.link.sleep(remaining)
            self.link.exposed[self.kind] += remaining


@dataclass
class Replica:
    """One process's model under one mode."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    tokens: Tensor
    loss: float = 0.0

    def forward(self) -> Tensor:
        """Return the mean loss."""
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        loss: Tensor = self.model(self.tokens[:, :-1], positions, labels=self.tokens[:, 1:]).mean()
        return loss

    def step(self) -> tuple[float, float]:
        """One training step; seconds of forward and of backward with their waiting."""
        self.model.zero_grad_buffer()
        started = time.perf_counter()
        loss = self.forward()
        forward_done = time.perf_counter()
        self.model.enable_grad_sync()
        loss.backward()
        backward_done = time.perf_counter()
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.loss = loss.item()
        return forward_done - started, backward_done - forward_done


def build(mode: str, groups: ProcessGroupCollection) -> Replica:
    """Both modes start from the same weights and see the same tokens."""
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
    )
    network = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE, pg_collection=groups)
    overlaps = mode == "overlapped"
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        bucket_size=12 * HIDDEN * HIDDEN if overlaps else None,  # a layer
    )
    model = DistributedDataParallel(config, ddp_config, network, pg_collection=groups)
    generator = torch.Generator().manual_seed(groups.dp.rank())
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return Replica(model, get_megatron_optimizer(OptimizerConfig(lr=1e-4), [model], pg_collection=groups), tokens)


def run(rank: int, rounds: int, link_share: float) -> dict[str, Any]:
    """On each process: measure computation, set the link's rate, then take both modes in turn."""
    torch.manual_seed(0)
    link = Link()
    for name in ("reduce_scatter_in_place", "all_reduce"):
        # The collectives are replaced where the buckets call them, so the code that is measured is the code that
        # trains.
        setattr(bucket_module, name, link.delayed("gradients", getattr(bucket_module, name)))
    bucket_module.all_gather_in_place = link.delayed("parameters", bucket_module.all_gather_in_place)
    groups = ProcessGroupCollection.build(RankGrid(PROCESSES), rank)
    replicas = {mode: build(mode, groups) for mode in MODES}
    for mode in ("overlapped", "plain"):
        replicas[mode].step()
        link.bytes = dict.fromkeys(KINDS, 0)
        times = [replicas[mode].step() for _ in range(2)]
    sizes = {kind: count / 2 for kind, count in link.bytes.items()}
    seconds = torch.tensor([min(column) for column in zip(*times, strict=True)])
    # Both processes must use one rate, or their links would differ.
    torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MIN)
    forward, backward = (float(value) for value in seconds)
    link.rate = {
        "gradients": sizes["gradients"] / (link_share * backward),
        "parameters": sizes["parameters"] / (link_share * forward),
    }
    found: dict[str, Any] = {mode: [] for mode in MODES} | {"forward": forward, "backward": backward, "bytes": sizes}
    for round_number in range(rounds + 1):
        for mode in MODES:
            torch.distributed.barrier()
            link.exposed = dict.fromkeys(KINDS, 0.0)
            started = time.perf_counter()
            replicas[mode].step()
            replicas[mode].step()
            replicas[mode].forward()  # a step's parameters are gathered during the next forward
            elapsed = time.perf_counter() - started
            # The first round warms up.
            if round_number > 0:
                found[mode].append({"round": elapsed} | {kind: link.exposed[kind] / 2 for kind in KINDS})
    found["losses"] = [replicas[mode].loss for mode in MODES]
    return found


def report(ranks: list[dict[str, Any]]) -> float:
    """Prints the table and returns the hidden share of all communication."""
    first = ranks[0]
    print(f"computation without the link: forward {first['forward']:.3f} s, backward {first['backward']:.3f} s")
    print(
        f"bytes in a step: gradients {first['bytes']['gradients']:,.0f}, parameters {first['bytes']['parameters']:,.0f}"
    )
    print(f"{'exposed seconds a step':<24}{'plain':>10}{'overlapped':>12}{'hidden':>9}")
    totals = dict.fromkeys(MODES, 0.0)
    for kind in KINDS:
        means = {mode: statistics.mean(entry[kind] for rank in ranks for entry in rank[mode]) for mode in MODES}
        for mode in MODES:
            totals[mode] += means[mode]
        print(f"{kind:<24}{means['plain']:>10.4f}{means['overlapped']:>12.4f}{_hidden(means):>9.1%}")
    print(f"{'both':<24}{totals['plain']:>10.4f}{totals['overlapped']:>12.4f}{_hidden(totals):>9.1%}")
    steps = {mode: statistics.median(entry["round"] for rank in ranks for entry in rank[mode]) for mode in MODES}
    print(f"{'wall seconds a round':<24}{steps['plain']:>10.4f}{steps['overlapped']:>12.4f}")
    print(f"loss of the last step, plain and overlapped: {first['losses'][0]:.6f} {first['losses'][1]:.6f}")
    return _hidden(totals)


def _hidden(exposed: dict[str, float]) -> float:
    return 1.0 - exposed["overlapped"] / exposed["plain"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both modes (default: 5)")
    parser.add_argument("--link-share", type=float, default=0.5, help="of forward or backward (default: 0.5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_conditions()
    hidden = report(run_locally(run, PROCESSES, (arguments.rounds, arguments.link_share)))
    print(f"hidden: {hidden:.1%} (goal: at least 70 %)")


if __name__ == "__main__":
    main()
