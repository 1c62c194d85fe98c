# SPDX-License-Identifier: Apache-2.0
"""Sparse attention against its definition in float64: outputs, all gradients, both losses; its flags, counts, cache and
what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.transformer import sparse_attention
from megatron.core.transformer.core_attention import chosen_keys
from megatron.core.transformer.core_attention.chosen_keys import IndexVectors, Places, choose_keys
from megatron.core.transformer.sparse_attention import SparseSelfAttention
from tests.support.gpt_models import assert_same_function, build_model, token_batch

LATENT = (
    "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 11 --q-lora-rank 13 --qk-head-dim 6 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 5 --qk-layernorm --disable-bias-linear --normalization RMSNorm "
    "--init-method-std 0.3"
)
SIZES = "--dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8"
SPARSE = f"{LATENT} --experimental-attention-variant dsa {SIZES}"
LOSS = "--dsa-indexer-loss-coeff 0.7"
TOKENS, BATCH, BOUNDS = 19, 2, [0, 3, 12, 19]


def attention_of(flags: str) -> SparseSelfAttention:
    """A layer's attention in float64, with norms that are not all ones."""
    attention = build_model(flags).decoder.layers[0].self_attention
    assert isinstance(attention, SparseSelfAttention)
    for name, param in attention.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(param, 0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return attention.double()


def turn(x: Tensor, rotation: sparse_attention.Rotation, start: int, interleaved: bool) -> Tensor:
    """Rotate four channels of [s, b, ..., c] from `start` on."""
    part, rest = x[..., start : start + 4], x[..., start + 4 :]
    pairs = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :2], part[..., 2:])
    shape = (x.shape[0], *[1] * (x.dim() - 2), 2)
    cos, sin = rotation.cos.double().view(shape), rotation.sin.double().view(shape)
    one, two = pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin
    turned = torch.stack((one, two), -1).flatten(-2) if interleaved else torch.cat((one, two), -1)
    return torch.cat((x[..., :start], turned, rest), -1)


