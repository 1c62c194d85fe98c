# SPDX-License-Identifier: Apache-2.0
"""Models whose decoder has mixers with a state: their flags, counts and refusals."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.plan.read import read_plan
from megatron.planner.memory import count_parameters
from tests.support.gpt_models import build_model, losses_and_grads, read_config

SIZES = """--mamba-num-heads 6 --mamba-head-dim 5 --mamba-num-groups 2 --mamba-state-dim 7 --linear-num-key-heads 3
    --linear-num-value-heads 3 --linear-key-head-dim 6 --linear-value-head-dim 6 --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear"""


def build(pattern: str, flags: str = "") -> GPTModel:
    return build_model(f"--num-layers {len(pattern)} --hybrid-layer-pattern {pattern} {SIZES} {flags}")


def shape(model: GPTModel, name: str) -> tuple[int, ...]:
    return tuple(dict(model.named_parameters())[f"decoder.layers.0.{name}"].shape)


@pytest.mark.flags("--mamba-num-heads", "--mamba-head-dim", "--mamba-num-groups", "--mamba-state-dim")
def test_sizes_of_mamba() -> None:
    model = build("M-")
    assert shape(model, "mixer.in_proj.weight") == (2 * 30 + 2 * 14 + 6, 32)
    assert shape(model, "mixer.conv1d.weight") == (30 + 2 * 14, 1, 4)
    assert shape(model, "mixer.A_log") == shape(model, "mixer.dt_bias") == shape(model, "mixer.D") == (6,)
    assert shape(model, "mixer.out_proj.weight") == (32, 30)


@pytest.mark.flags(
    "--linear-num-key-heads", "--linear-num-value-heads", "--linear-key-head-dim", "--linear-value-head-dim",
    "--linear-conv-kernel-dim",
)  # fmt: skip
def test_sizes_of_gated_delta_nets() -> None:
    model = build("G-", "--linear-num-value-heads 9 --linear-value-head-dim 4 --linear-conv-kernel-dim 2")
    assert shape(model, "self_attention.in_proj.weight") == (2 * 18 + 2 * 36 + 2 * 9, 32)
    assert shape(model, "self_attention.conv1d.weight") == (2 * 18 + 36, 1, 2)
    assert shape(model, "self_attention.out_norm.weight") == (4,)


@pytest.mark.flags("--short-conv-kernel-dim", "--short-conv-bias")
def test_sizes_of_short_convolutions() -> None:
    model = build("L-", "--short-conv-kernel-dim 5 --short-conv-bias")
    assert shape(model, "self_attention.in_proj.weight") == (3 * 32, 32)
    assert shape(model, "self_attention.conv1d.weight") == (32, 1, 5)
    assert all(shape(model, f"self_attention.{name}.bias") == (32,) for name in ("conv1d", "out_proj"))


@pytest.mark.flags("--linear-gate-rank", "--mamba-beside-attention")
@pytest.mark.parametrize(
    "flags", [*(f"--hybrid-layer-pattern {pattern}" for pattern in ("M", "G", "K", "L", "MG*-K-")),
              "--hybrid-layer-pattern K-K --linear-gate-rank 5", "--num-layers 2 --mamba-beside-attention"],
)  # fmt: skip
def test_all_parameters_learn_and_are_counted(flags: str) -> None:
    model = build_model(f"{flags} {SIZES}")
    losses, grads = losses_and_grads(model)
    assert losses.isfinite().all() and all(grad.any() for grad in grads.values())
    counted = count_parameters(model.config, padded_vocab_size=64, untied=False).decoder.sum_of_all
    # One number for each head or channel does not count, but for norms of the hidden states.
    norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight", "final_norm.weight", "final_layernorm.weight")
    held = sum(
        param.numel()
        for name, param in model.named_parameters()
        if name.startswith("decoder.") and (param.dim() > 1 or name.endswith(norms))
    )
    assert counted == held


@pytest.mark.parametrize(
    ("pattern", "flags", "problem"),
    [
        ("M-", "--mamba-num-groups 4", "--mamba-num-groups 4 does not divide the 6 Mamba-2 heads; use a divisor"),
        ("G-", "--linear-num-value-heads 4", "--linear-num-value-heads 4 must be a multiple of --linear-num-key-heads"),
        ("K-", "--linear-key-head-dim 4", "--linear-key-head-dim 4 is not --linear-value-head-dim 6"),
    ],
)
def test_sizes_that_contradict_each_other(pattern: str, flags: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(pattern, flags)


def test_heads_that_ranks_cannot_share() -> None:
    flags = f"--num-layers 2 --hybrid-layer-pattern MG {SIZES} --tensor-model-parallel-size 4"
    with pytest.raises(ConfigError) as error:
        read_config(flags)
    assert "cannot share --mamba-num-groups 2" in str(error.value)
    assert "cannot share --linear-num-key-heads 3" in str(error.value)


def test_a_plan_says_which_layer_has_a_state() -> None:
    config = read_config(f"--num-layers 4 --hybrid-layer-pattern MG*K {SIZES}")
    kinds = [layer.branches[0].kind for layer in read_plan(config.model).decoder]
    assert kinds == ["mamba", "gated_delta_net", "attention", "kimi_delta"]


_DELTA_FLAGS = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type none --linear-num-key-heads 3 "
    "--linear-num-value-heads 3 --linear-key-head-dim 8 --linear-value-head-dim 8 --hidden-size 36 "
    "--num-attention-heads 3"
)


@pytest.mark.parametrize("rank", ["", "--linear-gate-rank 5"])
def test_the_decay_of_kimi_delta_attention_stays_float32_in_bf16(rank: str) -> None:
    """Where a gated delta net's has the format of all parameters."""
    model = build_model(f"--hybrid-layer-pattern KG {_DELTA_FLAGS} --bf16 {rank}")
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert wide == {f"decoder.layers.0.self_attention.{name}" for name in ("A_log", "dt_bias")}
    tokens = torch.arange(1, 13)[None]
    model(tokens, torch.arange(12)[None]).float().square().sum().backward()
    for name in wide:
        gradient = model.get_parameter(name).grad
        assert gradient is not None and gradient.dtype == torch.float32 and gradient.isfinite().all() and gradient.any()


@pytest.mark.flags("--no-linear-norm-1p", "--apply-layernorm-1p")
@pytest.mark.parametrize("flags", ["", "--experimental-attention-variant gdn2"])
def test_the_norm_of_heads_is_stored_around_zero_as_others_are(flags: str) -> None:
    """The same function, by either way of storing it."""
    common = f"--hybrid-layer-pattern GK {_DELTA_FLAGS} {flags} --apply-layernorm-1p"
    centred, plain = build_model(common), build_model(f"{common} --no-linear-norm-1p")
    state = centred.state_dict()
    norms = [name for name in state if name.endswith("out_norm.weight")]
    assert len(norms) == 2 and all(not state[name].any() for name in norms)
    assert all((plain.get_parameter(name) == 1).all() for name in norms)
    for name in norms:
        state[name].copy_(torch.linspace(-0.5, 0.75, 8))
    plain.load_state_dict(state | {name: state[name] + 1 for name in norms})
    tokens = torch.arange(1, 13)[None]
    expected = centred(tokens, torch.arange(12)[None])
    assert torch.equal(plain(tokens, torch.arange(12)[None]), expected)
    plain.load_state_dict(state)
    assert not torch.allclose(plain(tokens, torch.arange(12)[None]), expected, rtol=1e-3)
