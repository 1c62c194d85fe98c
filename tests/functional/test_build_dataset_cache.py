# SPDX-License-Identifier: Apache-2.0
"""tools/build_dataset_cache.py: a job that starts with the same flags builds nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.faults.small_datasets import write_dataset
from tests.functional.pretrain_runs import TINY, run

FLAGS = " ".join(TINY).replace("--mock-data", "").replace("--vocab-size 60", "--vocab-size 1000").split()


def build(*flags: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(flags, program="tools/build_dataset_cache.py", **variables)


@pytest.fixture
def blend(tmp_path: Path) -> list[str]:
    a, b = (write_dataset(tmp_path / name, [40, 70] * 30, seed) for seed, name in enumerate("ab"))
    return ["--data-path", "1", str(a), "1", str(b), "--split", "80,20,0", "--data-cache-path", str(tmp_path / "cache")]


def arrays(tmp_path: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.npy")}


def test_the_job_builds_nothing_more(tmp_path: Path, blend: list[str]) -> None:
    flags = [*FLAGS, *blend, "--eval-interval", "2", "--eval-iters", "1"]
    done = build(*flags)
    assert done.returncode == 0, done.stderr
    assert "train      20 samples of 2 datasets" in done.stdout and "test       none" in done.stdout
    before = arrays(tmp_path)
    assert len(before) == 2 * (2 * 3 + 2), "two splits of two datasets, and their blends"
    job = run(flags)
    assert job.returncode == 0, job.stderr
    assert arrays(tmp_path) == before
    assert build(*flags).returncode == 0 and arrays(tmp_path) == before


def test_another_number_of_processes_is_another_batch(tmp_path: Path, blend: list[str]) -> None:
    """Without --global-batch-size it is --micro-batch-size times the processes."""
    flags = " ".join(FLAGS).replace("--global-batch-size 4 ", "").split()
    sizes = []
    for world in ("1", "8"):
        done = build(*flags, *blend, WORLD_SIZE=world)
        assert done.returncode == 0, done.stderr
        sizes.append(int(done.stdout.split("train")[1].split()[0]))
    assert sizes == [10, 80]


def test_what_cannot_be_kept_is_an_error(tmp_path: Path, blend: list[str]) -> None:
    (tmp_path / "file").write_text("")
    done = build(*FLAGS, *blend[:-1], str(tmp_path / "file" / "cache"))
    assert done.returncode == 74 and "nothing was kept for the job" in done.stderr and "Traceback" not in done.stderr


def test_bad_flags_are_the_jobs(tmp_path: Path) -> None:
    done = build(*TINY)
    assert done.returncode == 2 and "--mock-data has no files" in done.stderr
    done = build(*FLAGS, "--data-path", tmp_path / "absent")
    assert done.returncode == 2 and "absent.idx: no such file" in done.stderr
    assert build("--help").returncode == 0


@pytest.mark.flags("--per-dataset-sequences-path", "--dataloader-fast-cache-load")
def test_a_job_that_trusts_what_was_built(tmp_path: Path, blend: list[str]) -> None:
    """The same flags build and train; the job takes the counts from the file, and says where they do not agree."""
    counts = tmp_path / "counts.json"
    fast = ["--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap", "--per-dataset-sequences-path", counts]
    assert build(*FLAGS, *blend, *fast).returncode == 0
    before = arrays(tmp_path)
    job = run([*FLAGS, *blend, *fast])
    assert job.returncode == 0, job.stderr
    assert arrays(tmp_path) == before
    content = json.loads(counts.read_text())
    content[str(tmp_path / "a")]["documents"] += 1
    counts.write_text(json.dumps(content))
    job = run([*FLAGS, *blend, *fast])
    assert job.returncode == 2 and "has 60 sequences, 60 documents" in job.stderr and "says 60, 61" in job.stderr
