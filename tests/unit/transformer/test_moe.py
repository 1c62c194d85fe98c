# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts is what its definition says: compared with loops over tokens and experts, and flag by flag."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.products import multiply
from megatron.core.transformer.execution.operations import describe_expert_operations
from megatron.core.transformer.moe.experts import ExpertLinear
from megatron.core.transformer.moe.grouped_products import (
    ExpertByExpert,
    FP8Experts,
    GroupedMatmul,
    choose_expert_product,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.permutation import permute, sort_slots, unpermute
from megatron.core.transformer.moe.routing import choose_best, fit_into_capacity, keep_within_capacity, sinkhorn
from megatron.core.transformer.moe.token_dispatcher import AllGatherDispatcher, AllToAllDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.experts_by_definition import (
    MOE,
    B,
    E,
    H,
    K,
    S,
    assert_is_the_definition,
    by_definition,
    gradients,
    kept_choices,
    layer_of,
    tokens,
)
from tests.support.gpt_models import build_model, first_layer, read_config, token_batch
from tests.support.tiny_training import finish, prepare


@pytest.mark.flags(
    "--num-experts", "--moe-router-topk", "--moe-router-pre-softmax", "--moe-router-score-function",
    "--moe-router-enable-expert-bias", "--moe-router-num-groups", "--moe-router-group-topk",
    "--moe-router-topk-scaling-factor", "--moe-shared-expert-intermediate-size", "--moe-shared-expert-gate",
    "--moe-expert-capacity-factor", "--moe-token-drop-policy", "--moe-aux-loss-coeff", "--moe-z-loss-coeff",
    "--moe-router-load-balancing-type", "--moe-router-group-score", "--moe-expert-rank-capacity-factor",
)  # fmt: skip
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--moe-router-topk 1 --moe-router-pre-softmax --moe-aux-loss-coeff 0.3",
        "--moe-router-topk 3 --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5 --moe-z-loss-coeff 0.2",
        "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-grouped-gemm",
        "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 1.5 --moe-aux-loss-coeff 0.3 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-permute-fusion",
        "--moe-router-score-function sqrtsoftplus --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate "
        "--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 0.3 0.2",
        "--moe-expert-capacity-factor 0.75 --moe-shared-expert-intermediate-size 24 --moe-permute-fusion",
        "--moe-expert-capacity-factor 0.5 --moe-token-drop-policy position --moe-token-dispatcher-type alltoall",
        "--moe-expert-rank-capacity-factor 0.6 --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 2 "
        "--moe-router-group-score best --moe-router-pre-softmax",
    ],
)  # fmt: skip
def test_forward_and_gradients_are_those_of_the_definition(flags: str) -> None:
    assert_is_the_definition(layer_of(flags))


def test_experts_with_biases_and_without_a_gate() -> None:
    layer = build_model("--num-experts 8 --moe-ffn-hidden-size 16").decoder.layers[0].mlp
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    x = tokens().requires_grad_()
    output, _ = layer(x)
    expected, _ = by_definition(layer, x)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    found, wanted = (gradients(layer, out.square().sum(), x) for out in (output, expected))
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_the_global_loss_knows_the_microbatches_before() -> None:
    layer = layer_of("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1")
    router, batches = layer.router, [tokens(), 2.0 * tokens().roll(1, 0)]

    def shares_and_counts(x: Tensor) -> tuple[Tensor, Tensor]:
        shares = (x.flatten(0, 1) @ router.weight.t()).softmax(1)
        return shares.mean(0), shares.topk(K).indices.flatten().bincount(minlength=E) / (K * S * B)

    found = []
    for x in (*batches, batches[1]):
        if len(found) == 2:
            router.auxiliary_loss_scale.begin_step(1.0)
        router(x)
        found.append(router.take_losses()["global_load_balancing_loss"])
    (_, before), (shares, counts) = map(shares_and_counts, batches)
    torch.testing.assert_close(found[1], E * (shares * (before + counts) / 2).sum().detach())
    torch.testing.assert_close(found[2], E * (shares * counts).sum().detach())


