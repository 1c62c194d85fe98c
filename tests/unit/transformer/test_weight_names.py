# SPDX-License-Identifier: Apache-2.0
"""Names and marks of weights as upstream's programs know them, on a network that is always the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import AttnMaskType
from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.stacked_parameters import list_parameters
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

pytestmark = pytest.mark.filterwarnings("ignore:layers are those of the local spec")
EXPERTS = {"num_moe_experts": 3, "moe_ffn_hidden_size": 20, "moe_layer_freq": [0, 1], "add_bias_linear": True,
           "moe_shared_expert_intermediate_size": 24}  # fmt: skip
LATENT = {"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 8,
          "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "qk_layernorm": True}  # fmt: skip
TOKENS = torch.arange(14).view(2, 7)
POSITIONS = torch.arange(7).expand(2, 7)


def configure(**changes: Any) -> TransformerConfig:
    shape: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "hidden_dropout": 0.0,
                             "attention_dropout": 0.0, "normalization": "LayerNorm", "gated_linear_unit": True,
                             "add_bias_linear": False}  # fmt: skip
    return TransformerConfig(**shape | changes)


def build(config: TransformerConfig, spec: Any, **arguments: Any) -> GPTModel:
    return GPTModel(config, spec, 29, 16, position_embedding_type="rope", **arguments)


def of_layer(model: nn.Module, number: int) -> list[str]:
    prefix = f"decoder.layers.{number}."
    return [name.removeprefix(prefix) for name, _ in model.named_parameters() if name.startswith(prefix)]


@pytest.mark.parametrize("changes", [EXPERTS, LATENT], ids=["experts", "latent"])
def test_every_name_is_of_the_same_network(changes: dict[str, Any]) -> None:
    config = configure(**changes)
    own = build(config, get_gpt_layer_spec(multi_latent_attention=config.multi_latent_attention))
    for uses_engine in (False, True):
        model = build(config, get_gpt_decoder_block_spec(config, use_transformer_engine=uses_engine))
        # The same initial numbers, for they follow from our names.
        assert torch.equal(model(TOKENS, POSITIONS, None), own(TOKENS, POSITIONS, None))
        stored = {p.placement.name: p for _, p in list_parameters(model)}  # type: ignore[attr-defined]
        expected = dict(own.named_parameters())
        assert set(stored) == set(expected)
        assert all(torch.equal(stored[name], value) for name, value in expected.items())


def test_names_of_transformer_engine() -> None:
    config = configure(**EXPERTS)
    model = build(config, get_gpt_decoder_block_spec(config, use_transformer_engine=True))
    dense, sparse = of_layer(model, 0), of_layer(model, 1)
    norms = {"self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.layer_norm_bias"}
    assert norms | {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias"} <= set(dense)
    assert not [name for name in dense if "layernorm" in name]
    assert norms | {"pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias"} <= set(sparse)
    experts = [name.removeprefix("mlp.experts.") for name in sparse if "mlp.experts." in name]
    kinds = [f"linear_fc{n}.{kind}{e}" for n in (1, 2) for kind in ("weight", "bias") for e in range(3)]
    assert sorted(experts) == sorted(kinds)
    latent = build(configure(**LATENT), get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True))
    names = of_layer(latent, 1)
    assert {f"self_attention.linear_{x}_up_proj.layer_norm_weight" for x in ("q", "kv")} <= set(names)
    assert "input_layernorm.weight" in names and not [name for name in names if "_layernorm" in name and "self" in name]


def test_names_of_the_local_spec() -> None:
    config = configure(**EXPERTS)
    sparse = of_layer(build(config, get_gpt_decoder_block_spec(config)), 1)
    experts = [name.removeprefix("mlp.experts.local_experts.") for name in sparse if "mlp.experts." in name]
    assert experts == [f"{e}.linear_fc{n}.{kind}" for e in range(3) for n in (1, 2) for kind in ("weight", "bias")]
    assert "input_layernorm.weight" in sparse
    spec = get_gpt_layer_local_spec(num_experts=3, moe_grouped_gemm=True)
    assert set(of_layer(build(config, spec), 1)) == set(sparse)  # one spec for layers with experts and without


@pytest.mark.parametrize("uses_engine", [False, True])
def test_whoever_writes_to_an_expert_reaches_it(uses_engine: bool) -> None:
    config = configure(**EXPERTS)
    model = build(config, get_gpt_decoder_block_spec(config, use_transformer_engine=uses_engine))
    other = build(configure(**EXPERTS, seed=5), get_gpt_decoder_block_spec(config, use_transformer_engine=uses_engine))
    expected = other(TOKENS, POSITIONS, None)
    ways = [
        lambda model: model.load_state_dict(other.state_dict()),
        lambda model: [p.data.copy_(q) for p, q in zip(model.parameters(), other.parameters(), strict=True)],
        lambda model: [
            setattr(p, "data", q.data.clone()) for p, q in zip(model.parameters(), other.parameters(), strict=True)
        ],
        lambda model: [model.state_dict()[name].copy_(value) for name, value in other.state_dict().items()],
    ]
    for write in ways:
        changed = copy.deepcopy(model)
        assert torch.equal(changed(TOKENS, POSITIONS, None), model(TOKENS, POSITIONS, None))
        with torch.no_grad():
            write(changed)
        assert torch.equal(changed(TOKENS, POSITIONS, None), expected)
    wide = copy.deepcopy(other).double()
    assert wide(TOKENS, POSITIONS, None).dtype == torch.float64
    torch.testing.assert_close(wide(TOKENS, POSITIONS, None).float(), expected)


def step(model: GPTModel, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(TOKENS, POSITIONS, None, labels=TOKENS).sum().backward()
    optimizer.step()


def test_gradients_of_experts_are_seen_once() -> None:
    config = configure(**EXPERTS, gradient_accumulation_fusion=False)
    own, model = (build(config, spec) for spec in (get_gpt_layer_spec(), get_gpt_decoder_block_spec(config, True)))
    # With an optimizer of torch, which takes what parameters() lists.
    for network in (own, model):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(2):
            step(network, optimizer)
    expected = dict(own.named_parameters())
    for _, value in list_parameters(model):
        torch.testing.assert_close(value, expected[value.placement.name])  # type: ignore[attr-defined]
    with torch.no_grad():
        for param in model.parameters():
            param.requires_grad_(False)
    assert not model(TOKENS, POSITIONS, None).requires_grad


def test_experts_lie_in_flat_buffers_once() -> None:
    config, results = configure(**EXPERTS), []
    for spec in (get_gpt_layer_spec(), get_gpt_decoder_block_spec(config, use_transformer_engine=True)):
        model = build(config, spec)
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [chunk])
        chunk.zero_grad_buffer()
        chunk(TOKENS, POSITIONS, None, labels=TOKENS).sum().backward()
        chunk.finish_grad_sync()
        norm = torch.stack([p.main_grad.square().sum() for p in model.parameters()]).sum().sqrt()  # type: ignore[attr-defined]
        update = optimizer.step()
        torch.testing.assert_close(norm, update.grad_norm)
        results.append((sum(buffer.grad_data.numel() for buffer in chunk.flat_buffers), update.grad_norm))
        results[-1] += (model(TOKENS, POSITIONS, None),)
    (size, norm, logits), others = results
    assert size == others[0]
    torch.testing.assert_close((norm, logits), others[1:])


def test_marks_follow_from_the_layers() -> None:
    config = configure(**EXPERTS)
    for uses_engine in (True, False):
        model = build(config, get_gpt_decoder_block_spec(config, use_transformer_engine=uses_engine))
        for name, param in model.named_parameters():
            marks: Any = param
            column = any(part in name for part in ("linear_qkv", "linear_fc1", "embedding", "output_layer"))
            row = any(part in name for part in ("linear_proj.weight", "linear_fc2.weight"))
            dim = -1 if "layer_norm" in name or "layernorm" in name else 0 if column else 1 if row else -1
            assert (marks.tensor_model_parallel, marks.partition_dim) == (dim >= 0, dim), name
            assert marks.partition_stride == 1 and marks.allreduce and not marks.sequence_parallel


def test_edits_of_a_block_spec_take_effect() -> None:
    config = configure(**EXPERTS)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    assert len(spec.layer_specs) == 2 and spec.layer_norm is not None
    for layer in spec.layer_specs:
        layer.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.arbitrary
    spec.layer_specs[1].submodules.mlp.submodules.shared_experts.params["gate"] = True

    class Louder(TransformerLayer):
        def forward(self, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
            return 2 * super().forward(hidden_states, *inputs, **named)

    plain = build(config, get_gpt_decoder_block_spec(config))
    spec.layer_specs[0].module = Louder
    model = build(config, spec)
    assert type(model.decoder.layers[0]) is Louder and type(model.decoder.layers[1]) is TransformerLayer
    assert "mlp.shared_experts.gate_weight" in of_layer(model, 1)
    assert not torch.equal(model(TOKENS, POSITIONS, None), plain(TOKENS, POSITIONS, None))
    core: Any = model.decoder.layers[1]
    assert core.self_attention.core_attention.attn_mask_type == AttnMaskType.arbitrary
    predicting = configure(**EXPERTS, mtp_num_layers=1)
    block = get_gpt_decoder_block_spec(predicting)
    built = build(predicting, block, mtp_block_spec=get_gpt_mtp_block_spec(predicting, block))
    assert [name for name in dict(built.named_parameters()) if "local_experts.2.linear_fc2" in name and "mtp" in name]
    with pytest.raises(ConfigError, match="the block spec has 1 layers, this stage has 2"):
        spec.layer_specs.pop()
        build(config, spec)


def test_parts_of_a_layer_that_do_not_exist_are_refused() -> None:
    spec = get_gpt_layer_local_spec()
    spec.submodules.pre_mlp_layernorm = IdentityOp
    assert build(configure(), spec).decoder.layers[0].pre_mlp_layernorm is None
    for name in ("cross_attention", "self_attn_bda"):
        spec = get_gpt_layer_local_spec()
        setattr(spec.submodules, name, nn.Linear)
        with pytest.raises(ConfigError, match=name):
            build(configure(), spec)


def test_arguments_of_forward_and_of_the_model() -> None:
    model = build(configure(), get_gpt_layer_local_spec(), scatter_embedding_sequence_parallel=True, logit_dtype=None)
    assert model.vp_stage is None
    expected = model(TOKENS, None, None)
    ones = torch.ones_like(TOKENS)
    given = {
        "inference_params": None,
        "extra_block_kwargs": None,
        "runtime_gather_output": True,
    }
    for mask in (None, ones, ones.bool()):  # not read where the spec is causal
        assert torch.equal(model(TOKENS, None, mask, **given), expected)
    for name, value in (("extra_block_kwargs", {"a": 1}), ("padding_mask", ones), ("is_spec_decode", True)):
        with pytest.raises(ConfigError, match=f"forward\\(\\) has no {name}"):
            model(TOKENS, None, None, **{name: value})
    with pytest.raises(ConfigError, match="logit_dtype"):
        build(configure(), get_gpt_layer_local_spec(), logit_dtype=torch.float64)
    padded = get_gpt_layer_local_spec()
    padded.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    hidden = torch.zeros(2, 7, dtype=torch.int64)
    hidden[:, 5:] = 1  # True hides
    several = build(configure(), padded)
    short = several(TOKENS[:, :5], None, torch.zeros(2, 1, 1, 5, dtype=torch.bool))
    for mask in (hidden, hidden.bool()[:, None, None]):
        torch.testing.assert_close(several(TOKENS, None, mask)[:, :5], short)
