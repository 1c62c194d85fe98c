# SPDX-License-Identifier: Apache-2.0
"""--elastic-layouts: a run that is started again with fewer and with more processes is the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.errors import ConfigError
from tests.functional.pretrain_runs import environment, free_port
from tests.parallel.test_sites import FLAGS, PROGRAM, check
from tests.programs import ROOT, Program
from tests.support.run_flags import run_config

LAYOUTS = "tp2pp2,tp1pp2,tp1pp1"


def train(directory: Path, ranks: int, iterations: int, *flags: str | Path) -> None:
    directory.mkdir(exist_ok=True)
    program, port = directory / "train.py", free_port()
    program.write_text(PROGRAM)
    # 12 sequences, for 1 to 4 ranks alike.
    words = [*FLAGS, "--global-batch-size", "12", "--train-iters", "8", "--exit-interval", str(iterations)]
    words += ["--metrics-dir", str(directory / "metrics"), *map(str, flags)]
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    jobs = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]
    check([Program([program, *words], environment(one), ROOT) for one in jobs])


def read_rows(directory: Path) -> list[tuple[float, float, float]]:
    lines = (directory / "metrics" / "metrics.jsonl").read_text().splitlines()
    rows = {row["iteration"]: row for row in map(json.loads, lines) if "lm loss" in row}
    return [(row["lm loss"], row["lr"], row["consumed_samples"]) for _, row in sorted(rows.items())]


@pytest.mark.flags("--elastic-layouts")
def test_four_two_three_and_four_ranks_are_one_run(tmp_path: Path) -> None:
    train(tmp_path / "whole", 1, 8)
    run = tmp_path / "elastic"
    for count, (ranks, until) in enumerate([(4, 2), (2, 4), (3, 6), (4, 8)]):
        keeps = ["--save", run / "saved", "--load", run / "saved", "--save-interval", "2"]
        train(run, ranks, until, *keeps, "--elastic-layouts", LAYOUTS)
        assert len(read_rows(run)) == until, count
    for found, expected in zip(read_rows(run), read_rows(tmp_path / "whole"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(8, (2, 2)), (4, (2, 2)), (2, (1, 2)), (6, (1, 2)), (3, (1, 1)), (1, (1, 1))]
)
def test_the_first_layout_that_fits(ranks: int, sizes: tuple[int, int]) -> None:
    config = run_config(f"--elastic-layouts {LAYOUTS} --num-layers 4 --global-batch-size 24", world_size=ranks)
    assert (config.model.tensor_model_parallel_size, config.model.pipeline_model_parallel_size) == sizes
    assert config.training.global_batch_size == 24
    assert any(note.startswith("--elastic-layouts: tp") for note in config.notes)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--elastic-layouts tp2,tp4 --global-batch-size 12",
            "no layout for 3 processes (tp2: 2 processes for a copy; tp4: 4 processes for a copy); add one, or start "
            "2 or 4",
        ),
        ("--elastic-layouts tp1 --global-batch-size 8", "not divisible by 3); add one, or start 2 or 4"),
        ("--elastic-layouts tp4pp7 --global-batch-size 28", "add one, or start 28"),
        ("--elastic-layouts tp1 --global-batch-size 7 --micro-batch-size 2", "or start another number"),
        ("--elastic-layouts tp2xp2", "'tp2xp2' is no layout; give sizes such as tp2pp2"),
        ("--elastic-layouts tp1 --tensor-model-parallel-size 1", "says what --tensor-model-parallel-size 1 says, too"),
    ],
)
def test_what_fits_nowhere_is_a_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_config(flags, world_size=3)
    assert sentence in str(error.value)
