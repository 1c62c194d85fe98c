# SPDX-License-Identifier: Apache-2.0
"""Whatever layout and way a run was saved under, it goes on under any other: its next losses, optimizer state included,
are those of the run that one process would have made without a break.

Each layout trains two steps, saves, and later loads the checkpoints of all layouts, each for five further steps: one
job for saving and one for loading per layout. The usual table has a few layouts of at most three processes.

    MEGATRON_ALL_LAYOUTS=1 bash tests/run.sh tests/parallel/test_layout_matrix.py      all of them, in some minutes
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron.core.dist_checkpointing.async_save import AsyncSaver
from megatron.core.errors import ConfigError
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.config.checkpoint import FOR_UPSTREAM
from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training

BEFORE, AFTER = 2, 5
TOLERANCE = 1e-5
FLAGS = f"--train-iters {BEFORE + AFTER} --lr-warmup-iters 1 --lr 1e-2"
# Losses of experts are means over a microbatch: its size belongs to the run, not to the layout.
RUNS = {name: f"{flags} {FLAGS}" for name, flags in STYLES.items()} | {
    name: f"{flags} {FLAGS} --micro-batch-size 1 --global-batch-size 4" for name, flags in EXPERTS.items()
}
ONE = "--micro-batch-size=1"  # so that four replicas share the batch
ALLTOALL = "--moe-token-dispatcher-type=alltoall"

DENSE = ["1", "tp2,sp,pp2,vpp2", "dp3,dist-opt", "dp2,fsdp2"]
MIXED = ["1", f"dp2,ep2,{ALLTOALL},dist-opt", f"tp2,sp,ep2,etp1,{ALLTOALL}"]
TABLE = {"gpt2": DENSE, "moe": MIXED}
if os.environ.get("MEGATRON_ALL_LAYOUTS"):
    DENSE += [
        "tp2,sp", "pp2", "pp2,vpp2", "dp2,dist-opt", "dp3", "cp2", "tp2,pp2,dp2", "pp2,--pipeline-schedule=zb-v",
        f"dp4,fsdp2,--num-distributed-optimizer-instances=2,{ONE}", "tp2,dp2,fsdp2",
        "pp2,dp2,fsdp2", "tp2,sp,pp2,dp2,dist-opt",
        f"dp4,dist-opt,--num-distributed-optimizer-instances=2,{ONE}",
    ]  # fmt: skip
    MIXED += [
        f"dp2,ep2,{ALLTOALL}", f"tp2,sp,dp2,ep2,etp2,{ALLTOALL}", f"dp4,ep2,{ALLTOALL},dist-opt,overlap-all",
        f"pp2,dp2,ep2,{ALLTOALL}", "cp2,ep2", f"tp2,sp,dp2,ep4,etp1,{ALLTOALL},dist-opt",
    ]  # fmt: skip
    TABLE |= {"llama": DENSE, "picky": ["1", *MIXED[3:5]]}

# Of the other formats torch_dist takes the place.
WAYS = {"sync": "", "async": "--async-save"} | {name: f"--ckpt-format {name}" for name in FOR_UPSTREAM}


def list_ways(style: str, layout: str) -> list[str]:
    """In which the layout can save: not every format has a place for every layout."""

    def is_accepted(flags: str) -> bool:
        try:
            training(f"{RUNS[style]} {flags} --save s", layout)
        except ConfigError:
            return False
        return True

    return [way for way, flags in WAYS.items() if is_accepted(flags)]


def start(style: str, layout: str, flags: str = "") -> Any:
    """This process's share of the run, loaded where `flags` say so."""
    config, recipe = training(f"{RUNS[style]} {flags}", layout)
    return open_local_run(config, recipe, own_rank(config))


def steps(run: Any, number: int) -> list[dict[str, Tensor]]:
    """Losses of so many further steps."""
    batches = run.data.open("train", run.progress.consumed_train_samples)
    return [{name: float(loss) for name, loss in train_step(run, batches).losses.items()} for _ in range(number)]


