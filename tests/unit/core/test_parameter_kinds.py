# SPDX-License-Identifier: Apache-2.0
"""What a parameter is, is said where it is declared; weight decay, update rules and learning rates follow from it."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupKey, make_param_key
from megatron.core.placement import Kind, Part, Placement, Split, get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.parameters import declare_parameter, declare_vocabulary, initialise_parameters
from megatron.core.transformer.attention import SelfAttention
from tests.support.gpt_models import build_model, read_config

KINDS: dict[str, Kind] = {
    r"embedding\.word_embeddings\.weight": "embedding",
    r"embedding\.position_embeddings\.weight": "positions",
    r"output_layer\.weight": "head",
    r".*\.router\.weight": "router",
    r".*\.(router\.expert_bias|softmax_offset)": "vector",
    r".*\.[qk]_layernorm\.(weight|bias)": "qk_norm",
    r".*layernorm\.(weight|bias)": "norm",
    r".*linear\w*\.bias": "vector",
    r".*(linear\w*\.weight|gate_weight)": "matrix",
}
"""The first pattern that fits a parameter's name."""


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--untie-embeddings-and-output-weights --position-embedding-type rope --qk-layernorm --softmax-type learnable",
        "--normalization RMSNorm --qk-layernorm --qk-norm-scope all --norm-placement both --attention-output-gate",
        "--num-experts 4 --moe-ffn-hidden-size 16 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate",
    ],
)
def test_every_parameter_of_a_model_says_what_it_is(flags: str) -> None:
    for name, param in build_model(flags).named_parameters():
        placement = get_placement(param)
        expected = next(kind for pattern, kind in KINDS.items() if re.fullmatch(pattern, name))
        assert placement.kind == expected, name
        assert placement.is_hidden_matrix == (expected in ("matrix", "router"))
        assert placement.is_vocabulary == (expected in ("embedding", "head"))
        assert placement.is_vector == (expected in ("vector", "norm", "qk_norm"))


class OfAUser(nn.Module):
    """Plain torch, with some of upstream's names and its mark."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.table.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self.q_layernorm = nn.LayerNorm(4)
        self.norm = nn.LayerNorm(4)
        self.gru = nn.GRU(4, 4)
        self.output_layer = nn.Linear(4, 8)


def test_kinds_of_a_users_parameters_follow_from_names_shapes_and_upstreams_mark() -> None:
    found = {name: get_placement(param, name).kind for name, param in OfAUser().named_parameters()}
    assert found == {
        "table.weight": "embedding", "q_layernorm.weight": "qk_norm", "q_layernorm.bias": "qk_norm",
        "norm.weight": "vector", "norm.bias": "vector",
        "gru.weight_ih_l0": "matrix", "gru.weight_hh_l0": "matrix", "gru.bias_ih_l0": "vector",
        "gru.bias_hh_l0": "vector", "output_layer.weight": "head", "output_layer.bias": "vector",
    }  # fmt: skip
    assert Placement("layers.0.experts.bias", (4, 8)).kind == "vector"
    assert Placement("layers.0.experts.bias", (4, 8), kind="matrix").kind == "matrix"


def test_vocabulary_rows_are_said_once_and_only_of_tables_of_tokens() -> None:
    module = OfAUser()
    declare_vocabulary(module, 7)
    rows = {name: get_placement(param, name).valid_rows for name, param in module.named_parameters()}
    assert {name: count for name, count in rows.items() if count is not None} == {
        "table.weight": 7, "output_layer.weight": 7,
    }  # fmt: skip
    declare_vocabulary(module, 6)
    assert get_placement(module.table.weight).valid_rows == 7, "it was said already"
    smaller = OfAUser()
    declare_vocabulary(smaller, 9)
    assert get_placement(smaller.output_layer.weight, "output_layer.weight").valid_rows is None, "not of the vocabulary"
    declared = declare_parameter((8, 4), kind="embedding", valid_rows=5)
    assert (get_placement(declared).kind, get_placement(declared).logical_shape) == ("embedding", (5, 4))


def key(kind: Kind, shape: tuple[int, ...], **settings: object) -> GroupKey:
    return make_param_key(Placement("p", shape, kind=kind), OptimizerConfig(**settings))


def test_policies_follow_the_kind() -> None:
    for kind in ("matrix", "router", "embedding", "positions", "head"):
        assert not key(kind, (4, 4)).is_undecayed
    for kind in ("vector", "norm", "qk_norm"):
        assert key(kind, (4,)).is_undecayed
        assert key(kind, (4,), apply_wd_to_qk_layernorm=True).is_undecayed == (kind != "qk_norm")
    muon = {kind: key(kind, (4, 4), optimizer="muon").rule for kind in ("matrix", "router", "embedding", "head")}
    assert muon == {"matrix": "muon", "router": "muon", "embedding": "adam", "head": "adam"}
    assert key("matrix", (2, 4, 4), optimizer="muon").rule == "muon", "each matrix of a stack by itself"
    for kind in ("embedding", "head", "positions", "matrix"):
        found = key(kind, (4, 4), decoupled_lr=0.1, width_multiplier=2.0)
        assert (found.is_decoupled_lr, found.is_hidden_matrix) == (kind in ("embedding", "head"), kind == "matrix")


def test_biases_of_experts_are_vectors_although_they_lie_in_a_stack() -> None:
    """[experts, channels]: neither orthogonalised together nor scaled with the width."""
    model = build_model("--num-experts 4 --moe-ffn-hidden-size 16")
    biases = [(n, p) for n, p in model.named_parameters() if "experts" in n and n.endswith("bias")]
    assert len(biases) == 4
    for name, param in biases:
        assert param.dim() == 2
        config = OptimizerConfig(optimizer="muon", width_multiplier=2.0)
        assert make_param_key(get_placement(param, name), config) == GroupKey(True, False, "adam", False)


class Stage(nn.Module):
    """Layers of a pipeline stage whose first is the model's `first`."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        self.first = first
        self.scale = declare_parameter((2,))

    def global_parameter_name(self, name: str) -> str:
        """layers.0 -> layers.<first>."""
        head, _, rest = name.removeprefix("layers.").partition(".")
        return f"layers.{int(head) + self.first}.{rest}" if name.startswith("layers.") else name


