# SPDX-License-Identifier: Apache-2.0
"""Residual streams of both forms against their formulas in float64: outputs, all gradients, dropout; what is kept and
counted, generation, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory import KeptForBackward
from megatron.core.errors import ConfigError
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.speculation import PredictionDrafter
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.executor import compute_activation_shape
from megatron.core.plan.branch_kind import Tokens
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import Branch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.hyper_connections import HyperConnectedBranch, HyperConnection, MeanConnection
from megatron.core.transformer.layer_inputs import StageInputs
from megatron.planner.memory import count_parameters
from megatron.planner.parameters import count_on_rank
from megatron.planner.throughput import count_products
from tests.support.gpt_models import (
    assert_same_function,
    build_model,
    losses_and_grads,
    read_config,
    token_batch,
)

LEARNED = "--enable-hyper-connections --num-residual-streams 3"
MEAN = "--enable-mhc-connections --mhc-num-residual-streams 3"
FORMS = pytest.mark.parametrize("form", [LEARNED, MEAN])


def build(flags: str) -> GPTModel:
    """A model in float64 whose streams differ: all parameters of connections are drawn."""
    model = build_model(f"--mhc-sinkhorn-iterations 3 --init-method-std 0.3 {flags}").double()
    for name, param in model.named_parameters():
        if "hyper_connection" in name or "hc_head" in name:
            torch.nn.init.normal_(param, std=0.7, generator=torch.Generator().manual_seed(len(name)))
    return model


# ---- by the formulas


def by_formula(layer: Any, branch: str, x: Tensor, is_mean: bool, function: Any) -> Tensor:
    """Streams x [t, n, h] behind a branch with this function [t, h] -> [t, h]."""
    own = dict(getattr(layer, f"{branch}_hyper_connection").named_parameters())
    count, tiny = x.shape[1], 1e-6
    f = x.flatten(1)
    mean = f.square().mean(1, keepdim=True)
    f = f / (mean.sqrt() + tiny if is_mean else (mean + layer.config.layernorm_epsilon).sqrt())
    z, b = f @ own["mapping_proj.weight"].T, own["bias"]
    pre = torch.sigmoid(own["alpha_pre"] * z[:, :count] + b[:count]) + (0 if is_mean else tiny)
    post = 2 * torch.sigmoid(own["alpha_post"] * z[:, count : 2 * count] + b[count : 2 * count])
    m = (own["alpha_res"] * z[:, 2 * count :] + b[2 * count :]).unflatten(1, (count, count))
    if is_mean:
        m = m.exp()
        for _ in range(3):
            m = m / m.sum(2, keepdim=True)
            m = m / m.sum(1, keepdim=True)
    else:
        m = m.softmax(2) + tiny
        m = m / (m.sum(1, keepdim=True) + tiny)
        for _ in range(2):
            m = m / (m.sum(2, keepdim=True) + tiny)
            m = m / (m.sum(1, keepdim=True) + tiny)
    y = function(torch.einsum("tn,tnh->th", pre, x))
    mixed = torch.einsum("tkj,tjh->tkh" if is_mean else "tjk,tjh->tkh", m, x)
    return post[:, :, None] * y[:, None] + mixed


def layer_by_formula(layer: Any, streams: Tensor, shape: torch.Size, is_mean: bool) -> Tensor:
    """Streams [t, n, h] behind a layer, with its own attention, MLP and norms, which read this shape."""
    for branch, norm in (("self_attention", "input_layernorm"), ("mlp", "pre_mlp_layernorm")):

        def run(u: Tensor, branch: str = branch, norm: str = norm) -> Tensor:
            output, bias = getattr(layer, branch)(getattr(layer, norm)(u.view(shape)))
            return (output + (0 if bias is None else bias)).flatten(0, 1)

        streams = by_formula(layer, branch, streams, is_mean, run)
    return streams


def end_by_formula(end: Any, streams: Tensor) -> Tensor:
    """The learned sum of streams [t, n, h]; end: the module with its parameters."""
    f = streams.flatten(1)
    f = f / (f.square().mean(1, keepdim=True) + end.config.layernorm_epsilon).sqrt()
    weights = torch.sigmoid(end.hc_head_scale * (f @ end.hc_head_fn.T) + end.hc_head_base) + 1e-6
    return torch.einsum("tn,tnh->th", weights, streams)


def losses_by_formula(model: GPTModel, is_mean: bool) -> tuple[Tensor, Tensor]:
    """Loss of every token, with the model's own attention, MLPs, norms and ends, and the streams before the end."""
    ids, positions, labels = token_batch()
    x = model.embedding(ids, positions)
    streams = x.flatten(0, 1).unsqueeze(1).expand(-1, 3, -1)
    for layer in model.decoder.layers:
        streams = layer_by_formula(layer, streams, x.shape, is_mean)
    last = streams.mean(1) if is_mean else end_by_formula(model.decoder, streams)
    states = model.decoder.final_layernorm(last.view(x.shape))
    return model.compute_loss_of_states(labels, states, model._compute_logits), streams


