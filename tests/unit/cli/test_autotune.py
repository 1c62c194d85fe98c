# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest micro-batch, recomputation and kernels; what trials measure is played here."""

from __future__ import annotations

import fcntl
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import autotune
from megatron.cli.autotune import Candidate, Tuner
from megatron.core.errors import MemoryShortageError
from megatron.training import training
from tests.support.run_flags import SMALLEST_RUN, run_config

ROOT = Path(__file__).resolve().parents[3]
FLAGS = SMALLEST_RUN.split()


def tuner_of(play: Callable[[Candidate], dict[str, Any]], deadline: float = math.inf) -> Tuner:
    return Tuner(autotune.leave_out(FLAGS, autotune._TRIED), play, deadline, {})


def played(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "tokens_per_second": 1.0 / seconds, "peak_bytes": 1}


def test_it_begins_where_the_formula_says_and_climbs_while_memory_lasts() -> None:
    asked: list[Candidate] = []

    def play(candidate: Candidate) -> dict[str, Any]:
        asked.append(candidate)
        if candidate.recomputation:
            return played(2.0 / candidate.micro_batch)
        # Twice as much fits as the formula says; larger ones are faster.
        return played(1.0 / candidate.micro_batch) if candidate.micro_batch <= 4 else {"state": "out of memory"}

    tuner = tuner_of(play)
    best = tuner.search([1, 2, 4, 8], tuner.estimate_bytes(Candidate(2)), [])
    assert best is not None and best.candidate == Candidate(4)
    assert [(c.micro_batch, c.recomputation) for c in asked] == [
        (2, ""), (4, ""), (8, ""), (1, ""), (8, autotune.RECOMPUTATION[1]),
    ]  # fmt: skip


def test_it_goes_down_where_smaller_is_faster_and_only_there() -> None:
    asked: list[int] = []

    def play(candidate: Candidate) -> dict[str, Any]:
        asked.append(candidate.micro_batch)
        return played({8: 4.0, 4: 3.0, 2: 3.5, 1: 1.0}[candidate.micro_batch])

    best = tuner_of(play).search([1, 2, 4, 8], math.inf, [])
    # It stops at the first that is slower: sizes below are smaller products still.
    assert asked == [8, 4, 2] and best is not None and best.candidate.micro_batch == 4


def test_full_recomputation_is_estimated_and_tried_where_nothing_else_fits() -> None:
    full = autotune.RECOMPUTATION[-1]
    short = {"state": "out of memory", "text": "short"}
    tuner = tuner_of(lambda c: played(1 / c.micro_batch) if c.recomputation == full else short)
    best = tuner.search([1, 2], 0.0, [])
    assert best is not None and best.candidate == Candidate(2, full)
    assert tuner.outcomes[Candidate(1)].state == "out of memory: short"
    assert tuner.estimate_bytes(Candidate(2, full)) < tuner.estimate_bytes(Candidate(2))


def test_kernels_stay_where_they_are_faster() -> None:
    faster = {"--attention-backend flash": 0.9, "--cross-entropy-loss-fusion": 0.99, "--moe-grouped-gemm": 1.3}

    def play(candidate: Candidate) -> dict[str, Any]:
        return played(math.prod(faster[flag] for flag in candidate.kernels))

    best = tuner_of(play).search([1], math.inf, list(faster))
    assert best is not None and best.candidate.kernels == ("--attention-backend flash",), "1 % is no difference"


def test_a_failure_that_is_no_matter_of_memory_ends_the_search() -> None:
    tuner = tuner_of(lambda candidate: {"state": "failed", "text": "exit code 1: no such file"})
    assert tuner.search([1], math.inf, []) is None and len(tuner.outcomes) == 1


def test_it_stops_when_the_time_is_over() -> None:
    tuner = tuner_of(lambda candidate: played(1.0), deadline=-math.inf)
    assert tuner.search([1, 2], math.inf, []) is None and tuner.is_out_of_time


def test_flags_that_are_tried_are_left_out_with_their_values() -> None:
    words = "--micro-batch-size 4 --bf16 --recompute-modules mlp layernorm --lr=1e-3 --recompute-num-layers=2".split()
    assert autotune.leave_out(words, autotune._TRIED) == ["--bf16", "--lr=1e-3"]


def test_a_kernel_that_is_given_is_not_tried() -> None:
    assert autotune.list_kernels(["--bf16"], has_experts=True, on_gpu=True) == [
        *autotune.KERNELS, *autotune.KERNELS_OF_EXPERTS,
    ]  # fmt: skip
    for given in (["--attention-backend", "local"], ["--attention-backend=local"]):
        assert autotune.list_kernels(given, has_experts=False, on_gpu=True) == ["--cross-entropy-loss-fusion"]


def test_micro_batches_divide_the_share_of_a_replica() -> None:
    assert autotune.list_micro_batches(run_config("--global-batch-size 12"), None) == [1, 2, 3, 4, 6, 12]
    assert autotune.list_micro_batches(run_config("--global-batch-size 12", world_size=2), 4) == [1, 2, 3]


