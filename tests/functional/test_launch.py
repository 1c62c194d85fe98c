# SPDX-License-Identifier: Apache-2.0
"""The same run under plain python, torchrun and SLURM, on one process and on two; and what goes wrong at the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.cli.launch import describe_failure
from megatron.core.errors import ConfigError, TemporaryError, command_line
from tests.functional.pretrain_runs import (
    ROOT,
    TIMEOUT_SECONDS,
    TINY,
    environment,
    finish,
    free_port,
    launch,
    metrics,
    run,
    start,
)

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")

NO_DATA = [*(flag for flag in TINY if flag != "--mock-data"), "--data-path", "no/such/dataset", "--split", "99,1,0"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of the run under plain python."""
    directory = tmp_path_factory.mktemp("plain")
    done = launch([], [*TINY, "--metrics-dir", directory])
    assert done.returncode == 0, done.stderr
    return metrics(directory)


def test_plain_python(plain: list[dict[str, Any]]) -> None:
    assert [row["iteration"] for row in plain] == [1, 2, 3, 4, 5]
    assert plain[-1]["lm loss"] < plain[0]["lm loss"]


@pytest.mark.parametrize("module", ["run", "launch"])
def test_torchrun_and_its_forerunner_with_one_process(module: str, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    launcher = ("-m", f"torch.distributed.{module}", "--nproc_per_node", "1", "--master_port", free_port())
    done = launch(launcher, [*TINY, "--metrics-dir", tmp_path])
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path) == plain


def test_slurm_with_one_task(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu[1-4]"}
    done = run([*TINY, "--metrics-dir", tmp_path], **slurm)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path) == plain


def slurm_tasks(arguments: list[Any], *further: list[str]) -> list[Any]:
    """The two tasks of a SLURM job, each with its further flags."""
    port = free_port()
    processes = []
    for rank in range(2):
        variables = {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": str(rank),
            "SLURM_JOB_NODELIST": "localhost",
            "MASTER_PORT": port,
        }
        processes.append(start([*arguments, *(further[rank] if further else [])], **variables))
    return finish(processes)


def test_slurm_with_two_tasks(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    """Two data-parallel processes share each global batch: the same curve."""
    ranks = slurm_tasks([*TINY, "--metrics-dir", tmp_path])
    assert [done.returncode for done in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    found = metrics(tmp_path)
    assert [row["lm loss"] for row in found] == pytest.approx([row["lm loss"] for row in plain], rel=1e-5)
    assert [row["grad_norm"] for row in found] == pytest.approx([row["grad_norm"] for row in plain], rel=1e-4)
    assert "iteration        5/       5" in ranks[0].stdout
    assert "iteration" not in ranks[1].stdout, "only the first rank logs"


def error_lines(done: Any) -> list[str]:
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


def test_F9_garbage_in_the_environment() -> None:
    done = run(TINY, RANK="one", WORLD_SIZE="1")
    assert done.returncode == 2
    assert error_lines(done) == ["error: environment variable RANK='one' is not a whole number from 0 up"]


def test_F11_another_flag_on_one_rank() -> None:
    ranks = slurm_tasks(TINY, [], ["--seed", "99"])
    assert [done.returncode for done in ranks] == [2, 2]
    sentence = "rank 1 was started with --seed 99, rank 0 with --seed 1234; start all ranks alike"
    assert error_lines(ranks[0]) == [f"error: {sentence}"]
    assert error_lines(ranks[1]) == [f"error: {sentence}"], "said late, for want of a launcher that ends it"


def test_F11_another_layout_on_one_rank() -> None:
    ranks = slurm_tasks([*TINY, "--tensor-model-parallel-size", "2"], [], ["--sequence-parallel"])
    assert [done.returncode for done in ranks] == [2, 2]
    sentence = "rank 1 was started with --sequence-parallel True, rank 0 with --sequence-parallel False"
    assert error_lines(ranks[0]) == [f"error: {sentence}; start all ranks alike"]


def test_an_illegal_layout_is_refused_by_every_rank_for_itself() -> None:
    """Both problems at once, with the nearest legal choices, and before ranks wait for each other."""
    flags = "--tensor-model-parallel-size 4 --num-attention-heads 6 --hidden-size 48 --seq-length 30".split()
    done = run([*TINY, *flags, "--sequence-parallel"], RANK="1", WORLD_SIZE="8", MASTER_ADDR="nowhere", MASTER_PORT="1")
    assert done.returncode == 2
    heads, length = error_lines(done)
    assert "--num-attention-heads 6" in heads and "use 4 or 8 heads, or a tensor-parallel size of 3 or 6" in heads
    assert "--seq-length 30 is not divisible by --tensor-model-parallel-size 4" in length and "use 28 or 32" in length


@pytest.mark.flags("--sequence-parallel")
def test_sequence_parallelism_of_one_process_is_noted() -> None:
    done = run([*TINY, "--sequence-parallel", "--train-iters", "1"])
    assert done.returncode == 0, done.stderr
    assert "note: --sequence-parallel has no effect with --tensor-model-parallel-size 1" in done.stdout


def test_errors_of_all_ranks_are_said_once() -> None:
    done = launch((*TORCHRUN, "2"), NO_DATA)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, done.stderr
    # torchrun's report has it as well, and not only an exit code.
    assert f"traceback : {lines[0]}" in done.stderr.split("Root Cause")[1]


def test_the_last_line_of_our_launcher_is_the_sentence() -> None:
    """Without torchrun's table behind it, and with the exit code of the process that failed."""
    command = [sys.executable, "-m", "megatron", "launch", "--nproc_per_node", "2", "--", *NO_DATA]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=environment({}), cwd=ROOT
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: no/such/dataset.idx: no such file"), done.stderr
    assert "Root Cause" not in done.stderr and "Traceback" not in done.stderr


def test_R4_what_ended_a_process_is_told_for_each_way_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First errors stay, as a rank's own comes before that of its lost peer; bugs and signals have a sentence, too."""

    def describe(name: str, exit_code: int) -> list[str]:
        failure = ProcessFailure(local_rank=0, pid=7, exitcode=exit_code, error_file=str(tmp_path / name))
        return describe_failure(3, failure)

    def fail(error: Exception) -> int:
        @command_line
        def main() -> int:
            raise error

        return main()

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "told"))
    assert fail(ConfigError(["--a is bad", "--b is\nworse"])) == 2
    assert fail(TemporaryError("a peer was lost")) == 75
    assert describe("told", 2) == ["error: --a is bad", "error: --b is worse"]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "bug"))
    with pytest.raises(KeyError):
        fail(KeyError("x"))
    assert describe("bug", 1) == ["error: KeyError: 'x'"]
    assert describe("absent", -9) == ["error: rank 3 was ended by SIGKILL; the system does so when memory is short"]
    assert describe("absent", 5) == ["error: rank 3 ended with exit code 5; what it printed is above"]


@pytest.mark.flags("--transformer-impl")
def test_notes_say_what_a_flag_means_here() -> None:
    flags = ["--transformer-impl", "transformer_engine", "--use-mcore-models", "--train-iters", "1"]
    done = run([*TINY, *flags])
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stdout.splitlines() if line.startswith("note:")]
    assert any("--transformer-impl transformer_engine" in note for note in notes), done.stdout
    assert any("--use-mcore-models" in note for note in notes), done.stdout


def test_help_and_mistakes_do_not_import_torch() -> None:
    for flags, code in ((["--help"], 0), ([*TINY, "--print-config"], 0), (["--num-layer", "2"], 2)):
        done = launch(("-X", "importtime"), flags)
        assert done.returncode == code
        assert "| torch" not in done.stderr
