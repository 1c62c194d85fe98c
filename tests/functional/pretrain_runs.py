"""Starts pretrain_gpt.py as its users do, with a model that trains in a second."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = str(ROOT / "pretrain_gpt.py")

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


def start(arguments: Sequence[str | Path], launcher: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
    """pretrain_gpt.py as a child process."""
    command = [sys.executable, *launcher, PRETRAIN, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(variables), cwd=ROOT)


def run(
    arguments: Sequence[str | Path], launcher: Sequence[str] = (), timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """pretrain_gpt.py from start to end."""
    process = start(arguments, launcher, **variables)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what differs between machines."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES_AND_MEMORY} for line in lines]


def free_port() -> str:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
