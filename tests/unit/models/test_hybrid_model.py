# SPDX-License-Identifier: Apache-2.0
"""HybridModel by upstream's names, from flags and as a library; flags of hybrids that change what is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.placement import get_placement
from megatron.core.plan.read import read_plan
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.gpt_models import build_model, losses_and_grads, read_config

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "mamba_num_heads": 6, "mamba_head_dim": 5, "mamba_num_groups": 2,
    "mamba_state_dim": 7, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 6,
    "linear_value_head_dim": 6, "normalization": "RMSNorm", "add_bias_linear": False,
}  # fmt: skip
FLAGS = """--mamba-num-heads 6 --mamba-head-dim 5 --mamba-num-groups 2 --mamba-state-dim 7 --linear-num-key-heads 3
    --linear-num-value-heads 3 --linear-key-head-dim 6 --linear-value-head-dim 6 --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear"""
SPEC = "--spec megatron.core.models.hybrid.hybrid_layer_specs"


def names(pattern: str, flags: str = "") -> set[str]:
    return {name for name, _ in build_model(f"--hybrid-layer-pattern {pattern} {FLAGS} {flags}").named_parameters()}


def test_parameters_have_upstreams_names() -> None:
    config = TransformerConfig(hybrid_layer_pattern="MG*-E/*-", num_moe_experts=2, qk_layernorm=True, **SIZES)
    model = HybridModel(config, hybrid_stack_spec, 64, 16)
    found = {name for name, _ in model.named_parameters()}
    of_mixers = "in_proj.layer_norm_weight in_proj.weight dt_bias A_log out_proj.weight"
    layers = {
        "decoder.layers.0.mixer": f"{of_mixers} conv1d_weight conv1d_bias D norm.weight",
        "decoder.layers.1.self_attention": f"{of_mixers} conv1d.weight out_norm.weight",
        "decoder.layers.2.self_attention": "linear_qkv.layer_norm_weight linear_qkv.weight linear_proj.weight "
        "q_layernorm.weight k_layernorm.weight",
        "decoder.layers.3.mlp": "linear_fc1.layer_norm_weight linear_fc1.weight linear_fc2.weight",
        "decoder.layers.4": "pre_mlp_layernorm.weight mlp.router.weight mlp.experts.linear_fc1.weight0 "
        "mlp.experts.linear_fc1.weight1 mlp.experts.linear_fc2.weight0 mlp.experts.linear_fc2.weight1",
        "mtp.layers.0": "enorm.weight hnorm.weight eh_proj.weight final_layernorm.weight",
        "mtp.layers.0.mtp_model_layer.layers.0.self_attention": "linear_qkv.layer_norm_weight linear_qkv.weight "
        "linear_proj.weight q_layernorm.weight k_layernorm.weight",
        "mtp.layers.0.mtp_model_layer.layers.1.mlp": "linear_fc1.layer_norm_weight linear_fc1.weight linear_fc2.weight",
    }
    expected = {f"{start}.{name}" for start, parts in layers.items() for name in parts.split()}
    ends = {"embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_norm.weight"}
    assert found == expected | ends


def test_a_library_model_is_that_of_flags() -> None:
    """The same weights from the seed, whether flags or a program describe the model, and the same losses."""
    ours = build_model(f"--hybrid-layer-pattern M*-/M- {FLAGS} --untie-embeddings-and-output-weights")
    config = TransformerConfig(hybrid_layer_pattern="M*-/M-", hidden_dropout=0.0, attention_dropout=0.0, **SIZES)
    theirs = HybridModel(config, hybrid_stack_spec, 64, 16, position_embedding_type="rope")
    values = [
        {get_placement(parameter, name).name: parameter for name, parameter in model.named_parameters()}
        for model in (ours, theirs)
    ]
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert torch.equal(losses_and_grads(ours)[0], losses_and_grads(theirs)[0])
    given = HybridModel(TransformerConfig(num_layers=3, **SIZES), hybrid_stack_spec, 64, 16, "M*-/M-",
                        position_embedding_type="rope")  # fmt: skip
    assert [name for name, _ in given.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert isinstance(theirs.decoder, HybridStack) and isinstance(theirs.decoder.layers[0], MambaLayer)
    assert isinstance(theirs.decoder.layers[0].mixer, MambaMixer)


def test_ratios_are_an_earlier_pattern() -> None:
    config = TransformerConfig(num_layers=8, **SIZES)
    with pytest.warns(DeprecationWarning):
        model = HybridModel(config, hybrid_stack_spec, 64, 16, hybrid_attention_ratio=0.25, hybrid_mlp_ratio=0.25)
    assert model.config.hybrid_layer_pattern == "MM*-M*M-"
    with pytest.raises(ValueError, match="the ratios contradict the pattern M-"):
        HybridModel(config, hybrid_stack_spec, 64, 16, "M-", hybrid_attention_ratio=0.5)
    with pytest.raises(ValueError, match="needs the letters"):
        HybridModel(config, hybrid_stack_spec, 64, 16)


def test_a_stack_of_ones_own() -> None:
    config = TransformerConfig(num_layers=2, **SIZES)
    stack = build_module(hybrid_stack_spec, config, layer_type_list=["M", "-"])
    assert [layer.plan.kinds for layer in stack.layers] == [("mamba",), ("mlp",)]
    with pytest.raises(ConfigError, match="the stack's spec no mamba_layer"):
        HybridStack(config, HybridStackSubmodules(), layer_type_list=["M"])
    config = TransformerConfig(hybrid_layer_pattern="M-", **SIZES)
    with pytest.raises(ConfigError, match="this stage has the layers M- behind 0 others"):
        build_module(hybrid_stack_spec, config, layer_type_list=["-", "M"])


def test_one_depth_for_all() -> None:
    twice, once = "M-/*-/*-", "--mtp-use-repeated-layer"
    depths = [{name.split(".")[2] for name in names(twice, flags) if name.startswith("mtp")} for flags in ("", once)]
    assert depths == [{"0", "1"}, {"0"}]


@pytest.mark.flags("--hybrid-override-pattern", "--mtp-hybrid-override-pattern")
def test_earlier_spellings() -> None:
    config = read_config(f"{FLAGS} --hybrid-override-pattern M-*- --mtp-num-layers 2 --mtp-hybrid-override-pattern M*")
    assert config.model.hybrid_layer_pattern == "M-*-/M*/M*" and config.model.num_layers == 4
    assert "--hybrid-override-pattern is an earlier name of --hybrid-layer-pattern" in config.notes
    notes = read_config("--mtp-hybrid-override-pattern M*").notes
    assert any(note.startswith("--mtp-hybrid-override-pattern has no effect") for note in notes)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--num-layers 9", "num_layers", 3),
        ("--mtp-num-layers 3", "mtp_num_layers", 1),
        ("--linear-attention-freq 2", "linear_attention_freq", None),
        ("--num-experts 4 --moe-layer-freq 2 --hybrid-layer-pattern M-E/M", "moe_layer_freq", 1),
    ],
)
def test_letters_say_it(flags: str, name: str, value: object) -> None:
    config = read_config(f"{FLAGS} --hybrid-layer-pattern M-*/M {flags}")
    assert getattr(config.model, name) == value
    assert any("says which layers there are" in note for note in config.notes)


@pytest.mark.flags("--is-hybrid-model")
def test_a_hybrid_has_one_branch_a_layer() -> None:
    """Output projections of a hybrid start as those of a GPT with half as many layers."""
    kinds = {"": 4.0, "--is-hybrid-model": 2.0}
    deviations = {
        flags: build_model(f"--num-layers 2 --hidden-size 128 {flags}").decoder.layers[0].mlp.linear_fc2.weight.std()
        for flags in kinds
    }
    for flags, divisor in kinds.items():
        assert deviations[flags].item() == pytest.approx(0.02 / divisor**0.5, rel=0.02)
    letters = build_model("--num-layers 4 --hidden-size 128 --hybrid-layer-pattern *-*-")
    assert letters.decoder.layers[1].mlp.linear_fc2.weight.std().item() == pytest.approx(0.01, rel=0.02)


@pytest.mark.flags("--linear-attention-freq", "--experimental-attention-variant")
def test_a_gpt_with_gated_delta_nets() -> None:
    """The same layers as letters: attention or a gated delta net, and an MLP, in each layer."""

    def kinds(flags: str) -> list[str]:
        return [layer.kinds[0] for layer in read_plan(read_config(f"--num-layers 4 {FLAGS} {flags}").model).decoder]

    net, full = "gated_delta_net", "attention"
    variant = "--experimental-attention-variant"
    assert kinds(f"{variant} gdn --linear-attention-freq 2") == [net, full, net, full]
    assert kinds(f"{variant} gated_delta_net --linear-attention-freq [0,1,1,0]") == [full, net, net, full]
    assert kinds(f"{variant} gdn2 --linear-attention-freq 4") == [f"{net}_2"] * 3 + [full]
    gpt = build_model(f"--num-layers 2 {FLAGS} {variant} gdn2 --linear-attention-freq [1,0]")
    letters = build_model(f"--hybrid-layer-pattern G-*- {FLAGS} {variant} gdn2")
    assert [p.shape for p in gpt.parameters()] == [p.shape for p in letters.parameters()]
    letters.load_state_dict(dict(zip(letters.state_dict(), gpt.state_dict().values(), strict=True)))
    assert torch.equal(losses_and_grads(gpt)[0], losses_and_grads(letters)[0])
    with pytest.raises(ConfigError, match="gdn does not say which layers have it; add --linear-attention-freq"):
        read_config(f"{variant} gdn")


@pytest.mark.parametrize("spec", ["hybrid_stack_spec", "mamba_stack_spec", "hybrid_inference_stack_spec"])
def test_specs_by_name(spec: str) -> None:
    assert names("M-", f"{SPEC} {spec}") == names("M-")


def test_specs_that_lead_nowhere() -> None:
    with pytest.raises(ConfigError, match="gated delta products"):
        build_model(f"--hybrid-layer-pattern M- {FLAGS} {SPEC} gdp_stack_spec")
    with pytest.raises(ConfigError, match="add --hybrid-layer-pattern"):
        build_model(f"{FLAGS} {SPEC} hybrid_stack_spec")
