# SPDX-License-Identifier: Apache-2.0
"""Runs that are slow for a reason, or end for one, and what their pages say; alerts of a run on their way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.report.page import build_data
from megatron.report.pictures import write_pictures
from megatron.report.run_record import RunRecord, open_runs
from megatron.report.verdict import judge
from tests.functional.pretrain_runs import ROOT, TINY, environment, finish, free_port, run
from tests.programs import Program

SLOWED = """
import sys, time
from torch import distributed as dist
from megatron.core.transformer import mlp

what, seconds, rank = sys.argv[1], float(sys.argv[2]), sys.argv[3]
sys.argv[1:4] = []

def slow(function, is_slow=lambda: True):
    def call(*arguments, **options):
        if is_slow():
            time.sleep(seconds)
        return function(*arguments, **options)
    return call

if what == "collective":
    dist.all_reduce = slow(dist.all_reduce, lambda: str(dist.get_rank()) == rank)
elif what == "layers":
    mlp.MLP.forward = slow(mlp.MLP.forward, lambda: str(dist.get_rank()) == rank)
elif what == "loader":
    from megatron.core.datasets.gpt_dataset import MockGPTDataset
    MockGPTDataset.__getitem__ = slow(MockGPTDataset.__getitem__)
from megatron.cli.train import run
sys.exit(run())
"""
FLAGS = [*TINY, "--train-iters", "6", "--eval-iters", "0", "--log-interval", "2"]
PROFILE = ["--profile", "--use-pytorch-profiler", "--profile-step-start", "3", "--profile-step-end", "5"]


def run_slowed(
    folder: Path, what: str, seconds: float, flags: list[str], processes: int = 1, rank: int = 1
) -> RunRecord:
    """A run of pretrain_gpt.py in which something takes longer, and its record."""
    program = folder / "slowed.py"
    program.write_text(SLOWED)
    arguments = [program, what, str(seconds), str(rank), *FLAGS, *flags, "--metrics-dir", folder / "run" / "metrics",
                 "--profile-dir", folder / "run" / "profile"]  # fmt: skip
    (folder / "run").mkdir()
    job = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **job} if processes > 1 else {} for rank in range(processes)]
    done = finish([Program(arguments, environment(variables), ROOT) for variables in ranks])
    assert [program.returncode for program in done] == [0] * processes, done[0].stderr
    return open_runs([folder / "run"])[0]


@pytest.mark.parametrize("flags", [[], PROFILE], ids=["times", "profile"])
def test_a_slow_loader(flags: list[str], tmp_path: Path) -> None:
    record = run_slowed(tmp_path, "loader", 0.2, [*flags, "--num-workers", "1"])
    verdict = judge(record)
    assert verdict.cause == "data" and verdict.sentence.startswith("Data loading is ")
    assert verdict.shares["data"] > 0.4 and verdict.findings[0].flags[0] == "--num-workers 4"


def test_a_delayed_collective(tmp_path: Path) -> None:
    record = run_slowed(tmp_path, "collective", 0.4, PROFILE, processes=2)
    verdict = judge(record)
    assert verdict.cause == "collectives" and "most of it all-reduce" in verdict.sentence
    assert verdict.shares["all-reduce"] > 0.3


def test_an_uneven_pipeline(tmp_path: Path) -> None:
    trace = [
        "--pipeline-trace-dir",
        str(tmp_path / "run" / "pipeline"),
        "--profile-step-start",
        "3",
        "--profile-step-end",
        "5",
    ]
    flags = ["--pipeline-model-parallel-size", "2", "--num-layers", "4", *trace]
    record = run_slowed(tmp_path, "layers", 0.1, flags, processes=2)
    verdict = judge(record)
    assert verdict.cause == "uneven pipeline" and "stage 1 works" in verdict.sentence
    written = write_pictures(build_data([record]), tmp_path, pytest.importorskip("matplotlib.pyplot"))
    assert written[-1].name == "pipeline.png" and written[-1].read_bytes().startswith(b"\x89PNG")


def test_small_products(tmp_path: Path) -> None:
    verdict = judge(run_slowed(tmp_path, "nothing", 0.0, PROFILE))
    assert verdict.cause == "small products" and "--micro-batch-size" in verdict.findings[0].flags[0]
    assert {"products", "elementwise", "host"} <= set(verdict.shares)


READER = "import sys, pathlib; pathlib.Path(sys.argv[1]).open('a').write(sys.stdin.read()); sys.exit(3)"


@pytest.mark.flags("--alert-command", "--metrics-dir")
def test_alerts_events_and_a_restart(tmp_path: Path) -> None:
    """A run whose loss is spoilt tells a command, which fails and ends nothing; its page shows both attempts."""
    told, home = tmp_path / "told", tmp_path / "run"
    home.mkdir()
    (tmp_path / "reader.py").write_text(READER)
    save = ["--save", home / "save", "--load", home / "save", "--save-interval", "2", "--metrics-dir", home / "metrics"]
    flags = [*FLAGS, *save, "--alert-command", f"{sys.executable} {tmp_path / 'reader.py'} {told}"]
    first = run([*flags, "--simulate-fault", "nan:0,5", "--log-interval", "1"])
    assert first.returncode != 0
    alerts = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(alert["alert"], alert["iteration"]) for alert in alerts][0] == ("nan", 5)
    assert "--alert-command did not take the alert" in first.stderr
    second = run(flags)
    assert second.returncode == 0, second.stderr
    data = build_data(open_runs([home]))
    kinds = [mark["kind"] for mark in data["runs"][0]["marks"]]
    # The error that the run has noted, and its failure in --save, are one.
    assert {"start", "save", "alert", "fault", "restart", "end"} == set(kinds) and kinds.count("fault") == 1
    loss = next(chart for chart in data["charts"] if chart["title"] == "Loss")
    segments: list[dict[str, Any]] = loss["curves"][0]["segments"]
    assert [[x for x, _ in segment["points"]] for segment in segments if not segment["redone"]] == [[1, 2, 3, 4, 5, 6]]
    settings = json.loads((home / "metrics" / "events.jsonl").read_text().splitlines()[0])["settings"]
    assert settings["training"]["train_iters"] == 6
