# SPDX-License-Identifier: Apache-2.0
"""Cost of the guards of a run, and time in which they find a fault.

    python -m benchmarks guards --pairs 20              # steps with all guards against steps with none
    python -m benchmarks guards --parts                 # milliseconds a step of each guard's own functions
    python -m benchmarks guards --detect stop kill nan  # seconds from a simulated fault to the end of the job

Steps of both sides are timed in turns, in pairs that take turns in which goes first, in two processes over gloo; the
ratio is the median over the pairs with its 95 % interval, by order statistics. Guards: the watch for hangs, the checks
of losses, of gradients, of spikes and of weights that replicas hold alike, and the report of slow ranks.

Most of what guards cost is a constant for each step, so that the ratio depends on how long a step takes, and the
milliseconds are printed beside it. The steps here are of a model of 4 layers of 256 on 2,048 tokens, a third to half of
a second on two cores, as runs on a laptop have them; steps of a GPU's size have larger weights to hash, on the device.
`--parts` is quick, and exact also on a machine that is not quiet: it adds up processor time.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.conditions import print_conditions
from megatron.training.launch.launch import Launch
from megatron.training.launch.local_job import run_locally

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-attention-heads 4 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 1000000 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 "
    "--log-interval 10 --num-workers 0 --hidden-dropout 0 --attention-dropout 0"
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


class Sizes(NamedTuple):
    """Sizes of the model and of a step."""

    layers: int = 4
    hidden: int = 256
    sequence: int = 256
    batch: int = 8

    @property
    def flags(self) -> str:
        """Return them as flags of a run."""
        return (
            f"{MODEL} --num-layers {self.layers} --hidden-size {self.hidden} --seq-length {self.sequence} "
            f"--max-position-embeddings {self.sequence} --global-batch-size {self.batch}"
        )


class Sides(NamedTuple):
    """Seconds of the steps of a pair."""

    on: float
    off: float


class Side:
    """A run that takes steps on one of two processes, with guards or without."""

    def __init__(self, rank: int, sizes: Sizes, name: str, number: int = 0) -> None:
        """name: of GUARDS. number: tells runs of one process apart."""
        from megatron.core.device import current_device
        from megatron.core.process_groups_config import ProcessGroupCollection, rendezvous_store
        from megatron.training.config.gpu_needs import replace_gpu_settings
        from megatron.training.flags.read import read_run_config
        from megatron.training.launch.hang_watch import build_hang_watch
        from megatron.training.launch.initialize import Process, build_rank_grid
        from megatron.training.loop import iterate, open_batches
        from megatron.training.recipes.gpt import build_gpt_recipe
        from megatron.training.setup import setup

        self.name = name
        config = read_run_config([*sizes.flags.split(), *GUARDS[name].split()], {"WORLD_SIZE": "2"})
        replace_gpu_settings(config)
        groups = ProcessGroupCollection.build(build_rank_grid(config, 2), rank)
        groups.set_current()
        # All ranks are on this machine, so that the watcher needs no store. Each run has a directory of its own for it.
        launch = Launch(rank, 2, local_rank=rank, master_addr="localhost", master_port=1, beginning=number)
        watch = build_hang_watch(config, launch, rendezvous_store(), lambda: None)
        self._run = setup(config, Process(launch, current_device(), groups, watch=watch), build_gpt_recipe(config))
        self._run.hooks.on_train_start(self._run)
        self._step, self._batches = self._run.hooks.wrap_step(iterate), open_batches(self._run)

    def take(self) -> float:
        """Take a step together with the other process; return its seconds."""
        import torch.distributed as dist

        dist.barrier()
        began_at = time.perf_counter()
        self._step(self._run, self._batches)
        return time.perf_counter() - began_at

    def close(self) -> None:
        """End the run."""
        self._run.hooks.on_close(self._run)
        self._run.data.close()


def compare_steps(rank: int, sizes: Sizes, pairs: int, steps: int) -> list[Sides]:
    """Time steps of two runs in turns on one of two processes; return those of each pair."""
    # Two runs of a side: where in memory a run lies is worth more than guards cost.
    sides = [Side(rank, sizes, name, number) for number, name in enumerate(("off", "on", "on", "off"))]

    def take(order: Sequence[Side]) -> Sides:
        # Step by step in turns: what else the machine does changes within the steps of a side.
        seconds = dict.fromkeys(GUARDS, 0.0)
        for _ in range(steps):
            for side in order:
                seconds[side.name] += side.take() / 2
        return Sides(**seconds)

    take(sides)
    found = [take(sides if pair % 2 else sides[::-1]) for pair in range(pairs)]
    for side in reversed(sides):
        side.close()
    return found


def list_parts() -> dict[str, list[tuple[Any, str]]]:
    """The functions of each guard: (class or module, name)."""
    from megatron.core import progress_record
    from megatron.training.hooks import guards, replicas, stragglers, work_clock
    from megatron.training.launch.hang_watch import HangWatch

    return {
        "report of slow ranks": [
            *((stragglers.StragglerHook, name) for name in ("on_step_start", "on_step_end")),
            *((work_clock.WorkClock, name) for name in ("_begin_backward", "_begin_forward", "_end_forward")),
        ],
        "state before a step": [(guards.StepStart, "take")],
        "hash of weights": [(replicas, "compare_weights")],
        "watch for hangs": [
            *((HangWatch, name) for name in ("begin_step", "end_step")),
            *((progress_record.ProgressRecord, "take_microbatch"), (progress_record._Fanout, "add")),
        ],
        "checks of numbers": [
            *((guards.NonFiniteHook, name) for name in ("on_step_start", "on_metrics")),
            *((guards.OutlierHook, name) for name in ("on_metrics",)),
        ],
    }


def measure_parts(rank: int, sizes: Sizes, steps: int) -> dict[str, tuple[float, float]]:
    """Milliseconds in a step that each guard's own functions take on one of two processes: (processor, wall)."""
    spent = {part: [0.0, 0.0] for part in list_parts()}
    for part, functions in list_parts().items():
        for owner, name in functions:
            setattr(owner, name, _timed(getattr(owner, name), spent[part]))
    side = Side(rank, sizes, "on")
    for _ in range(20):
        side.take()
    for times in spent.values():
        times[:] = 0.0, 0.0
    for _ in range(steps):
        side.take()
    side.close()
    return {part: (1e3 * processor / steps, 1e3 * wall / steps) for part, (processor, wall) in spent.items()}


