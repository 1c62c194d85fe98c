# SPDX-License-Identifier: Apache-2.0
"""A verdict on a run's speed: shares of a step, what costs most, and the flags that would help.

Shares come from profiles (trace_shares.py). Without one, metrics.jsonl knows the wait for data, --log-straggler and
--pipeline-trace-dir which rank or stage works longest, and the verdict says which flags would tell more. A share is a
cause when it is larger than what a good run has (`_USUAL`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.core.pipeline_parallel.timelines import MeasuredStep
from megatron.report.run_record import RunRecord

HOW_TO_PROFILE = "--profile --use-pytorch-profiler --profile-dir RUN/profile"
_OWN_WORK = ("data", "forward", "backward", "optimizer")
"""Phases in which a rank does not wait for others."""
_USUAL = {"slow rank": 0.05, "data": 0.02, "host": 0.10, "bubble": 0.10, "elementwise": 0.25, "collectives": 0.10}
_SMALL_PRODUCT_SECONDS = 300e-6
"""A product that takes less leaves launching it no time to hide."""
_LOW_MFU = 0.3
_CLEAR = 0.15
"""A share that explains a low MFU."""
_UNEVEN = 1.15
"""Work of the busiest stage over the mean one."""
_SLOW_RANK = 1.2
RECENT_ROWS = 200
"""Steps that count, the last ones."""
_KINDS = (
    "gradients",
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "send and receive",
    "broadcast",
    "other communication",
)


@dataclass(frozen=True)
class TimeCost:
    """One thing that costs time."""

    cause: str
    """data, collectives, uneven pipeline, bubble, slow rank, small products, host, elementwise, none, unknown."""
    share: float
    """Of a step, 0 to 1."""
    sentence: str
    flags: tuple[str, ...] = ()
    """Flags to try."""


@dataclass(frozen=True)
class Verdict:
    """Shares of a step's time, and the cause of the largest."""

    sentence: str
    findings: list[TimeCost] = field(default_factory=list)
    """The most expensive first."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Part -> share of a step, in sum 1."""
    source: str = ""
    """Source of the shares, in words."""

    @property
    def cause(self) -> str:
        """The first finding's."""
        return self.findings[0].cause if self.findings else "none"


def judge(run: RunRecord) -> Verdict:
    """Say where a run's time goes."""
    shares, source = _find_shares(run)
    findings = sorted(_list_findings(run, shares), key=lambda finding: -finding.share)
    if all(finding.share < _CLEAR for finding in findings):
        findings = [*_judge_utilisation(run), *findings]
    if findings:
        return Verdict(findings[0].sentence, findings, shares, source)
    if not shares and run.metrics is not None and len(run.metrics.iterations):
        return Verdict(f"Where a step's time goes was not recorded: profile a few with {HOW_TO_PROFILE}.")
    if not shares:
        return Verdict("Nothing has been measured yet.")
    if run.profiles or len(shares) > 2:
        largest = max(shares, key=lambda part: shares[part])
        return Verdict(f"Nothing stands out: {largest} take {shares[largest]:.0%} of a step.", [], shares, source)
    return Verdict(
        f"No wait for data; what else a step does is not known: profile a few with {HOW_TO_PROFILE}.",
        [],
        shares,
        source,
    )


def measure_data_share(run: RunRecord) -> float | None:
    """The share of the last steps in which the first rank waited for batches; None where it was not measured."""
    if run.times is None:
        return None
    waits, steps = (run.times.column(name)[-RECENT_ROWS:] for name in ("data_seconds", "step_seconds"))
    known = np.isfinite(waits) & np.isfinite(steps)
    if known.sum() > 1:
        known[np.argmax(known)] = False  # the first steps start the loaders
    total = float(steps[known].sum())
    return min(1.0, float(waits[known].sum()) / total) if total > 0 else None


