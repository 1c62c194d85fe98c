# SPDX-License-Identifier: Apache-2.0
"""The verdict on a run's speed, from traces whose answer is known."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.report.run_record import RunRecord, open_runs
from megatron.report.trace_shares import measure, read_profile, sweep
from megatron.report.verdict import judge
from megatron.training.flags.declarations import flags_by_spelling
from tests.support.source_code import ROOT

MILLISECOND = 1000.0
"""In the microseconds of a trace."""


def build_event(category: str, name: str, start_ms: float, end_ms: float, thread: int = 1) -> dict[str, Any]:
    start, duration = start_ms * MILLISECOND, (end_ms - start_ms) * MILLISECOND
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": duration}


def build_run(tmp_path: Path, events: list[dict[str, Any]] | None = None, **settings: Any) -> RunRecord:
    """A run with a profile of these events."""
    row = {"event": "start", "iteration": 0, "settings": {"model": settings}}
    (tmp_path / "events.jsonl").write_text(json.dumps(row) + "\n")
    if events is not None:
        (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": events}))
    return open_runs([tmp_path])[0]


GPU = [
    build_event("kernel", "sm90_xmma_gemm_bf16", 0, 40),
    build_event("kernel", "flash_fwd_kernel", 40, 50),
    build_event("kernel", "elementwise_kernel", 50, 60),
    build_event("kernel", "ncclDevKernel_AllReduce_Sum", 30, 80, 7),  # 30 of it hidden, 20 not
    build_event("user_annotation", "fetch batch", 70, 90),  # 10 of it while nothing else goes on
    build_event("cpu_op", "aten::mm", 0, 1),
    build_event("kernel", "void cutlass::Kernel", 95, 100),
]


def test_each_moment_of_a_device_counts_once() -> None:
    profile = measure(GPU, 3)
    milliseconds = {part: 1e3 * seconds for part, seconds in profile.parts.items()}
    expected = {"products": 45, "attention": 10, "elementwise": 10, "all-reduce": 20, "data": 10, "host": 5}
    # Data comes before communication: while a batch is fetched, no collective is waited for.
    expected |= {"all-reduce": 10, "data": 20}
    assert milliseconds == pytest.approx(expected)
    assert sum(profile.shares.values()) == pytest.approx(1.0)
    assert (profile.rank, profile.products, profile.usual_product_seconds) == (3, 2, pytest.approx(22.5e-3))


def test_operations_of_a_host_belong_to_the_outermost() -> None:
    events = [
        build_event("cpu_op", "autograd::engine::evaluate_function: MmBackward", 0, 30),
        build_event("cpu_op", "aten::linear", 2, 12),
        build_event("cpu_op", "aten::empty", 3, 4),
        build_event("cpu_op", "aten::scaled_dot_product_attention", 12, 20),
        build_event("cpu_op", "aten::bmm", 13, 19),
        build_event("cpu_op", "aten::gelu", 20, 30),
        build_event("user_annotation", "gloo:all_reduce", 5, 50, 9),
        build_event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 50, 70),
        build_event("cpu_op", "aten::stack", 51, 60),
        build_event("cpu_op", "aten::mul", 70, 72),
    ]
    milliseconds = {part: 1e3 * seconds for part, seconds in measure(events, 0).parts.items()}
    # The trace begins with its first operation.
    expected = {"products": 10, "attention": 8, "elementwise": 12, "all-reduce": 20, "data": 20}
    assert milliseconds == pytest.approx(expected)


def test_sweep_against_a_clock_of_small_ticks() -> None:
    layers = [[(1.0, 3.0, "a"), (2.0, 5.0, "a")], [(0.0, 4.0, "b"), (6.0, 7.0, "b")]]
    found = sweep(layers, 0.0, 8.0)

    def name(at: float) -> str:
        return next((part for layer in layers for start, end, part in layer if start <= at < end), "host")

    ticks = [name(tick / 100) for tick in range(800)]
    assert found == pytest.approx({part: ticks.count(part) / 100 for part in set(ticks)})


@pytest.mark.parametrize(
    ("cause", "words", "settings", "events"),
    [
        ("data", "Data loading is 80% of a step: --num-workers 4", {}, [
            build_event("kernel", "gemm", 0, 20), build_event("user_annotation", "fetch batch", 20, 100),
            build_event("kernel", "gemm", 100, 100.001)]),
        ("collectives", "most of it all-reduce: --overlap-grad-reduce", {}, [
            build_event("kernel", "gemm", 0, 50), build_event("kernel", "ncclDevKernel_AllReduce", 50, 99),
            build_event("kernel", "gemm", 99, 100)]),
        ("collectives", "most of it all-gather: --sequence-parallel", {"tensor_model_parallel_size": 4}, [
            build_event("kernel", "gemm", 0, 50), build_event("kernel", "ncclDevKernel_AllGather", 50, 99),
            build_event("kernel", "gemm", 99, 100)]),
        ("bubble", "idle for 50% of a step: a larger --global-batch-size", {"pipeline_model_parallel_size": 4}, [
            build_event("kernel", "gemm", 0, 50), build_event("kernel", "ncclDevKernel_SendRecv", 50, 100),
            build_event("kernel", "gemm", 100, 100.001)]),
        ("small products", "a larger --micro-batch-size", {}, [
            build_event("kernel", "gemm", start, start + 0.01) for start in range(100)]),
        ("host", "waits for the host 50% of a step: --cuda-graph-impl local", {}, [
            build_event("kernel", "gemm", 0, 50), build_event("kernel", "gemm", 100, 150),
            build_event("kernel", "gemm", 200, 200.001)]),
        ("elementwise", "Elementwise work is 40% of a step", {}, [
            build_event("kernel", "gemm", 0, 60), build_event("kernel", "add", 60, 100)]),
        ("none", "Nothing stands out: products take 90% of a step.", {}, [
            build_event("kernel", "gemm", 0, 90), build_event("kernel", "add", 90, 100)]),
    ],
)  # fmt: skip
def test_cause_and_remedy(
    cause: str, words: str, settings: dict[str, Any], events: list[dict[str, Any]], tmp_path: Path
) -> None:
    verdict = judge(build_run(tmp_path, events, **settings))
    assert verdict.cause == cause and words in verdict.sentence


def write_trace(directory: Path, backward_ms: float) -> None:
    """Two stages, whose second one takes that long for each backward."""
    header = {"schedule": "1f1b", "stages": 2, "chunks": 1, "folded": False, "group_size": None}
    for stage, cost in ((0, 10.0), (1, backward_ms)):
        rows: list[dict[str, Any]] = [header]
        for microbatch in range(4):
            start = 100.0 * microbatch
            rows += [
                {"iteration": 1, "kind": kind, "microbatch": microbatch, "chunk": 0, "start": (start + at) / 1e3,
                 "end": (start + at + long) / 1e3}
                for kind, at, long in (("F", 0.0, 10.0), ("B", 20.0, cost))
            ]  # fmt: skip
        (directory / f"stage-{stage}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_stages_that_differ(tmp_path: Path) -> None:
    write_trace(tmp_path, 70.0)
    verdict = judge(build_run(tmp_path, pipeline_model_parallel_size=2))
    assert verdict.cause == "uneven pipeline"
    assert (
        "stage 1 works 1.60 times as long" in verdict.sentence
        and "--account-for-loss-in-pipeline-split" in verdict.sentence
    )
    write_trace(tmp_path, 10.0)
    assert judge(build_run(tmp_path, pipeline_model_parallel_size=2)).cause == "bubble"


def note_ranks(run: RunRecord, directory: Path, rows: list[tuple[int, dict[str, float]]]) -> None:
    ranks = [
        {"rank": rank, "host": "h", "stage": stage, "forward_ms": phases["forward"], "phases": phases}
        for rank, (stage, phases) in enumerate(rows)
    ]
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "ranks", "iteration": 9, "ranks": ranks}) + "\n")
    run.refresh()


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_a_rank_that_is_slow(tmp_path: Path, phase: str) -> None:
    run = build_run(tmp_path)
    usual = {"data": 10.0, "forward": 10.0, "backward": 20.0, "optimizer": 2.0, "communication": 30.0}
    note_ranks(run, tmp_path, [(0, usual | ({phase: 2 * usual[phase]} if rank == 2 else {})) for rank in range(4)])
    verdict = judge(run)
    assert verdict.cause == "slow rank" and verdict.sentence.startswith(f"Rank 2 takes in {phase} 2.0 times as long")


def test_stages_that_differ_without_a_trace(tmp_path: Path) -> None:
    """The last stage has more to do; no rank is slow beside its peers."""
    run = build_run(tmp_path, pipeline_model_parallel_size=2)
    stages = [(stage, {"forward": 10.0 + 10 * stage, "backward": 20.0 + 20 * stage}) for stage in (0, 0, 1, 1)]
    note_ranks(run, tmp_path, stages)
    verdict = judge(run)
    assert verdict.cause == "uneven pipeline" and "stage 1 works 1.33 times" in verdict.sentence


def test_without_a_profile(tmp_path: Path) -> None:
    """Waits for data are known from times.jsonl, the parts of a step from timers."""
    rows = [{"iteration": i, "step_seconds": 1.0, "data_seconds": 0.4} for i in range(1, 9)]
    (tmp_path / "times.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = judge(build_run(tmp_path, num_workers=6))
    assert verdict.cause == "data" and verdict.sentence == "Data loading is 40% of a step: --num-workers 12"
    assert verdict.shares == pytest.approx({"data": 0.4, "everything else": 0.6})
    times = {"forward-backward": 0.5, "forward-compute": 0.2, "backward-compute": 0.3, "all-grads-sync": 0.4}
    row = {"iteration": 1, "iteration_time_seconds": 1.0, **{f"{name}-time": value for name, value in times.items()}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "times.jsonl").unlink()
    verdict = judge(build_run(tmp_path))
    assert verdict.cause == "collectives" and verdict.shares["gradients"] == pytest.approx(0.4)


def test_nothing_is_claimed_of_what_was_not_recorded(tmp_path: Path) -> None:
    assert judge(build_run(tmp_path)).sentence == "Nothing has been measured yet."
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "lm loss": 2.0, "mfu": 0.4}) + "\n")
    assert "was not recorded: profile a few with --profile" in judge(build_run(tmp_path)).sentence


def test_a_profile_that_is_none(tmp_path: Path) -> None:
    for content in ("", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X", "ts": "a"}, 3]}'):
        (tmp_path / "rank-0.json").write_text(content)
        with pytest.raises(Exception):  # noqa: B017 (any, as long as the record makes it a note)
            read_profile(tmp_path / "rank-0.json")
        run = build_run(tmp_path)
        assert not run.profiles and "is no profile" in run.notes[0]


def test_flags_to_try_exist() -> None:
    known = set(flags_by_spelling())
    tree = ast.parse((ROOT / "megatron/report/verdict.py").read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {flag for text in texts for flag in re.findall(r"--[a-z][a-z0-9-]+", text)}
    assert len(named) > 12 and named <= known
