# SPDX-License-Identifier: Apache-2.0
"""Gradients against differences of the loss in float64: every kind of layer, loss and norm is sound, and mistakes put
into backward on purpose, which all layouts share, are found by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from megatron.core import activations
from megatron.core.auxiliary_loss import AuxiliaryLossScale
from megatron.core.tensor_parallel import cross_entropy, products
from megatron.core.transformer import multi_token_prediction, norms, rotary
from megatron.core.transformer.core_attention import block_kernels, query_blocks
from megatron.core.transformer.moe import permutation
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.verify.gradients import SlopeReport, check_slopes, widen_settings

TINY = """
    --hidden-size 16 --num-attention-heads 4 --seq-length 12 --max-position-embeddings 12 --micro-batch-size 2
    --global-batch-size 4 --lr 1e-3 --train-iters 2 --hidden-dropout 0 --attention-dropout 0 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 47 --make-vocab-size-divisible-by 16 --eval-iters 0 --num-workers 0
    --num-layers 1 --init-method-std 0.1
"""
ROPE = "--position-embedding-type rope --normalization RMSNorm"
GATED = "--swiglu --ffn-hidden-size 24 --disable-bias-linear --untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 12"
LATENT = "--multi-latent-attention --kv-lora-rank 11 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5"
SPARSE = (
    f"{LATENT} --q-lora-rank 13 --qk-layernorm --experimental-attention-variant dsa --dsa-indexer-n-heads 3 "
    "--dsa-indexer-head-dim 8 --dsa-indexer-topk 4 --dsa-indexer-loss-coeff 0.7"
)
FORMS = {
    # Mixers, with one feed-forward form after the other.
    "learned positions, gelu, dropout": "--hidden-dropout 0.2 --attention-dropout 0.2",
    "grouped queries, norms of heads, gate": f"{ROPE} {GATED} --num-query-groups 2 --group-query-attention "
    "--qk-layernorm --attention-output-gate --rotary-percent 0.5 --calculate-per-token-loss",
    "window, sinks, clamp": f"{ROPE} --ffn-hidden-size 24 --window-size 3,0 --softmax-type learnable "
    "--quick-geglu --activation-func-clamp-value 0.05 --glu-linear-offset 1 --add-qkv-bias",
    "bounded scores and logits, two norms": f"{ROPE} --geglu --disable-bias-linear --norm-placement both "
    "--attn-logit-softcapping 0.5 --final-logit-softcapping 0.3 --apply-layernorm-1p --embedding-multiplier 4",
    "norms of outputs and all heads": f"{ROPE} {GATED} --norm-placement output --qk-layernorm --qk-norm-scope all "
    "--cross-entropy-loss-fusion",
    "L2 norms, chunks, temperature": f"{ROPE} {GATED} --qk-l2-norm --attention-chunk-size 5 --no-rope-freq 2 "
    "--num-layers 2 --attn-temperature-floor 4 --attn-temperature-scale 0.1 --loss-chunk-size 5",
    "local attention, elementary norms": "--attention-backend local --no-persist-layer-norm --softmax-type off-by-one "
    "--no-bias-dropout-fusion --no-bias-gelu-fusion --apply-residual-connection-post-layernorm --squared-relu",
    "parallel residual, scaled residuals": f"{ROPE} --parallel-residual --residual-multiplier 0.7 "
    "--logit-multiplier 0.8 --rotary-interleaved --no-rope-fusion",
    "one norm for both, with a weight alone": f"{ROPE} --parallel-residual --parallel-residual-shares-norm "
    "--norm-parameters weight --add-output-layer-bias --add-embedding-norm --relu",
    "norms without weights, of heads behind the rotation": f"{ROPE} {GATED} --num-layers 2 --qk-l2-norm "
    "--norm-parameters none --qk-norm-after-rotation",
    "latent attention, temperature": f"{ROPE} {GATED} {LATENT} --attn-temperature-layers all "
    "--attn-temperature-floor 4 --attn-temperature-scale 0.1",
    "latent attention": f"{ROPE} {GATED} {LATENT} --q-lora-rank 13 --qk-layernorm",
    "latent attention of full queries": f"{ROPE} {GATED} {LATENT} --attention-backend unfused",
    "sparse attention, dense loss": f"{ROPE} {GATED} {SPARSE}",
    "sparse attention, shared choice": f"{ROPE} {GATED} {SPARSE} --dsa-indexer-use-sparse-loss --num-layers 2 "
    "--calculate-per-token-loss --dsa-indexer-topk-freq 2",
    # Feed-forward layers of experts, and what is added to the loss.
    "experts, all losses": f"{ROPE} {GATED} {EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss "
    "global_aux_loss --moe-aux-loss-coeff 0.1 0.2 0.3 --moe-z-loss-coeff 0.01",
    "experts, sigmoid, groups, shared": f"{ROPE} {GATED} {EXPERTS} --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1 "
    "--moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --calculate-per-token-loss",
    "experts, shares of a softmax, bias": f"{ROPE} {GATED} {EXPERTS} --moe-router-score-function softmax-share "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1",
    "narrow experts with biases that drop tokens": f"{EXPERTS} --squared-relu --moe-latent-size 6 "
    "--use-fused-weighted-squared-relu --moe-expert-capacity-factor 0.9 --moe-pad-expert-input-to-capacity",
    "experts, weighted inputs": f"{ROPE} {GATED} {EXPERTS} --moe-apply-probs-on-input --moe-router-topk 1 "
    "--moe-router-score-function sigmoid --moe-grouped-gemm --moe-permute-fusion --moe-input-jitter-eps 0.1",
    "experts by Sinkhorn, router's bias": f"{ROPE} {GATED} {EXPERTS} --moe-router-load-balancing-type sinkhorn "
    "--moe-router-add-bias --moe-router-topk 1",
    "further tokens of one layer": f"{ROPE} {GATED} --mtp-num-layers 2 --mtp-use-repeated-layer "
    "--mtp-loss-scaling-factor 0.5",
    "further tokens, detached, experts": f"{ROPE} {GATED} {EXPERTS} --mtp-num-layers 1 --mtp-detach-heads "
    "--calculate-per-token-loss --moe-z-loss-coeff 0.01",
}


def check(flags: str) -> SlopeReport:
    config = read_run_config([*TINY.split(), *flags.split()], {})
    widen_settings(config)
    return check_slopes(config, build_gpt_recipe(config))


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_the_derivatives_of_the_loss(name: str) -> None:
    report = check(FORMS[name])
    assert not report.errors and not report.unjudged, "\n".join(map(str, report.errors))
    assert report.tensors >= 10 and not report.unseen


# ---- mistakes


def halve(function: Callable[..., Any], index: int | None = None) -> Callable[..., Any]:
    """The function, of whose result half is returned, or half of one of its parts."""

    def halved(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if index is None:
            return result * 0.5
        return *result[:index], result[index] * 0.5, *result[index + 1 :]

    return halved


def forget_mean(ctx: Any, grad: torch.Tensor) -> Any:
    """The norm's gradient without what flows through the root mean square."""
    rows, weight, rstd = ctx.saved_tensors
    grad_rows = grad.reshape(-1, rows.shape[-1])
    return (grad_rows * weight * rstd).view(grad.shape), (grad_rows * rows * rstd).sum(0), None


