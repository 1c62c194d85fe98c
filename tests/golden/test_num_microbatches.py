# SPDX-License-Identifier: Apache-2.0
"""Batch sizes and numbers of microbatches over the run equal the recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.errors import ConfigError
from megatron.core.num_microbatches_calculator import (
    NumMicrobatchesCalculator,
    build_num_microbatches_calculator,
)

REFERENCE = json.loads((Path(__file__).parent / "data" / "num_microbatches.json").read_text())


def calculator(case: str, **changes: object) -> NumMicrobatchesCalculator:
    arguments = REFERENCE[case]["args"] | changes
    return build_num_microbatches_calculator(
        global_batch_size=arguments["gbs"],
        micro_batch_size=arguments["mb"],
        data_parallel_size=arguments["dp"],
        rampup_batch_size=arguments.get("ramp"),
        step_batch_size_schedule=arguments.get("sched"),
        decrease_batch_size_if_needed=arguments.get("dec", False),
    )


# The reference parses --rampup-batch-size and ignores it; its rows are those of a constant batch size.
CASES = {"const": {}, "const_dec": {}, "ramp_ignored": {"ramp": None}, "step_samples": {}}


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_the_reference(case: str) -> None:
    batch_size = calculator(case, **CASES[case])
    for row in REFERENCE[case]["result"]:
        at = row[0]
        found = [
            at,
            batch_size.num_microbatches(at),
            batch_size.global_batch_size(at),
            batch_size.running_global_batch_size(at),
        ]
        assert found == row


def test_what_the_reference_refuses_is_refused_with_the_nearest_sizes() -> None:
    assert "error" in REFERENCE["const_bad"]["result"]
    with pytest.raises(ConfigError, match=r"global batch size 10 .*--micro-batch-size 4 .*; use 8 or 12"):
        calculator("const_bad")


def test_the_reference_covers_nothing_else() -> None:
    assert set(REFERENCE) == {*CASES, "const_bad"}


def test_rampup_takes_effect_here() -> None:
    batch_size = calculator("ramp_ignored")  # 8 -> 32 by 8 over 100 samples
    sizes = [batch_size.global_batch_size(at) for at in (0, 33, 34, 66, 67, 99, 100, 10**9)]
    assert sizes == [8, 8, 16, 16, 24, 24, 32, 32]
