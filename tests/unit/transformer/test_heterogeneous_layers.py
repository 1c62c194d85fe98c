# SPDX-License-Identifier: Apache-2.0
"""Layers of different shapes: a Llama of transformers that imitates them, their counts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.plan.heterogeneous import parse_blocks
from megatron.core.plan.read import read_plan
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.planner.batch_flops import count_batch_flops
from megatron.planner.memory import count_parameters
from megatron.training.recipes.families import find_family
from tests.support.gpt_models import build_model, read_config, token_batch

HIDDEN, HEADS, FFN, WIDTH = 32, 4, 48, 8
OWN = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": None}}
BLOCKS: list[dict[str, Any]] = [
    OWN,
    {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"ffn_hidden_size": 20, "ffn_mult": 3}},
    {"attention": {"n_heads_in_group": None, "window_length": 7}, "mlp": {"no_op": True}},
    {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
    {"attention": {"no_op": True}, "ffn": {"no_op": True}, "sparsify": []},
]
FLAGS = f"""--num-layers 5 --hidden-size {HIDDEN} --num-attention-heads {HEADS} --group-query-attention
    --num-query-groups 2 --ffn-hidden-size {FFN} --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --heterogeneous-layers-config-encoded-json="""
FIELDS = {"hidden_size": HIDDEN, "num_hidden_layers": 5, "num_attention_heads": HEADS, "tie_word_embeddings": False}


def encode(blocks: list[dict[str, Any]], **fields: Any) -> str:
    """Without spaces, since tests split flags at them."""
    return json.dumps({"block_configs": blocks, **fields}, separators=(",", ":"))


def build(blocks: list[dict[str, Any]] | None = None, flags: str = "") -> GPTModel:
    return build_model(FLAGS + encode(BLOCKS if blocks is None else blocks, **FIELDS) + " " + flags)


class Pair(nn.Linear):
    """A matrix in attention's place, which returns weights, too."""

    def forward(self, *, hidden_states: Tensor, **_: Any) -> Any:  # type: ignore[override]
        return super().forward(hidden_states), None