@pytest.mark.flags(
    "--enable-hyper-connections", "--num-residual-streams", "--enable-mhc-connections", "--mhc-num-residual-streams",
    "--mhc-sinkhorn-iterations",
)  # fmt: skip
@FORMS
def test_the_formulas(form: str) -> None:
    """Losses, and the gradient of every parameter."""
    model = build(form)
    losses, grads = losses_and_grads(model)
    model.zero_grad()
    expected, _ = losses_by_formula(model, form == MEAN)
    expected.mean().backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-6, atol=1e-6)
    for name, param in model.named_parameters():
        assert param.grad is not None and param.grad.abs().max() > 0, name
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-6, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_further_tokens_go_on_from_the_streams() -> None:
    """Depths add the token to each stream, and have a learned sum of their own."""
    model = build(f"{LEARNED} --mtp-num-layers 2 --position-embedding-type none --mtp-loss-scaling-factor 0.5")
    losses, grads = losses_and_grads(model)
    further = model.mtp_loss.take_sums()
    model.zero_grad()
    expected, streams = losses_by_formula(model, is_mean=False)
    (ids, positions, labels), total = token_batch(), expected.mean()
    for depth, part in enumerate(model.mtp.layers):
        ids, labels = (F.pad(x[:, 1:], (0, 1)) for x in (ids, labels))
        token = model.embedding(ids, positions)
        of_token = (part.enorm(token) @ part.e_proj.weight.T).flatten(0, 1)
        joined = of_token[:, None] + part.hnorm(streams) @ part.h_proj.weight.T
        streams = layer_by_formula(part.mtp_model_layer, joined, token.shape, is_mean=False)
        states = part.final_layernorm(end_by_formula(part, streams).view(token.shape))
        of_depth = model.compute_loss_of_states(labels, states, model._compute_logits)[:, : -depth - 1]
        torch.testing.assert_close((further[depth, 0] / further[depth, 1]).double(), of_depth.mean(), rtol=1e-6, atol=0)
        total = total + 0.5 / 2 * of_depth.mean()
    total.backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-6, atol=1e-6)
    for name, param in model.named_parameters():
        assert param.grad is not None and param.grad.abs().max() > 0, name
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-6, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", [HyperConnection, MeanConnection])
def test_finite_differences(kind: type[HyperConnection]) -> None:
    form = LEARNED if kind is HyperConnection else MEAN
    model = build(f"{form} --num-layers 1 --hidden-size 4 --num-attention-heads 2")
    (branch, _) = model.decoder.layers[0].branches
    assert isinstance(branch, HyperConnectedBranch) and type(branch.connection) is kind
    names, params = zip(*branch.connection.named_parameters(), strict=True)
    x = torch.randn(2, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        held = dict(zip(names, values, strict=True))
        u, streams = torch.func.functional_call(branch.connection, held, (x,))
        return branch.sum(u.sin(), None, streams)

    assert torch.autograd.gradcheck(run, (x, *params))


@FORMS
def test_initial_values(form: str) -> None:
    """At first every stream gets the branch's output and the mean of all."""
    layer = build_model(f"{form} --mhc-init-gating-factor 0").decoder.layers[0]
    u, streams = layer.mlp_hyper_connection(torch.ones(4, 2, 96))
    torch.testing.assert_close(u, torch.full((4, 2, 32), 1.5), rtol=1e-5, atol=0)
    torch.testing.assert_close(streams.post, torch.ones(8, 3, 1))
    torch.testing.assert_close(streams.mixing, torch.full((8, 3, 3), 1 / 3), rtol=1e-5, atol=0)
    usual = build_model(form).decoder.layers[0].mlp_hyper_connection
    assert usual.alpha_pre.item() == pytest.approx(0.01) and usual.mapping_proj.weight.std() > 0.05
    assert usual.mapping_proj.weight.abs().max() <= (6 / (96 + 15)) ** 0.5


@pytest.mark.flags("--mhc-init-gating-factor")
def test_the_initial_factor() -> None:
    of = {value: build_model(f"{LEARNED} --mhc-init-gating-factor {value}") for value in (0.01, 0.5)}
    assert of[0.5].decoder.layers[1].mlp_hyper_connection.alpha_res.item() == 0.5
    losses = [losses_and_grads(model)[0] for model in of.values()]
    assert not torch.equal(*losses)


@FORMS
def test_dropout_is_of_what_the_output_adds_to_each_stream(form: str) -> None:
    branch = build(f"{form} --hidden-dropout 0.5").decoder.layers[0].branches[1]
    generator = torch.Generator().manual_seed(1)
    x, output = (torch.randn(5, 2, n, dtype=torch.float64, generator=generator) for n in (96, 32))
    bias = torch.randn(32, dtype=torch.float64, generator=generator)
    _, streams = branch.connection(x)
    branch.parts[branch.name].eval()
    whole = branch.leave(output, bias, streams).view(10, 3, 32)
    mixed = torch.bmm(streams.mixing, streams.tokens)
    added = streams.post * (output + bias).view(10, 1, 32)
    torch.testing.assert_close(whole, mixed + added)
    branch.parts[branch.name].train()
    found = branch.leave(output, bias, streams).view(10, 3, 32) - mixed
    is_kept = found.abs() > 1e-9
    torch.testing.assert_close(found, torch.where(is_kept, 2 * added, 0.0))
    assert 0.4 < is_kept.double().mean() < 0.6 and not torch.equal(is_kept[:, 0], is_kept[:, 1])


# ---- what surrounds the formula


@FORMS
@pytest.mark.parametrize(
    "options",
    ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
     "--recompute-granularity selective --recompute-modules layernorm mlp core_attn",
     "--no-bias-dropout-fusion", "--no-persist-layer-norm"],
)  # fmt: skip
def test_other_ways_to_compute_it(form: str, options: str) -> None:
    assert_same_function(build_model(form), build_model(f"{form} {options}"))


