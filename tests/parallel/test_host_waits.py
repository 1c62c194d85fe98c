# SPDX-License-Identifier: Apache-2.0
"""Steps without a progress line wait for the device nowhere, on several processes either."""

from __future__ import annotations

import pytest

from megatron.training.loop import train
from megatron.training.verify.parity import open_local_run
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training
from tests.unit.test_host_waits import ALLOWED, LOADING, Watch


def places(style: str, layout: str) -> set[tuple[str, str]]:
    """Where the host waits, beside loading, in the second and third iteration; the progress line is after the fifth."""
    flags = f"{(STYLES | EXPERTS)[style]} --log-interval 5 --train-iters 5"
    config, recipe = training(flags, layout)
    with open_local_run(config, recipe, own_rank(config)) as run:
        run.hooks.hooks.append(watch := Watch())  # type: ignore[attr-defined]
        train(run)
    return {place for iteration in (2, 3) for place in watch.by_iteration[iteration] if place[0] != LOADING}


@pytest.mark.parametrize("layout", ["pp2,vpp2", "tp2,sp", "dp2,dist-opt,--overlap-grad-reduce"])
def test_dense_layouts_do_not_wait(layout: str) -> None:
    assert run_distributed(places, 2, "llama", layout) == [set()] * 2


def test_experts_wait_for_sizes_only() -> None:
    for found in run_distributed(places, 2, "moe", "dp2,ep2,--moe-token-dispatcher-type=alltoall"):
        assert found and found <= set(ALLOWED)