def _timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        processor, wall = time.thread_time(), time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            spent[0] += time.thread_time() - processor
            spent[1] += time.perf_counter() - wall

    return timed


def detect(kind: str) -> tuple[float, str]:
    """Start a job of two processes that meets a fault; return the seconds from the fault to the end of the job, and its
    sentence."""
    fault, _ = FAULTS[kind]
    port = str(_find_port())
    with tempfile.TemporaryDirectory() as save:
        flags = f"{Sizes(2, 64, 128, 4).flags} --log-interval 10 --hang-timeout 3 --save {save}"
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
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="steps of each side of a pair; of 100 with --parts")
    for name, usual in Sizes()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--parts", action="store_true", help="measure each guard's own functions instead")
    parser.add_argument("--detect", nargs="*", choices=list(FAULTS), help="measure these faults instead; all of them")
    arguments = parser.parse_args()
    print_conditions()
    if arguments.detect is not None:
        print(f"{'fault':10} {'seconds':>8}  to be named within")
        for kind in arguments.detect or FAULTS:
            seconds, sentence = detect(kind)
            print(f"{kind:10} {seconds:8.1f}  {FAULTS[kind][1]}\n  {sentence[:300]}", flush=True)
        return
    sizes = Sizes(*(getattr(arguments, name) for name in Sizes._fields))
    if arguments.parts:
        parts = run_locally(measure_parts, 2, (sizes, 10 * arguments.steps), 3600.0)[0]
        print(f"{'milliseconds in a step':24} {'processor':>9} {'wall':>7}")
        together = sum(times[0] for times in parts.values()), sum(times[1] for times in parts.values())
        for name, (processor, wall) in [*parts.items(), ("together", together)]:
            print(f"{name:24} {processor:9.3f} {wall:7.3f}")
        return
    pairs = run_locally(compare_steps, 2, (sizes, arguments.pairs, arguments.steps), 3600.0)[0]
    ratio, lower, upper = find_interval([pair.on / pair.off for pair in pairs])
    print(f"{len(pairs)} pairs of {arguments.steps} steps: on / off = {ratio:.4f} (95 %: {lower:.4f} to {upper:.4f})")
    cost, least, most = find_interval([1e3 * (pair.on - pair.off) / arguments.steps for pair in pairs])
    length = 1e3 * statistics.median(pair.off for pair in pairs) / arguments.steps
    print(f"on - off = {cost:.2f} ms (95 %: {least:.2f} to {most:.2f}) in steps of {length:.0f} ms")


if __name__ == "__main__":
    main()
