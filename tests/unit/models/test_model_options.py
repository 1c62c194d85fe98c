# SPDX-License-Identifier: Apache-2.0
"""Norm placement, residual stream, multipliers and initial weights: from the command line to the function computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.errors import CheckpointError
from megatron.core.tensor_parallel.parameters import derive_parameter_seed
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.flags.read import examine
from tests.support.gpt_models import build_model, first_layer, losses_and_grads, read_config, token_batch
from tests.support.pretend_groups import pretend
from tests.support.run_flags import SMALLEST_RUN, run_config
from tests.support.tiny_training import differing, prepare, train_tiny


def problems(flags: str) -> str:
    return " ".join(problem.text for problem in examine([*SMALLEST_RUN.split(), *flags.split()], {}).problems)


def randomise(layer: TransformerLayer) -> TransformerLayer:
    """Values that make every norm, bias and weight matter."""
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return layer


def pieces(layer: TransformerLayer) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Attention and MLP of a layer with their biases, without norms."""

    def attention(x: Tensor) -> Tensor:
        output, bias = layer.self_attention(x)
        return output + bias

    def mlp(x: Tensor) -> Tensor:
        output, bias = layer.mlp(x)
        return output + bias

    return attention, mlp


@pytest.mark.flags(
    "--norm-placement",
    "--parallel-residual",
    "--apply-residual-connection-post-layernorm",
    "--residual-multiplier",
    "--parallel-residual-shares-norm",
    "--norm-parameters",
)
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--norm-placement output",
        "--norm-placement both",
        "--parallel-residual",
        "--parallel-residual --norm-placement both",
        "--parallel-residual --parallel-residual-shares-norm --norm-parameters weight",
        "--norm-parameters none --no-persist-layer-norm",
        "--apply-residual-connection-post-layernorm",
        "--residual-multiplier 0.5",
        "--residual-multiplier 0.5 --norm-placement both --no-bias-dropout-fusion",
    ],
)
def test_layer_formulas(flags: str) -> None:
    """The layer is the formula in its module's docstring, value and gradient."""
    layer = randomise(first_layer(build_model(flags)))
    attention, mlp = pieces(layer)
    before, after = ("norm-placement output" not in flags), ("placement" in flags)

    def norm(which: str, x: Tensor) -> Tensor:
        module = getattr(layer, which)
        expected = before if which in ("input_layernorm", "pre_mlp_layernorm") else after
        if "shares" in flags and which == "pre_mlp_layernorm":
            assert module is None
            return norm("input_layernorm", x)
        assert (module is not None) == expected
        if module is None:
            return x
        parameters = [getattr(module, name, None) for name in ("weight", "bias")]
        assert [x is not None for x in parameters] == [part not in flags for part in ("none", "parameters")]
        return F.layer_norm(x, (32,), *parameters, 1e-5)

    factor = 0.5 if "multiplier" in flags else 1.0
    x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    first = norm("input_layernorm", x)
    added = factor * norm("post_self_attn_layernorm", attention(first))
    middle = (first if "post-layernorm" in flags else x) + added
    second = norm("pre_mlp_layernorm", x if "parallel" in flags else middle)
    expected = (second if "post-layernorm" in flags else middle) + factor * norm("post_mlp_layernorm", mlp(second))
    found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    gradients = [torch.autograd.grad((y * weights).sum(), x, retain_graph=True)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_contradicting_residual_options_are_refused() -> None:
    start = "--apply-residual-connection-post-layernorm"
    assert "use --norm-placement input or both" in problems(f"{start} --norm-placement output")
    assert "--parallel-residual contradict" in problems(f"{start} --parallel-residual")
    assert "--norm-placement" in problems("--norm-placement after")
    shared = "--parallel-residual --parallel-residual-shares-norm"
    assert "use --norm-placement input" in problems(f"{shared} --norm-placement both")
    assert "leave out --cuda-graph-modules" in problems(f"{shared} --cuda-graph-impl local --cuda-graph-modules attn")
    assert "--norm-parameters none leaves no weight" in problems("--norm-parameters none --apply-layernorm-1p")


def test_norms_over_all_heads_are_refused_where_they_cannot_be() -> None:
    assert "add --normalization RMSNorm" in problems("--qk-layernorm --qk-norm-scope all")
    assert any("--qk-layernorm" in note for note in run_config("--qk-norm-scope all --normalization RMSNorm").notes)
    assert "--qk-norm-scope all" in problems(
        "--qk-layernorm --qk-norm-scope all --normalization RMSNorm --num-query-groups 1 --tensor-model-parallel-size 2"
    )


@pytest.mark.flags("--embedding-multiplier", "--logit-multiplier")
def test_multipliers_of_embedding_and_logits() -> None:
    ids, positions, _ = token_batch()
    plain, scaled = build_model(), build_model("--embedding-multiplier 3")
    torch.testing.assert_close(scaled.embedding(ids, positions), 3 * plain.embedding(ids, positions))
    logits = build_model("--logit-multiplier 0.25")(ids, positions)
    torch.testing.assert_close(logits, 0.25 * plain(ids, positions))


@pytest.mark.flags("--add-output-layer-bias", "--add-embedding-norm", "--learned-position-offset", "--relu")
def test_ends_and_activation_of_other_models() -> None:
    ids, positions, _ = token_batch()
    plain = build_model()
    biased = build_model("--add-output-layer-bias")
    with torch.no_grad():
        biased.output_layer.bias.copy_(torch.linspace(-1, 1, len(biased.output_layer.bias)))
        torch.testing.assert_close(biased(ids, positions), plain(ids, positions) + biased.output_layer.bias)
        embedded = plain.embedding(ids, positions)
        normed = build_model("--add-embedding-norm").embedding(ids, positions)
        torch.testing.assert_close(normed, F.layer_norm(embedded, (32,)), rtol=1e-5, atol=1e-5)
        shifted = build_model("--learned-position-offset 2").embedding
        words, table = shifted.word_embeddings.weight[ids], shifted.position_embeddings.weight
        assert len(table) == len(plain.embedding.position_embeddings.weight) + 2
        torch.testing.assert_close(shifted(ids, positions), (words + table[positions + 2]).transpose(0, 1))
        mlp = build_model("--relu").decoder.layers[0].mlp
        inner = F.relu(mlp.linear_fc1(embedded)[0] + mlp.linear_fc1.bias)
        torch.testing.assert_close(mlp(embedded)[0], mlp.linear_fc2(inner)[0])


@pytest.mark.flags("--fp32-residual-connection")
@pytest.mark.parametrize("placement", ["input", "output", "both"])
def test_residual_stream_in_float32(placement: str) -> None:
    """Between layers float32; attention, MLP and logits in bfloat16. Small additions then survive beside a large
    stream."""
    flags = f"--bf16 --norm-placement {placement}"
    model = build_model(f"{flags} --fp32-residual-connection --init-method-std 0.2")
    seen = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
        layer.mlp.register_forward_pre_hook(lambda module, inputs: seen.append((inputs[0].dtype,)))
    ids, positions, _ = token_batch()
    logits = model(ids, positions)
    assert set(seen) == {(torch.float32, torch.float32), (torch.bfloat16,)}
    assert logits.dtype == torch.bfloat16
    reference = build_model(f"--norm-placement {placement} --init-method-std 0.2")
    reference.load_state_dict(model.state_dict())
    short = build_model(f"{flags} --init-method-std 0.2")
    expected = reference(ids, positions)
    errors = [(m(ids, positions).float() - expected).abs().mean() for m in (model, short)]
    assert errors[0] < errors[1]
    assert not any(grad.isnan().any() for grad in losses_and_grads(model)[1].values())
    assert "--fp32-residual-connection" in problems("--fp32-residual-connection")


@pytest.mark.flags("--embedding-init-method-std")
def test_embeddings_have_a_standard_deviation_of_their_own() -> None:
    flags = "--hidden-size 64 --embedding-init-method-std 0.5"
    for tied in (True, False):
        model = build_model(flags + ("" if tied else " --untie-embeddings-and-output-weights"))
        assert model.embedding.word_embeddings.weight.std().item() == pytest.approx(0.5, rel=0.08)
        assert model.embedding.position_embeddings.weight.std().item() == pytest.approx(0.5, rel=0.08)
        assert first_layer(model).mlp.linear_fc1.weight.std().item() == pytest.approx(0.02, rel=0.08)
        if not tied:
            assert model.output_layer.weight.std().item() == pytest.approx(0.02, rel=0.08)


@pytest.mark.flags("--init-method-xavier-uniform")
def test_xavier_uniform() -> None:
    model = build_model("--init-method-xavier-uniform --hidden-size 64")
    for name, parameter in model.named_parameters():
        if "linear" in name and name.endswith("weight"):
            bound = math.sqrt(6 / sum(parameter.shape))
            assert 0.98 * bound < parameter.abs().max().item() <= bound, name
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
    assert model.embedding.word_embeddings.weight.std().item() == pytest.approx(0.02, rel=0.08)


def test_xavier_uniform_leaves_the_sinks_normal() -> None:
    """It is defined for matrices; the scores of the sinks are one number for each head."""
    plain, xavier = (
        first_layer(build_model(f"--softmax-type learnable {flags}")).self_attention.core_attention.softmax_offset
        for flags in ("", "--init-method-xavier-uniform")
    )
    assert xavier.any() and torch.equal(plain, xavier)


@pytest.mark.flags("--no-initialization")
def test_without_initialization_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only norms and biases are set; the flag asks for a checkpoint."""
    drawn: list[str] = []
    monkeypatch.setattr(
        "megatron.core.tensor_parallel.parameters.derive_parameter_seed",
        lambda seed, name: drawn.append(name) or derive_parameter_seed(seed, name),
    )
    build_model()
    assert any("linear_fc1.weight" in name for name in drawn)
    drawn.clear()
    model = build_model("--no-initialization --load /somewhere")
    assert drawn and all(name.endswith(".bias") or "layernorm" in name for name in drawn)
    assert (model.decoder.final_layernorm.weight == 1).all()
    assert "--no-initialization" in problems("--no-initialization")


@pytest.mark.flags("--no-clone-scatter-output-in-embedding")
def test_the_whole_embedded_sequence_is_freed() -> None:
    """A rank's part of the sequence has memory of its own, not a view of the whole."""
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.tensor_parallel.parameters import initialise_parameters

    ids, positions, _ = token_batch()
    stored = {}
    for flags in ("", "--no-clone-scatter-output-in-embedding"):
        config = read_config(flags).model
        config.sequence_parallel = True
        group = pretend(tp=2).tp
        embedding = LanguageModelEmbedding(config, 64, 16, tp_group=group)
        initialise_parameters(embedding, seed=1)
        embedding.word_embeddings.leave = lambda x, group: x.contiguous()  # the sum of one rank is enough here
        part = embedding(ids, positions)
        assert part.shape == (8, 2, 32)
        stored[flags] = part.untyped_storage().nbytes()
    assert stored[""] * 2 == stored["--no-clone-scatter-output-in-embedding"]


@pytest.mark.flags("--disable-bf16-reduced-precision-matmul")
def test_bf16_sums_in_float32() -> None:
    from megatron.training.launch.initialize import initialize, shut_down

    switch = torch.backends.cuda.matmul
    before = switch.allow_bf16_reduced_precision_reduction
    try:
        for flags, allowed in (("", True), ("--disable-bf16-reduced-precision-matmul", False)):
            initialize(run_config(flags))
            shut_down()
            assert switch.allow_bf16_reduced_precision_reduction is allowed
    finally:
        switch.allow_bf16_reduced_precision_reduction = before


@pytest.mark.flags("--empty-unused-memory-level")
@pytest.mark.parametrize(("level", "calls"), [(0, 0), (1, 2), (2, 4)])
def test_empty_unused_memory_level(level: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two iterations: nothing, once each, or twice each."""
    counted: list[int] = []
    monkeypatch.setattr("megatron.training.hooks.housekeeping.release_cached_memory", lambda: counted.append(1))
    train_tiny("--train-iters", "2", "--empty-unused-memory-level", str(level))
    assert len(counted) == calls


@pytest.mark.flags("--output-logit-dtype")
@pytest.mark.parametrize("fusion", ["", "--no-gradient-accumulation-fusion", "--cross-entropy-loss-fusion"])
def test_logits_in_float32(fusion: str) -> None:
    """Not rounded to bfloat16; losses and gradients stay those of the rounded logits, as far as these go."""
    flags = f"--bf16 --untie-embeddings-and-output-weights --init-method-std 0.2 {fusion}"
    model, short = build_model(f"{flags} --output-logit-dtype fp32"), build_model(f"{flags} --output-logit-dtype bf16")
    ids, positions, _ = token_batch()
    seen: list[Tensor] = []
    model.output_layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    logits = model(ids, positions)
    assert logits.dtype == torch.float32 and short(ids, positions).dtype == torch.bfloat16
    exact = F.linear(seen[0].float(), model.output_layer.weight.float()).transpose(0, 1)
    torch.testing.assert_close(logits, exact)
    assert not torch.equal(logits, logits.bfloat16().float())
    (losses, grads), (expected, expected_grads) = losses_and_grads(model), losses_and_grads(short)
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=1e-2)
    for name, grad in expected_grads.items():
        error = (grads[name] - grad).float().norm() / grad.float().norm().clamp(min=1e-6)
        assert grads[name].dtype == torch.bfloat16 and error < 0.05, name
    assert "--output-logit-dtype bf16" in problems("--output-logit-dtype bf16")


def test_a_run_without_initialization_has_the_weights_it_loads(tmp_path: Path) -> None:
    checkpoint = ("--save", tmp_path, "--load", tmp_path, "--save-interval", "2")
    with pytest.raises(CheckpointError, match="--no-initialization leaves the weights undefined"):
        train_tiny("--no-initialization", *checkpoint)
    saved = train_tiny(*checkpoint, "--train-iters", "2")
    assert differing(saved, prepare("--no-initialization", "--load", tmp_path, "--train-iters", "2")) == []