def _find_shares(run: RunRecord) -> tuple[dict[str, float], str]:
    if run.profiles:
        profile = run.profiles[0]
        shares = dict(profile.shares)
        between = shares.pop("send and receive", 0.0)
        if between:
            is_pipeline = run.setting("pipeline_model_parallel_size", 1) > 1 or run.pipeline is not None
            shares["bubble" if is_pipeline else "send and receive"] = between
        return shares, f"profile of rank {profile.rank}, {profile.seconds:.3g} s"
    timed = _read_timers(run)
    if timed:
        return timed, "timers of --timing-log-level, the slowest rank's, in metrics.jsonl"
    data = measure_data_share(run)
    if data is None:
        return {}, ""
    return {"data": data, "everything else": 1 - data}, "waits of the first rank's host, in times.jsonl"


def _read_timers(run: RunRecord) -> dict[str, float]:
    """Shares by the timers that --log-timers-to-tensorboard adds to the metrics; none where they are not there."""

    def read(name: str) -> float:
        column = run.metrics.column(name)[-RECENT_ROWS:] if run.metrics is not None else np.empty(0)
        known = column[np.isfinite(column)]
        return float(np.median(known)) if len(known) else 0.0

    step, inside = read("iteration_time_seconds"), read("forward-backward-time")
    computing = sum(
        read(f"{name}-time")
        for name in ("forward-compute", "backward-compute", "weight-grad-compute", "forward-backward-compute")
    )
    if not step or not computing:
        return {}
    data = min(read("batch-generator-time"), inside)
    is_pipeline = run.setting("pipeline_model_parallel_size", 1) > 1 or run.pipeline is not None
    found = {
        # The forward pass fetches its batch.
        "computing": max(0.0, min(computing, inside) - data), "data": data,
        "gradients": read("all-grads-sync-time"), "optimizer": read("optimizer-time"),
        "bubble" if is_pipeline else "host": max(0.0, inside - computing),
    }  # fmt: skip
    found["everything else"] = max(0.0, step - sum(found.values()))
    whole = sum(found.values())
    return {part: seconds / whole for part, seconds in found.items() if seconds}


def _list_findings(run: RunRecord, shares: Mapping[str, float]) -> Iterator[TimeCost]:
    yield from _judge_data(run, shares)
    collectives = {kind: shares[kind] for kind in _KINDS if shares.get(kind)}
    slow = _find_slow_rank(run)
    bubble = shares.get("bubble", 0.0)
    if run.pipeline is not None:
        bubble = max(bubble, run.pipeline.timeline.bubble)
    elif not bubble and (work := _measure_stages(run)):
        # Of stages that differ the others wait for the busiest, how often so ever.
        uneven = 1 - statistics.fmean(work) / max(work, default=1.0) if max(work) else 0.0
        bubble = uneven if max(work) > _UNEVEN * statistics.fmean(work) else 0.0
    if slow is not None:
        yield slow
    elif sum(collectives.values()) > _USUAL["collectives"]:
        yield _judge_collectives(run, collectives)
    if bubble > _USUAL["bubble"]:
        yield _judge_bubble(run, bubble, shares)
    yield from _judge_computing(run, shares)


def _judge_data(run: RunRecord, shares: Mapping[str, float]) -> Iterator[TimeCost]:
    share = max(shares.get("data", 0.0), measure_data_share(run) or 0.0)
    if share > _USUAL["data"]:
        workers = int(run.setting("num_workers", 2))
        flags = (f"--num-workers {max(4, 2 * workers)}", "--data-cache-path on a local disk")
        yield TimeCost("data", share, f"Data loading is {share:.0%} of a step: {flags[0]}", flags)