def drop_up(grad: torch.Tensor, x: torch.Tensor, activation: Any) -> None:
    """The gate's gradient without the factor `up`."""
    gate, up = x.chunk(2, dim=-1)
    torch.mul(grad, activation.forward(gate), out=up)
    activation.backward_(grad.clone(), gate)


def turn_on(target: torch.Tensor, grad: torch.Tensor, rotation: Any) -> None:
    """The rotation once more, instead of back."""
    target.copy_(grad)
    rotary._rotate_(target, rotation)


def set_rows(self: Any, grad: torch.Tensor, x: Any, weight: Any, main_grad: Any, ends: Any = None) -> None:
    """A token's row gets the gradient of one of its places alone."""
    main_grad.index_copy_(0, x.reshape(-1), grad)


class Mistake(NamedTuple):
    """What is put where, the form in which it shows, and the tensor that is named first."""

    form: str
    owner: Any
    attribute: str
    replacement: Any
    first: str
    ratio: float | None = None
    """By which the tensor's gradient is too large."""


LAYER = "decoder.layers.0"
static = staticmethod
LINEAR = "grouped queries, norms of heads, gate"
MISTAKES = {
    "half of the gradient into the latent": Mistake(
        "latent attention", rotary._RotateAndJoin, "backward", static(halve(rotary._RotateAndJoin.backward, 1)),
        f"{LAYER}.self_attention.linear_kv_up_proj.weight", 0.5,
    ),
    "a norm's gradient without the mean": Mistake(
        LINEAR, norms._FusedRMSNorm, "backward", static(forget_mean), f"{LAYER}.mlp.linear_fc2.weight",
    ),
    "a gate without its factor": Mistake(
        LINEAR, activations, "_gated_backward_", drop_up, f"{LAYER}.mlp.linear_fc1.weight",
    ),
    "positions rotated on instead of back": Mistake(
        "latent attention", rotary, "_rotate_back_into", turn_on, f"{LAYER}.self_attention.linear_q_up_proj.weight",
    ),
    "half of the values' gradient": Mistake(
        "parallel residual, scaled residuals", query_blocks._BlockedCausalAttention, "backward",
        static(halve(query_blocks._BlockedCausalAttention.backward, 2)), f"{LAYER}.self_attention.linear_qkv.weight",
    ),
    "half of the sinks' gradient": Mistake(
        "window, sinks, clamp", query_blocks, "compute_sinks_grad", halve(block_kernels.compute_sinks_grad),
        f"{LAYER}.self_attention.core_attention.softmax_offset", 0.5,
    ),
    "half of the loss's gradient": Mistake(
        LINEAR, cross_entropy._VocabParallelCrossEntropy, "backward",
        static(halve(cross_entropy._VocabParallelCrossEntropy.backward, 0)), "output_layer.weight", 0.5,
    ),
    "balancing losses not divided by the microbatches": Mistake(
        "experts, all losses", AuxiliaryLossScale, "value", property(lambda self: 1.0, lambda self, value: None),
        f"{LAYER}.mlp.router.weight",
    ),
    "further losses not divided by the depths": Mistake(
        "further tokens of one layer", multi_token_prediction, "attach_auxiliary_loss",
        lambda x, loss, scale, attach=multi_token_prediction.attach_auxiliary_loss: attach(x, 2 * loss, scale),
        "output_layer.weight",
    ),
    "half of the gradient of tokens that return": Mistake(
        "experts, weighted inputs", permutation._Unpermute, "backward",
        static(halve(permutation._Unpermute.backward, 0)),
        f"{LAYER}.mlp.experts.linear_fc2.weight", 0.5,
    ),
    "half of the gradient of experts' weights": Mistake(
        "narrow experts with biases that drop tokens", activations._WeightedSquaredReLU, "backward",
        static(halve(activations._WeightedSquaredReLU.backward, 1)), f"{LAYER}.mlp.router.weight",
    ),
    "half of a bias's gradient": Mistake(
        "learned positions, gelu, dropout", products, "sum_bias_grad", halve(products.sum_bias_grad),
        f"{LAYER}.self_attention.linear_qkv.bias", 0.5,
    ),
    "a token that occurs twice is counted once": Mistake(
        LINEAR, products.TableLookup, "weight_grad", set_rows, "embedding.word_embeddings.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_that_all_layouts_share_are_found_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = MISTAKES[name]
    monkeypatch.setattr(mistake.owner, mistake.attribute, mistake.replacement, raising=False)
    report = check(FORMS[mistake.form])
    assert report.errors, "nobody saw it"
    print(*report.errors, sep="\n")
    assert report.errors[0].name == mistake.first
    if mistake.ratio is not None:
        assert report.errors[0].ratio == pytest.approx(mistake.ratio, rel=1e-4)
