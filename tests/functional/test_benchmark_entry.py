# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: every preset and operation runs, small, on the CPU; how fast is nothing for a test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import __main__ as entry
from benchmarks import measurements, operations, training
from megatron.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")

    def call(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["benchmarks", *words])
        return entry.main()

    return call


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_benchmark_is_listed_and_has_its_code(start, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("list") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(entry.TABLE)
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef main()" in path.read_text("utf-8")}
    assert programs - {"__main__", "gpu_parts"} == {name for name, known in entry.TABLE.items() if known.is_program}
    assert set(training.PRESETS) | set(operations.OPERATIONS) <= set(listed)


def test_operations_are_measured_against_their_baselines(start, tmp_path: Path) -> None:
    names = list(operations.OPERATIONS)
    assert start(*names, "--tiny", "--rounds=2", f"--json={tmp_path}/o.json", f"--picture={tmp_path}/o.png") == 0
    reports = read(tmp_path / "o.json")
    assert [report["title"].split(":")[0] for report in reports] == names
    for report in reports:
        assert report["notes"] == [], "every case runs on the CPU"
        assert report["ceilings"]["product_flops"] > 0 and report["conditions"]["command"]
        by_name = {one["name"]: one for one in report["measurements"]}
        baselines = [one["baseline"] for one in by_name.values() if one["baseline"]]
        assert baselines and set(baselines) <= set(by_name)
        assert all(one["seconds"] > 0 for one in by_name.values())
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["1b", "moe"])
def test_training_steps_are_measured_beside_their_peers(start, tmp_path: Path, name: str, capsys) -> None:
    words = [name, "--tiny", "--steps=2", "--warm-ups=1", f"--json={tmp_path}/t.json"]
    assert start(*words) == 0
    (report,) = read(tmp_path / "t.json")
    found = {one["name"]: one for one in report["measurements"]}
    ours = found["ours"]
    assert len(ours["details"]["seconds"]) == 2, "warm-ups do not count"
    assert ours["details"]["loss"] == pytest.approx(6.24, abs=0.2), "about log(512)"
    assert ("plain torch" in found) == (name == "1b")
    # The formula is said, and is the planner's.
    assert measurements.FLOP_FORMULA in report["notes"]
    tokens, sizes = 64, training.shrink(training.PRESETS[name]).sizes
    matrices = sizes.layers * (sizes.hidden * 64 * 3 + 3 * sizes.hidden * sizes.ffn * (2 if sizes.experts else 1))
    attention = sizes.layers * sizes.hidden * 32
    assert ours["flops"] == pytest.approx(6 * tokens * (matrices + sizes.vocab * sizes.hidden + attention))
    out = capsys.readouterr().out
    assert "baseline time / this" in out and "command: " in out


def test_the_plain_model_has_the_same_parameters() -> None:
    import torch

    preset = training.shrink(training.PRESETS["8b-slice"])
    clock = training.StepClock()
    training.train_here(training.build_flags(preset, torch.float32, 1), [clock])
    plain = training.build_plain(preset, torch.device("cpu"))
    assert sum(p.numel() for p in plain.parameters()) == clock.facts["parameters"]


def test_another_checkout_is_measured_by_its_own_log(tmp_path: Path) -> None:
    lines = ["elapsed time per iteration (ms): 90000.0", *["elapsed time per iteration (ms): 20.0"] * 2]
    (tmp_path / "pretrain_gpt.py").write_text(f"import sys\nprint({lines!r}, sys.argv)\n")
    found = training.measure_checkout(tmp_path, ["--num-layers", "2"], warm_ups=1)
    assert found.seconds == pytest.approx(0.02) and "--transformer-impl local" in found.details["command"]
    (tmp_path / "pretrain_gpt.py").write_text("raise SystemExit('no such flag')\n")
    with pytest.raises(RuntimeError, match="exit code 1: no such flag"):
        training.measure_checkout(tmp_path, [], warm_ups=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ovrlap"], "no such benchmark"),
        (["memory", "loss"], "options of its own"),
        (["--json", "x"], "a name comes first"),
    ],
)
def test_words_that_mean_nothing(words: Sequence[str], said: str, start, capsys: pytest.CaptureFixture[str]) -> None:
    if words[0].startswith("-"):
        assert start(*words) == 2
        assert said in capsys.readouterr().err
        return
    with pytest.raises(ConfigError, match=said):
        entry.split_names(words)


def test_a_program_keeps_its_options_and_its_words_go_to_the_file(start, tmp_path: Path, monkeypatch) -> None:
    from benchmarks import memory

    def main() -> None:
        import sys

        print("planned and measured", sys.argv[1:])

    monkeypatch.setattr(memory, "main", main)
    assert start("memory", "--rounds", "3", f"--json={tmp_path}/m.json") == 0
    content = json.loads((tmp_path / "m.json").read_text())
    assert content["output"] == ["planned and measured ['--rounds', '3']"]
    assert content["conditions"]["command"].endswith("memory --rounds 3 --json=" + f"{tmp_path}/m.json")