@pytest.mark.flags("--mhc-recompute-layer-num")
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("form", [LEARNED, f"{MEAN} --hidden-dropout 0.2", f"{LEARNED} --bf16"])
def test_streams_that_are_mixed_again(form: str, number: int) -> None:
    """The same bits, and as much memory as the plan says."""
    usual = "--num-layers 5 --hidden-size 64 --normalization RMSNorm --disable-bias-linear --swiglu"
    found, kept = [], []
    for options in ("", f"--mhc-recompute-layer-num {number}"):
        model = build_model(f"{form} {usual} {options}")
        torch.manual_seed(1)
        found.append(losses_and_grads(model))
        count, (ids, positions, _) = KeptForBackward(), token_batch()
        x = model.embedding(ids, positions)
        with count.counting():
            output = model.decoder.run_layers(range(5), StageInputs(), x.repeat(1, 1, 3))
        kept.append(count.now)
        assert output.requires_grad
    (losses, grads), (again, grads_again) = found
    assert torch.equal(losses, again) and all(torch.equal(grad, grads_again[name]) for name, grad in grads.items())
    streams = 32 * 3 * 64 * (2 if "bf16" in form else 4)
    assert kept[0] - kept[1] == streams * (10 - -(-5 // number))


@FORMS
def test_norms_and_factors_around_a_branch(form: str) -> None:
    """What is normalised, scaled and biased before it is added to one stream is so before it is added to several."""
    options = "--norm-placement both --residual-multiplier 0.5 --normalization RMSNorm"
    layer = build(f"{form} {options}").decoder.layers[0]
    x = torch.randn(5, 2, 96, dtype=torch.float64)

    def run(u: Tensor) -> Tensor:
        output, bias = layer.mlp(layer.pre_mlp_layernorm(u))
        return 0.5 * layer.post_mlp_layernorm(output + bias)

    expected = by_formula(layer, "mlp", x.view(10, 3, 32), form == MEAN, run).view(5, 2, 96)
    torch.testing.assert_close(layer.branches[1].add(x, ()), expected)


@FORMS
def test_layers_of_one_branch(form: str) -> None:
    """In letters each has a connection under the name of its part."""
    model = build_model(
        f"{form} --hybrid-layer-pattern M*- --mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 "
        "--mamba-state-dim 6 --position-embedding-type rope --normalization RMSNorm"
    )
    found = {name.split(".")[3] for name, _ in model.named_parameters() if "hyper_connection" in name}
    assert found == {"mixer_hyper_connection", "self_attention_hyper_connection", "mlp_hyper_connection"}
    _, grads = losses_and_grads(model)
    assert all(grad.abs().sum() > 0 for name, grad in grads.items() if "mapping_proj" in name)


@FORMS
def test_bfloat16(form: str) -> None:
    """Of the first form the parameters are in float32; the second has the model's format."""
    model = build_model(f"{form} --bf16")
    wide = torch.float32 if form == LEARNED else torch.bfloat16
    formats = {p.dtype for n, p in model.named_parameters() if "hyper_connection" in n or "hc_head" in n}
    assert formats == {wide}
    losses, _ = losses_and_grads(model)
    torch.testing.assert_close(losses, losses_and_grads(build_model(form))[0], rtol=0.02, atol=0.02)
    in_float, _ = losses_and_grads(build_model(f"{form} --bf16 --fp32-residual-connection"))
    torch.testing.assert_close(losses, in_float, rtol=0.02, atol=0.02)


@FORMS
def test_generated_text_is_that_of_the_whole_sequence(form: str) -> None:
    model = build_model(form).eval()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    with_cache, without = (
        generate(model, prompts, max_new_tokens=8, sampling=Sampling(greedy=True), use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert with_cache == without


# ---- costs


@FORMS
def test_parameters_and_products_are_counted(form: str) -> None:
    config = read_config(form).model
    streams, plain = (
        count_parameters(model, padded_vocab_size=64, untied=False) for model in (config, read_config().model)
    )
    model = build_model(form)
    mapped = 4 * 15 * 96 + (3 * 96 if form == LEARNED else 0)
    assert streams.total - plain.total == mapped
    built = sum(p.numel() for n, p in model.named_parameters() if n.endswith(("mapping_proj.weight", "hc_head_fn")))
    assert built == mapped and count_on_rank([model])["vector"] > 4 * (3 + 15)
    more = [count_products(model, padded_vocab_size=64, seq_length=16)[0] for model in (config, read_config().model)]
    # W f, the sum that is read, the mixture, and the output in each stream.
    assert more[0] - more[1] == 4 * (15 * 96 + (3 + 9 + 3) * 32)


@FORMS
def test_memory_is_what_the_plan_says(form: str) -> None:
    model = build_model(f"{form} --hidden-size 64 --normalization RMSNorm --disable-bias-linear --swiglu")
    count, x = KeptForBackward(), torch.randn(64, 2, 192, requires_grad=True) * 1.0
    with count.counting():
        output = model.decoder.layers[0].branches[1].add(x, ())
    rows = find_kind("mlp").kept(model.config, Branch("mlp"), Tokens(128, 128))
    assert output.requires_grad and count.now == pytest.approx(sum(row.bytes for row in rows), rel=0.03)


@FORMS
def test_stages_exchange_all_streams(form: str) -> None:
    config = read_config(form).model
    assert compute_activation_shape(config, ProcessGroupCollection.single(), 16, 2) == (16, 2, 96)


# ---- what is refused


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (f"{LEARNED} --parallel-residual", "--enable-hyper-connections does not work with --parallel-residual, whose "
         "branches read and write one stream; leave it out"),
        (f"{MEAN} --parallel-residual", "--enable-mhc-connections does not work with --parallel-residual, whose "
         "branches read and write one stream; leave it out"),
        (f"{LEARNED} {MEAN}", "--enable-hyper-connections and --enable-mhc-connections are two forms of one thing; "
         "keep one"),
        (f"{MEAN} --mtp-num-layers 1 --position-embedding-type rope", "--enable-mhc-connections does not work with "
         "--mtp-num-layers 1; leave it out, or take --enable-hyper-connections"),
        (f"{MEAN} --mhc-recompute-layer-num 1 --recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 1", "--mhc-recompute-layer-num 1 mixes again what --recompute-granularity full"),
        (f"{MEAN} --mhc-recompute-layer-num 1 --cpu-offloading-num-layers 1", "--mhc-recompute-layer-num 1 needs on "
         "the device what --cpu-offloading-num-layers 1 takes to the host"),
        (f"{LEARNED} --apply-residual-connection-post-layernorm", "--enable-hyper-connections does not work with "
         "--apply-residual-connection-post-layernorm; leave it out"),
        (f"{LEARNED} --mhc-sinkhorn-iterations 0", "--mhc-sinkhorn-iterations"),
    ],
)  # fmt: skip
def test_what_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(flags)
    assert any(sentence in problem for problem in error.value.problems), error.value.problems


def test_drafts_from_streams_are_refused() -> None:
    model = build_model(f"{LEARNED} --mtp-num-layers 1 --position-embedding-type rope")
    with pytest.raises(ConfigError, match="--speculate drafts from a model's hidden states"):
        PredictionDrafter(model)
