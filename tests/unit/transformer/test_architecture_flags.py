# SPDX-License-Identifier: Apache-2.0
"""Flags that shape the model: from the command line to the built model's shapes and values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.transformer.norms import LayerNorm, RMSNorm
from tests.support.gpt_models import (
    assert_same_function,
    build_model,
    first_attention,
    first_layer,
    first_mlp,
    losses_and_grads,
    read_config,
    token_batch,
)


def shapes(flags: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in build_model(flags).named_parameters()}


@pytest.mark.flags(
    "--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size", "--kv-channels",
    "--max-position-embeddings",
)  # fmt: skip
def test_sizes() -> None:
    found = shapes(
        "--num-layers 3 --hidden-size 24 --num-attention-heads 3 --ffn-hidden-size 40 --kv-channels 6 "
        "--max-position-embeddings 20"
    )
    assert {name.split(".")[2] for name in found if ".layers." in name} == {"0", "1", "2"}
    assert found["decoder.layers.0.self_attention.linear_qkv.weight"] == (3 * 3 * 6, 24)
    assert found["decoder.layers.0.self_attention.linear_proj.weight"] == (24, 18)
    assert found["decoder.layers.0.mlp.linear_fc1.weight"] == (40, 24)
    assert found["decoder.layers.0.mlp.linear_fc2.weight"] == (24, 40)
    assert found["embedding.position_embeddings.weight"] == (20, 24)
    # The number of heads changes no shape when the width of a head is given: it shows in the function.
    assert first_attention(build_model("--num-attention-heads 2")).head_width == 16


@pytest.mark.flags("--group-query-attention", "--num-query-groups")
def test_query_groups() -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert shapes("")[name] == (96, 32)
    assert shapes("--group-query-attention --num-query-groups 2")[name] == (32 + 2 * 2 * 8, 32)
    assert shapes("--group-query-attention --num-query-groups 1")[name] == (32 + 2 * 8, 32)


def test_grouped_attention_is_attention_with_repeated_heads() -> None:
    """Copying each group's key and value rows to its query heads gives the same function with one group per head."""
    grouped = build_model("--group-query-attention --num-query-groups 2")
    full = build_model("")
    state = dict(grouped.state_dict())
    for name, value in grouped.state_dict().items():
        if "linear_qkv" in name:
            q, k, v = value.unflatten(0, (2, 4, 8)).split((2, 1, 1), dim=1)  # 2 groups of (2 queries, key, value)
            state[name] = torch.stack((q, k.expand_as(q), v.expand_as(q)), dim=2).flatten(0, 3)
    full.load_state_dict(state)
    torch.testing.assert_close(losses_and_grads(full)[0], losses_and_grads(grouped)[0])


@pytest.mark.flags("--normalization", "--norm-epsilon", "--apply-layernorm-1p", "--no-persist-layer-norm")
def test_norms() -> None:
    assert isinstance(first_layer(build_model("")).input_layernorm, LayerNorm)
    rms = build_model("--normalization RMSNorm --norm-epsilon 0.5")
    norm = first_layer(rms).pre_mlp_layernorm
    assert isinstance(norm, RMSNorm)
    x = torch.randn(4, 2, 32)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), eps=0.5))
    layer = first_layer(build_model("--norm-epsilon 0.5")).input_layernorm
    torch.testing.assert_close(layer(x), F.layer_norm(x, (32,), eps=0.5))
    for kind in ("LayerNorm", "RMSNorm"):
        centred = build_model(f"--normalization {kind} --apply-layernorm-1p").decoder.final_layernorm
        plain = build_model(f"--normalization {kind}").decoder.final_layernorm
        assert not centred.weight.any() and (plain.weight == 1).all()
        torch.testing.assert_close(centred(x), plain(x))
        assert plain.is_fused
        assert not build_model(f"--normalization {kind} --no-persist-layer-norm").decoder.final_layernorm.is_fused
        assert_same_function(
            build_model(f"--normalization {kind}"), build_model(f"--normalization {kind} --no-persist-layer-norm")
        )


ACTIVATIONS = {
    "": F.gelu,
    "--swiglu": F.silu,
    "--squared-relu": lambda x: F.relu(x) ** 2,
    "--openai-gelu": lambda x: F.gelu(x, approximate="tanh"),
    "--quick-geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "--geglu": F.gelu,
    "--geglu --openai-gelu": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.flags("--swiglu", "--squared-relu", "--openai-gelu", "--quick-geglu", "--geglu")
@pytest.mark.parametrize("flag", ACTIVATIONS)
def test_activations(flag: str) -> None:
    mlp = first_mlp(build_model(flag))
    x = torch.randn(4, 2, 32)
    wide = F.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias)
    if "glu" in flag:
        gate, up = wide.chunk(2, dim=-1)
        expected = ACTIVATIONS[flag](gate) * up
    else:
        expected = ACTIVATIONS[flag](wide)
    output, bias = mlp(x)
    torch.testing.assert_close(output + bias, F.linear(expected, mlp.linear_fc2.weight, mlp.linear_fc2.bias))


