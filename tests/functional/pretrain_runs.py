# SPDX-License-Identifier: Apache-2.0
"""Runs pretrain_gpt.py as its users do, with a model that trains in a second."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.programs import Program

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = str(ROOT / "pretrain_gpt.py")

TIMEOUT_SECONDS = 240

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 5 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60 --make-vocab-size-divisible-by 16 --eval-iters 0 --log-interval 1 --num-workers 0 "
    "--hidden-dropout 0 --attention-dropout 0"
).split()

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TIMES_AND_MEMORY = ("iteration_time_seconds", "tokens_per_second", "tflops", "mfu", "memory_bytes", "peak_memory_bytes")


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any launcher's variables, on the CPU, plus `changes`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("SLURM_", "TORCHELASTIC_"))
    }
    return kept | {"OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu"} | changes


def start(arguments: Sequence[str | Path], **variables: str) -> Program:
    """pretrain_gpt.py as a child process."""
    return Program([PRETRAIN, *arguments], environment(variables), ROOT)


def run(
    arguments: Sequence[str | Path], program: str = PRETRAIN, directory: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """pretrain_gpt.py, or another program of this repository, from start to end."""
    return finish([Program([program, *arguments], environment(variables), directory)])[0]


def run_ranks(arguments: Sequence[str | Path], processes: int) -> subprocess.CompletedProcess[str]:
    """pretrain_gpt.py on several processes, with the variables that torchrun gives them, until all have ended.

    The exit code is that of the first rank that failed; the output is rank 0's, the errors are everybody's.
    """
    job = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    ranks = finish([start(arguments, RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(processes)])
    code = next((rank.returncode for rank in ranks if rank.returncode), 0)
    return subprocess.CompletedProcess(ranks[0].args, code, ranks[0].stdout, "".join(rank.stderr for rank in ranks))


def finish(programs: Sequence[Program], timeout: float = TIMEOUT_SECONDS) -> list[subprocess.CompletedProcess[str]]:
    """Wait for programs; those that do not end in time are killed."""
    try:
        outputs = [program.communicate(timeout) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return [
        subprocess.CompletedProcess(program.args, program.returncode or 0, *output)
        for program, output in zip(programs, outputs, strict=True)
    ]


def launch(launcher: Sequence[str], arguments: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """pretrain_gpt.py started for real, with arguments of the interpreter in front: `-m torch.distributed.run`."""
    command = [sys.executable, *launcher, PRETRAIN, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=environment({}), cwd=ROOT
    )


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what differs between machines."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES_AND_MEMORY} for line in lines]


def free_port() -> str:
    """A port nobody listens on, for a run that is about to start."""
    for port in _OWN_PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("there is no end of ports")


def _count_ports() -> Iterator[int]:
    """Ports below those that the system gives to whoever asks for any: between choosing one and the start of the run,
    each process of another run asks for many. No worker of a test session has another's."""
    worker, workers = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 16, 16
    lowest, count = 12_000, 20_000 // workers
    for number in itertools.count(random.SystemRandom().randrange(count)):
        yield lowest + number % count * workers + worker


_OWN_PORTS = _count_ports()
