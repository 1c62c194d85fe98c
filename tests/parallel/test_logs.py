# SPDX-License-Identifier: Apache-2.0
"""What a log says does not depend on the layout."""

from __future__ import annotations

import functools

import pytest

from megatron.core.optimizer.grad_statistics import compute_layer_norms, count_zeros
from megatron.core.ssm.state_norms import StateNorm, compute_state_norms, list_state_mixers
from megatron.training.hooks.measures import list_flat_buffers
from megatron.training.run import Hook, Run
from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import OPTIONS, STYLES, own_rank, training

Statistics = tuple[dict[str, float], dict[str, float], int, str]


class Counting(Hook):
    """Looks at the gradients where the logs do."""

    def on_gradients(self, run: Run) -> None:
        self.gradients = compute_layer_norms(list_flat_buffers(run), run.optimizer.model_sum, "gradients")
        self.zeros = int(count_zeros(list_flat_buffers(run), run.optimizer.model_sum))


def statistics(layout: str) -> Statistics:
    """Norms and zeros after a step, and what the timers report."""
    config, recipe = training(STYLES["llama"], f"{layout},--timing-log-level=1")
    with open_local_run(config, recipe, own_rank(config)) as run:
        run.hooks = found = Counting()
        train_step(run, run.data.open("train", 0))
        parameters = compute_layer_norms(list_flat_buffers(run), run.optimizer.model_sum, "parameters")
        report = run.timers.report(["forward-backward", "optimizer"], run.groups.world, option="all")
        return parameters, found.gradients, found.zeros, report


@functools.cache
def alone() -> Statistics:
    return statistics("1")


@pytest.mark.flags("--log-layer-norms", "--log-num-zeros-in-grad", "--timing-log-option")
@pytest.mark.parametrize("layout", ["tp4,sp", "pp2", "dp2,dist-opt", "dp2,fsdp2"])
def test_statistics_are_those_of_one_process(layout: str) -> None:
    *norms, zeros, _ = alone()
    assert list(norms[0])[0].startswith("embedding") and "output_layer" in norms[0]
    assert zeros > 0
    world_size = parse_layout(layout).world_size
    for *found, found_zeros, report in run_distributed(statistics, world_size, layout):
        for ours, expected in zip(found, norms, strict=True):
            assert list(ours) == list(expected)
            assert ours == pytest.approx(expected, rel=1e-5)
        assert found_zeros == zeros
        assert report.count(f"rank {world_size - 1:2d}:") == 2 and report.count(f"rank {world_size:2d}:") == 0


RECOMPUTED = "--recompute-granularity=full,--recompute-method=uniform,--recompute-num-layers=1"


def state_norms(layout: str) -> dict[str, StateNorm]:
    """Norms of the states of a step."""
    config, recipe = training(OPTIONS["states"], layout)
    with open_local_run(config, recipe, own_rank(config)) as run:
        modules = [chunk.module for chunk in run.model]
        for _, mixer in (found for module in modules for found in list_state_mixers(module)):
            mixer.notes_states = True
        train_step(run, run.data.open("train", 0))
        return compute_state_norms(modules, run.groups)


@pytest.mark.flags("--log-layer-norms")
@pytest.mark.parametrize("layout", ["tp2,sp", "pp2", "dp2", "cp2", f"tp2,cp2,{RECOMPUTED}"])
def test_norms_of_states_are_those_of_one_process(layout: str) -> None:
    expected = state_norms("1")
    assert [name.partition(".")[0] for name in expected] == ["decoder"] * 3 + ["mtp"] * 2
    assert all(0 < norm.mean < norm.largest for norm in expected.values())
    for found in run_distributed(state_norms, parse_layout(layout).world_size, layout):
        assert found.keys() == expected.keys()
        for name, norm in found.items():
            assert norm == pytest.approx(expected[name], rel=1e-5), name
