# SPDX-License-Identifier: Apache-2.0
"""--save-params-interval and its like: what is written; a run computes the same, and goes on without a disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core.upstream_checkpoints.stored_tensors import open_checkpoint
from megatron.training.flags.read import read_run_config
from tests.support.tiny_training import FLAGS, differing, train_tiny

KINDS = ("params", "wgrads", "activations", "dgrads", "tokens-per-expert")
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear")
EVERY_TWO = tuple(word for kind in KINDS for word in (f"--save-{kind}-interval", "2"))


def read(root: Path, iteration: int) -> dict[str, torch.Tensor]:
    return {tensor.key: tensor.read() for tensor in open_checkpoint(root, iteration).tensors}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps of iterations 2, 4 and 6 of a run that is not changed by them."""
    root = tmp_path_factory.mktemp("dumped")
    without = train_tiny(*EXPERTS)
    run = train_tiny(*EXPERTS, *EVERY_TWO, "--save", root / "run", "--metrics-dir", root)
    assert differing(run, without) == []
    return root


@pytest.mark.flags("--save-params-interval", "--save-wgrads-interval", "--save-activations-interval")
@pytest.mark.flags("--save-dgrads-interval", "--save-tokens-per-expert-interval")
def test_a_directory_for_each_kind_and_iteration(dumped: Path) -> None:
    for kind in KINDS:
        found = sorted(path.name for path in (dumped / "run" / kind.replace("-", "_")).glob("iter_*"))
        assert found == ["iter_0000002", "iter_0000004", "iter_0000006"], kind
    assert not list(dumped.rglob("*.tmp-*"))


def test_parameters_are_those_of_the_checkpoint(dumped: Path) -> None:
    found, saved = read(dumped / "run" / "params", 6), read(dumped / "run", 6)
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in found
    assert all(torch.equal(tensor, saved[key]) for key, tensor in found.items())
    assert not torch.equal(found["decoder.final_layernorm.weight"], read(dumped / "run" / "params", 4)[
        "decoder.final_layernorm.weight"
    ])  # fmt: skip


def test_gradients_have_the_norm_that_is_logged(dumped: Path) -> None:
    rows = [json.loads(line) for line in (dumped / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1::2]:
        grads = read(dumped / "run" / "wgrads", row["iteration"])
        assert grads.keys() == read(dumped / "run" / "params", 2).keys()
        norm = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5
        assert norm == pytest.approx(row["grad_norm"], rel=1e-4)


def test_activations_lead_to_their_gradients_and_to_those_of_weights(dumped: Path) -> None:
    """A linear layer's weight gradient is dY^T X, of all microbatches: [tokens, channels]."""
    activations, dgrads = (read(dumped / "run" / kind, 4) for kind in ("activations", "dgrads"))
    assert activations["decoder.layers.1.input_layernorm.output"].shape == (4 * 16, 16)
    x = activations["decoder.layers.1.input_layernorm.output"]
    dy = dgrads["decoder.layers.1.self_attention.linear_qkv.output"]
    weight_grad = read(dumped / "run" / "wgrads", 4)["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert torch.allclose(dy.T @ x, weight_grad, rtol=1e-3, atol=1e-6 + 1e-4 * float(weight_grad.abs().max()))
    assert "tokens" in activations and "tokens" not in dgrads


def test_every_token_chooses_as_many_experts(dumped: Path) -> None:
    counts = read(dumped / "run" / "tokens_per_expert", 2)
    assert sorted(counts) == [f"decoder.layers.{layer}.mlp.router.tokens_per_expert" for layer in range(2)]
    assert all(found.dtype == torch.int64 and found.sum() == 2 * 4 * 16 for found in counts.values())


def test_gradients_are_not_those_of_the_scaled_loss(tmp_path: Path) -> None:
    for scale in ("128", "512"):
        train_tiny("--fp16", "--loss-scale", scale, "--train-iters", "1", "--save-wgrads-interval", "1", "--save",
                   tmp_path / scale)  # fmt: skip
    first, second = (read(tmp_path / scale / "wgrads", 1) for scale in ("128", "512"))
    for key, grad in first.items():
        assert torch.allclose(grad, second[key], rtol=0.05, atol=0.02 * float(grad.abs().max()) + 1e-6), key


def test_a_run_goes_on_without_a_disk_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "params").write_text("in the way")
    run = train_tiny("--save", tmp_path, "--save-params-interval", "1", "--save-wgrads-interval", "3")
    assert run.progress.iteration == 6 and (tmp_path / "iter_0000006").is_dir()
    errors = capsys.readouterr().err
    assert errors.count("training goes on") == 4, "with the directory, and the first, second and fourth dump"
    assert f"{tmp_path}/params: 6 dumps were not written" in errors
    assert len(list((tmp_path / "wgrads").glob("iter_*"))) == 2


def test_a_resumed_run_dumps_its_iterations_anew(dumped: Path, tmp_path: Path) -> None:
    flags = ("--save", tmp_path, "--save-params-interval", "2")
    train_tiny(*flags, "--exit-interval", "2")
    train_tiny(*flags, "--save-interval", "100", "--load", tmp_path)
    again = read(tmp_path / "params", 4)
    train_tiny(*flags, "--load", tmp_path, "--ckpt-step", "2")
    assert all(torch.equal(tensor, again[key]) for key, tensor in read(tmp_path / "params", 4).items())


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--save-params-interval 2", "has no effect without --save"),
        ("--save s --save-tokens-per-expert-interval 2", "has no effect without --num-experts"),
    ],
)
def test_where_there_is_nothing_to_dump(flags: str, note: str) -> None:
    assert any(note in text for text in read_run_config([*FLAGS.split(), *flags.split()], {}).notes)