def test_the_table_says_what_became_of_each(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path) -> None:
    def play(flags: list[str], arguments: Any, candidate: Candidate) -> dict[str, Any]:
        return played(0.01) if candidate.micro_batch < 8 else {"state": "out of memory", "text": "short of 3 GB"}

    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    monkeypatch.setattr(autotune, "start_trial", play)
    monkeypatch.setattr(sys, "argv", ["autotune", f"--json={tmp_path}/found.json", "--most-micro-batch=8", *FLAGS])
    assert autotune.main() == 0
    out = capsys.readouterr().out
    assert "out of memory: short of 3 GB" in out and "trial 2 of at most" in out and "min left" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["changed"][:2] == ["--micro-batch-size", "4"] and "fastest, 100 tokens/s: --micro-batch-size 4" in out
    assert run_config(" ".join(found["flags"]), base="").training.micro_batch_size == 4, "the flags are a whole run"

    monkeypatch.setattr(autotune, "start_trial", lambda *given: {"state": "out of memory", "text": "none left"})
    with pytest.raises(MemoryShortageError, match="no candidate could train a step here"):
        autotune.tune(
            autotune.argparse.Namespace(
                processes=1, most_micro_batch=1, minutes=1.0, json=None, trial_steps=1, warm_up_steps=0
            ),
            FLAGS,
        )


def test_a_trial_measures_real_steps_and_writes_nothing_else(tmp_path: Path, monkeypatch, no_yardstick: None) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    path, places = tmp_path / "found.json", [f"--save={tmp_path}/a", f"--metrics-dir={tmp_path}/b", "--save-interval=1"]
    # Steps enough to be measured, however short the run is.
    short = ["--train-iters=1", "--exit-interval=1"]
    assert autotune.run_trial(path, 2, 1, [*FLAGS, *places, *short]) == 0
    found = json.loads(path.read_text())
    assert found["seconds"] > 0 and found["tokens_per_second"] == pytest.approx(8 * 64 / found["seconds"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["found.json"]
    assert autotune.run_trial(path, 1, 0, [*FLAGS, "--micro-batch-size=3"]) != 0
    assert json.loads(path.read_text())["state"] == "cannot run"


def test_any_rank_says_that_it_lacks_memory_and_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*given: Any) -> None:
        raise MemoryShortageError("short of 3 GB")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(training, "run_recipe", run)
    # torchrun lets the others wait for a process that has left with 0.
    assert autotune.run_trial(tmp_path / "found.json", 2, 1, FLAGS) != 0
    assert json.loads((tmp_path / "found.json").read_text()) == {"state": "out of memory", "text": "short of 3 GB"}


def trial_arguments(**given: Any) -> Any:
    defaults = {"processes": 1, "trial_steps": 3, "warm_up_steps": 1, "trial_minutes": 10.0}
    return autotune.argparse.Namespace(**defaults | given)


def test_a_trial_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], *given: Any) -> tuple[int, str]:
        seen.append(command)
        return -9, ""

    monkeypatch.setattr(autotune, "_run_with_limit", run)
    found = autotune.start_trial(["--bf16"], trial_arguments(processes=4), Candidate(2))
    assert found["state"] == "out of memory"
    assert seen[0][:6] == [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    assert seen[0][-3:] == ["--bf16", "--micro-batch-size", "2"]
    said = "error: x.idx: no such file\nE1122 elastic: failed (exitcode: 2)\n=========="
    monkeypatch.setattr(autotune, "_run_with_limit", lambda *given: (1, said))
    text = autotune.start_trial(["--bf16"], trial_arguments(), Candidate(2))["text"]
    assert text == "exit code 1: error: x.idx: no such file"


def test_what_a_trial_says_is_read_from_its_errors_or_else_from_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for print_it, text in (("print('a error: b')", "a error: b"), ("sys.exit('error: c')", "error: c")):
        monkeypatch.setattr(autotune, "find_program", lambda p=print_it: ["-c", f"import sys; {p}; sys.exit(3)"])
        status = 1 if "exit" in print_it else 3
        found = autotune.start_trial([], trial_arguments(), Candidate(1))
        assert found == {"state": "failed", "text": f"exit code {status}: {text}"}


def test_a_trial_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores the request to end. Its child, as itself, holds a lock as long as it lives."""
    lock, ready = tmp_path / "lock", tmp_path / "ready"
    lock.touch()
    program = f"""import fcntl, os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = open({str(lock)!r})
fcntl.flock(file, fcntl.LOCK_EX)
os.fork()
pathlib.Path({str(ready)!r}).touch()
time.sleep(10000)
"""

    class Patient(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            while self.poll() is None and not ready.exists():
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(autotune.subprocess, "Popen", Patient)
    monkeypatch.setattr(autotune, "find_program", lambda: ["-c", program])
    monkeypatch.setattr(autotune, "_GRACE_SECONDS", 0.01)
    found = autotune.start_trial([], trial_arguments(trial_minutes=1e-4), Candidate(1))
    text = "not done after 0.0001 min and ended; --trial-minutes gives more"
    assert found == {"state": "failed", "text": text} and ready.exists()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # for ever, if one of them lived


def test_a_trial_needs_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for minutes in ("0", "nan"):
        monkeypatch.setattr(sys, "argv", ["autotune", "--trial-minutes", minutes, *FLAGS])
        assert autotune.main() == 2 and f"--trial-minutes {minutes} leaves no time" in capsys.readouterr().err
