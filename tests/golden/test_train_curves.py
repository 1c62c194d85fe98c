# SPDX-License-Identifier: Apache-2.0
"""The reference's training runs, repeated by pretrain_gpt.py itself with the reference's own command line.

    a   GPT-2 style: learned positions, LayerNorm, gelu, biases, tied embeddings; with evaluation
    b   Llama style: RoPE, RMSNorm, SwiGLU, grouped queries, no biases, untied
    c   Mixtral style: as b with four experts, two for each token, and a balancing loss

and the first ten iterations on two processes: data, tensor, sequence, pipeline and expert parallel.

From the given initial weights and data: loss within 2e-5, gradient norm within 1e-4 (relative), learning rate equal.
The .bin file holds only the tokens that these runs read; the others are zero, so that it is small when compressed.
"""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.pretrain_runs import run_ranks

DATA = Path(__file__).parent / "data"
LOSS_TOLERANCE = 2e-5
GRAD_NORM_TOLERANCE = 1e-4
PARAMS_NORM_TOLERANCE = 1e-6

# What every one of these runs shows by following the reference's curve.
FLAGS = (
    "--global-batch-size", "--train-iters", "--lr", "--min-lr", "--lr-decay-style", "--lr-warmup-iters",
    "--weight-decay", "--adam-beta2", "--split", "--data-path", "--attention-dropout", "--hidden-dropout",
    "--make-vocab-size-divisible-by", "--pretrained-checkpoint", "--metrics-dir", "--log-params-norm",
    "--tokenizer-model", "--tokenizer-type", "--seq-length", "--num-layers", "--hidden-size", "--num-attention-heads",
)  # fmt: skip