def test_each_block_says_which_layers_it_holds() -> None:
    """Of any name, several in a model, and one inside another."""
    outer = Stage(10)
    outer.layers[1] = Stage(100)
    model = nn.ModuleDict({"encoder": Stage(4), "prediction": outer})
    initialise_parameters(model, seed=1)
    assert [get_placement(param).name for param in model.parameters()] == [
        "encoder.scale", "encoder.layers.4.weight", "encoder.layers.5.weight",
        "prediction.scale", "prediction.layers.10.weight", "prediction.layers.11.scale",
        "prediction.layers.11.layers.100.weight", "prediction.layers.11.layers.101.weight",
    ]  # fmt: skip
    bare = Stage(3)
    initialise_parameters(bare, seed=1)
    assert get_placement(bare.layers[0].weight).name == "layers.3.weight"


def test_named_parts_are_those_of_the_whole_tensor() -> None:
    parts = (Part(4, (0, 1), name="query"), Part(2, (0, 1), name="key"), Part(4, (1, 2), name="query"))
    placement = Placement("qkv", (10, 3), (Split(0, "tp", 2, 1, parts),))
    assert placement.named_parts() == [("query", 0, 4), ("key", 4, 2), ("query", 6, 4)]
    assert placement.local_parts() == [("query", 0, 4)]
    assert placement.named_parts(1) == [("", 0, 3)]


def test_norms_of_a_users_own_around_queries_are_norms_of_queries() -> None:
    """A class that declares nothing, put into the layer's spec."""

    class PlainNorm(nn.Module):
        def __init__(self, config: object, hidden_size: int, **_: object) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(hidden_size))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    config = read_config("--qk-layernorm").model
    spec = get_gpt_layer_local_spec().submodules.self_attention
    parts = dataclasses.replace(spec.submodules, q_layernorm=PlainNorm)
    attention = SelfAttention(config, parts, 1, pg_collection=ProcessGroupCollection.single(), **spec.params)
    initialise_parameters(attention, seed=1)
    placement = get_placement(attention.q_layernorm.gain)
    assert (placement.name, placement.kind) == ("q_layernorm.gain", "qk_norm")
