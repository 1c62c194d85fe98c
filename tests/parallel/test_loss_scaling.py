# SPDX-License-Identifier: Apache-2.0
"""float16 under several processes: all agree on an overflow that one of them has; the run is that of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import STYLES, own_rank, training

FLAGS = f"{STYLES['llama']} --fp16 --initial-loss-scale 32768 --hysteresis 1 --lr-warmup-iters 1"
OVERFLOWS_AT = 2


def train(layout: str) -> list[tuple[bool, float, float, float]]:
    """(skipped, loss scale, loss, gradient norm) of each step; in one of them the last process has an infinity."""
    config, recipe = training(FLAGS, layout)
    found: list[tuple[bool, float, float, float]] = []
    with open_local_run(config, recipe, own_rank(config)) as run:
        update = run.optimizer.step

        def overflowing() -> Any:
            if len(found) == OVERFLOWS_AT and own_rank(config) == config.world_size - 1:
                buffer = run.model[0].flat_buffers[0]
                buffer.grad_data[buffer.owned[0][0]] = float("inf")
            return update()

        run.optimizer.step = overflowing  # type: ignore[method-assign]
        batches = run.data.open("train", 0)
        for _ in range(5):
            result = train_step(run, batches)
            assert result.grad_norm is not None
            found.append((result.skipped, result.loss_scale, float(result.losses["lm loss"]), float(result.grad_norm)))
    return found


@functools.cache
def reference() -> list[tuple[bool, float, float, float]]:
    return train("1")


@pytest.mark.flags("--fp16")
@pytest.mark.parametrize("layout", ["tp2,sp", "pp2", "dp2,dist-opt"])
def test_layout_is_the_same_run(layout: str) -> None:
    ranks = run_distributed(train, parse_layout(layout).world_size, layout)
    assert ranks[0] == ranks[1]
    for step, (found, expected) in enumerate(zip(ranks[0], reference(), strict=True)):
        assert found[0] == expected[0] == (step == OVERFLOWS_AT)
        assert found[1] == expected[1] == (32768 if step <= OVERFLOWS_AT else 16384)
        assert found[2:] == pytest.approx(expected[2:], rel=1e-2)