# ---- parts


def test_groups_limit_the_choice() -> None:
    scores = torch.tensor([[9.0, 0.0, 5.0, 5.0, 6.0, 1.0]])
    assert choose_best(scores, 2).tolist() == [[0, 4]]
    assert choose_best(scores, 2, num_groups=3, group_topk=1).tolist() == [[2, 3]]  # 9 + 0 < 5 + 5
    assert choose_best(scores, 2, num_groups=3, group_topk=1, group_score="best").tolist() == [[0, 1]]  # 9 > 6 > 5


def test_sinkhorn_gives_every_expert_as_much() -> None:
    logits = 2.0 * torch.randn(40, 4, generator=torch.Generator().manual_seed(1)) + torch.tensor([3.0, 0.0, 0.0, 0.0])
    shares = sinkhorn(logits)
    torch.testing.assert_close(shares.sum(0), torch.full((4,), 0.25), rtol=1e-3, atol=1e-4)
    assert logits.argmax(1).bincount(minlength=4)[0] > 25
    assert shares.argmax(1).bincount(minlength=4)[0] < 15


def test_within_capacity() -> None:
    experts, weights = torch.tensor([[0], [0], [0], [1]]), torch.tensor([[0.1], [0.3], [0.2], [0.1]])
    assert fit_into_capacity(experts, weights, 2, 2, "probs").flatten().tolist() == [False, True, True, True]
    assert fit_into_capacity(experts, weights, 2, 2, "position").flatten().tolist() == [True, True, False, True]


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factors", [(0.8, 0.7), (None, 0.7), (None, 2.0), (1.0, 0.01)])
def test_within_the_capacity_of_ranks(factors: tuple[float | None, float], policy: str) -> None:
    """Beside that of experts: against the loop over ranks and choices."""
    config = TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, num_moe_experts=E, moe_router_topk=3,
        expert_model_parallel_size=4, moe_expert_capacity_factor=factors[0],
        moe_expert_rank_capacity_factor=factors[1], moe_token_drop_policy=policy,
    )  # fmt: skip
    # The first ranks are wanted more.
    wanted = torch.rand(20, E, generator=torch.Generator().manual_seed(4)) + torch.linspace(1.0, 0.0, E)
    weights, experts = wanted.topk(3)
    kept = keep_within_capacity(experts, weights, config)
    found = {(t, int(e)) for t in range(20) for e in experts[t][kept[t]]}
    choices = [(row.tolist(), list(own)) for row, own in zip(experts, weights, strict=True)]
    assert found == kept_choices(SimpleNamespace(config=config), choices)  # type: ignore[arg-type]


def test_permute_and_combine_are_transposes() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    destinations = torch.tensor([2, 0, 1, 1, 3, 0, 2, 2, 0, 3])  # two of each token; 3 goes nowhere
    order, ends = sort_slots(destinations, 3, kept=8)
    assert ends.tolist() == [3, 5, 8]
    assert order.tolist() == [1, 5, 8, 2, 3, 0, 6, 7]
    assert torch.autograd.gradcheck(lambda x: permute(x, order, 2), x)
    rows = permute(x, order, 2).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: unpermute(rows, order, 5, 2), rows)
    assert torch.equal(unpermute(rows, order, 5, 2)[4], rows[2])


