# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks gpu`: it stops in time, a part that fails is no end, and every line of every part runs."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import string
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import forms, gpu, gpu_parts, gpu_steps
from benchmarks.gpu_item import Part
from benchmarks.step_profile import list_kernels
from benchmarks.training import PRESETS, build_flags
from megatron.core.errors import ConfigError, MemoryShortageError
from tests.gpu.__main__ import find_files
from tests.programs import Program

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """
import json, os, subprocess, sys, time
name, out = sys.argv[3], sys.argv[sys.argv.index("--out") + 1]
json.dump({"headline": f"{name} began", "results": {"pid": os.getpid()}}, open(out, "w"))
if name == "tests":
    raise ValueError("no such kernel")
if name == "curves" and float(sys.argv[sys.argv.index("--seconds") + 1]) < 10:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    scratch = sys.argv[sys.argv.index("--scratch") + 1]
    open(f"{scratch}/large", "w").close()
    json.dump({"headline": "3 of 9", "results": {"child": child.pid, "scratch": scratch}}, open(out, "w"))
    time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def python(tmp_path: Path) -> list[str]:
    """Starts items of which one fails, and one hangs when it has less than ten seconds."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return [sys.executable, str(tmp_path / "stand_in.py")]


def test_one_that_fails_is_no_end_and_one_that_was_cut_has_the_time_that_is_left(
    tmp_path: Path, python: list[str]
) -> None:
    shares = {"curves": 4, "versions": 20, "tests": 20, "1b": 20}
    items = [gpu.Item(name, share, "") for name, share in shares.items()]
    summary = gpu.run_items(items, tmp_path / "out", 60.0, python, is_tiny=True)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    states = {outcome["name"]: outcome["state"] for outcome in summary}
    assert states == {"curves": "done", "versions": "done", "tests": "failed", "1b": "done"}
    assert list(states) == list(shares), "in their order"
    assert summary[2]["error"] == "ValueError: no such kernel"
    assert summary[0]["limit_seconds"] > 10 and summary[0]["headline"] == "curves began"


def test_it_stops_in_time_and_keeps_what_was_found(tmp_path: Path, python: list[str]) -> None:
    began_at = time.monotonic()
    (cut,) = gpu.run_items([gpu.Item("curves", 1, "")], tmp_path / "out", 9.0, python, is_tiny=True)
    assert time.monotonic() - began_at < 9 + 2 * gpu._TERM_SECONDS
    assert cut["state"] == "cut" and cut["headline"] == "3 of 9" and "were over" in cut["error"]
    assert not is_alive(cut["results"]["child"]), "what an item starts ends with it"
    assert not Path(cut["results"]["scratch"]).exists(), "and what it leaves behind"
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == [cut]
    with tarfile.open(tmp_path / "out" / "rest.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["curves.json", "curves.log"]


def test_what_is_left_is_four_small_files(tmp_path: Path) -> None:
    """However much items say: random letters do not compress."""
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir(), out.mkdir()
    chooser, found = random.Random(1), []
    for item in gpu.ITEMS:
        noise = "".join(chooser.choices(string.ascii_letters + "\n", k=300_000))
        (work / f"{item.name}.log").write_text(noise + "the last line")
        (work / f"{item.name}.json").write_text(noise)
        results = {"short": 1, "kernels": [], "long": noise} | {str(n): noise[:1800] for n in range(3)}
        found.append({"name": item.name, "state": "done", "seconds": 1.0, "headline": "fast", "results": results})
    found[3]["results"] = {"waits": ["step.py:7"], "kernels": [{"name": "gemm", "calls": 3, "seconds": 0.25}]}
    gpu.write_results(found, work, out)
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    assert set(sizes) == {"table.txt", "summary.json", "profile.txt", "rest.tar.gz"} and sum(sizes.values()) < 1e6
    assert "step.py:7" in (out / "profile.txt").read_text() and "gemm" in (out / "profile.txt").read_text()
    assert len((out / "table.txt").read_text().splitlines()) == len(gpu.ITEMS)
    first = json.loads((out / "summary.json").read_text())[0]
    assert first["left_out"] == ["long"] and first["results"]["short"] == 1
    with tarfile.open(out / "rest.tar.gz") as archive:
        log = archive.extractfile("versions.log")
        assert log is not None and log.read().endswith(b"the last line")


def test_an_item_for_which_no_time_is_left_is_not_begun(tmp_path: Path) -> None:
    (found,) = gpu.run_items(gpu.choose_items("moe"), tmp_path, 1.0, [sys.executable], is_tiny=True)
    assert found["state"] == "no time"


def test_items_have_their_code_and_fit_in_nine_minutes() -> None:
    assert [item.name for item in gpu.ITEMS] == list(gpu_parts.PARTS)
    with pytest.raises(ConfigError, match="--only moes is no item"):
        gpu.choose_items("1b,moes")


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match="needs a CUDA device; --tiny"):
        gpu.main()


# ---- the parts, small, on the CPU


def fork(part: Part, command: list[str], environment: dict[str, str], log: Any) -> Program:
    """A process that has imported torch already, in place of one that is started."""
    arguments = command[command.index("benchmarks.gpu_parts") + 1 :]
    return Program(["benchmarks/gpu_parts.py", *arguments], environment, ROOT, log)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, no_yardstick: None) -> Iterator[None]:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    # What the parts leave in the process for its rest.
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "LOCAL_RANK"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", [name for name in gpu_parts.PARTS if name not in ("tests", "1b-compiled")])
def test_every_part_runs_on_the_cpu(name: str, tmp_path: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "start", fork)
    part = Part(tmp_path / "part.json", 600.0, [sys.executable], is_tiny=True)
    gpu_parts.PARTS[name](part)
    content = json.loads((tmp_path / "part.json").read_text())
    assert content["headline"] and content["results"]
    check = CHECKS.get(name)
    if check is not None:
        check(content["results"])