@pytest.mark.flags("--activation-func-clamp-value", "--glu-linear-offset")
@pytest.mark.parametrize("gate", ["--swiglu", "--quick-geglu"])
@pytest.mark.parametrize(("limit", "offset"), [(0.5, 0.0), (0.5, 1.0), (None, 1.0)])
def test_clamped_and_offset_gates(gate: str, limit: float | None, offset: float) -> None:
    """act(min(gate, c)) * (max(-c, min(up, c)) + o), fused and written out, with the same gradients."""
    flags = f"{gate} --init-method-std 0.4" + (f" --activation-func-clamp-value {limit}" if limit else "")
    flags += f" --glu-linear-offset {offset}" if offset else ""
    model = build_model(flags)
    mlp = first_mlp(model)
    x = torch.randn(4, 2, 32)
    left, right = F.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias).chunk(2, dim=-1)
    if limit:
        assert (left > limit).any() and (right < -limit).any()
        left, right = left.clamp(max=limit), right.clamp(-limit, limit)
    expected = F.linear(ACTIVATIONS[gate](left) * (right + offset), mlp.linear_fc2.weight)
    torch.testing.assert_close(mlp(x)[0], expected)
    assert_same_function(model, build_model(f"{flags} --no-bias-swiglu-fusion"), tolerance=1e-4)


def test_gate_options_without_a_gate_are_noted() -> None:
    for flag in ("--activation-func-clamp-value 7", "--glu-linear-offset 1"):
        assert any(note.startswith(flag.split()[0]) for note in read_config(flag).notes)
        assert not any(note.startswith(flag.split()[0]) for note in read_config(f"{flag} --swiglu").notes)


def test_one_activation() -> None:
    for flags in ("--swiglu --geglu", "--quick-geglu --openai-gelu", "--squared-relu --swiglu"):
        with pytest.raises(ConfigError, match="keep one activation"):
            build_model(flags)


def test_gated_width_follows_from_the_hidden_size() -> None:
    assert shapes("--swiglu --hidden-size 96")["decoder.layers.0.mlp.linear_fc1.weight"] == (2 * 256, 96)
    assert shapes("--quick-geglu --hidden-size 96")["decoder.layers.0.mlp.linear_fc1.weight"] == (2 * 384, 96)


@pytest.mark.flags("--disable-bias-linear", "--add-qkv-bias")
def test_biases() -> None:
    def biases(flags: str) -> set[str]:
        return {name.split(".")[-2] for name in shapes(flags) if name.endswith(".bias") and "linear" in name}

    assert biases("") == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert biases("--disable-bias-linear") == set()
    assert biases("--disable-bias-linear --add-qkv-bias") == {"linear_qkv"}


def test_biases_are_added() -> None:
    """Every bias has a gradient, and moving it moves the loss."""
    for flags in ("", "--swiglu", "--no-bias-dropout-fusion --no-bias-gelu-fusion"):
        model = build_model(flags)
        before, grads = losses_and_grads(model)
        for name, param in model.named_parameters():
            if name.endswith("linear_proj.bias") or name.endswith("linear_fc1.bias") or name.endswith("fc2.bias"):
                assert grads[name].any(), name
                with torch.no_grad():
                    param += 0.1 * torch.randn_like(param)
                after, _ = losses_and_grads(model)
                assert not torch.allclose(before, after), name
                before = after


@pytest.mark.flags("--hidden-dropout")
def test_hidden_dropout() -> None:
    model = build_model("--hidden-dropout 0.5")
    one, two = losses_and_grads(model)[0], losses_and_grads(model)[0]
    assert not torch.equal(one, two)
    model.eval()
    assert torch.equal(losses_and_grads(model)[0], losses_and_grads(model)[0])
    # Of the embedding's values half are dropped and the others doubled.
    model.train()
    ids, positions, _ = token_batch()
    dropped = model.embedding(ids, positions)
    share = (dropped == 0).float().mean().item()
    assert share == pytest.approx(0.5, abs=0.1)
    model.eval()
    torch.testing.assert_close(dropped[dropped != 0], 2 * model.embedding(ids, positions)[dropped != 0])


