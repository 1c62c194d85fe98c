# SPDX-License-Identifier: Apache-2.0
"""Mixers with a state against the Hugging Face modules that compute the same, weights and gradients mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.placement import get_placement
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNet2
from megatron.core.ssm.kimi_delta_attention import KimiDeltaAttention
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.state_mixer import StateMixer, StateMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.parameters import initialise_parameters
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.pretend_groups import pretend

HIDDEN = 72
Weights = dict[str, Tensor]


def build(mixer_class: type[StateMixer], tp: int = 1, **widths: Any) -> StateMixer:
    """A mixer with large weights, so that nothing is nearly linear."""
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=6, normalization="RMSNorm", layernorm_epsilon=1e-6,
        init_method_std=0.2, tensor_model_parallel_size=tp, **widths,
    )  # fmt: skip
    submodules = StateMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    mixer = mixer_class(config, submodules, layer_number=1, pg_collection=pretend(0, tp=tp, dp=1))
    initialise_parameters(mixer, seed=5)
    return mixer


def mamba() -> tuple[StateMixer, nn.Module, Callable[[Weights], Weights]]:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    ours = build(MambaMixer, mamba_num_heads=6, mamba_head_dim=24, mamba_state_dim=7, mamba_num_groups=3)
    config = Mamba2Config(
        num_heads=6, head_dim=24, hidden_size=HIDDEN, state_size=7, n_groups=3, conv_kernel=4, use_bias=False,
        layer_norm_epsilon=1e-5, chunk_size=32, expand=2,
    )  # fmt: skip
    return ours, Mamba2Mixer(config, 0), dict


def gated_delta_net() -> tuple[StateMixer, nn.Module, Callable[[Weights], Weights]]:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    sizes = {"linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 8,
             "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3}  # fmt: skip
    ours = build(GatedDeltaNet, **sizes)
    theirs = Qwen3_5GatedDeltaNet(Qwen3NextConfig(hidden_size=HIDDEN, rms_norm_eps=1e-6, **sizes), 0)

    def translate(weights: Weights) -> Weights:
        rows = dict(zip(ours.sections, weights.pop("in_proj.weight").split(list(ours.sections.values())), strict=True))
        return weights | {
            "in_proj_qkv.weight": torch.cat([rows["query"], rows["key"], rows["value"]]),
            "in_proj_z.weight": rows["z"],
            "in_proj_b.weight": rows["beta"],
            "in_proj_a.weight": rows["alpha"],
            "norm.weight": weights.pop("out_norm.weight"),
        }

    return ours, theirs, translate


@pytest.mark.parametrize("tokens", [1, 2, 50, 130])
@pytest.mark.parametrize(("case", "rounding"), [(mamba, 3e-6), (gated_delta_net, 5e-5)])
def test_equal_to_hugging_face(case: Callable, rounding: float, tokens: int) -> None:
    """Their delta rule takes differences of float32 sums, and a norm of few channels makes its rounding larger."""
    ours, theirs, translate = case()
    theirs.load_state_dict(translate(dict(ours.state_dict())))
    torch.manual_seed(tokens)
    hidden = torch.randn(tokens, 2, HIDDEN, requires_grad=True)
    found = ours(hidden)[0]
    expected = theirs(hidden.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding * expected.abs().max().item())
    weights = torch.randn_like(expected)
    names = [name for name, _ in ours.named_parameters()]
    of_ours = torch.autograd.grad((found * weights).sum(), [hidden, *ours.parameters()])
    theirs_by_name = dict(theirs.named_parameters())
    of_theirs = torch.autograd.grad((expected * weights).sum(), [hidden, *theirs_by_name.values()])
    torch.testing.assert_close(of_ours[0], of_theirs[0], rtol=0, atol=rounding * of_theirs[0].abs().max().item())
    gradients = translate(dict(zip(names, of_ours[1:], strict=True)))
    for name, gradient in zip(theirs_by_name, of_theirs[1:], strict=True):
        tolerance = (1e-4 if name in ("A_log", "dt_bias") else rounding) * gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=tolerance)


def test_kimi_delta_attention_is_that_of_hugging_face() -> None:
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    ours = build(KimiDeltaAttention, linear_num_value_heads=6, linear_num_key_heads=6, linear_key_head_dim=8,
                 linear_value_head_dim=8)  # fmt: skip
    config = KimiLinearConfig(
        hidden_size=HIDDEN, linear_head_dim=8, linear_num_heads=6, linear_conv_kernel_dim=4, rms_norm_eps=1e-6
    )
    theirs = KimiLinearDeltaAttention(config, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.3)
        weight = {name.removesuffix(".weight"): parameter for name, parameter in theirs.named_parameters()}
        gate = "forget_gate."
        # Their decay and gate come through a narrow layer, whose two matrices make one.
        decay = weight[gate + "f_b_proj"] @ weight[gate + "f_a_proj"]
        rows = [*(weight[f"{name}_proj"] for name in "qkv"), decay, weight["g_b_proj"] @ weight["g_a_proj"]]
        ours.load_state_dict({
            "in_proj.weight": torch.cat([*rows, weight["b_proj"]]), "conv1d.weight": weight["conv1d"],
            "A_log": weight[gate + "A_log"].flatten(), "dt_bias": weight[gate + "dt_bias"],
            "out_norm.weight": weight["o_norm"], "out_proj.weight": weight["o_proj"],
        })  # fmt: skip
        hidden = torch.randn(150, 2, HIDDEN)
        expected = theirs(hidden.transpose(0, 1))
        expected = (expected[0] if isinstance(expected, tuple) else expected).transpose(0, 1)
        # Their chunks take differences of float32 sums, which is where the rest comes from.
        torch.testing.assert_close(ours(hidden)[0], expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("mixer_class", "widths"),
    [
        (MambaMixer, {"mamba_num_heads": 6, "mamba_head_dim": 2, "mamba_state_dim": 3, "mamba_num_groups": 3}),
        (GatedDeltaNet, {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 2}),
        (GatedDeltaNet2, {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 2}),
        (KimiDeltaAttention, {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_value_head_dim": 3}),
    ],
)
def test_gradients_equal_differences_in_float64(mixer_class: type[StateMixer], widths: dict[str, int]) -> None:
    """Of every parameter and of the input, with documents of one token and of fewer than the convolution reads."""
    mixer = build(mixer_class, linear_key_head_dim=3, **widths).double()
    torch.manual_seed(3)
    hidden = torch.randn(21, 1, HIDDEN, dtype=torch.float64, requires_grad=True)
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 1, 3, 19, 21]))

    def run(hidden: Tensor, *parameters: Tensor) -> Tensor:
        output: Tensor = mixer(hidden, packed_seq_params=packed)[0]
        return output

    assert torch.autograd.gradcheck(run, (hidden, *mixer.parameters()), atol=1e-6, fast_mode=True)
    apart = [mixer(part)[0] for part in hidden.split([1, 2, 16, 2])]
    torch.testing.assert_close(run(hidden), torch.cat(apart), rtol=0, atol=1e-12)


@pytest.mark.flags("--linear-allow-neg-eigval", "--linear-norm-epsilon")
@pytest.mark.parametrize("allowed", [True, False])
def test_the_gated_delta_net_of_olmo(allowed: bool) -> None:
    """It writes with a strength of up to 2, and its norm has an epsilon of its own."""
    from transformers import OlmoHybridConfig
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

    sizes = {"linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 8,
             "linear_value_head_dim": 12}  # fmt: skip
    config = OlmoHybridConfig(hidden_size=HIDDEN, num_hidden_layers=2, linear_allow_neg_eigval=allowed, **sizes)
    theirs = OlmoHybridGatedDeltaNet(config, 0)
    ours = build(GatedDeltaNet, linear_norm_epsilon=1e-5, linear_allow_neg_eigval=allowed, **sizes)
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        ours.load_state_dict({
            "in_proj.weight": torch.cat([weights[f"{name}_proj.weight"] for name in "qkvgba"]),
            "conv1d.weight": weights["conv1d.weight"], "A_log": weights["A_log"], "dt_bias": weights["dt_bias"],
            "out_norm.weight": weights["o_norm.weight"], "out_proj.weight": weights["o_proj.weight"],
        })  # fmt: skip
        hidden = torch.randn(70, 2, HIDDEN, generator=torch.Generator().manual_seed(3))
        expected = theirs(hidden.transpose(0, 1)).transpose(0, 1)
        found = ours(hidden)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-5 * expected.abs().max().item())
        for option in ({"linear_norm_epsilon": 1e-3}, {"linear_allow_neg_eigval": not allowed}):
            other = build(
                GatedDeltaNet, **sizes, **{"linear_norm_epsilon": 1e-5, "linear_allow_neg_eigval": allowed} | option
            )
            other.load_state_dict(ours.state_dict())
            assert (other(hidden)[0] - expected).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.flags("--mamba-gate-norm")
@pytest.mark.parametrize(("form", "settings"), [
    ("gated", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    ("ungated", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    ("none", {"mamba_rms_norm": False}),
])  # fmt: skip
def test_what_the_mixer_of_falcon_normalises(form: str, settings: dict[str, bool]) -> None:
    from transformers import FalconH1Config
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer

    config = FalconH1Config(
        hidden_size=HIDDEN, mamba_d_ssm=60, mamba_n_heads=6, mamba_n_groups=3, mamba_d_state=7, rms_norm_eps=1e-5,
        **settings,
    )  # fmt: skip
    theirs = FalconH1Mixer(config, 0)
    theirs.mup_vector = 1.0
    ours = build(MambaMixer, mamba_num_heads=6, mamba_head_dim=10, mamba_state_dim=7, mamba_num_groups=3,
                 mamba_gate_norm=form)  # fmt: skip
    theirs.load_state_dict(ours.state_dict())
    hidden = torch.randn(70, 2, HIDDEN, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(hidden.transpose(0, 1)).transpose(0, 1)
        torch.testing.assert_close(ours(hidden)[0], expected, rtol=0, atol=5e-6 * expected.abs().max().item())


def test_what_filters_and_decays_are() -> None:
    mixer = build(MambaMixer, mamba_num_heads=6, mamba_head_dim=24, mamba_state_dim=7, mamba_num_groups=3)
    kinds = {name: get_placement(parameter, name).kind for name, parameter in mixer.named_parameters()}
    assert kinds["conv1d.weight"] == "filter" and kinds["norm.weight"] == "norm"
    assert {kinds[name] for name in ("A_log", "D", "dt_bias", "conv1d.bias")} == {"vector"}
    # The speeds of decay start in [1, 16], step sizes in [0.001, 0.1].
    assert mixer.A_log.min() >= 0 and mixer.A_log.max() <= torch.tensor(16.0).log()
    steps = nn.functional.softplus(mixer.dt_bias)
    assert steps.min() > 0.00099 and steps.max() < 0.101


def test_heads_that_ranks_cannot_share_are_named() -> None:
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 3 does not divide"):
        build(MambaMixer, tp=3, mamba_num_heads=6, mamba_head_dim=24, mamba_state_dim=8, mamba_num_groups=2)