def _judge_collectives(run: RunRecord, kinds: Mapping[str, float]) -> TimeCost:
    share, worst = sum(kinds.values()), max(kinds, key=lambda kind: kinds[kind])
    flags: list[str] = []
    if run.setting("tensor_model_parallel_size", 1) > 1 and worst in ("all-gather", "reduce-scatter", "all-reduce"):
        flags += ["--sequence-parallel", "--tp-comm-overlap", "a smaller --tensor-model-parallel-size"]
    if worst == "all-to-all":
        flags += ["--overlap-moe-expert-parallel-comm", "a smaller --expert-model-parallel-size"]
    elif worst == "send and receive":
        flags += ["a smaller --context-parallel-size"]
    else:
        if run.setting("tensor_model_parallel_size", 1) <= 1 or worst != "all-reduce":
            flags += ["--overlap-grad-reduce"]
        flags += ["--use-distributed-optimizer --overlap-param-gather", "a larger --global-batch-size"]
    return TimeCost(
        "collectives", share,
        f"Communication that nothing hides is {share:.0%} of a step, most of it {worst}: {flags[0]}", tuple(flags),
    )  # fmt: skip


def _find_slow_rank(run: RunRecord) -> TimeCost | None:
    """One rank that works longer than its peers, which all wait for it: from profiles of several ranks of one stage, or
    from --log-straggler, phase by phase."""
    working = {profile.rank: profile.working_seconds for profile in run.profiles}
    if len(working) > 1 and run.pipeline is None and run.setting("pipeline_model_parallel_size", 1) <= 1:
        return _name_slow_rank(working, run.profiles[0].seconds, "works")
    rows = list(_list_phases(run))
    found = []
    for stage in {stage for _, stage, _ in rows}:
        peers = {rank: phases for rank, of_stage, phases in rows if of_stage == stage}
        step = max(sum(phases.values()) for phases in peers.values())
        for phase in {phase for phases in peers.values() for phase in phases if phase in _OWN_WORK}:
            taken = {rank: phases.get(phase, 0.0) for rank, phases in peers.items()}
            found.append(_name_slow_rank(taken, step, f"takes in {phase}"))
    return max((one for one in found if one is not None), key=lambda one: one.share, default=None)


def _name_slow_rank(taken: Mapping[int, float], step: float, does: str) -> TimeCost | None:
    """The rank that takes clearly longer than the others; none where there is none. step: a whole one, in the same
    unit."""
    if len(taken) < 2 or step <= 0:
        return None
    slowest = max(taken, key=lambda rank: taken[rank])
    usual = statistics.median(time for rank, time in taken.items() if rank != slowest)
    lost = min(1.0, (taken[slowest] - usual) / step)
    if taken[slowest] < _SLOW_RANK * usual or lost < _USUAL["slow rank"]:
        return None
    return TimeCost(
        "slow rank", lost,
        f"Rank {slowest} {does} {taken[slowest] / max(usual, 1e-9):.1f} times as long as its peers, who wait: "
        "look at its node", ("--log-straggler",),
    )  # fmt: skip


