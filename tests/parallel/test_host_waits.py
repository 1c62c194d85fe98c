# SPDX-License-Identifier: Apache-2.0
"""Steps without a progress line wait for the device nowhere, on several processes either."""

from __future__ import annotations

import pytest

from megatron.training.loop import train
from megatron.training.verify.parity import open_local_run
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training
from tests.unit.house.test_host_waits import ALLOWED, LOADING, Watch

ALLTOALL = "--moe-token-dispatcher-type=alltoall"


def places(style: str, layout: str) -> dict[tuple[str, str], int]:
    """Where the host waits, beside loading, and how often in the second and third iteration; the progress line is after
    the fifth."""
    flags = f"{(STYLES | EXPERTS)[style]} --log-interval 5 --train-iters 5"
    config, recipe = training(flags, layout)
    with open_local_run(config, recipe, own_rank(config)) as run:
        run.hooks.hooks.append(watch := Watch())  # type: ignore[attr-defined]
        train(run)
    found = watch.by_iteration[2] + watch.by_iteration[3]
    return {place: times for place, times in found.items() if place[0] != LOADING}


@pytest.mark.parametrize(
    ("style", "layout"),
    [
        ("llama", "pp2,vpp2"),
        ("llama", "tp2,sp"),
        ("llama", "dp2,dist-opt,--overlap-grad-reduce"),
        # Experts that all get as many rows as capacity allows: nobody asks how many are used.
        ("picky", f"dp2,ep2,{ALLTOALL},--moe-pad-expert-input-to-capacity"),
        ("picky", "tp2,sp,ep2,etp1,--moe-pad-expert-input-to-capacity"),
    ],
)
def test_layouts_do_not_wait(style: str, layout: str) -> None:
    assert run_distributed(places, 2, style, layout) == [{}] * 2


DISPATCH = ("megatron/core/transformer/moe/token_dispatcher.py", "dispatch")


def test_experts_wait_for_sizes_only() -> None:
    for found in run_distributed(places, 2, "moe", f"dp2,ep2,{ALLTOALL}"):
        assert found and set(found) <= set(ALLOWED)
    # Dropped tokens or not, all sizes of an exchange come to the host in one copy. Two iterations, three microbatches,
    # two layers of experts each.
    for found in run_distributed(places, 2, "picky", f"dp2,ep2,{ALLTOALL}"):
        assert found[DISPATCH] == 2 * 3 * 2