@pytest.mark.parametrize("kind", [ExpertByExpert, GroupedMatmul], ids=lambda kind: kind.name)
@pytest.mark.parametrize("ends", [[2, 2, 7], [0, 0, 0]])
def test_products_of_experts(kind: type[ExpertByExpert], ends: list[int]) -> None:
    """Also of experts without rows, into a main gradient that holds something already, and without one."""
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((ends[-1], 16), (3, 8, 16)))
    grad = torch.randn(ends[-1], 8, generator=generator)
    starts = [0, *ends[:-1]]
    expected = torch.cat([x[i:j] @ w.t() for i, j, w in zip(starts, ends, weight, strict=True)])
    weight_grad = torch.stack([grad[i:j].t() @ x[i:j] for i, j in zip(starts, ends, strict=True)])
    for accumulates in (False, True):
        leaf, rows = weight.clone().requires_grad_(), x.clone().requires_grad_()
        leaf.main_grad = torch.ones(3, 8, 16)
        y = multiply(kind(accumulates=accumulates), rows, leaf, ends=torch.tensor(ends, dtype=torch.int32))
        torch.testing.assert_close(y, expected)
        y.backward(grad)
        torch.testing.assert_close(
            rows.grad, torch.cat([grad[i:j] @ w for i, j, w in zip(starts, ends, weight, strict=True)])
        )
        if accumulates:
            assert leaf.grad is None
            torch.testing.assert_close(leaf.main_grad, weight_grad + 1.0)
        else:
            torch.testing.assert_close(leaf.grad, weight_grad)


# ---- flags


@pytest.mark.flags("--moe-ffn-hidden-size", "--moe-layer-freq")
def test_which_layers_have_experts_of_which_width() -> None:
    def kinds(flags: str) -> list[str]:
        model = build_model(f"--num-layers 4 --num-experts 4 {flags}")
        return ["moe" if isinstance(layer.mlp, MoELayer) else "mlp" for layer in model.decoder.layers]

    assert kinds("") == ["moe"] * 4
    assert kinds("--moe-layer-freq 2") == ["moe", "mlp", "moe", "mlp"]
    assert kinds("--moe-layer-freq ([0]*1+[1]*3)") == ["mlp", "moe", "moe", "moe"]
    assert layer_of("").experts.linear_fc1.weight.shape == (8, 2 * 16, H)
    assert build_model("--num-experts 4").decoder.layers[0].mlp.experts.linear_fc2.weight.shape == (4, H, 4 * H)
    with pytest.raises(ConfigError, match="--moe-layer-freq lists 2 layers"):
        read_config("--num-layers 4 --num-experts 4 --moe-layer-freq [0,1]")


@pytest.mark.flags("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-token-dispatcher-type")
def test_how_experts_compute() -> None:
    plain, other = (
        layer_of(""),
        layer_of("--moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall"),
    )
    assert isinstance(other.experts.linear_fc1.product, GroupedMatmul)
    assert not isinstance(plain.experts.linear_fc1.product, GroupedMatmul)
    assert (other.dispatcher.permute, other.dispatcher.unpermute) == (permute, unpermute)
    assert plain.dispatcher.permute is not permute
    assert isinstance(other.dispatcher, AllToAllDispatcher)
    assert isinstance(plain.dispatcher, AllGatherDispatcher)
    torch.testing.assert_close(other(tokens())[0], plain(tokens())[0])
    said = describe_expert_operations(read_config(f"{MOE} --moe-grouped-gemm").model, torch.device("cpu"))
    assert said["products of experts"] == "grouped_mm"
    flex = read_config(f"{MOE} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep")
    assert flex.model.moe_token_dispatcher_type == "alltoall"
    assert any("--moe-token-dispatcher-type flex becomes alltoall" in note for note in flex.notes)


@pytest.mark.flags("--moe-grouped-gemm", "--init-model-with-meta-device")
def test_products_of_experts_without_memory_are_chosen_when_they_have_some() -> None:
    """Which kernel takes them depends on the device, which weights on the meta device do not tell."""
    flags = "--num-experts 4 --moe-grouped-gemm --bf16 --disable-bias-linear --train-iters 1"
    for more, kind in (("", GroupedMatmul), ("--fp8-format hybrid --fp8-emulation", FP8Experts)):
        run = prepare(*f"{flags} --init-model-with-meta-device {more}".split())
        finish(run)
        experts = [part for chunk in run.model for part in chunk.module.modules() if isinstance(part, ExpertLinear)]
        assert len(experts) == 4 and all(type(part.product) is kind for part in experts)