def _list_phases(run: RunRecord) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yield rank, stage, and milliseconds of an iteration by phase, as --log-straggler has left them."""
    for row in run.ranks:
        rank, stage, phases = row.get("rank"), row.get("stage", 0), row.get("phases")
        if isinstance(rank, int) and isinstance(stage, int) and isinstance(phases, dict):
            known = {str(name): float(ms) for name, ms in phases.items() if isinstance(ms, int | float)}
            yield rank, stage, known


def find_stage_work(step: MeasuredStep) -> list[float]:
    """Milliseconds that each stage computed in the traced iteration."""
    work: dict[int, float] = defaultdict(float)
    for event in step.timeline.events:
        if not event.action.is_beside:
            work[event.rank] += event.end - event.start
    return [work[stage] for stage in sorted(work)]


def _measure_stages(run: RunRecord) -> list[float]:
    """Milliseconds of work of each stage, the median of its ranks, from --log-straggler; none without a pipeline."""
    by_stage: dict[int, list[float]] = defaultdict(list)
    for _, stage, phases in _list_phases(run):
        by_stage[stage].append(sum(phases.get(phase, 0.0) for phase in ("forward", "backward")))
    return [statistics.median(by_stage[stage]) for stage in sorted(by_stage)] if len(by_stage) > 1 else []


def _judge_bubble(run: RunRecord, bubble: float, shares: Mapping[str, float]) -> TimeCost:
    work: Sequence[float] = ()
    flags: tuple[str, ...]
    if run.pipeline is not None:
        work = find_stage_work(run.pipeline)
    elif len(run.profiles) > 1 and len(run.profiles) == run.setting("pipeline_model_parallel_size", 1):
        work = [profile.working_seconds for profile in run.profiles]
    else:
        work = _measure_stages(run)
    if len(work) > 1 and max(work) > _UNEVEN * statistics.fmean(work):
        busiest = max(range(len(work)), key=lambda stage: work[stage])
        ratio = max(work) / statistics.fmean(work)
        flags = ("--pipeline-model-parallel-layout with fewer layers there",)
        if busiest == len(work) - 1:
            flags = ("--account-for-loss-in-pipeline-split", "--decoder-last-pipeline-num-layers N", *flags)
        elif busiest == 0:
            flags = ("--decoder-first-pipeline-num-layers N", *flags)
        return TimeCost(
            "uneven pipeline", bubble,
            f"Stages wait {bubble:.0%} of a step: stage {busiest} works {ratio:.2f} times as long as the mean one: "
            f"{flags[0]}", flags,
        )  # fmt: skip
    flags = ("a larger --global-batch-size", "--num-layers-per-virtual-pipeline-stage N", "fewer stages")
    return TimeCost("bubble", bubble, f"The pipeline is idle for {bubble:.0%} of a step: {flags[0]}", flags)


def _judge_computing(run: RunRecord, shares: Mapping[str, float]) -> Iterator[TimeCost]:
    flags: tuple[str, ...]
    host, small = shares.get("host", 0.0), False
    if run.profiles:
        profile = run.profiles[0]
        small = 0 < profile.usual_product_seconds < _SMALL_PRODUCT_SECONDS
        graphs = ("--cuda-graph-impl local",) if profile.has_device else ()
        if host > _USUAL["host"] and small:
            flags = (*_enlarge_products(run), *graphs)
            yield TimeCost(
                "small products",
                host,
                f"Products are small ({1e6 * profile.usual_product_seconds:.0f} microseconds each), and the host's own "
                f"time is {host:.0%} of a step: {flags[0]}",
                flags,
            )
        elif host > _USUAL["host"]:
            flags = (*graphs, "--manual-gc", "a larger --micro-batch-size")
            yield TimeCost("host", host, f"Computing waits for the host {host:.0%} of a step: {flags[0]}", flags)
    elementwise = shares.get("elementwise", 0.0)
    if elementwise > _USUAL["elementwise"] and not small:
        flags = ("the fused kernels that docs/kernels.md lists", "less recomputation")
        yield TimeCost(
            "elementwise", elementwise, f"Elementwise work is {elementwise:.0%} of a step: {flags[0]}", flags
        )


def _judge_utilisation(run: RunRecord) -> Iterator[TimeCost]:
    """A low MFU, where nothing else is known to cost much time."""
    mfu = run.metrics.column("mfu")[-RECENT_ROWS:] if run.metrics is not None else np.empty(0)
    known = mfu[np.isfinite(mfu)]
    median = float(np.median(known)) if len(known) else 1.0
    if median < _LOW_MFU and _has_small_products(run):
        flags = _enlarge_products(run)
        more = "" if run.profiles else f"; {HOW_TO_PROFILE} says more"
        sentence = f"MFU is {median:.1%}, and matrices are small for the device: {flags[0]}{more}"
        yield TimeCost("small products", 1 - median / _LOW_MFU, sentence, flags)


def _has_small_products(run: RunRecord) -> bool:
    hidden, split = run.setting("hidden_size", 0.0), run.setting("tensor_model_parallel_size", 1.0)
    rows = run.setting("micro_batch_size", 1.0) * run.setting("seq_length", 1e9)
    return 0 < hidden / max(split, 1.0) < 512 or rows < 512


def _enlarge_products(run: RunRecord) -> tuple[str, ...]:
    divided = run.setting("tensor_model_parallel_size", 1) > 1
    return ("a larger --micro-batch-size", *(["a smaller --tensor-model-parallel-size"] if divided else []))
