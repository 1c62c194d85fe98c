# SPDX-License-Identifier: Apache-2.0
"""L1-L5, L16, L18: damage of any file of a checkpoint is found before use, and the newest good one is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import damaged_checkpoints
from tests.faults.damaged_checkpoints import KINDS
from tests.parallel.harness import run_distributed


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undamaged") / "checkpoints"
    damaged_checkpoints.make_directory(root)
    return root


def test_L3_a_thousand_bits_and_lengths_are_found(undamaged: Path) -> None:
    verdicts = list(damaged_checkpoints.flip(undamaged, seed=1, cases=1000))
    assert len(verdicts) == 1000 and [verdict for verdict in verdicts if verdict.problem] == []


def test_L1_to_L5_L16_L18_kinds_of_damage_before_one_rank(undamaged: Path, tmp_path: Path) -> None:
    verdicts = damaged_checkpoints.play_kinds(str(undamaged), str(tmp_path), "", list(KINDS))
    assert [verdict for verdict in verdicts if verdict.problem] == []
    assert len([kind for kind in KINDS.values() if kind.names]) >= 20


def test_L1_to_L5_L16_L18_kinds_of_damage_before_two_ranks(undamaged: Path, tmp_path: Path) -> None:
    found = run_distributed(damaged_checkpoints.play_kinds, 2, str(undamaged), str(tmp_path), "tp2", list(KINDS))
    assert [verdict for verdict in found[0] if verdict.problem] == [] and found[0] == found[1]