TWO_PROCESSES = (
    "a_tp2",
    "b_tp2",
    "b_tp2_sp",
    "b_dp2",
    "b_dp2_distopt",
    "a_pp2",
    "b_pp2",
    "b_pp2_vpp1",
    "c_ep2",
    "c_tp2",
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory laid out as the reference command lines name it (GOLDEN)."""
    return lay_out(tmp_path_factory.mktemp("golden"))


def lay_out(directory: Path) -> Path:
    """Put the tokenizer and the dataset of the reference runs where their command lines expect them."""
    shutil.copytree(DATA / "tok" / "hf_bpe1k", directory / "tok" / "hf_bpe1k")
    dataset = directory / "preprocess" / "hf_full_eod"
    dataset.mkdir(parents=True)
    compressed = DATA / "preprocess" / "hf_full_eod"
    shutil.copy(compressed / "out_text_document.idx", dataset)
    tokens = lzma.decompress((compressed / "train_tokens.bin.xz").read_bytes())
    (dataset / "out_text_document.bin").write_bytes(tokens)
    return directory


def upstream_checkpoint(model: str, directory: Path) -> Path:
    """The initial weights as upstream's `torch` format stores them."""
    weights = torch.load(DATA / f"train_{model}" / "init_rank0.pt", weights_only=True)
    parameters = {name: tensor for name, tensor in weights.items() if not name.startswith("buffer:")}
    if "--moe-router-enable-expert-bias" in (DATA / f"train_{model}" / "args.txt").read_text():
        # Buffers there, which a checkpoint has and the file of parameters has not; they begin with zeros.
        routers = {name: tensor.shape[0] for name, tensor in parameters.items() if name.endswith("router.weight")}
        biases = {name.replace("router.weight", "router.expert_bias"): torch.zeros(n) for name, n in routers.items()}
        parameters |= biases
    shard = directory / "iter_0000000" / "mp_rank_00"
    shard.mkdir(parents=True)
    torch.save({"model": parameters}, shard / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("0")
    return directory


def command_line(case: str, reference: Path, tmp_path: Path) -> list[str]:
    """The reference's arguments with paths of this machine, and where to start from and to report to."""
    text = (DATA / f"train_{case}" / "args.txt").read_text()
    arguments = text.replace("GOLDEN", str(reference)).replace("CACHE_DIR", str(tmp_path / "cache")).split()
    checkpoint = upstream_checkpoint(case[0], tmp_path / "initial")
    return [*arguments, "--pretrained-checkpoint", str(checkpoint), "--metrics-dir", str(tmp_path / "metrics")]


def train(processes: int, arguments: list[str]) -> str:
    """Run pretrain_gpt.py; its output."""
    done = run_ranks(arguments, processes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same_step(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """One row of our metrics and the reference's of the same iteration."""
    where = f"iteration {ours['iteration']}"
    assert ours["lm loss"] == pytest.approx(theirs["loss"]["lm loss"], rel=LOSS_TOLERANCE), where
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=GRAD_NORM_TOLERANCE), where
    assert ours["params_norm"] == pytest.approx(theirs["params_norm"], rel=PARAMS_NORM_TOLERANCE), where
    assert ours["lr"] == theirs["lr"], where
    assert ours["consumed_samples"] == 8 * ours["iteration"]


def assert_same_curve(case: str, tmp_path: Path, iterations: int) -> None:
    expected = rows(DATA / f"train_{case}" / "metrics_rank0.jsonl")
    found = rows(tmp_path / "metrics" / "metrics.jsonl")
    steps = [row for row in found if "eval" not in row]
    references = [row for row in expected if "eval" not in row]
    assert (
        [row["iteration"] for row in steps]
        == [row["iteration"] for row in references]
        == list(range(1, iterations + 1))
    )
    for ours, theirs in zip(steps, references, strict=True):
        assert_same_step(ours, theirs)
    evaluations = [(row["eval"]["lm loss"]) for row in found if "eval" in row]
    assert evaluations == pytest.approx(
        [row["eval"]["lm loss"] for row in expected if "eval" in row], rel=LOSS_TOLERANCE
    )


@pytest.mark.flags(*FLAGS, "--eval-interval", "--eval-iters")
def test_gpt2_style(reference: Path, tmp_path: Path) -> None:
    output = train(1, command_line("a", reference, tmp_path))
    assert_same_curve("a", tmp_path, 50)
    assert [row["iteration"] for row in rows(tmp_path / "metrics" / "metrics.jsonl") if "eval" in row] == [20, 40, 50]
    assert "validation loss at iteration 20 | lm loss value: 6.398108E+00 | lm loss PPL: 6.007" in output
    assert "validation loss at iteration 50 on validation set | lm loss value: 6.08105" in output


@pytest.mark.flags(*FLAGS, "--swiglu", "--group-query-attention", "--num-query-groups", "--disable-bias-linear",
                   "--untie-embeddings-and-output-weights", "--ffn-hidden-size", "--position-embedding-type",
                   "--normalization")  # fmt: skip
def test_llama_style(reference: Path, tmp_path: Path) -> None:
    train(1, command_line("b", reference, tmp_path))
    assert_same_curve("b", tmp_path, 50)


@pytest.mark.flags("--num-experts", "--moe-router-topk", "--moe-aux-loss-coeff", "--moe-router-load-balancing-type")
def test_mixtral_style(reference: Path, tmp_path: Path) -> None:
    train(1, command_line("c", reference, tmp_path))
    assert_same_curve("c", tmp_path, 50)
    expected = rows(DATA / "train_c" / "metrics_rank0.jsonl")
    for ours, theirs in zip(rows(tmp_path / "metrics" / "metrics.jsonl"), expected, strict=True):
        mean = sum(theirs["moe"]["load_balancing_loss"]) / (4 * 4)  # of each layer the sum of four microbatches
        assert ours["load_balancing_loss"] == pytest.approx(mean, rel=LOSS_TOLERANCE), ours["iteration"]


@pytest.mark.flags("--exit-interval", "--tensor-model-parallel-size")
@pytest.mark.parametrize("case", TWO_PROCESSES)
def test_two_processes(case: str, reference: Path, tmp_path: Path) -> None:
    """Ten iterations (--exit-interval 10) of the same curve, shared by two processes."""
    output = train(2, command_line(case, reference, tmp_path))
    assert_same_curve(case, tmp_path, 10)
    assert "exiting program at iteration 10" in output
    assert output.count("iteration        3/      50") == 1, "only the first rank logs"