def save_in_every_way(style: str, layout: str, root: str) -> list[dict[str, float]]:
    """The first steps, then a checkpoint in each of the ways; their losses."""
    losses = []
    for way in list_ways(style, layout):
        flags = WAYS[way]
        with start(style, layout, f"{flags} --save {root}-{way} --save-interval 99") as run:
            losses = steps(run, BEFORE)
            if "--async-save" not in flags:
                save_checkpoint(run)
                continue
            saver = AsyncSaver(None)
            save_checkpoint(run, saver)
            # Training goes on while it is written, and must not change it.
            steps(run, 1)
            outcome = saver.wait()
            assert outcome is not None
            outcome.check()
            saver.close()
    return losses


def go_on_from_each(style: str, layout: str, roots: list[str], flags: str = "") -> list[list[dict[str, float]]]:
    """For each checkpoint the losses of the steps after it."""
    losses = []
    for root in roots:
        with start(style, layout, f"--load {root} {flags}") as run:
            assert run.progress.iteration == BEFORE
            losses.append(steps(run, AFTER))
    return losses


def on(layout: str, function: Any, *arguments: Any) -> Any:
    """What `function` returns on the first process of the layout."""
    processes = parse_layout(layout).world_size
    if processes == 1:
        return function(*arguments)
    return run_distributed(function, processes, *arguments, timeout=900.0)[0]


@functools.cache
def uninterrupted(style: str) -> list[dict[str, float]]:
    with start(style, "1") as run:
        return steps(run, BEFORE + AFTER)


def list_differences(found: list[dict[str, float]], expected: list[dict[str, float]]) -> list[str]:
    """Losses beyond the tolerance."""
    assert [losses.keys() for losses in found] == [losses.keys() for losses in expected]
    return [
        f"step {number}: {name} {loss} instead of {then[name]}"
        for number, (now, then) in enumerate(zip(found, expected, strict=True), start=1)
        for name, loss in now.items()
        if abs(loss - then[name]) > TOLERANCE * abs(then[name])
    ]


@pytest.fixture(scope="module", params=list(TABLE))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(style, directory with a checkpoint of each layout and way)."""
    style, root = request.param, tmp_path_factory.mktemp(request.param)
    for number, layout in enumerate(TABLE[style]):
        losses = on(layout, save_in_every_way, style, layout, str(root / str(number)))
        assert list_differences(losses, uninterrupted(style)[:BEFORE]) == [], layout
    return style, root


def list_cases(style: str, number: int) -> list[tuple[int, str]]:
    """What a layout loads: (number of a layout, way) of all layouts, and of another one for each of the other ways."""
    layouts = TABLE[style]
    cases = [(before, "sync") for before in range(len(layouts))]
    for distance, way in enumerate([*WAYS][1:], start=1):
        others = [before for before, layout in enumerate(layouts) if way in list_ways(style, layout)]
        cases.append((others[(number + distance) % len(others)], way))
    return cases


@pytest.mark.parametrize("number", range(max(map(len, TABLE.values()))))
def test_a_layout_goes_on_from_the_checkpoints_of_all(saved: tuple[str, Path], number: int) -> None:
    style, root = saved
    if number >= len(TABLE[style]):
        pytest.skip("this style has fewer layouts")
    layout = TABLE[style][number]
    cases = list_cases(style, number)
    found = on(layout, go_on_from_each, style, layout, [f"{root}/{before}-{way}" for before, way in cases])
    expected = uninterrupted(style)[BEFORE:]
    assert expected[0] != expected[-1]
    problems = {
        f"{style}: {TABLE[style][before]} ({way}) -> {layout}": differences
        for (before, way), losses in zip(cases, found, strict=True)
        if (differences := list_differences(losses, expected))
    }
    assert problems == {}


def test_a_forgotten_optimizer_state_would_be_seen(saved: tuple[str, Path]) -> None:
    style, root = saved
    (found,) = go_on_from_each(style, "1", [f"{root}/1-sync"], "--no-load-optim --override-opt-param-scheduler")
    assert len(list_differences(found[1:], uninterrupted(style)[BEFORE + 1 :])) >= AFTER - 1