def check_curves(results: dict[str, Any]) -> None:
    """The CPU agrees with itself: the same curve twice, and bit for bit after a resume."""
    assert len(results["curves"]) == 14 and all(curve["is_right"] for curve in results["curves"].values())


def check_two_processes(results: dict[str, Any]) -> None:
    assert len(results["alone"]) == 3
    assert all(results[name]["largest_relative_error"] < 1e-4 for name in gpu_parts.LAYOUTS)


def check_profile(results: dict[str, Any]) -> None:
    assert any("mm" in row["name"] for row in results["kernels"])


def test_each_kernel_is_counted_once() -> None:
    def entry(key: str, device_type: DeviceType, seconds: float, *, is_range: bool = False) -> SimpleNamespace:
        times = {"self_device_time_total": 1e6 * seconds, "self_cpu_time_total": 1e6}
        return SimpleNamespace(key=key, count=2, device_type=device_type, is_user_annotation=is_range, **times)

    entries = [
        entry("aten::mm", DeviceType.CPU, 3.0), entry("add", DeviceType.CUDA, 1.0), entry("gemm", DeviceType.CUDA, 3.0),
        entry("layer 1", DeviceType.CUDA, 4.0, is_range=True),
    ]  # fmt: skip
    rows = list_kernels(entries, on_device=True)
    assert [(row["name"], row["seconds"]) for row in rows] == [("gemm", 3.0), ("add", 1.0)]
    assert len(list_kernels(entries, on_device=False)) == 4


CHECKS = {"curves": check_curves, "two-processes": check_two_processes, "profile": check_profile}


def test_memory_shortage_is_met_with_recomputation(tmp_path: Path, on_cpu: None, monkeypatch) -> None:
    """Where the formula was wrong."""
    asked = []

    def measure(name: str, flags: list[str], *rest: Any) -> Any:
        asked.append(" ".join(flags))
        if "mlp" not in asked[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        raise ValueError("enough of it")

    monkeypatch.setattr(gpu_steps, "measure_ours", measure)
    part = Part(tmp_path / "part.json", 600.0, [], is_tiny=True)
    with pytest.raises(ValueError, match="enough"):
        gpu_steps.train_8b(part)
    assert [flags.count("--recompute-granularity") for flags in asked] == [0, 1, 1]


@pytest.mark.parametrize(("gib", "layers"), [(141, {"8b": 32, "moe": 16, "8b-slice": 16}), (78, {})])
def test_the_largest_form_that_fits_is_asked_of_the_formula(
    gib: int, layers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "read_total_memory", lambda: (gib << 30, "this GPU has"))
    for name, variants in {"8b": ("",), "1b": ("",), "moe": ("",), "8b-slice": ("", gpu_steps.FP8)}.items():
        preset = PRESETS[name]
        found = forms.list_fitting_forms(preset, torch.bfloat16, variants)
        usable = forms._USABLE_SHARE * (gib << 30) - forms._CONTEXT_BYTES
        assert all(form.planned_bytes <= usable for form in found)
        largest = found[0]
        assert largest.preset.sizes.layers == layers.get(name, largest.preset.sizes.layers)
        assert f"{largest.preset.sizes.layers} layers" in largest.describe() and "by the formula" in largest.describe()
        # Nothing larger fits: not the same layers with less computed again, nor twice as many.
        ways = list(forms.WAYS)
        larger = [(largest.preset, way) for way in ways[: ways.index(largest.way)]]
        if largest.preset.sizes.layers < preset.sizes.layers:
            sizes = dataclasses.replace(preset.sizes, layers=2 * largest.preset.sizes.layers)
            larger.append((dataclasses.replace(preset, sizes=sizes), ways[-1]))
        for other, way in larger:
            flags = [build_flags(other, torch.bfloat16, 1, f"{forms.WAYS[way]} {more}".split()) for more in variants]
            assert max(map(forms.predict_bytes, flags)) > usable, (name, other.sizes.layers, way)


def test_a_device_for_which_all_forms_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "read_total_memory", lambda: (3 << 30, "this GPU has"))
    with pytest.raises(MemoryShortageError, match="Llama 3.1 8B: the smallest form takes .*this GPU has 3"):
        forms.list_fitting_forms(PRESETS["8b"], torch.bfloat16, [""])


def test_files_of_gpu_tests_have_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies takes no other with it, and the summary says which."""
    (tmp_path / "pytest_stand_in.py").write_text(
        "import os, signal, sys\nfile = sys.argv[-1]\n"
        "if 'test_device' in file:\n"
        "    print(f'{file}::test_first PASSED', flush=True)\n    os.kill(os.getpid(), signal.SIGABRT)\n"
        "if 'test_curves' in file:\n"
        "    print(f'FAILED {file}::test_y')\n    print('1 failed in 2 s')\n    sys.exit(1)\n"
        "print('=== 3 passed in 1 s ===')\n"
    )
    part = Part(tmp_path / "part.json", 60.0, [sys.executable, str(tmp_path / "pytest_stand_in.py")], is_tiny=True)
    with pytest.raises(RuntimeError, match="tests ended with 1"):
        gpu_parts.run_tests(part)
    found = json.loads((tmp_path / "part.json").read_text())
    files = len(find_files())
    assert found["headline"] == f"{files} files: 1 with failures, 1 died" and files > 5
    failed = found["results"]["failed"]
    died = "DIED tests/unit/core/test_device.py: SIGABRT, after tests/unit/core/test_device.py::test_first"
    assert any(line.startswith(died) for line in failed)
    assert "FAILED tests/gpu/test_curves.py::test_y" in failed
