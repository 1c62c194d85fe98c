# SPDX-License-Identifier: Apache-2.0
"""examples/run_simple_mcore_train_loop.py: the library under Megatron-LM's names, on one, two and four processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.functional.pretrain_runs import ROOT, environment, finish, free_port
from tests.programs import Program

EXAMPLE = "examples/run_simple_mcore_train_loop.py"


def losses(processes: int, *flags: str | Path) -> list[float]:
    """What the first process prints: the loss of each iteration."""
    job = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    places = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    variables = places if processes > 1 else [{}]
    ranks = finish([Program([EXAMPLE, *flags], environment(changes), ROOT) for changes in variables])
    assert [rank.returncode for rank in ranks] == [0] * processes, "".join(rank.stderr for rank in ranks)
    return [float(loss) for rank in ranks for loss in re.findall(r"lm loss ([0-9.]+)", rank.stdout)]


def test_losses_are_those_of_one_process_on_every_layout_and_after_a_checkpoint(tmp_path: Path) -> None:
    tp2, pp2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
    alone = losses(1, "--iterations", "4", "--save", tmp_path / "of-one")
    assert len(alone) == 4 and all(later < earlier for earlier, later in zip(alone, alone[1:], strict=False))
    for processes, layout in ((2, tp2), (2, pp2), (4, pp2)):
        assert losses(processes, *layout, "--iterations", "4") == pytest.approx(alone, abs=2e-5)
    both = losses(4, *tp2, *pp2, "--iterations", "4", "--save", tmp_path / "of-four")
    assert both == pytest.approx(alone, abs=2e-5)

    # Trained weights of one layout continue on another: both begin with the loss of four iterations of training.
    of_one = losses(2, *tp2, "--iterations", "2", "--load", tmp_path / "of-one")
    of_four = losses(1, "--iterations", "2", "--load", tmp_path / "of-four")
    assert of_one == pytest.approx(of_four, abs=2e-5)
    assert of_four[0] < alone[1]
