# SPDX-License-Identifier: Apache-2.0
"""pretrain_hybrid.py and pretrain_mamba.py; checkpoints between GPT and hybrid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.functional.pretrain_runs import environment, finish
from tests.programs import Program

SIZES = """--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2
    --global-batch-size 4 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --log-interval 1
    --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0 --mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 6"""


def run(directory: Path, script: str, flags: str, code: int = 0) -> str:
    program = Program([script, *SIZES.split(), *flags.split()], environment({}), directory)
    (done,) = finish([program])
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    return output


def losses(output: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", output)


def test_the_programs(tmp_path: Path) -> None:
    output = run(tmp_path, "pretrain_mamba.py", "--hybrid-layer-pattern M-*/M --train-iters 1")
    assert "pretrain_mamba.py is an earlier name of pretrain_hybrid.py" in output and losses(output)
    output = run(tmp_path, "pretrain_hybrid.py", "--num-layers 2 --train-iters 1", code=2)
    assert "error: --hybrid-layer-pattern is missing" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("--num-layers 2", "--hybrid-layer-pattern *-*-"),
        ("--hybrid-layer-pattern *-*-", "--num-layers 2"),
    ],
)
def test_a_run_goes_on_under_another_description(tmp_path: Path, first: str, second: str) -> None:
    """Weights, optimizer and progress: the losses are those of a run that goes on unchanged, bit for bit."""
    run(tmp_path, "pretrain_gpt.py", f"{first} --train-iters 2 --save-interval 2 --save saved --lr-decay-iters 4")
    on = "--train-iters 4 --load saved --lr-decay-iters 4"
    as_before, changed = (losses(run(tmp_path, "pretrain_gpt.py", f"{flags} {on}")) for flags in (first, second))
    assert len(changed) == 2 and changed == as_before


def test_layers_that_a_gpt_does_not_have(tmp_path: Path) -> None:
    run(tmp_path, "pretrain_gpt.py", "--num-layers 2 --train-iters 1 --save-interval 1 --save saved")
    load = "--train-iters 2 --load saved --lr-decay-iters 1"
    output = run(tmp_path, "pretrain_gpt.py", f"--hybrid-layer-pattern *-*-*- {load}", code=2)
    assert "3 layers of attention and 3 of" in output and "Traceback" not in output
    output = run(tmp_path, "pretrain_gpt.py", f"--hybrid-layer-pattern M*-*- {load} --save-interval 2 --save hybrid")
    assert "a GPT has no counterpart of layers 1 of the pattern M*-*-, which start with their initial values" in output
    output = run(tmp_path, "pretrain_gpt.py", "--num-layers 2 --train-iters 3 --lr-decay-iters 1 --load hybrid", code=2)
    assert "a GPT has no counterpart of the letter M" in output and "Traceback" not in output
