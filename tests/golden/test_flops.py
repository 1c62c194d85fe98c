# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a global batch equal the reference's, exactly."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron.cli.report_theoretical_memory import read
from megatron.planner.throughput import count_training_flops_per_token

CASES = json.loads((Path(__file__).parent / "data" / "flops_memory.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_flops_of_a_global_batch(name: str) -> None:
    case = CASES[name]
    run, expected = read(shlex.split(case["cli"]), {"WORLD_SIZE": str(case["world_size"])}), case["result"]
    assert run.data.seq_length is not None and run.training.global_batch_size is not None
    per_token = count_training_flops_per_token(
        run.model, seq_length=run.data.seq_length, padded_vocab_size=expected["padded_vocab_size"]
    )
    assert per_token * run.data.seq_length * run.training.global_batch_size == expected["num_flops_global_batch"]
