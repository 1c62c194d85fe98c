# SPDX-License-Identifier: Apache-2.0
"""--fault-injector-*: upstream's flags for simulated faults."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import ConfigError
from megatron.training.config.reliability import ReliabilityConfig
from megatron.training.flags.read import read_run_config
from megatron.training.hooks.injected_faults import draw_injections
from tests.functional.pretrain_runs import TINY, run
from tests.support.tiny_training import FLAGS


def _settings(**values: Any) -> ReliabilityConfig:
    return ReliabilityConfig(**{"fault_injector_fault_delay": 3.0, **values})


@pytest.mark.flags("--fault-injector-ranks", "--fault-injector-fault-types", "--fault-injector-fault-delay")
@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("sigkill", -signal.SIGKILL, ""),
        ("SEGFAULT", -signal.SIGSEGV, ""),
        ("SIGINT", 130, "interrupted: finishing the iteration"),
        ("WORKLOAD_EXC", 1, "RuntimeError: --fault-injector-fault-types WORKLOAD_EXC on rank 0"),
        ("ASYNC_EXC", 1, "RuntimeError"),
        ("SIGNAL_EXC", 1, "RuntimeError: --fault-injector-fault-types SIGNAL_EXC"),
    ],
)
def test_each_type_ends_the_run_as_it_does_in_earnest(tmp_path: Path, kind: str, code: int, text: str) -> None:
    flags = ["--fault-injector-ranks", "0", "--fault-injector-fault-types", kind, "--fault-injector-fault-delay", "0.1"]
    outcome = run([*TINY, "--save", tmp_path, "--train-iters", "100000", *flags])
    assert (outcome.returncode, text in outcome.stderr) == (code, True), outcome.stderr
    assert f"note: --fault-injector-fault-types {kind.upper()} on rank 0" in outcome.stderr


@pytest.mark.flags("--fault-injector-delay-start-iteration")
def test_the_clock_starts_in_its_iteration_and_the_fault_strikes_once(tmp_path: Path) -> None:
    flags = "--fault-injector-ranks 0 --fault-injector-fault-types SIGKILL --fault-injector-fault-delay 0".split()
    late = run([*TINY, *flags, "--save", tmp_path / "late", "--fault-injector-delay-start-iteration", "6"])
    assert late.returncode == 0, "5 iterations are over before"
    places = ["--save", tmp_path / "again", "--load", tmp_path / "again", "--save-interval", "1"]
    again = [*TINY, *places, *flags, "--train-iters", "100000", "--exit-interval", "50"]
    assert run(again).returncode == -signal.SIGKILL
    assert run(again).returncode == 0


@pytest.mark.flags("--fault-injector-num-ranks", "--fault-injector-seed", "--fault-injector-fault-probabilities")
def test_what_is_drawn_follows_from_the_seed() -> None:
    draws = [draw_injections(_settings(fault_injector_num_ranks=2, fault_injector_seed=s), 5) for s in range(40)]
    assert draws == [
        draw_injections(_settings(fault_injector_num_ranks=2, fault_injector_seed=s), 5) for s in range(40)
    ]
    assert {rank for found in draws for rank, _, _ in found} == {1, 2, 3, 4}, "the first rank is left alone"
    assert {len(found) for found in draws} == {2}
    assert len({kind for found in draws for _, kind, _ in found}) == 10
    shares = {"fault_injector_fault_types": "SIGTERM,sigstop", "fault_injector_fault_probabilities": "0, 2.5"}
    found = [draw_injections(_settings(fault_injector_ranks="1,3", **shares), 4) for _ in range(20)]
    assert found == [[(1, "SIGSTOP", 3.0), (3, "SIGSTOP", 3.0)]] * 20


@pytest.mark.flags("--fault-injector-mtti-seconds", "--fault-injector-offset-seconds")
def test_times_are_exponential_beyond_their_offset() -> None:
    delays = []
    for seed in range(2000):
        settings = ReliabilityConfig(
            fault_injector_ranks="0", fault_injector_mtti_seconds=20.0, fault_injector_offset_seconds=5.0,
            fault_injector_seed=seed,
        )  # fmt: skip
        delays.append(draw_injections(settings, 1)[0][2])
    assert min(delays) >= 5.0
    # 2000 draws: the mean of 20 has a standard error of 0.45.
    assert sum(delays) / len(delays) == pytest.approx(25.0, abs=2.0)
    assert sorted(delays)[1000] == pytest.approx(5.0 + 20.0 * 0.693, abs=2.0)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("-ranks 0 -num-ranks 1 -fault-delay 1", "give one of the two"),
        ("-ranks a -fault-delay 1", "--fault-injector-ranks a is not a list of ranks such as 1,3"),
        ("-ranks 0", "give one of the two"),
        ("-ranks 0 -fault-delay 1 -mtti-seconds 2", "give one of the two"),
        ("-ranks 0 -fault-delay 1 -fault-types gpu_error", "faults of GPUs are not simulated"),
        ("-ranks 0 -fault-delay 1 -fault-types FIRE", "there is no such type; choose from WORKLOAD_EXC"),
        ("-ranks 0 -fault-delay 1 -fault-types SIGINT -fault-probabilities 1,2", "not one number for each of the 1"),
    ],
)
def test_what_cannot_be_injected_is_refused(flags: str, sentence: str) -> None:
    words = [f"--fault-injector{word}" if word[0] == "-" else word for word in flags.split()]
    with pytest.raises(ConfigError) as caught:
        read_run_config([*FLAGS.split(), *words], {})
    assert sentence in str(caught.value)


def test_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks 0 to 1 only"):
        draw_injections(_settings(fault_injector_ranks="2"), 2)
    with pytest.raises(ConfigError, match="all but the first one"):
        draw_injections(_settings(fault_injector_num_ranks=2), 2)


@pytest.mark.flags(
    "--adlr-autoresume",
    "--adlr-autoresume-interval",
    "--enable-ft-package",
    "--calc-ft-timeouts",
    "--ft-num-warmup-iters",
    "--exit-signal-handler-for-training",
    "--inprocess-progress-watchdog-interval",
)
@pytest.mark.parametrize(
    "flag",
    [
        "--adlr-autoresume",
        "--adlr-autoresume-interval 3",
        "--enable-ft-package",
        "--calc-ft-timeouts",
        "--ft-num-warmup-iters 3",
        "--exit-signal-handler-for-training",
        "--inprocess-progress-watchdog-interval 3",
    ],
)
def test_flags_for_what_is_always_so_are_noted(flag: str) -> None:
    config = read_run_config([*FLAGS.split(), *flag.split()], {})
    assert [note for note in config.notes if flag.split()[0] in note]