@pytest.mark.flags("--untie-embeddings-and-output-weights")
def test_tied_and_untied_output() -> None:
    assert "output_layer.weight" not in shapes("")
    untied = build_model("--untie-embeddings-and-output-weights")
    assert untied.output_layer.weight.shape == (64, 32)
    assert not torch.equal(untied.output_layer.weight, untied.embedding.word_embeddings.weight)
    tied = build_model("")
    assert tied.shared_embedding_or_output_weight() is tied.embedding.word_embeddings.weight
    # Both uses contribute to the one gradient: every row has one, also rows of tokens that are not in the input.
    assert losses_and_grads(tied)[1]["embedding.word_embeddings.weight"].any(dim=1).all()


FUSIONS = {
    "--no-bias-gelu-fusion": ("", lambda m: first_mlp(m).activate.__name__),
    "--no-bias-swiglu-fusion": ("--swiglu", lambda m: first_mlp(m).activate.__name__),
    "--no-bias-dropout-fusion": ("", lambda m: first_layer(m).branches[0].bias_dropout_add.__name__),
    "--no-rope-fusion": ("--position-embedding-type rope", lambda m: str(first_attention(m).is_rope_fused)),
    "--no-masked-softmax-fusion": (
        "--attention-backend local",
        lambda m: first_attention(m).core_attention.backend.softmax.__name__,
    ),
    "--no-gradient-accumulation-fusion": ("", lambda m: first_mlp(m).linear_fc1.product.name),
}


@pytest.mark.flags(
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-masked-softmax-fusion",
    "--no-gradient-accumulation-fusion",
)
@pytest.mark.parametrize("flag", FUSIONS)
def test_fusions_change_the_implementation_and_not_the_result(flag: str) -> None:
    others, implementation = FUSIONS[flag]
    fused, plain = build_model(others), build_model(f"{others} {flag}")
    assert implementation(fused) != implementation(plain)
    assert_same_function(fused, plain)


@pytest.mark.flags("--init-method-std")
@pytest.mark.parametrize("std", [0.02, 0.5])
def test_initial_standard_deviations(std: float) -> None:
    model = build_model(f"--hidden-size 64 --num-layers 4 --init-method-std {std}")
    narrow = std / math.sqrt(2 * 4)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            assert not param.any(), name
        elif "layernorm" in name:
            assert (param == 1).all(), name
        else:
            expected = narrow if "linear_proj" in name or "linear_fc2" in name else std
            assert param.std().item() == pytest.approx(expected, rel=0.08), name
            assert abs(param.mean().item()) < 4 * expected / math.sqrt(param.numel()), name


@pytest.mark.flags("--seed")
def test_initial_weights_follow_from_the_seed() -> None:
    one, again, other = (build_model(f"--seed {seed}").state_dict() for seed in (1, 1, 2))
    for name, value in one.items():
        assert torch.equal(value, again[name])
        if "linear" in name and name.endswith("weight"):
            assert not torch.equal(value, other[name])


def test_initial_weights_do_not_depend_on_the_state_of_the_generator() -> None:
    torch.manual_seed(1)
    one = build_model("").state_dict()
    torch.rand(7)
    assert all(torch.equal(value, one[name]) for name, value in build_model("").state_dict().items())


@pytest.mark.flags("--use-cpu-initialization")
def test_cpu_initialization(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag decides on which device full-size tensors are drawn; seen by watching where generators are made."""
    drawn_on = []
    make = torch.Generator

    def watched(device: torch.device) -> torch.Generator:
        drawn_on.append(torch.device(device).type)
        return make("cpu")

    class ElsewhereParameter(nn.Parameter):
        """A parameter that says it lies on another device."""

        device = torch.device("privateuseone")

    from megatron.core.tensor_parallel import parameters

    def fill(parameter: Tensor, placement: object, init: object, seed: int, device: torch.device) -> None:
        watched(device)

    monkeypatch.setattr(parameters, "_fill", fill)
    for flags in ("", "--use-cpu-initialization"):
        config = read_config(flags).model
        module = nn.Module()
        module.weight = parameters.declare_parameter((2, 2))
        module.weight.__class__ = ElsewhereParameter
        parameters.initialise_parameters(module, seed=1, draw_on_cpu=config.use_cpu_initialization)
    assert drawn_on == ["privateuseone", "cpu"]


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="--num-query-groups 3"):
        build_model("--group-query-attention --num-query-groups 3")
    with pytest.raises(ConfigError, match="--hidden-size 33"):
        build_model("--hidden-size 33")
