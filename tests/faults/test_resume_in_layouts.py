# SPDX-License-Identifier: Apache-2.0
"""S26 in a layout: eight processes on the quickstart's data, killed and resumed, continue their curve bit for bit.

MEGATRON_ALL_LAYOUTS=1 bash tests/run.sh tests/faults/test_resume_in_layouts.py      all of them, with 8 processes
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.faults.test_resume import iterations, log_of, rows
from tests.functional.pretrain_runs import PRETRAIN, ROOT, environment

ITERATIONS = 12
MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 1 --global-batch-size 8 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 3
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --split 95,5,0
    --hidden-dropout 0.1 --attention-dropout 0.1 --num-workers 1 --log-interval 4 --eval-interval 5 --eval-iters 2"""
LAYOUTS = {
    "tp2,pp2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "tp2,pp2,dp2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer",
}
PROCESSES = {"tp2,pp2": 4, "tp2,pp2,dp2": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's corpus, tokenizer and dataset, made by its own programs, smaller."""
    directory = tmp_path_factory.mktemp("quickstart")
    corpus, tokenizer = str(directory / "corpus.jsonl"), str(directory / "tokenizer")
    for program, flags in (
        ("examples/quickstart/build_corpus.py", ["--output", corpus, "--megabytes", "1"]),
        ("examples/quickstart/train_tokenizer.py", ["--input", corpus, "--output", tokenizer, "--vocab-size", "512"]),
        (
            "tools/preprocess_data.py",
            ["--input", corpus, "--output-prefix", str(directory / "stdlib"), "--append-eod", "--workers", "1"]
            + ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer],
        ),
    ):
        subprocess.run(
            [sys.executable, program, *flags], cwd=ROOT, env=environment({}), check=True, capture_output=True
        )
    return directory


def start(layout: str, data: Path, directory: Path, *flags: str) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES[layout])),
        *(PRETRAIN, *MODEL.split(), *LAYOUTS[layout].split(), "--train-iters", str(ITERATIONS)),
        *("--data-path", str(data / "stdlib_text_document"), "--data-cache-path", str(data / "cache")),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(data / "tokenizer")),
        *("--metrics-dir", str(directory / "metrics"), *flags),
    ]
    log = (directory / "log.txt").open("a")
    return subprocess.Popen(command, stdout=log, stderr=log, text=True, cwd=directory, env=environment({}))


def kill_at(job: subprocess.Popen[str], directory: Path, iteration: int) -> None:
    """SIGKILL to the launcher and every process of the job, as soon as the iteration shows in the metrics."""
    while iterations(directory) < iteration:
        try:
            job.wait(timeout=0.01)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the job ended by itself:\n{log_of(directory)}")
    launcher = psutil.Process(job.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    for process in processes:
        process.kill()
    job.wait()
    psutil.wait_procs(processes, timeout=30)


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not os.environ.get("MEGATRON_ALL_LAYOUTS"),
    reason="MEGATRON_ALL_LAYOUTS=1 runs it; test_layout_checkpoints.py has a smaller one",
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_S26_killed_and_resumed_in_a_layout_is_bit_identical(layout: str, data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    assert start(layout, data, whole).wait(timeout=280) == 0, log_of(whole)

    flags = ("--save", str(parts / "ckpt"), "--load", str(parts / "ckpt"), "--save-interval", "4")
    kill_at(start(layout, data, parts, *flags), parts, 7)
    assert start(layout, data, parts, *flags).wait(timeout=280) == 0, log_of(parts)

    assert len([row for row in rows(whole) if "lm loss" in row]) == ITERATIONS
    assert rows(parts) == rows(whole), log_of(parts)[-3000:]
    assert "resuming from" in log_of(parts)
