# SPDX-License-Identifier: Apache-2.0
"""--log-straggler: the report's lines, and which ranks are slower than the others."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.training.config.reliability import ReliabilityConfig
from megatron.training.hooks import work_clock
from megatron.training.hooks.stragglers import RankTimes, StragglerHook, describe_times, find_slow_ranks, find_suspects
from megatron.training.hooks.work_clock import OWN_WORK, QUEUE, PhaseTime, ProcessorQueue, WorkClock, _summarise
from tests.functional.pretrain_runs import ROOT, TINY, environment, finish, free_port, metrics, run, run_ranks
from tests.programs import Program

_USUAL = {"data": 1.0, "forward": 10.0, "backward": 20.0, "optimizer": 4.0, "communication": 5.0, QUEUE: 0.0}


def _times(factor: float = 1.0, *, stage: int = 0, **phases: float | PhaseTime) -> RankTimes:
    found = {
        phase: value if isinstance(value, PhaseTime) else PhaseTime(factor * value, 0.0)
        for phase, value in (_USUAL | phases).items()
    }
    return RankTimes("a", stage, found)


@pytest.mark.parametrize("ranks", [2, 3, 4, 16, 1000])
def test_a_rank_that_is_slower_by_three_tenths_is_found_among_noisy_ones(ranks: int) -> None:
    generator = random.Random(ranks)
    for _ in range(20):
        usual = generator.uniform(1, 1000)
        times = [usual * generator.uniform(0.98, 1.02) for _ in range(ranks)]
        assert find_slow_ranks("forward", times) == []
        slow = generator.randrange(ranks)
        times[slow] = 1.3 * usual
        (found,) = find_slow_ranks("forward", times)
        assert (found.rank, found.phase, found.milliseconds) == (slow, "forward", 1.3 * usual)
    assert find_slow_ranks("forward", [5.0]) == []
    assert find_slow_ranks("fetching data", [0.1, 0.1, 0.9], least=1.0) == []


def test_lines_of_the_report() -> None:
    times = [_times(data=1.0), _times(data=0.5, forward=20.0), _times(data=2.0, forward=12.5)]
    first, bottom, top, phases = describe_times(times, 1000.0, 2)
    assert re.sub(r"\[.*\]", "[now]", first) == (
        "[now] | MnRtt/Rnk: 10.00ms/0 | MxRtt/Rnk: 20.00ms/1 | MnDRtt/Rnk: 0.50ms/1 | MxDRtt/Rnk: 2.00ms/2 | "
        "MnEtpt/Rnk: 50.00TF/1 | MxEtpt/Rnk: 100.00TF/0 |"
    )
    assert bottom == "^^^^ Bottom 2 Ranks with lowest Etpt(TF): 50.00/1, 80.00/2"
    assert top == "^^^^ Top    2 Ranks with highest Etpt(TF): 100.00/0, 80.00/2"
    assert len(describe_times(times, 1000.0, 1)) == 2
    assert phases == (
        "own work in an iteration, median and slowest rank: data 1.00 and 2.00 ms (rank 2), forward 12.50 and 20.00 ms "
        "(rank 1), backward 20.00 and 20.00 ms (rank 0), optimizer 4.00 and 4.00 ms (rank 0); "
        "communication 5.00 and 5.00 ms (rank 0), waiting included, "
        "of which processor wait 0.00 and 0.00 ms (rank 0)"
    )


@pytest.mark.parametrize("phase", OWN_WORK)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_is_slower_by_three_tenths_is_named_with_its_phase_in_three_reports(
    phase: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hook, generator = StragglerHook(ReliabilityConfig(log_straggler=True), 1), random.Random(ranks)
    for report in range(4):
        slow = 20.0 if report == 0 else 26.0
        noisy = [generator.uniform(0.98, 1.02) for _ in range(ranks)]
        hook._accuse([_times(noisy[r], **{phase: slow if r == 1 else 20.0}) for r in range(ranks)])
        assert ("warning: rank 1 (a) is slow in" in capsys.readouterr().out) == (report == 3)


def test_noise_of_a_busy_machine_and_stages_with_more_work_accuse_nobody(
    capsys: pytest.CaptureFixture[str],
) -> None:
    generator = random.Random(5)
    hook = StragglerHook(ReliabilityConfig(log_straggler=True), 1)
    for _ in range(1000):
        # Each iteration is disturbed by what else the machine does: the mean has an error that says so.
        times = []
        for _ in range(4):
            values = [10.0 * generator.choice([1, 1, 1, generator.uniform(1, 4)]) for _ in range(10)]
            times.append(_times(forward=_summarise(values)))
        hook._accuse(times)
    assert "is slow" not in capsys.readouterr().out
    stages = [_times(stage=stage, forward=10.0 * (1 + stage)) for stage in (0, 0, 1, 1)]
    assert find_suspects(stages) == []
    # Processes that fetch data wait for processors, too; the forward pass has its time without such waits.
    busy = [_times(data=30.0 if rank == 1 else 6.0, **{QUEUE: 30.0}) for rank in range(3)]
    assert find_suspects(busy) == []
    assert [found.rank for found in find_suspects([_times(), _times(forward=30.0, **{QUEUE: 30.0}), _times()])] == [1]


def test_work_is_timed_without_waits_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    now, queued = [100.0], [0.0]

    def pass_time(work: float, wait: float) -> None:
        now[0] += work + wait
        queued[0] += wait

    def fetch() -> Iterator[dict[str, torch.Tensor]]:
        pass_time(0.001, 0.002)
        yield {}

    monkeypatch.setattr(work_clock, "mark", lambda: now[0])
    monkeypatch.setattr(work_clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ProcessorQueue, "read_seconds", lambda self: queued[0])
    clock = WorkClock()
    clock.begin_iteration()
    next(clock.time_data(fetch()))
    clock._begin_forward()
    pass_time(0.010, 0.030)
    clock._end_forward(torch.nn.Identity(), None, torch.zeros(1))
    with clock._time_update():
        pass_time(0.004, 0.005)
    pass_time(0.020, 0.0)
    clock.end_iteration()
    found = {phase: time.milliseconds for phase, time in clock.read().items()}
    expected = {"data": 1.0, "forward": 10.0, "backward": 0.0, "optimizer": 4.0, "communication": 57.0, QUEUE: 37.0}
    assert found == pytest.approx(expected)


def test_the_clock_stands_still_while_another_program_has_the_processor() -> None:
    queue, processors = ProcessorQueue(), os.sched_getaffinity(0)
    if not queue.read_seconds():
        pytest.skip("this kernel does not count")
    before, began, worked = queue.read_seconds(), time.perf_counter(), time.thread_time()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(other.pid, {min(processors)})
        os.sched_setaffinity(0, {min(processors)})
        while time.thread_time() - worked < 0.3:
            pass
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, processors)
    passed, queued = time.perf_counter() - began, queue.read_seconds() - before
    assert queued > 0.1
    assert passed - queued == pytest.approx(0.3, rel=0.2)


@pytest.mark.flags("--log-straggler", "--straggler-minmax-count")
def test_R6_a_run_names_the_rank_that_is_slow(tmp_path: Path) -> None:
    flags = [*TINY, "--train-iters", "75", "--global-batch-size", "6", "--log-interval", "15"]
    slow = ["--simulate-fault", "slow:1,1,8", "--save", tmp_path, "--metrics-dir", tmp_path]
    outcome = run_ranks([*flags, "--log-straggler", "--straggler-minmax-count", "2", *slow], 3)
    assert outcome.returncode == 0, outcome.stderr
    lines = [line for line in outcome.stdout.splitlines() if "MnRtt/Rnk" in line]
    assert len(lines) == 5
    assert all("/1 | MnDRtt" in line for line in lines[1:]), "the slowest in forward"
    assert "^^^^ Bottom 2 Ranks with lowest Etpt(TF): " in outcome.stdout
    (named,) = [line for line in outcome.stdout.splitlines() if "is slow in forward" in line]
    assert {f"{phase}-ms-of-{which}-rank" for phase in OWN_WORK for which in ("slowest", "median")} <= set(
        metrics(tmp_path)[14]
    )
    phases = outcome.stdout.partition("own work in an iteration, ")[2].splitlines()[0]
    assert all(float(ms) > 0 for ms in re.findall(r"(?:forward|backward|optimizer) ([0-9.]+) and", phases)), phases
    assert named.startswith(f"warning: rank 1 ({socket.gethostname()}) is slow in forward: ")


def test_R6_a_rank_that_is_slower_by_three_tenths_is_named_within_three_reports() -> None:
    flags = [*TINY, "--hidden-size", "64", "--train-iters", "40", "--global-batch-size", "6", "--log-interval", "10"]
    slow = ["--log-straggler", "--straggler-ctrlr-port", free_port(), "--simulate-fault", "slow:1,1,1.3"]
    job = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    program = str(ROOT / "tests/faults/slow_rank.py")
    ranks = [
        Program([program, *flags, *slow], environment({"RANK": str(rank), "LOCAL_RANK": str(rank), **job}), ROOT)
        for rank in range(3)
    ]
    first, *others = finish(ranks)
    assert [rank.returncode for rank in (first, *others)] == [0, 0, 0], first.stderr
    named = re.findall(r"rank (\d+) \(\S+\) is slow in (\w+)", first.stdout)
    assert ("1", "forward") in named, first.stdout
    assert {rank for rank, _ in named} == {"1"}, first.stdout
    # Before the fourth report.
    assert "is slow" in "MnRtt/Rnk".join(first.stdout.split("MnRtt/Rnk")[:4])


@pytest.mark.flags("--disable-straggler-on-startup")
def test_reports_can_be_off_from_the_start() -> None:
    outcome = run([*TINY, "--log-straggler", "--disable-straggler-on-startup", "--straggler-ctrlr-port", free_port()])
    assert outcome.returncode == 0, outcome.stderr
    assert "MnRtt/Rnk" not in outcome.stdout


@pytest.mark.flags("--straggler-ctrlr-port")
def test_a_connection_switches_reports_on_and_off() -> None:
    port = int(free_port())
    hook = StragglerHook(ReliabilityConfig(log_straggler=True, straggler_ctrlr_port=port), 1)
    hook._listen()
    try:
        for word in ("off", "on"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5) as answer:
                assert answer.read().decode() == f"straggler reports are {word} from the next interval on\n"
            assert hook._is_on is (word == "on")
    finally:
        assert hook._switch is not None
        hook._switch.close()
