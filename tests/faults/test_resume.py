# SPDX-License-Identifier: Apache-2.0
"""S26, L8: a run that was killed and started again gives the numbers of the run that was not, bit for bit."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.functional.pretrain_runs import PRETRAIN, TIMES_AND_MEMORY, environment
from tests.programs import Program

ITERATIONS = 24
COMMAND = [
    PRETRAIN,
    *"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
        --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 3
        --mock-data --tokenizer-type NullTokenizer --vocab-size 200 --num-workers 2 --log-interval 8
        --hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 5 --eval-iters 2""".split(),
    "--train-iters", str(ITERATIONS),
]  # fmt: skip


def start(directory: Path, *flags: str) -> Program:
    flags = (*flags, "--metrics-dir", str(directory / "metrics"))
    log = (directory / "log.txt").open("a")
    return Program([*COMMAND, *flags], environment({}), directory, log)


def rows(directory: Path) -> list[dict[str, Any]]:
    """What the run measured, without what depends on the machine's mood. A torn last line is none."""
    # While a run begins anew it sets the file aside.
    try:
        lines = (directory / "metrics" / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES_AND_MEMORY}
        for line in lines
        if line.endswith("\n")
    ]


def iterations(directory: Path) -> int:
    return max((row["iteration"] for row in rows(directory)), default=0)


def kill_at(process: Program, directory: Path, iteration: int) -> bool:
    """SIGKILL as soon as the iteration shows in the metrics; False where the run came to its end before."""
    deadline = time.monotonic() + 120
    while iterations(directory) < iteration and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get anywhere"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    code = process.wait()
    assert code in (0, -signal.SIGKILL), (directory / "log.txt").read_text()
    return code != 0


def log_of(directory: Path) -> str:
    return (directory / "log.txt").read_text()


@pytest.mark.flags("--save", "--load", "--save-interval")
def test_S26_killed_twice_and_resumed_is_bit_identical(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert start(whole).wait(timeout=200) == 0, log_of(whole)

    seed = random.SystemRandom().randrange(2**32)
    pick = random.Random(seed)
    # On a busy machine a run may come to its end before its kill does: then another one is begun.
    for attempt in range(20):
        parts = tmp_path / f"parts{attempt}"
        parts.mkdir()
        flags = ("--save", str(parts / "ckpt"), "--load", str(parts / "ckpt"), "--save-interval", "4")
        if all(kill_at(start(parts, *flags), parts, pick.randint(*span)) for span in ((5, 12), (13, 20))):
            break
    else:
        pytest.fail("the runs are too quick to be killed")
    assert start(parts, *flags).wait(timeout=200) == 0, log_of(parts)

    expected, found = rows(whole), rows(parts)
    assert len([row for row in expected if "lm loss" in row]) == ITERATIONS
    differing = [(a, b) for a, b in zip(expected, found, strict=False) if a != b]
    assert (len(expected), differing[:2]) == (len(found), []), f"seed {seed}\n{log_of(parts)[-3000:]}"
    assert log_of(parts).count("resuming from") == 2, log_of(parts)
    assert not [path.name for path in (parts / "ckpt").iterdir() if ".tmp-" in path.name]