@torch.no_grad()
def imitate(model: GPTModel) -> nn.Module:
    """transformers' Llama with as many groups as heads and the widest MLP in each layer, and our weights."""
    transformers = pytest.importorskip("transformers")
    state = model.state_dict()
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(state["embedding.word_embeddings.weight"]), hidden_size=HIDDEN, intermediate_size=FFN,
            num_hidden_layers=5, num_attention_heads=HEADS, num_key_value_heads=HEADS, rms_norm_eps=1e-5,
            attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    hf.model.embed_tokens.weight.copy_(state["embedding.word_embeddings.weight"])
    hf.lm_head.weight.copy_(state["output_layer.weight"])
    hf.model.norm.weight.copy_(state["decoder.final_layernorm.weight"])
    for number, layer in enumerate(hf.model.layers):
        mine = {name.removeprefix(f"decoder.layers.{number}."): value for name, value in state.items()
                if name.startswith(f"decoder.layers.{number}.")}  # fmt: skip
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        for ours, theirs in (("input", "input"), ("pre_mlp", "post_attention")):
            if f"{ours}_layernorm.weight" in mine:
                getattr(layer, f"{theirs}_layernorm").weight.copy_(mine[f"{ours}_layernorm.weight"])
        if "self_attention.linear_qkv.weight" in mine:
            groups = 2
            packed = mine["self_attention.linear_qkv.weight"].view(groups, HEADS // groups + 2, WIDTH, HIDDEN)
            layer.self_attn.q_proj.weight.copy_(packed[:, :-2].flatten(0, 2))
            for place, name in ((-2, "k_proj"), (-1, "v_proj")):
                repeated = packed[:, place].repeat_interleave(HEADS // groups, dim=0)
                getattr(layer.self_attn, name).weight.copy_(repeated.flatten(0, 1))
            layer.self_attn.o_proj.weight.copy_(mine["self_attention.linear_proj.weight"])
        if "self_attention.weight" in mine:
            layer.self_attn = Pair(HIDDEN, HIDDEN, bias=False)
            layer.self_attn.weight.copy_(mine["self_attention.weight"])
        if "mlp.linear_fc1.weight" in mine:
            gate, up = mine["mlp.linear_fc1.weight"].chunk(2)
            layer.mlp.gate_proj.weight[: len(gate)] = gate
            layer.mlp.up_proj.weight[: len(up)] = up
            layer.mlp.down_proj.weight[:, : len(up)] = mine["mlp.linear_fc2.weight"]
        if "mlp.weight" in mine:
            layer.mlp = nn.Linear(HIDDEN, HIDDEN, bias=False)
            layer.mlp.weight.copy_(mine["mlp.weight"])
        assert set(mine) <= {"input_layernorm.weight", "pre_mlp_layernorm.weight", "self_attention.weight",
                             "mlp.weight",
                             *(f"self_attention.linear_{name}.weight" for name in ("qkv", "proj")),
                             *(f"mlp.linear_fc{number}.weight" for number in (1, 2))}  # fmt: skip
    return hf


@pytest.mark.flags("--heterogeneous-layers-config-encoded-json")
def test_a_llama_that_imitates_the_layers_has_the_same_logits_and_texts() -> None:
    model = build(flags="--init-method-std 0.3").eval()
    hf = imitate(model)
    ids, positions, _ = token_batch()
    with torch.no_grad():
        expected, found = hf(input_ids=ids).logits, model(ids, positions)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        texts = hf.generate(ids[:, :6], max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    ours = generate(model, ids[:, :6].tolist(), max_new_tokens=5, sampling=Sampling(greedy=True))
    assert [list(text.tokens)[-5:] for text in ours] == texts[:, -5:].tolist()


def test_counts_are_those_of_each_layer() -> None:
    model = build()
    plan = read_plan(model.config)
    assert [layer.kinds for layer in plan.decoder] == [
        ("attention", "mlp"), ("mlp",), ("attention",), ("linear_for_attention", "linear_for_mlp"), (),
    ]  # fmt: skip
    held = sum(param.numel() for name, param in model.named_parameters() if name.startswith("decoder."))
    assert count_parameters(model.config, padded_vocab_size=64, untied=True).decoder.sum_of_all == held
    matrices = sum(param.numel() for param in model.parameters() if param.dim() > 1) - 64 * HIDDEN  # the embedding
    scores = 2 * HEADS * 2 * WIDTH * 16 // 2  # of two layers, for an average token of 16
    counted = count_batch_flops(
        model.config, seq_length=16, padded_vocab_size=64, global_batch_size=3, as_reference=False
    )
    assert counted == 6 * 3 * 16 * (matrices + scores)


def test_published_widths() -> None:
    """Multiples of 2/3 of the hidden size, cut, and then rounded up to 256."""
    blocks = [{"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": each}} for each in (2.625, 1.0, 0.5)]
    parsed = parse_blocks(encode(blocks), 8192, 64)
    assert [block.ffn_hidden_size for block in parsed] == [14336, 5632, 2816]
    assert {block.query_groups for block in parsed} == {8}


def test_a_config_may_have_different_numbers_of_groups() -> None:
    """Where a program builds the model by itself."""
    blocks = [{"attention": {"num_query_groups": groups}, "ffn": {"ffn_mult": None}} for groups in (1, 2, 4)]
    config = TransformerConfig(
        num_layers=3,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        heterogeneous_layers_config_encoded_json=encode(blocks),
    )
    spec = get_gpt_layer_local_spec()
    layers = [TransformerLayer(config, spec.submodules, number) for number in (1, 2, 3)]
    assert [len(layer.self_attention.linear_qkv.weight) for layer in layers] == [6 * WIDTH, 8 * WIDTH, 12 * WIDTH]


def test_names_of_a_matrix_in_place_of_attention() -> None:
    """The norm is a part of it, as upstream's layers by Transformer Engine have it."""
    layer = TransformerLayer(build().config, get_gpt_layer_spec(names="engine").submodules, 4)
    assert set(dict(layer.named_parameters())) == {
        f"{part}.{name}" for part in ("self_attention", "mlp") for name in ("weight", "layer_norm_weight")
    }


def test_published_files_with_code_of_their_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="nemotron-nas do not convert: transformers has no class for them"):
        find_family("nemotron-nas")


@pytest.mark.flags("--heterogeneous-layers-config-path")
def test_the_text_comes_from_the_file_and_wins_over_it(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(encode(BLOCKS, **FIELDS))
    by_text = FLAGS.rpartition(" ")[0]
    read = read_config(f"{by_text} --heterogeneous-layers-config-path {path}").model
    assert read.heterogeneous_layers_config_encoded_json == path.read_text()
    others = encode([OWN] * 5, **FIELDS)
    both = read_config(f"{FLAGS}{others} --heterogeneous-layers-config-path {path}").model
    assert both.heterogeneous_layers_config_encoded_json == others
    for flags, expected in (("missing.json", "cannot be read: "),):
        with pytest.raises(ConfigError, match=expected):
            read_config(f"{by_text} --heterogeneous-layers-config-path {tmp_path / flags}")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 1}}, "is 3, which does not divide the 4 heads"),
        ({"attention": {"n_heads_in_group": 2, "no_op": True}, "ffn": {"ffn_mult": 1}}, "_in_group must be null"),
        ({"attention": {"no_op": True, "replace_with_linear": True}, "ffn": {"ffn_mult": 1}}, "says both no_op and"),
        ({"attention": {"no_op": 1}, "ffn": {"ffn_mult": 1}}, "no_op is 1; it must be true or false"),
        ({"attention": {}, "ffn": {"ffn_mult": 1}}, "has neither num_query_groups nor n_heads_in_group"),
        ({"attention": {"n_heads_in_group": 2}, "ffn": {}}, "has neither ffn_hidden_size nor ffn_mult"),
        ({"attention": {"n_heads_in_group": 2}}, "has no ffn or mlp"),
        ({"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": -1}}, "ffn_mult is -1; give a number above 0"),
        ({"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_hidden_size": 2.5}}, "ffn_hidden_size is 2.5; give"),
        ("none", "has no attention"),
    ],
)  # fmt: skip
def test_blocks_that_say_nothing_are_refused(block: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build([OWN, block, OWN, OWN, OWN])


@pytest.mark.parametrize(
    ("flags", "text", "expected"),
    [
        ("", "{", "this is not JSON"), ("", "[]", "block_configs is missing"), ("", encode([OWN] * 4), "of 4 layers"),
        ("--num-experts 4", encode([OWN] * 5), "--num-experts 4 says what layers are"),
        ("--tensor-model-parallel-size 4", encode([OWN] * 4 + [BLOCKS[1] | {"ffn": {"ffn_hidden_size": 6}}]),
         "has an inner width of 6, which --tensor-model-parallel-size 4 does not divide"),
        ("", encode([OWN] * 5, hidden_act="gelu"), "hidden_act 'gelu'"),
        ("--rotary-base 500", encode([OWN] * 5, hidden_size=64, rope_theta=10000.0, tie_word_embeddings=True),
         "give --hidden-size 64, --rotary-base 10000.0, no --untie-embeddings-and-output-weights"),
        ("--rotary-percent 0.5", encode([OWN | {"attention": {"n_heads_in_group": 4}}] * 5),
         "give --rotary-percent 1.0, --num-query-groups 1"),
        ("", encode([OWN] * 4 + [OWN | {"attention": {"n_heads_in_group": 4}}]), "layers of .1, 2. key-value heads"),
        ("--hybrid-layer-pattern *-*-*", encode([OWN] * 5), "--hybrid-layer-pattern"),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(flags: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_config(f"{FLAGS}{text} {flags}")
