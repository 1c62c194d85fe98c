# SPDX-License-Identifier: Apache-2.0
"""Traces of a pipeline that really ran, and tools/draw_schedule.py over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.errors import DataError
from megatron.core.pipeline_parallel.schedules import Action, build_tables
from megatron.core.pipeline_parallel.timelines import needs, read_trace
from megatron.training.loop import train
from megatron.training.verify.parity import open_local_run
from tests.functional.test_draw_schedule import draw
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training


def traced(layout: str, directory: str, style: str = "gpt2", first: int = 1) -> list[str]:
    steps = f"--profile-step-start={first},--profile-step-end={first + 2}"
    flags = f"--pipeline-trace-dir={directory},{steps},--train-iters=4"
    config, recipe = training((STYLES | EXPERTS)[style], f"{layout},{flags},--timing-log-level=2,--log-interval=100")
    with open_local_run(config, recipe, own_rank(config)) as run:
        train(run)
        return run.timers.names()


@pytest.mark.flags("--pipeline-trace-dir", "--timing-log-level", "--profile-step-start", "--profile-step-end")
@pytest.mark.parametrize(("layout", "schedule"), [("pp2", "1f1b"), ("pp2,--pipeline-schedule=zb-v", "zb-v")])
def test_trace_of_a_run(tmp_path: Path, layout: str, schedule: str) -> None:
    for names in run_distributed(traced, 2, layout, str(tmp_path)):
        assert {"forward-compute", "backward-compute", "batch-generator"} <= set(names)
        assert ("weight-grad-compute" in names) == (schedule == "zb-v")
    for stage in (0, 1):
        rows = [json.loads(line) for line in (tmp_path / f"stage-{stage}.jsonl").read_text().splitlines()]
        assert {row["iteration"] for row in rows[1:]} == {2, 3}
    step = read_trace(tmp_path)
    assert (step.iteration, step.schedule, step.microbatches) == (3, schedule, 6)
    events = step.timeline.events
    planned = build_tables(schedule, step.shape, 6)  # type: ignore[arg-type]
    for rank, table in enumerate(planned):
        own = [event for event in events if event.rank == rank]
        assert [event.action for event in own] == table, "what ran is what was planned"
        assert all(before.end <= after.start for before, after in zip(own, own[1:], strict=False))
    done = {(e.action.kind, e.action.microbatch, step.shape.index(e.rank, e.action.chunk)): e.end for e in events}
    for event in events:
        for need in needs(event.action, event.rank, step.shape):
            assert done[need] <= event.start + 1.0, f"{event} began before its input was there"
    assert 0 < step.timeline.bubble < 1

    result = draw("--trace", tmp_path, "--iteration", "2")
    assert result.returncode == 0, result.stderr
    titles = [line for line in result.stdout.splitlines() if "% idle" in line]
    assert [title.split(", ")[3].split(":")[0] for title in titles] == ["planned", "measured in iteration 2"]
    bubble = 100 * read_trace(tmp_path, 2).timeline.bubble
    assert f"{bubble:.1f} % idle" in titles[1]
    assert result.stdout.count("rank 0") == result.stdout.count("rank 1") == 2


def test_one_process_has_no_bubble_but_its_gaps(tmp_path: Path) -> None:
    traced("1", str(tmp_path))
    step = read_trace(tmp_path)
    assert [event.action for event in step.timeline.events[:2]] == [Action("F", 0), Action("B", 0)]
    # A later start that traces nothing, such as a restart beyond these steps, leaves what is there.
    traced("1", str(tmp_path), first=10)
    assert read_trace(tmp_path).iteration == step.iteration == 3


def test_trace_of_backwards_beside_forwards(tmp_path: Path) -> None:
    flags = "--moe-token-dispatcher-type=alltoall,--overlap-moe-expert-parallel-comm,--delay-wgrad-compute"
    for names in run_distributed(traced, 2, f"dp2,ep2,{flags}", str(tmp_path), "moe"):
        assert {"forward-compute", "forward-backward-compute", "backward-compute"} <= set(names)
    step = read_trace(tmp_path)
    (table,) = build_tables(step.schedule, step.shape, 3, side_by_side=True, delays_weights=True)
    assert (step.side_by_side, step.delays_weights) == (True, True)
    assert [event.action for event in step.timeline.events] == table
    assert 0 <= step.timeline.bubble < 1 and step.costs.weight == 0.0
    result = draw("--trace", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("F1+B0") == result.stdout.count("B2+W2") == 2


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="stage-0.jsonl cannot be read"):
        read_trace(tmp_path)
    (tmp_path / "stage-0.jsonl").write_text('{"stages": 1}\n')
    with pytest.raises(DataError, match="no trace of a pipeline"):
        read_trace(tmp_path)
    result = draw("--trace", tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr


def test_an_iteration_whose_end_was_cut_off_is_left_out(tmp_path: Path) -> None:
    header = {"schedule": "1f1b", "stages": 1, "chunks": 1, "folded": False, "group_size": None}
    action = {"microbatch": 0, "chunk": 0, "start": 0.0, "end": 0.1}
    rows = [header, *({"iteration": n, "kind": kind} | action for n in (1, 2) for kind in "FB")]
    file = tmp_path / "stage-0.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_trace(tmp_path).iteration == 2
    file.write_text(file.read_text()[:-3])
    step = read_trace(tmp_path)
    assert step.iteration == 1
    assert step.notes == (f"{file} ends in an unfinished line, which is left out with iteration 2",)
