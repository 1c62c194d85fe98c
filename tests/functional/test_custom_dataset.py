# SPDX-License-Identifier: Apache-2.0
"""examples/custom_dataset.py: a script's own samples, its own batches, and both continued from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional.pretrain_runs import metrics, run

FLAGS = (
    "--largest 9 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 12 --max-position-embeddings 12 "
    "--micro-batch-size 8 --global-batch-size 16 --lr 1e-2 --train-iters 8 --tokenizer-type NullTokenizer "
    "--vocab-size 13 --eval-interval 4 --eval-iters 1 --log-interval 4 --num-workers 0 --hidden-dropout 0 "
    "--attention-dropout 0 --make-vocab-size-divisible-by 1"
).split()


def train(metrics_dir: Path, *flags: str | Path) -> list[dict[str, object]]:
    done = run([*FLAGS, "--metrics-dir", metrics_dir, *flags], program="examples/custom_dataset.py")
    assert done.returncode == 0, done.stderr
    return metrics(metrics_dir)


@pytest.mark.flags("--dataloader-type")
def test_samples_and_batches_of_a_users_own(tmp_path: Path) -> None:
    rows = train(tmp_path / "samples")
    losses = [float(row["lm loss"]) for row in rows if "lm loss" in row]  # type: ignore[arg-type]
    assert len(losses) == 8 and losses[-1] < 0.9 * losses[0]
    assert [row["split"] for row in rows if "eval" in row] == ["validation", "validation", "validation", "test"]
    whole = train(tmp_path / "batches", "--dataloader-type", "external")
    assert whole == rows, "the same samples, loaded by the script itself"


@pytest.mark.flags("--dataloader-type")
def test_an_external_loader_is_told_where_to_continue(tmp_path: Path) -> None:
    external = ("--dataloader-type", "external", "--eval-iters", "0")
    whole = train(tmp_path / "whole", *external)
    saving = ("--save", tmp_path / "ckpt", "--save-interval", "4", "--load", tmp_path / "ckpt")
    train(tmp_path / "half", *external, *saving, "--exit-interval", "4")
    resumed = train(tmp_path / "half", *external, *saving)
    assert resumed == whole
