# SPDX-License-Identifier: Apache-2.0
"""--simulate-fault: each kind strikes once in the life of a run, and the run does about it what it does about a real
one."""

from __future__ import annotations

import platform
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.training.config.reliability import FAULT_KINDS, SimulatedFault, parse_fault
from megatron.training.hooks.simulated_faults import SimulatedFaultsHook
from tests.functional.pretrain_runs import TINY, metrics, run, run_ranks


def _train(root: Path, *flags: str) -> tuple[int, str]:
    places = ["--save", str(root), "--load", str(root), "--save-interval", "1", "--metrics-dir", str(root / "metrics")]
    outcome = run([*TINY, *places, *flags])
    return outcome.returncode, outcome.stderr


@pytest.mark.flags("--simulate-fault")
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("kill:0,3", -signal.SIGKILL, ""),
        ("exception:0,3", 1, "RuntimeError: --simulate-fault exception:0,3"),
        ("nan:0,3", 17, "word_embeddings.weight is not finite in"),
        ("disk:0,3", 0, "error: iteration 3 was not saved"),
    ],
)
def test_a_fault_strikes_once_and_the_run_goes_on_where_it_was(
    tmp_path: Path, fault: str, code: int, text: str
) -> None:
    found, errors = _train(tmp_path, "--simulate-fault", fault)
    assert (found, text in errors) == (code, True), errors
    assert f"note: --simulate-fault {fault}" in errors
    assert _train(tmp_path, "--simulate-fault", fault)[0] == 0
    undisturbed = tmp_path / "undisturbed"
    assert _train(undisturbed)[0] == 0
    rows = {row["iteration"]: row["lm loss"] for row in metrics(tmp_path / "metrics")}
    assert rows == {row["iteration"]: row["lm loss"] for row in metrics(undisturbed / "metrics")}


@pytest.mark.parametrize("what", ["weight", "grad"])
def test_R16_a_flipped_bit_of_one_replica_is_named(tmp_path: Path, what: str) -> None:
    """A gradient's: at a check after its update, when by the clipping other tensors differ, too, if less."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    flags = [*TINY, "--check-weight-hash-across-dp-replicas-interval", "3", "--global-batch-size", "12"]
    outcome = run_ranks([*flags, "--save", tmp_path, "--simulate-fault", f"bitflip:1,2,{what}:{name}"], 3)
    assert outcome.returncode == 75
    assert f"rank 1 ({platform.node()}) holds other bits of {name}" in outcome.stderr
    assert "than ranks 0, 2; this is the first comparison" in outcome.stderr


def test_the_flag_may_be_given_several_times(tmp_path: Path) -> None:
    flags = "--simulate-fault exception:0,9 exception:0,8 --lr 1e-2 --simulate-fault exception:0,2".split()
    code, errors = _train(tmp_path, *flags)
    assert (code, "the last one counts" in errors) == (1, False)
    assert "RuntimeError: --simulate-fault exception:0,2" in errors


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    code, errors = _train(tmp_path, "--simulate-fault", "burn:0,1", "nan:0", "slow:0,1,fast", "network:0,1", "kill:0,0")
    assert code == 2
    assert "--simulate-fault burn:0,1: there is no fault 'burn'; choose from kill, stop, exception, slow" in errors
    for text in ("nan:0", "slow:0,1,fast", "network:0,1", "kill:0,0"):
        assert f"--simulate-fault {text}: it is not {text.partition(':')[0]}:RANK,ITERATION" in errors


def test_every_fault_is_read_as_it_is_written() -> None:
    generator = random.Random(3)
    values = {"slow": "1.5", "nan": "a.b_1", "bitflip": "grad:a.b", "network": "3"}
    for kind, row in FAULT_KINDS.items():
        for value in {values.get(kind), None if not row.needs_value else values[kind]}:
            fault = SimulatedFault(kind, generator.randrange(999), generator.randrange(1, 999), value)
            assert parse_fault(str(fault)) == fault


def test_a_slow_rank_waits_as_long_as_it_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = SimulatedFaultsHook([], None)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    hook._slow_factor, hook._worked_until = 1.5, time.process_time() - 4.0
    hook._be_slow()
    assert slept[0] == pytest.approx(2.0, abs=0.1), "half as long again"
    unhurried: Any = SimulatedFaultsHook([], None)
    unhurried._be_slow()
    assert len(slept) == 1
