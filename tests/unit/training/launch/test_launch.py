# SPDX-License-Identifier: Apache-2.0
"""Reading a process's place in the job from the environment, for every launcher, and from nonsense."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron.core.errors import ConfigError
from megatron.training.launch import launch
from megatron.training.launch.launch import Launch, add_world_size, find_first_host, read_launch, run_job

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29400"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "gpu[003-006,009]"}


def test_plain_python_is_one_process() -> None:
    assert read_launch({}) == Launch(rank=0, world_size=1, local_rank=0)


def test_torchrun() -> None:
    assert read_launch(
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    ) == Launch(rank=3, world_size=4, local_rank=1, master_addr="node7", master_port=29400, agent_store=True, attempt=2)


def test_one_process_under_torchrun_needs_no_meeting_point() -> None:
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == Launch()
    assert read_launch({"WORLD_SIZE": "1"}) == Launch()


def test_slurm() -> None:
    assert read_launch(SLURM) == Launch(
        rank=5, world_size=8, local_rank=1, master_addr="gpu003", master_port=launch.DEFAULT_PORT
    )
    assert read_launch(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}).master_addr == "head"


def test_torchrun_inside_slurm_counts() -> None:
    assert read_launch(SLURM | TORCHRUN).rank == 3


def test_world_size_for_reading_flags() -> None:
    assert add_world_size(SLURM)["WORLD_SIZE"] == "8"
    assert add_world_size(SLURM | TORCHRUN)["WORLD_SIZE"] == "4"
    assert "WORLD_SIZE" not in add_world_size({})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[07-09]", "gpu07"),
        ("rack2-gpu[1,4-6].cluster,login", "rack2-gpu1.cluster"),
        ("", None),
    ],
)
def test_first_host(nodelist: str, host: str | None) -> None:
    assert find_first_host(nodelist) == host


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"RANK": "four"}, "environment variable RANK='four' is not a whole number"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"RANK": "٣"}, "RANK="),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is missing"),
        ({"RANK": None}, "RANK is missing"),
        ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK='1.5'"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT='99999' is not a whole number from 1 to 65535"),
        ({"MASTER_PORT": None}, "MASTER_PORT is missing"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is missing"),
    ],
)
def test_F9_unusable_torchrun_variables_are_named(changes: dict[str, str | None], sentence: str) -> None:
    environ = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        read_launch(environ)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID=8 is not below SLURM_NTASKS=8"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS='many'"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST='' names no host"),
    ],
)
def test_F9_unusable_slurm_variables_are_named(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch(SLURM | changes)
    assert sentence in str(caught.value)


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch(TORCHRUN | {"RANK": "x", "LOCAL_RANK": "y"})
    assert len(caught.value.problems) == 2


def test_rank_0_says_errors_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waits: list[float] = []
    # In place of the module: other tests' threads, which may still sleep, are none of this one's.
    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=waits.append))

    def fail() -> int:
        raise ConfigError("--lr is missing")

    assert run_job(fail, {}) == 2
    assert capsys.readouterr().err == "error: --lr is missing\n"
    assert waits == []
    assert run_job(fail, {"RANK": "3"}) == 2
    assert capsys.readouterr().err == "error: rank 3: --lr is missing\n"
    assert waits == [launch.RANK_0_SPEAKS_FIRST_SECONDS]


LEAVING = """
import atexit, sys
from megatron.training.launch.launch import leave

class Late:
    def __del__(self):
        print("the interpreter has cleaned up", flush=True)

late = Late()
atexit.register(print, "closed")
print("said", end=" ")
leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("exit_code", "output"), [(0, "said closed\n"), (17, "said ")])
def test_leaving_keeps_the_exit_code_and_what_was_said(exit_code: int, output: str) -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVING, str(exit_code)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (exit_code, output, "")
