# SPDX-License-Identifier: Apache-2.0
"""Cost of the guards of a run, and time in which they find a fault.

    python -m benchmarks guards --pairs 24              # steps with all guards against steps with none
    python -m benchmarks guards --detect stop kill nan  # seconds from a simulated fault to the end of the job

Steps of both sides are timed in turns, in pairs that take turns in which goes first, in two processes over gloo; the
ratio is the median over the pairs with its 95 % interval, by order statistics. Guards: the watch for hangs, the checks
of losses, of gradients, of spikes and of weights that replicas hold alike, and the report of slow ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.conditions import print_conditions
from megatron.training.launch.launch import Launch
from megatron.training.launch.local_job import run_locally

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-attention-heads 4 --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 1000000 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 "
    "--log-interval 10 --num-workers 0 --hidden-dropout 0 --attention-dropout 0 --seq-length 128"
)
GUARDS = {
    "off": "--no-check-for-nan-in-loss-and-grad --hang-timeout 0",
    "on": "--hang-timeout 600 --log-straggler --check-for-spiky-loss --check-for-large-grads "
    "--check-weight-hash-across-dp-replicas-interval 100",
}
FAULTS = {
    "stop": ("stop:1,20", "the --hang-timeout of 3 s, and 2 s"),
    "kill": ("kill:1,20", "2 s"),
    "nan": ("nan:1,20", "the step"),
    "weight": ("bitflip:1,20", "the next check, every 5 steps"),
    "gradient": ("bitflip:1,20,grad:decoder.final_layernorm.weight", "the next check, every 5 steps"),
}
"""Kind -> the fault, and within what it is to be named."""


def find_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the bounds between which it lies in 95 of 100 cases, by order statistics."""
    ordered = sorted(values)
    count = len(ordered)
    # Of `count` values that lie on either side of the median by chance, as a normal distribution.
    lower = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return statistics.median(ordered), ordered[lower], ordered[count - 1 - lower]


def compare_steps(rank: int, sizes: tuple[int, int], pairs: int, steps: int) -> list[float]:
    """Time steps of two runs in turns on one of two processes; return the ratios of on to off."""
    import torch.distributed as dist

    from megatron.core.device import current_device
    from megatron.core.process_groups_config import ProcessGroupCollection, rendezvous_store
    from megatron.training.config.gpu_needs import replace_gpu_settings
    from megatron.training.flags.read import read_run_config
    from megatron.training.launch.hang_watch import build_hang_watch
    from megatron.training.launch.initialize import Process, build_rank_grid
    from megatron.training.loop import iterate, open_batches
    from megatron.training.recipes.gpt import build_gpt_recipe
    from megatron.training.setup import setup

    # All ranks are on this machine, so that the watcher needs no store.
    launch = Launch(rank, 2, local_rank=rank, master_addr="localhost", master_port=1)
    layers, hidden = sizes
    runs: list[tuple[str, Any, Any, Any]] = []
    # Two runs of a side: where in memory a run lies is worth more than guards cost.
    for beginning, name in enumerate(("off", "on", "on", "off")):
        words = f"{MODEL} --num-layers {layers} --hidden-size {hidden} {GUARDS[name]}".split()
        config = read_run_config(words, {"WORLD_SIZE": "2"})
        replace_gpu_settings(config)
        groups = ProcessGroupCollection.build(build_rank_grid(config, 2), rank)
        groups.set_current()
        # Each with a directory of its own for its watch.
        place = dataclasses.replace(launch, beginning=beginning)
        watch = build_hang_watch(config, place, rendezvous_store(), lambda: None)
        run = setup(config, Process(place, current_device(), groups, watch=watch), build_gpt_recipe(config))
        run.hooks.on_train_start(run)
        runs.append((name, run, run.hooks.wrap_step(iterate), open_batches(run)))

    def take(order: Sequence[tuple[str, Any, Any, Any]]) -> dict[str, float]:
        # Step by step in turns: what else the machine does changes within the steps of a side.
        seconds = dict.fromkeys(GUARDS, 0.0)
        for _ in range(steps):
            for name, run, step, batches in order:
                dist.barrier()
                began_at = time.perf_counter()
                step(run, batches)
                seconds[name] += time.perf_counter() - began_at
        return seconds

    take(runs)
    ratios = []
    for pair in range(pairs):
        seconds = take(runs if pair % 2 else runs[::-1])
        ratios.append(seconds["on"] / seconds["off"])
    for _, run, _, _ in reversed(runs):
        run.hooks.on_close(run)
        run.data.close()
    return ratios


def detect(kind: str) -> tuple[float, str]:
    """Start a job of two processes that meets a fault; return the seconds from the fault to the end of the job, and its
    sentence."""
    fault, _ = FAULTS[kind]
    port = str(_find_port())
    with tempfile.TemporaryDirectory() as save:
        flags = f"{MODEL} --num-layers 2 --hidden-size 64 --log-interval 10 --hang-timeout 3 --save {save}"
        check = "--check-weight-hash-across-dp-replicas-interval 5"
        words = [str(ROOT / "pretrain_gpt.py"), *flags.split(), *check.split(), "--simulate-fault", fault]
        job = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, *words], env=job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        assert ranks[1].stderr is not None
        for line in ranks[1].stderr:
            if "--simulate-fault" in line:
                break
        struck_at = time.monotonic()
        errors = ranks[0].communicate()[1]
        seconds = time.monotonic() - struck_at
        ranks[1].wait()
    return seconds, next((line for line in errors.splitlines() if line.startswith("error:")), "nothing was said")


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=10, help="steps of each side of a pair")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--detect", nargs="*", choices=list(FAULTS), help="measure these faults instead; all of them")
    arguments = parser.parse_args()
    print_conditions()
    if arguments.detect is not None:
        print(f"{'fault':10} {'seconds':>8}  to be named within")
        for kind in arguments.detect or FAULTS:
            seconds, sentence = detect(kind)
            print(f"{kind:10} {seconds:8.1f}  {FAULTS[kind][1]}\n  {sentence[:300]}", flush=True)
        return
    sizes = (arguments.layers, arguments.hidden)
    ratios = run_locally(compare_steps, 2, (sizes, arguments.pairs, arguments.steps), 3600.0)
    median, lower, upper = find_interval(ratios[0])
    interval = f"95 %: {lower:.4f} to {upper:.4f}"
    print(f"{arguments.pairs} pairs of {arguments.steps} steps: on / off = {median:.4f} ({interval})")


if __name__ == "__main__":
    main()
