# SPDX-License-Identifier: Apache-2.0
"""Maximal update parametrisation: initial weights, multipliers, attention scores and learning rates."""

from __future__ import annotations

import pytest
import torch

from megatron.training.flags.read import examine
from tests.support.gpt_models import assert_same_function, build_model, first_attention, first_mlp
from tests.support.run_flags import SMALLEST_RUN, run_config
from tests.support.tiny_training import train_tiny, values


def problems(flags: str) -> str:
    return " ".join(problem.text for problem in examine([*SMALLEST_RUN.split(), *flags.split()], {}).problems)


@pytest.mark.flags(
    "--use-mup", "--mup-base-hidden-size", "--mup-width-mult", "--mup-embedding-mult", "--mup-output-mult",
    "--mup-base-head-dim", "--mup-attn-scale-power",
)  # fmt: skip
@pytest.mark.parametrize(
    ("mup", "plain"),
    [
        # Heads are 8 wide: 1 / 8 instead of 1 / sqrt(8).
        ("", "--softmax-scale 0.125"),
        ("--mup-base-head-dim 8", ""),
        ("--mup-base-head-dim 2", f"--softmax-scale {2**0.5 / 8}"),
        ("--mup-base-head-dim 2 --mup-attn-scale-power 0.5", ""),
        ("--mup-base-head-dim 8 --mup-embedding-mult 3", "--embedding-multiplier 3"),
        ("--mup-base-head-dim 8 --mup-embedding-mult 3 --embedding-multiplier 2", "--embedding-multiplier 6"),
        ("--mup-base-head-dim 8 --mup-base-hidden-size 8", "--logit-multiplier 0.25"),
        ("--mup-base-head-dim 8 --mup-width-mult 4", "--logit-multiplier 0.25"),
        ("--mup-base-head-dim 8 --mup-width-mult 4 --mup-output-mult 2", "--logit-multiplier 0.5"),
        ("--mup-base-head-dim 8 --mup-output-mult 2 --logit-multiplier 3", "--logit-multiplier 6"),
    ],
)
def test_multipliers(mup: str, plain: str) -> None:
    assert_same_function(build_model(f"--init-method-std 0.3 --use-mup {mup}"), build_model(plain))


@pytest.mark.flags("--use-mup", "--mup-base-hidden-size")
def test_initial_standard_deviations() -> None:
    """Only the matrices of attention and MLP are scaled, by the root of the width."""
    flags = "--hidden-size 64 --untie-embeddings-and-output-weights"
    plain, mup = build_model(flags), build_model(f"{flags} --use-mup --mup-base-hidden-size 16")
    for (name, expected), found in zip(plain.named_parameters(), mup.parameters(), strict=True):
        is_scaled = "linear" in name and name.endswith("weight")
        torch.testing.assert_close(found, expected / 2 if is_scaled else expected, msg=name)


EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-add-bias --moe-shared-expert-intermediate-size 24 "
    "--moe-shared-expert-gate --swiglu --ffn-hidden-size 24"
)


def test_initial_standard_deviations_with_experts() -> None:
    """Experts are scaled as any MLP; router and gate, whose outputs stay as many, by the width itself."""
    flags = f"--hidden-size 64 {EXPERTS}"
    plain, mup = build_model(flags), build_model(f"{flags} --use-mup --mup-base-hidden-size 16")
    divisors = {}
    for (name, expected), found in zip(plain.named_parameters(), mup.named_parameters(), strict=True):
        divisor = 4 if name.endswith(("router.weight", "gate_weight")) else 2 if ".linear" in name else 1
        divisors[name.rpartition("mlp.")[2]] = divisor
        torch.testing.assert_close(found[1], expected / divisor, msg=name)
    assert divisors["router.weight"] == divisors["shared_experts.gate_weight"] == 4
    assert divisors["experts.linear_fc1.weight"] == divisors["experts.linear_fc2.weight"] == 2


def test_learning_rates_with_experts() -> None:
    one_step = "--train-iters 1 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0 --adam-eps 1e-30 --weight-decay 0"
    flags = f"{one_step} {EXPERTS} --use-mup --mup-width-mult 4".split()
    start = dict(values(train_tiny(*flags, "--lr", "0")))
    for name, parameter in train_tiny(*flags).model[0].module.named_parameters():
        steps = (parameter - start[name]).abs()
        is_scaled = name.endswith(("router.weight", "gate_weight")) or (".linear" in name and name.endswith("weight"))
        assert steps.max().item() == pytest.approx(2.5e-4 if is_scaled else 1e-3, rel=1e-2), name


@pytest.mark.flags("--use-mup", "--mup-width-mult")
@pytest.mark.parametrize("width", ["--mup-width-mult 4", "--mup-base-hidden-size 4"])
def test_learning_rates(width: str) -> None:
    """Adam's first step moves each weight by its learning rate: a quarter of it in the matrices of the layers."""
    one_step = "--train-iters 1 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0 --adam-eps 1e-30 --weight-decay 0"
    flags = f"{one_step} --untie-embeddings-and-output-weights --use-mup {width}".split()
    start = dict(values(train_tiny(*flags, "--lr", "0")))
    for name, parameter in train_tiny(*flags).model[0].module.named_parameters():
        steps = (parameter - start[name]).abs()
        is_scaled = "linear" in name and name.endswith("weight")
        assert steps.max().item() == pytest.approx(2.5e-4 if is_scaled else 1e-3, rel=1e-2), name


def test_what_contradicts_or_has_no_effect() -> None:
    assert "--mup-width-mult 2" in problems("--use-mup --mup-width-mult 2 --mup-base-hidden-size 8")
    assert "--init-method-xavier-uniform and --use-mup" in problems("--use-mup --init-method-xavier-uniform")
    assert "Adam and Lion" in problems("--use-mup --optimizer sgd")
    assert any(note.startswith("--mup-output-mult") for note in run_config("--mup-output-mult 2").notes)
    model = build_model("--use-mup --mup-base-hidden-size 8 --kv-channels 8")
    assert first_mlp(model).config.width_multiplier == 4
    assert first_attention(model).config.attention_scale == 1 / 8
