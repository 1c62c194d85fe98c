# SPDX-License-Identifier: Apache-2.0
"""examples/custom_model.py: another architecture on the same trainer."""

from __future__ import annotations

from pathlib import Path

from tests.functional.pretrain_runs import metrics, run

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 1 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 4 --global-batch-size 8 --lr 1e-2 --train-iters 6 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 31 --eval-iters 0 --log-interval 3 --num-workers 0 --make-vocab-size-divisible-by 1"
).split()


def train(metrics_dir: Path, *flags: str | Path) -> list[float]:
    done = run([*FLAGS, "--residual", "--metrics-dir", metrics_dir, *flags], program="examples/custom_model.py")
    assert done.returncode == 0, done.stderr
    return [float(row["lm loss"]) for row in metrics(metrics_dir) if "lm loss" in row]  # type: ignore[arg-type]


def test_a_recurrent_network_trains_and_continues_from_its_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    whole = train(tmp_path / "whole", "--save", directory, "--save-interval", "3")
    assert len(whole) == 6 and whole[-1] < whole[0]
    assert train(tmp_path / "again", "--load", directory, "--ckpt-step", "3") == whole[3:]
