# SPDX-License-Identifier: Apache-2.0
"""A few cases of the random trial; `python -m tests.trial` runs it whole, with other seeds every time one likes."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.training.verify.parity import RankTrace
from tests.functional.pretrain_runs import PRETRAIN
from tests.trial import hybrid_table, random_precision
from tests.trial.__main__ import print_tally
from tests.trial.hostile_inputs import KINDS, MOCK, MODEL, HostileCase, draw_input, judge_input, remove_saved_run
from tests.trial.hybrid_table import BY_FLAGS, LAYOUTS, ROWS, Table, draw_pair, list_cells
from tests.trial.random_layouts import LayoutCase, draw_case, judge_layout
from tests.trial.random_precision import (
    GATED,
    MODULES,
    RECIPES,
    draw_precision,
    draw_recomputation,
    find_recipe,
    judge_precision,
    judge_recomputation,
)
from tests.trial.verdict import Verdict


def judged(verdict: Verdict) -> str:
    assert verdict.kind != "fault", f"{verdict.text}\n    {verdict.command}"
    return verdict.kind


@pytest.mark.parametrize("seed", [0, 5, 35, 17, 106])
def test_random_layouts(seed: int) -> None:
    assert judged(judge_layout(draw_case(seed))) == "ran"


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    with contextlib.closing(Table()) as table:
        yield table


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_table_of_hybrids(row: str, table: Table) -> None:
    """Two layouts of each, the second going on from the first."""
    for cell in draw_pair(row, 1):
        assert judged(table.judge(cell)) == "ran"


def test_a_layout_in_fp8() -> None:
    assert judged(judge_precision(draw_precision(5))) == "ran"


@pytest.mark.parametrize("seed", [0, 4])
def test_pairs_of_recomputed_modules(seed: int) -> None:
    assert judged(judge_recomputation(draw_recomputation(seed))) == "ran"


def test_draws_are_functions_of_their_seed_and_see_every_recipe_and_module() -> None:
    for draw in (draw_precision, draw_recomputation):
        cases = [draw(seed) for seed in range(100)]
        assert [draw(seed) for seed in range(100)] == cases
        assert {find_recipe(case) for case in cases} >= RECIPES.keys() - {"fp32", "bf16"}
        patterns = [flag for case in cases for flag in case.model if flag.startswith("--hybrid-layer-pattern=")]
        assert set("".join(pattern.split("=")[1] for pattern in patterns)) == set("MGK*+-E")
    assert {module for case in cases for module in case.layout[2:]} == {*MODULES, GATED}


def test_other_bits_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first loss of a layout is held to more than the later ones, where ranks have the same scales."""

    def kinds(draw: Callable[[int], LayoutCase], judge: Callable[[LayoutCase], Verdict], *losses: float) -> str:
        found = iter([[{"lm loss": loss} for loss in losses], [{"lm loss": 2.0}] * len(losses)])
        monkeypatch.setattr(
            random_precision, "run_distributed", lambda *a, **k: [RankTrace(next(found), [1.0] * len(losses), [])]
        )
        return judge(draw(5)).kind

    assert kinds(draw_recomputation, judge_recomputation, 2.0, 2.0) == "ran"
    assert kinds(draw_recomputation, judge_recomputation, 2.0, 2.0000002) == "fault"
    assert kinds(draw_precision, judge_precision, 2.0, 2.001) == "ran"
    assert kinds(draw_precision, judge_precision, 2.0001, 2.0) == "fault"
    assert kinds(draw_precision, judge_precision, 2.0, math.nan) == "fault"


def test_the_tally_has_a_line_for_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    print_tally(Counter({("layout", "ran"): 3, ("input: lacks", "fault"): 1, ("input: lacks", "refused"): 2}))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["input:", "lacks", *"3021"], ["layout", *"3300"], ["all", *"6321"]]


def test_hostile_inputs() -> None:
    """One of each kind."""
    try:
        kinds = [judged(judge_input(draw_input(seed))) for seed in range(len(KINDS))]
    finally:
        remove_saved_run()
    # A trial whose every case is refused for the same reason would find nothing. Which of those drawn run depends on
    # the flags there are; what all of them are based on runs.
    assert judged(judge_input(HostileCase(0, "nothing hostile", PRETRAIN, [*MODEL, *MOCK]))) == "ran"
    assert "refused" in kinds


def test_the_table_of_hybrids_is_whole_and_sees_other_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = list_cells(3)
    found = {(cell.model.row, cell.name.removesuffix(BY_FLAGS)) for cell in cells}
    assert found == {(row, name) for row in ROWS for name in LAYOUTS}
    assert all(cell.before != cell.name for cell in cells)
    of_gpts = {cell.argv[-1].split("=")[0] for cell in cells if cell.model.row.startswith("GPT")}
    assert of_gpts == {"--num-layers", "--hybrid-layer-pattern"}

    def kind(whole: float, behind: float) -> str:
        def run(function: object, world: int, argv: object, size: int, save: str, load: str | None, **_: object) -> Any:
            found = [[{"lm loss": 2.0}] * 4, [{"lm loss": 2.0}] * 2]
            return [found if load is None else [[{"lm loss": whole}] * 4, [{"lm loss": behind}] * 2]]

        monkeypatch.setattr(hybrid_table, "run_distributed", run)
        with contextlib.closing(Table()) as table:
            return table.judge(next(cell for cell in cells if cell.name == "cp2")).kind

    assert (kind(2.0000001, 2.0), kind(2.00001, 2.0), kind(2.0, math.nan)) == ("ran", "fault", "fault")


def test_other_losses_are_a_fault() -> None:
    def kind(loss: float) -> str:
        def run(function: object, world_size: int, *args: object, **kwargs: object) -> list[RankTrace]:
            losses = [{"lm loss": 2.0}, {"lm loss": loss if world_size > 1 else 2.0}]
            return [RankTrace(losses, [1.0, 1.0], [])]

        return judge_layout(draw_case(0), run).kind

    assert (kind(2.00001), kind(2.0001), kind(math.nan)) == ("ran", "fault", "fault")


@pytest.mark.parametrize(
    ("ending", "fault"),
    [
        ("raise ValueError('x')", "Traceback"),
        ("sys.exit(3)", "exit code 3"),
        ("sys.exit(2)", "without an error: line"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("open('left', 'w'); print('error: x', file=sys.stderr); sys.exit(2)", "left left"),
    ],
)
def test_bad_endings_are_faults(tmp_path: Path, ending: str, fault: str) -> None:
    (tmp_path / "program.py").write_text(f"import os, sys\n{ending}\n")
    verdict = judge_input(HostileCase(0, "test", str(tmp_path / "program.py"), []))
    assert verdict.kind == "fault" and fault in verdict.text