@pytest.mark.flags("--moe-grouped-gemm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(32, 64), (30, 96), (48, 30), (24, 12), (12, 24), (33, 7), (7, 33), (64, 50)])
def test_grouped_products_have_any_width(widths: tuple[int, int], dtype: torch.dtype) -> None:
    """Where a kernel refuses one of the three products of training, all are made one expert after the other."""
    config = read_config(f"{MOE} --moe-grouped-gemm").model
    inputs, outputs = widths
    generator = torch.Generator().manual_seed(7)
    x, grad = (torch.randn(10, width, generator=generator).to(dtype) for width in widths)
    weights = torch.randn(3, outputs, inputs, generator=generator).to(dtype)
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    results = []
    for product in (choose_expert_product(config, widths, dtype, torch.device("cpu")), ExpertByExpert()):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weights)]
        output = multiply(product, *leaves, ends=ends)
        output.backward(grad)
        results.append([output, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.flags("--moe-router-dtype")
def test_router_dtype() -> None:
    assert layer_of("--bf16").router.compute_logits(tokens().bfloat16()).dtype == torch.bfloat16
    assert layer_of("--bf16 --moe-router-dtype fp32").router.compute_logits(tokens().bfloat16()).dtype == torch.float32
    double = layer_of("--bf16 --moe-router-dtype fp64")
    assert double.router.compute_logits(tokens().bfloat16()).dtype == torch.float64
    assert double(tokens().bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.flags("--moe-input-jitter-eps")
def test_jitter() -> None:
    layer = layer_of("--moe-input-jitter-eps 0.1")
    clean = tokens().flatten(0, 1) @ layer.router.weight.t()
    torch.testing.assert_close(layer.eval().router.compute_logits(tokens()), clean)
    jittered = layer.train().router.compute_logits(tokens())
    assert not torch.allclose(jittered, clean)
    assert (jittered - clean).abs().max() < 0.1 * (tokens().flatten(0, 1).abs() @ layer.router.weight.abs().t()).max()


@pytest.mark.flags("--moe-router-force-load-balancing")
def test_forced_balance() -> None:
    x = tokens()[:1].expand(200, -1, -1)  # all tokens alike: the router's own choice is one and the same
    assert len(layer_of("").router(x).experts.unique(dim=0)) == B
    counts = layer_of("--moe-router-force-load-balancing").router(x).experts.flatten().bincount(minlength=E)
    assert counts.min() > 60  # of a hundred on average


def test_sinkhorn_in_training_only() -> None:
    layer = layer_of("--moe-router-load-balancing-type sinkhorn --moe-router-topk 1")
    with torch.no_grad():
        layer.router.weight[0] = 3.0 * tokens().mean((0, 1))
    x = tokens() + tokens().mean((0, 1))
    balanced, greedy = layer.router(x), layer.eval().router(x)
    assert balanced.experts.flatten().bincount(minlength=E).max() < greedy.experts.flatten().bincount(minlength=E).max()
    scores = (x.flatten(0, 1) @ layer.router.weight.t()).sigmoid()
    torch.testing.assert_close(balanced.weights, scores.gather(1, balanced.experts))
    with pytest.raises(ConfigError, match="sinkhorn balances without a loss"):
        read_config(f"{MOE} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1")


def test_sinkhorn_says_what_it_takes_no_account_of() -> None:
    groups = "--moe-router-num-groups 2 --moe-router-group-topk 1"
    expected = "--moe-router-group-topk 1 has no effect without a --moe-router-load-balancing-type other than sinkhorn"
    for balancing, is_noted in (("sinkhorn", True), ("aux_loss", False)):
        notes = read_config(f"{MOE} {groups} --moe-router-load-balancing-type {balancing}").notes
        assert (expected in " ".join(notes)) is is_noted


@pytest.mark.flags("--moe-router-bias-update-rate")
def test_bias_follows_the_load() -> None:
    layer = layer_of(
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
    )
    router = layer.router
    with torch.no_grad():
        router.expert_bias.zero_()
    counts = sum(router(tokens() + shift).experts.flatten().bincount(minlength=E) for shift in (0.0, 0.5))
    groups = ProcessGroupCollection.current()
    router.finish_step(groups)
    expected = 0.1 * torch.sign(counts.float().mean() - counts)
    torch.testing.assert_close(router.expert_bias, expected)
    before = router.expert_bias.clone()
    router.eval()(tokens())
    router.finish_step(groups)  # nothing was counted: evaluation moves no bias
    assert torch.equal(router.expert_bias, before)


def test_what_is_computed_again_is_counted_once() -> None:
    flags = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.3"
    grads, losses, biases = [], [], []
    for recomputes in (False, True):
        layer, x = layer_of(flags), tokens().requires_grad_()
        output = checkpoint(lambda x, f=layer: f(x)[0], x, use_reentrant=False) if recomputes else layer(x)[0]
        grads.append(gradients(layer, output.square().sum(), x))
        losses.append(layer.router.take_losses()["load_balancing_loss"])
        assert layer.router._tokens_per_expert.sum() == S * B * K
        layer.router.finish_step(ProcessGroupCollection.current())
        biases.append(layer.router.expert_bias.detach())
    torch.testing.assert_close(grads[1], grads[0])
    assert losses[0] == losses[1]
    assert torch.equal(biases[0], biases[1])


def test_initial_weights_of_an_expert_do_not_depend_on_how_many_are_here() -> None:
    """And have the size that --init-method-xavier-uniform gives a matrix alone."""
    model = build_model(f"{MOE} --init-method-xavier-uniform")
    weight = first_layer(model).mlp.experts.linear_fc1.weight
    bound = math.sqrt(6.0 / (32 + H))
    assert 0.9 * bound < weight.abs().max() <= bound


def test_text_can_be_generated_token_by_token() -> None:
    model: GPTModel = build_model(MOE).eval()
    ids, positions, _ = token_batch()
    with torch.no_grad():
        together = model(ids, positions)
        alone = model(ids[:, :1], positions[:, :1])
    torch.testing.assert_close(together[:, :1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--moe-shared-expert-gate", "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size"),
        ("--moe-router-num-groups 4 --moe-router-group-topk 3", "--moe-router-group-topk 3 is more than"),
        ("--moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8; use 8 or fewer"),
        (
            "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap",
            "--moe-shared-expert-overlap does not work with --moe-token-dispatcher-type allgather.*use --moe-token-"
            "dispatcher-type alltoall or flex",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_config(f"{MOE} {flags}")


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--moe-router-topk 3", "--moe-router-topk 3 has no effect without --num-experts"),
        (
            "--num-experts 4 --moe-router-score-function sigmoid --moe-router-pre-softmax",
            "--moe-router-pre-softmax has no effect without --moe-router-score-function softmax",
        ),
        (
            "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-shared-expert-overlap",
            "--moe-shared-expert-overlap has no effect without --moe-shared-expert-intermediate-size",
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff 0.1 has no effect without --moe-router-load-balancing-type aux_loss",
        ),
    ],
)
def test_what_has_no_effect_is_noted(flags: str, note: str) -> None:
    assert note in read_config(flags).notes


@pytest.mark.parametrize("flags", ["", "--moe-shared-expert-intermediate-size 24", "--moe-latent-size 12"])
def test_an_output_that_is_added_to_in_place_keeps_its_hooks(flags: str) -> None:
    """By such hooks FSDP gathers the layer's weights before its backward; those of a view are lost."""
    x = tokens()
    output, bias = layer_of(flags)(x)
    assert bias is None and not output._is_view()
    grads: list[Tensor] = []
    output.register_hook(grads.append)
    output.add_(x).sum().backward()
    assert len(grads) == 1
