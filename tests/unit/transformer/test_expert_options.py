# SPDX-License-Identifier: Apache-2.0
"""What experts may do otherwise, flag by flag: compared with loops in double precision, also where all tokens choose
the same experts and the others have none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.placement import Split, get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import list_gate_and_up
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.permutation import pad_slots, permute, permute_reference, sort_slots, unpermute
from megatron.core.transformer.moe.routing import score_choice
from megatron.planner.memory import count_parameters
from megatron.planner.parameters import count_whole
from megatron.planner.throughput import count_products
from megatron.training.launch.initialize import shut_down
from tests.support.experts_by_definition import MOE, B, E, S, assert_is_the_definition, layer_of, tokens
from tests.support.gpt_models import build_model, losses_and_grads, read_config
from tests.support.tiny_training import prepare, train_tiny, values
from tests.unit.house.test_host_waits import Counting

PLAIN = MOE.replace("--swiglu", "--squared-relu")
BIASED = PLAIN.replace("--disable-bias-linear", "")


def send_all_to_one(layer: MoELayer) -> MoELayer:
    """All tokens choose the same experts: the bias of their logits outweighs the tokens."""
    assert layer.router.bias is not None
    with torch.no_grad():
        layer.router.bias.fill_(-50.0)
        layer.router.bias[: layer.config.moe_router_topk] = 50.0
    return layer


@pytest.mark.flags(
    "--moe-apply-probs-on-input", "--use-fused-weighted-squared-relu", "--moe-mlp-glu-interleave-size",
    "--moe-shared-expert-glu-interleave-size", "--moe-router-add-bias", "--moe-latent-size",
    "--moe-pad-expert-input-to-capacity", "--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8",
)  # fmt: skip
@pytest.mark.parametrize(
    ("base", "flags"),
    [
        (MOE, "--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-score-function sigmoid"),
        (PLAIN, "--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax --moe-permute-fusion"),
        (BIASED, "--use-fused-weighted-squared-relu --moe-aux-loss-coeff 0.1"),
        (PLAIN, "--use-fused-weighted-squared-relu --recompute-granularity selective --recompute-modules moe_act"),
        (
            MOE,
            "--moe-mlp-glu-interleave-size 4 --moe-shared-expert-intermediate-size 24 "
            "--moe-shared-expert-glu-interleave-size 3",
        ),
        (MOE, "--moe-mlp-glu-interleave-size 2 --no-bias-swiglu-fusion"),
        (MOE, "--moe-latent-size 12 --moe-shared-expert-intermediate-size 24 --moe-aux-loss-coeff 0.1"),
        (BIASED, "--moe-latent-size 20 --moe-expert-capacity-factor 0.5"),
        (MOE, "--moe-expert-capacity-factor 0.75 --moe-pad-expert-input-to-capacity --moe-permute-fusion"),
        (
            BIASED,
            "--moe-expert-capacity-factor 2.5 --moe-pad-expert-input-to-capacity --moe-token-drop-policy position",
        ),
        (MOE, "--moe-router-padding-for-quantization --moe-permute-fusion"),
        (BIASED, "--moe-router-padding-for-quantization --moe-expert-capacity-factor 0.5"),
        (MOE, "--moe-router-padding-for-fp8 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"),
    ],
)
@pytest.mark.parametrize("is_uneven", [False, True])
def test_outputs_and_gradients_are_those_of_the_definition(base: str, flags: str, is_uneven: bool) -> None:
    layer = layer_of(f"{flags} --moe-router-add-bias", base=base)
    assert_is_the_definition(send_all_to_one(layer) if is_uneven else layer)


CAPACITY = "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity"
ALLTOALL = "--moe-token-dispatcher-type alltoall"


@pytest.mark.flags("--moe-pad-expert-input-to-capacity")
@pytest.mark.parametrize("flags", [CAPACITY, f"{CAPACITY} --moe-permute-fusion {ALLTOALL}"])
def test_experts_with_equal_rows_ask_for_no_sizes(flags: str) -> None:
    layer, x = layer_of(flags), tokens().requires_grad_()
    waits = Counting()
    with waits as found:
        dispatched = layer.dispatcher.dispatch(x.flatten(0, 1), layer.router(x))
        dispatched.combine(layer.experts(*dispatched[:3])).sum().backward()
    assert not found
    rows = math.ceil(S * B * 2 / E * 1.5)
    assert dispatched.ends.tolist() == [rows * (e + 1) for e in range(E)]
    assert dispatched.rows.shape == (E * rows, 32)


@pytest.mark.flags("--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8")
@pytest.mark.parametrize("flag", ["--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8"])
def test_experts_get_multiples_of_rows(flag: str) -> None:
    layer, x = layer_of(flag), tokens()
    dispatched = layer.dispatcher.dispatch(x.flatten(0, 1), layer.router(x))
    assert not (dispatched.ends % 16).any()
    assert dispatched.ends[-1] == len(dispatched.rows)


@pytest.mark.parametrize(("kind", "padded"), [("each", permute), ("multiple", permute), ("each", permute_reference)])
def test_padded_rows_without_any_token(kind: str, padded: Any) -> None:
    """Rank without tokens: every expert has rows of zeros, and backward reaches what was permuted."""
    found = sort_slots(torch.empty(0, dtype=torch.int64), 3)
    order, ends = pad_slots(found, 0, **({"rows_each": 4} if kind == "each" else {"multiple": 4}))
    x = torch.empty(0, 5, requires_grad=True)
    rows = padded(x, order, 1, padded=True)
    assert rows.shape == (ends[-1], 5)
    assert not rows.any()
    rows.sum().backward()
    assert x.grad is not None
    assert unpermute(rows, order, 0, 1, padded=True).shape == (0, 5)


def test_parts_of_gates_and_up_projections_take_turns() -> None:
    """And a rank has whole blocks of both."""
    of_second_rank = Split(0, "etp", 2, 1, list_gate_and_up(16, 4, 2))
    assert of_second_rank.boxes(32) == [(16, 16)]
    assert [name for name, _, _ in of_second_rank.local_parts(32)] == ["gate", "up", "gate", "up"]


def test_latent_vectors_in_counts() -> None:
    """Elements as placements have them, and multiplications of a token."""
    configs = {size: read_config(f"{MOE} {size and f'--moe-latent-size {size}'}").model for size in ("", "12")}
    counts = {size: count_parameters(c, padded_vocab_size=64, untied=False).decoder for size, c in configs.items()}
    placements = [get_placement(p) for p in build_model(f"{MOE} --moe-latent-size 12").parameters()]
    found = count_whole(placements)
    assert found.of_experts["matrix"] == counts["12"].expert_matrices == 2 * E * 3 * 12 * 16
    projections = 2 * 2 * 12 * 32
    assert found["matrix"] - counts["12"].matrices == counts["12"].projections == projections
    assert counts["12"].replicated - counts[""].replicated == projections
    products = {size: count_products(config, padded_vocab_size=64)[0] for size, config in configs.items()}
    assert products[""] - products["12"] == 2 * 2 * 3 * (32 - 12) * 16 - projections


@pytest.mark.parametrize("base", [MOE, BIASED])
def test_latent_experts_in_a_whole_model(base: str) -> None:
    """The residual stream is added to their output in place."""
    losses, grads = losses_and_grads(build_model(f"{base} --moe-latent-size 12"))
    assert losses.isfinite().all()
    assert grads["decoder.layers.0.mlp.fc2_latent_proj.weight"].abs().max() > 0


@pytest.mark.flags("--use-fused-weighted-squared-relu")
def test_the_fused_weighting_keeps_only_its_input() -> None:
    def count_kept(flags: str) -> int:
        layer, kept = layer_of(flags, base=PLAIN), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            layer(tokens().requires_grad_())
        # By memory: what two operations keep of one tensor takes it once. 16 channels inside, two experts for a token.
        return len({x.data_ptr() for x in kept if x.shape == (2 * S * B, 16)})

    assert count_kept("--use-fused-weighted-squared-relu") < count_kept("")


@pytest.mark.flags("--moe-router-force-biased")
def test_forced_bias_is_one_number_for_each_expert() -> None:
    layer, x = layer_of("--moe-router-force-biased 3"), tokens()
    router, plain = layer.router, layer_of("").router
    logits = plain.compute_logits(x)
    # Weights of the chosen experts say by how much their logits differ.
    first, second = router(x), router(x)
    assert not torch.equal(first.weights, second.weights)
    torch.manual_seed(9)
    drawn = torch.empty(E).normal_(0.0, 3.0)
    torch.manual_seed(9)
    found = router(x)
    chosen = (logits + drawn).topk(2)
    assert torch.equal(found.experts, chosen.indices)
    torch.testing.assert_close(found.weights, chosen.values.softmax(1))
    always = [layer_of("--moe-router-force-biased -3", index).router for index in (0, 0, 1)]
    weights = [router(x).weights for router in [always[0], always[0], always[1], always[2]]]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])  # layers differ


@pytest.mark.flags("--moe-router-load-balancing-type", "--moe-router-quantile-balancing-ema")
@pytest.mark.parametrize(
    "flags",
    ["", "--moe-router-score-function sigmoid --moe-router-topk 3", "--moe-router-pre-softmax --moe-router-topk 1"],
)
def test_quantile_balancing(flags: str) -> None:
    """The bias is that of a loop over tokens and experts, and after some steps experts have even loads."""
    base = f"--moe-router-load-balancing-type quantile_balancing {flags}"
    router, slow = layer_of(base).router, layer_of(f"{base} --moe-router-quantile-balancing-ema 0.75").router
    with torch.no_grad():
        router.expert_bias.zero_()
        slow.expert_bias.zero_()
    k, groups = router.config.moe_router_topk, ProcessGroupCollection.current()
    x = torch.randn(64, 4, 32, generator=torch.Generator().manual_seed(5)) + 0.5  # a common part: some are preferred
    tokens_of = 64 * 4
    scores = score_choice(router.compute_logits(x).detach(), router.config).double()
    above = []
    for row in scores.tolist():
        ranked = sorted(row, reverse=True)
        above.append([score - (ranked[k - 1] + ranked[k]) / 2 for score in row])
    prices = []
    for expert in range(E):
        ordered = sorted((row[expert] for row in above), reverse=True)
        share = tokens_of * k // E
        prices.append((ordered[share - 1] + ordered[share]) / 2)
    expected = torch.tensor([sum(prices) / E - price for price in prices])
    loads = []
    for step in range(12):
        loads.append(router(x).experts.flatten().bincount(minlength=E).max() * E / (tokens_of * k))
        router.finish_step(groups)
        if step == 0:
            torch.testing.assert_close(router.expert_bias.detach(), expected, rtol=1e-4, atol=1e-5)
    assert loads[0] > 1.5
    assert loads[-1] < 1.15
    before = router.expert_bias.detach().clone()
    router.eval()(x)
    router.finish_step(groups)
    assert torch.equal(router.expert_bias, before)  # evaluation moves no bias
    slow(x)
    slow.finish_step(groups)
    torch.testing.assert_close(slow.expert_bias.detach(), expected / 4, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            f"{MOE} --moe-router-load-balancing-type quantile_balancing sinkhorn --moe-aux-loss-coeff 0 0",
            "cannot be combined with sinkhorn; leave one of the two out",
        ),
        (f"{MOE} --moe-apply-probs-on-input", "needs one expert for a token; found --moe-router-topk 2, use 1"),
        (f"{MOE} --use-fused-weighted-squared-relu", "relu needs experts with --squared-relu"),
        (f"{MOE} --moe-pad-expert-input-to-capacity", "needs --moe-expert-capacity-factor"),
        (
            f"{MOE} --moe-mlp-glu-interleave-size 5",
            "--moe-mlp-glu-interleave-size 5 does not divide --moe-ffn-hidden-size 16; use a divisor of 16",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_config(flags)


def test_router_losses_weigh_the_same_however_a_batch_is_divided() -> None:
    """Losses of sequences and tokens: microbatches of any size, and the mean over all tokens, give one update."""
    flags = (
        "--num-experts 4 --moe-ffn-hidden-size 8 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 10 "
        "--moe-z-loss-coeff 1 --hidden-dropout 0 --attention-dropout 0 --optimizer sgd --sgd-momentum 0 --clip-grad 0 "
        "--lr-decay-style constant --train-iters 1"
    ).split()
    name = "decoder.layers.1.mlp.router.weight"
    updated = {
        (size, *mean): dict(values(train_tiny(*flags, "--micro-batch-size", size, *mean)))[name]
        for size in ("1", "2", "4")
        for mean in ((), ("--calculate-per-token-loss",))
    }
    before = dict(values(prepare(*flags)))[name]
    shut_down()
    expected = updated["4",] - before
    assert expected.abs().max() > 1e-3
    for how, found in updated.items():
        torch.testing.assert_close(found - before, expected, rtol=1e-3, atol=1e-5, msg=lambda m, at=how: f"{at}: {m}")
