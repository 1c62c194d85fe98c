# SPDX-License-Identifier: Apache-2.0
"""Programs for a GPU on one that does nothing: a sample here, all of them with MEGATRON_ALL_LAYOUTS=1."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import ITEMS
from tests.fake_device.device import build

ROOT = Path(__file__).resolve().parents[2]
everything = pytest.mark.skipif(not os.environ.get("MEGATRON_ALL_LAYOUTS"), reason="takes minutes")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = build(tmp_path_factory.mktemp("fake_device"))
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("items", ["profile,attention", pytest.param(None, marks=everything)])
def test_the_gpu_command(library: Path, tmp_path: Path, items: str | None) -> None:
    python = shlex.join([sys.executable, "-m", "tests.fake_device.command", str(library)])
    words = ["--tiny", "--minutes", "30", "--out", str(tmp_path / "out"), "--python", python]
    names = items or ",".join(item.name for item in ITEMS)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", *words, "--only", names], cwd=ROOT, capture_output=True, text=True
    )
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    states = {row["name"]: (row["state"], row.get("error")) for row in found}
    assert states == dict.fromkeys(names.split(","), ("done", None)), done.stdout + done.stderr
    memory = next(row["results"]["memory"] for row in found if row["name"] == "profile")
    assert len(memory) == 1 and memory[0].endswith("| expandable segments on")
    left = list((tmp_path / "out").iterdir())
    assert len(left) <= 8 and sum(path.stat().st_size for path in left) <= 1e6
    rows = (tmp_path / "out" / "table.txt").read_text().splitlines()
    assert [row.split()[0] for row in rows] == names.split(",")


@everything
@pytest.mark.timeout(3600)
def test_the_tests_for_a_gpu(library: Path) -> None:
    done = subprocess.run(
        ["bash", "tests/run.sh", "--gpu", "-p", "tests.fake_device.command"], cwd=ROOT,
        env=os.environ | {"FAKE_CUDA": str(library)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