def by_definition(
    attention: SparseSelfAttention, x: Tensor, rotation: sparse_attention.Rotation, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [s, b, h] and the mean of KL over the rows; allowed: bool [s, t]."""
    config, weights = attention.config, dict(attention.named_parameters())

    def project(y: Tensor, name: str) -> Tensor:
        return y @ weights[f"{name}.weight"].T

    def norm(y: Tensor, name: str) -> Tensor:
        return y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[f"{name}.weight"]

    cq = norm(project(x, "linear_q_down_proj"), "q_layernorm")
    q = turn(project(cq, "linear_q_up_proj").unflatten(-1, (4, 10)), rotation, 6, True)
    c, kr = project(x, "linear_kv_down_proj").split([11, 4], -1)
    kr = turn(kr, rotation, 0, True)
    expanded = project(norm(c, "kv_layernorm"), "linear_kv_up_proj").unflatten(-1, (4, 11))
    k = torch.cat((expanded[..., :6], kr.unsqueeze(2).expand(-1, -1, 4, -1)), -1)
    pre = "core_attention.indexer."
    interleaved = config.dsa_indexer_rope_interleaved
    qi = turn(project(cq.detach(), f"{pre}linear_wq_b").unflatten(-1, (3, 8)), rotation, 0, interleaved)
    eps = config.dsa_indexer_k_norm_epsilon or 1e-5
    ki = torch.nn.functional.layer_norm(
        project(x.detach(), f"{pre}linear_wk"), (8,), weights[f"{pre}k_norm.weight"], weights[f"{pre}k_norm.bias"], eps
    )
    ki = turn(ki, rotation, 0, interleaved)
    w = project(x.detach(), f"{pre}linear_weights_proj") * 3**-0.5 * 8**-0.5
    products = torch.einsum("sbgd,tbd->bgst", qi, ki)
    products = products.relu() if config.dsa_indexer_scoring_relu else products
    scores = torch.einsum("sbg,bgst->bst", w, products).masked_fill(~allowed, -math.inf)
    # Of equal scores the first, which a stable sort keeps first.
    order = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., : config.dsa_indexer_topk]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & allowed
    logits = torch.einsum("sbnd,tbnd->bnst", q, k) * 10**-0.5
    probabilities = logits.masked_fill(~chosen.unsqueeze(1), -math.inf).softmax(-1)
    output = project(torch.einsum("bnst,tbnd->sbnd", probabilities, expanded[..., 6:]).flatten(2), "linear_proj")
    among = chosen if config.dsa_indexer_use_sparse_loss else allowed.expand_as(chosen)
    target = logits.detach().masked_fill(~among.unsqueeze(1), -math.inf).softmax(-1).sum(1)
    target = target / target.sum(-1, keepdim=True)
    logs = scores.masked_fill(~among, -math.inf).log_softmax(-1).masked_fill(~among, 0.0)
    return output, (target * (target.clamp(min=1e-10).log() - logs)).sum(-1).mean()


@pytest.mark.flags(
    "--experimental-attention-variant", "--dsa-indexer-topk", "--dsa-indexer-loss-coeff",
    "--dsa-indexer-use-sparse-loss", "--dsa-indexer-rope-interleaved", "--dsa-indexer-scoring-relu",
    "--dsa-indexer-k-norm-epsilon",
)  # fmt: skip
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(
    "options",
    ["--dsa-indexer-topk 5", "--dsa-indexer-topk 5 --dsa-indexer-use-sparse-loss --dsa-indexer-rope-interleaved",
     "--dsa-indexer-topk 4 --no-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon 0.1 --calculate-per-token-loss"],
)  # fmt: skip
def test_the_definition(options: str, gathers: bool, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, losses, and the gradient of everything, in both forms, by blocks of a few queries."""
    monkeypatch.setattr(chosen_keys, "_BLOCK_ELEMENTS", 700)
    monkeypatch.setattr(SparseSelfAttention, "_is_gathering_cheaper", lambda self, keys: gathers)
    attention = attention_of(f"{SPARSE} {LOSS} {options}").train()
    generator = torch.Generator().manual_seed(3)
    batch = 1 if is_packed else BATCH
    x = torch.randn(TOKENS, batch, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    angles = torch.outer(torch.arange(float(TOKENS)), torch.tensor([1.0, 0.01]))
    rotation = sparse_attention.Rotation(angles.cos(), angles.sin(), True)
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor(BOUNDS)) if is_packed else None
    documents = torch.zeros(TOKENS) if packed is None else TokenLayout.of_documents(BOUNDS).sequences
    allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & (documents[:, None] == documents)
    expected, loss = by_definition(attention, x, rotation, allowed)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    per_token = TOKENS * batch if "per-token" in options else 1
    ((expected * weight).sum() + 0.7 * loss * per_token).backward()
    parameters = [x, *attention.parameters()]
    grads = [param.grad.clone() for param in parameters]
    for param in parameters:
        param.grad = None
    found, _ = attention(x, rotation=rotation, packed_seq_params=packed)
    (found * weight).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(attention.core_attention.take_loss(), 0.7 * loss.detach(), rtol=1e-9, atol=0)
    for param, grad in zip(parameters, grads, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=1e-11 * max(1.0, grad.abs().max().item()))


def test_ties_go_to_the_first_keys() -> None:
    """Where the relu makes all scores zero, and where some are equal at the edge."""
    nothing = IndexVectors(torch.ones(9, 1, 1, 2), -torch.ones(9, 1, 2), torch.ones(9, 1, 1))
    chosen = choose_keys(nothing, Places(9, 9, torch.device("cpu")), 3)
    assert chosen is not None
    assert chosen[:3, 0].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]] and (chosen[3:, 0] == torch.arange(3)).all()
    some = IndexVectors(torch.ones(5, 1, 1, 1), torch.tensor([1.0, 3, 1, 2, 1]).view(5, 1, 1), torch.ones(5, 1, 1))
    last = choose_keys(some, Places(5, 5, torch.device("cpu")), 3)
    assert last is not None and last[4, 0].tolist() == [0, 1, 3]


def test_as_many_keys_as_tokens_are_the_usual_attention() -> None:
    """To the last bit, in the model without an indexer; and one key less is not."""
    plain, model = build_model(LATENT), build_model(f"{SPARSE} --dsa-indexer-topk 16")
    model.load_state_dict(plain.state_dict(), strict=False)
    ids, positions, labels = token_batch()
    assert torch.equal(plain(ids, positions, labels=labels), model(ids, positions, labels=labels))
    fewer = build_model(f"{SPARSE} --dsa-indexer-topk 15")
    fewer.load_state_dict(model.state_dict())
    assert not torch.equal(plain(ids, positions, labels=labels), fewer(ids, positions, labels=labels))


@pytest.mark.parametrize(
    "other",
    ["--attention-backend local", "--no-rope-fusion", "--recompute-granularity selective", "--compile",
     "--recompute-granularity selective --recompute-modules mla_up_proj core_attn",
     "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"],
)  # fmt: skip
def test_one_function_however_it_is_computed(other: str) -> None:
    flags = f"{SPARSE} {LOSS} --num-layers 4 --dsa-indexer-topk 5 --dsa-indexer-topk-freq 2"
    assert_same_function(build_model(flags), build_model(f"{flags} {other}"), tolerance=2e-5)
