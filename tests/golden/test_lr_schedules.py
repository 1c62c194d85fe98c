# SPDX-License-Identifier: Apache-2.0
"""Learning-rate and weight-decay curves equal the recorded ones at every step, from the same command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

REFERENCE = json.loads((Path(__file__).parent / "data" / "lr_schedules.json").read_text())


class Groups:
    """Stands for an optimizer: the recorded groups."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"wd_mult": 1.0, "lr_mult": 1.0}, {"wd_mult": 0.0, "lr_mult": 0.5}]


def scheduler_from_argv(command_line: str) -> tuple[OptimizerParamScheduler, int]:
    """The scheduler a run with these flags has, and its global batch size."""
    from megatron.training.data.samples import build_batch_size_calculator
    from megatron.training.flags.read import read_run_config
    from megatron.training.setup import build_scheduler

    config = read_run_config(shlex.split(command_line), {})
    return build_scheduler(config, Groups()), build_batch_size_calculator(config).global_batch_size(0)


@pytest.mark.flags(
    "--lr", "--min-lr", "--lr-decay-style", "--lr-decay-iters", "--lr-decay-samples", "--lr-warmup-iters",
    "--lr-warmup-samples", "--lr-warmup-fraction", "--lr-warmup-init", "--lr-wsd-decay-style", "--lr-wsd-decay-iters",
    "--weight-decay", "--start-weight-decay", "--end-weight-decay", "--weight-decay-incr-style",
    "--train-iters", "--train-samples", "--global-batch-size",
)  # fmt: skip
@pytest.mark.parametrize("case", REFERENCE)
def test_curves_and_state_equal_the_reference(case: str) -> None:
    reference = REFERENCE[case]["result"]
    scheduler, global_batch_size = scheduler_from_argv(REFERENCE[case]["base_cli"] + REFERENCE[case]["cli"])
    first, second = scheduler.optimizer.param_groups
    for step in range(len(reference["lr"])):
        if step:
            scheduler.step(global_batch_size)
        found = (first["lr"], first["weight_decay"], second["lr"], second["weight_decay"])
        expected = tuple(reference[key][step] for key in ("lr", "wd", "lr_g1", "wd_g1"))
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-18), f"after {step} steps"
    assert scheduler.state_dict() == reference["state_dict"]
