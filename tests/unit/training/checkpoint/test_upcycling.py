# SPDX-License-Identifier: Apache-2.0
"""--moe-use-upcycling: a mixture of experts computes at first what the dense model did of which it was made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.errors import CheckpointError, ConfigError
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.launch.initialize import shut_down
from megatron.training.run import Run
from tests.support.tiny_training import SEQUENCE, VOCABULARY, differing, prepare, train_tiny

GATED = ("--swiglu", "--disable-bias-linear", "--ffn-hidden-size", "24")
BIASED = ("--ffn-hidden-size", "24")
UPCYCLED = ("--moe-use-upcycling", "--moe-ffn-hidden-size")


def close(run: Run) -> None:
    """End a run that trains nothing."""
    run.hooks.on_close(run)
    run.data.close()
    shut_down()


def compute_logits(run: Run) -> Tensor:
    """[s, b, v], without dropout."""
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(2))
    model = run.model[0].module.eval()
    with torch.no_grad():
        logits: Tensor = model(tokens, torch.arange(SEQUENCE).expand(2, -1))
    return logits


def save_dense(root: Path, *flags: str) -> Tensor:
    """Save a dense model, whose biases are no zeros, and return its logits."""
    run = prepare("--save", root, *flags)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in run.model[0].module.named_parameters():
            if ".mlp." in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_checkpoint(run)
    logits = compute_logits(run)
    close(run)
    return logits


@pytest.mark.flags("--moe-use-upcycling", "--moe-upcycling-granularity")
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (GATED, "24 --num-experts 4"),
        (BIASED, "24 --num-experts 3 --moe-router-topk 3 --moe-router-score-function sigmoid "
         "--moe-router-topk-scaling-factor 2.5 --ckpt-format upstream_torch_dist"),
        (GATED, "12 --num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 2 --moe-mlp-glu-interleave-size 3"),
        (BIASED, "6 --num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 4 --moe-layer-freq 2"),
    ],
)  # fmt: skip
def test_the_first_function_is_that_of_the_dense_model(tmp_path: Path, kind: tuple[str, ...], flags: str) -> None:
    written = flags.split()
    format_ = written[written.index("--ckpt-format") :] if "--ckpt-format" in written else []
    # Weights alone are taken, and need no optimizer's state beside them.
    expected = save_dense(tmp_path / "dense", *kind, *format_, *(["--no-save-optim"] if format_ else []))
    run = prepare("--load", tmp_path / "dense", *kind, *UPCYCLED, *written)
    torch.testing.assert_close(compute_logits(run), expected, rtol=1e-4, atol=1e-5)
    assert run.progress.iteration == 0
    close(run)


def test_an_upcycled_run_goes_on_and_does_not_begin_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    expected = save_dense(dense, *GATED)
    experts = (*GATED, *UPCYCLED, "24", "--num-experts", "4", "--save", sparse)
    first = prepare("--pretrained-checkpoint", dense, "--load", sparse, *experts)
    assert "at first the model computes what the dense model did" in capfd.readouterr().out
    with torch.no_grad():
        first.model[0].module.decoder.layers[0].mlp.router.weight.add_(1.0)
    save_checkpoint(first)
    kept = first.model[0].module.decoder.layers[0].mlp.router.weight.detach().clone()
    close(first)
    again = prepare("--pretrained-checkpoint", dense, "--load", sparse, *experts)
    assert torch.equal(again.model[0].module.decoder.layers[0].mlp.router.weight, kept)
    torch.testing.assert_close(compute_logits(again), expected, rtol=1e-4, atol=1e-5)
    close(again)
    with pytest.raises(CheckpointError, match=r"sparse holds checkpoints of a run already; leave the flag out"):
        prepare("--load", dense, *experts)
    with pytest.raises(CheckpointError, match="is of another model"):
        prepare("--load", dense, *GATED, "--num-experts", "4", "--moe-ffn-hidden-size", "24")


def test_an_upcycled_run_is_resumed_whole(tmp_path: Path) -> None:
    """By the command that began it: optimizer and random numbers go on, although the dense model's were not taken."""
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    save_dense(dense, *GATED)
    flags = (*GATED, *UPCYCLED, "24", "--num-experts", "4", "--pretrained-checkpoint", dense)
    whole = train_tiny(*flags)
    train_tiny(*flags, "--save", sparse, "--exit-interval", "3")
    assert differing(whole, train_tiny(*flags, "--save", sparse, "--load", sparse)) == []


def test_weights_that_add_up_to_no_constant_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_dense(tmp_path, *GATED)
    close(prepare("--load", tmp_path, *GATED, *UPCYCLED, "24", "--num-experts", "4", "--moe-router-pre-softmax"))
    assert "computes about what the dense model did" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num-experts 6 --moe-upcycling-granularity 4", "6 is no multiple of --moe-upcycling-granularity 4"),
        ("--num-experts 4 --moe-latent-size 8", "cannot make --moe-latent-size 8 of a dense model"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused(tmp_path: Path, flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        prepare("--load", tmp_path, *GATED, *UPCYCLED, "24", *flags.split())
