# SPDX-License-Identifier: Apache-2.0
"""Sparse attention against its definition in float64: outputs, all gradients, both losses; its flags, counts, cache and
what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.memory import KeptForBackward
from megatron.core.errors import ConfigError
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.plan.branch_kind import Tokens
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import Branch
from megatron.core.plan.read import read_plan
from megatron.core.sequences.state import SequenceState
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.transformer import sparse_attention
from megatron.core.transformer.config_fields.sparse_attention import SparseAttentionFields
from megatron.core.transformer.core_attention import chosen_keys
from megatron.core.transformer.core_attention.chosen_keys import IndexVectors, Places, choose_keys
from megatron.core.transformer.sparse_attention import SparseSelfAttention, build_hadamard
from megatron.planner.memory import count_parameters
from megatron.planner.throughput import count_products
from tests.support.gpt_models import (
    SEQUENCE_LENGTH,
    assert_same_function,
    build_model,
    losses_and_grads,
    read_config,
    token_batch,
)

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
    expanded = project(norm(c, "kv_layernorm"), "linear_kv_up_proj").unflatten(-1, (4, -1))
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
     "--dsa-indexer-topk 4 --no-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon 0.1 --calculate-per-token-loss "
     "--v-head-dim 13"],
)  # fmt: skip
def test_the_definition(options: str, gathers: bool, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, losses, and the gradient of everything, in both forms, by blocks of a few queries."""
    monkeypatch.setattr(chosen_keys, "_BLOCK_ELEMENTS", 700)
    monkeypatch.setattr(SparseAttentionFields, "gathers_chosen_keys", lambda self, keys: gathers)
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


@pytest.mark.flags("--dsa-indexer-topk-freq", "--dsa-indexer-skip-topk-offset")
@pytest.mark.parametrize(
    ("flags", "owners"),
    [("--num-layers 10 --dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 2", [1, 2, 6, 10]),
     ("--num-layers 5 --dsa-indexer-topk-freq 2", [1, 3, 5]), ("--num-layers 2", [1, 2]),
     ("--hybrid-layer-pattern D-DD --dsa-indexer-topk-freq 2", [1, 3])],
)  # fmt: skip
def test_layers_that_have_an_indexer(flags: str, owners: list[int]) -> None:
    model = build_model(f"{SPARSE} {LOSS} --dsa-indexer-topk 5 {flags}")
    names = [name for name, _ in model.named_parameters() if name.endswith("linear_wk.weight")]
    assert [int(name.split(".")[2]) + 1 for name in names] == owners
    assert all(grad.any() for grad in losses_and_grads(model)[1].values())
    cores = {core.layer_number: core for core in model.modules() if isinstance(core, sparse_attention.SparseCore)}
    for number, core in cores.items():
        chooser = max(owner for owner in owners if owner <= number)
        assert core.source[0] is cores[chooser] and (core.latest is None) == (number not in owners)
    counted = count_parameters(model.config, padded_vocab_size=64, untied=False).decoder
    held = sum(p.numel() for name, p in model.named_parameters() if name.startswith("decoder."))
    assert counted.sum_of_all == held


def test_nothing_trains_an_indexer_without_a_loss() -> None:
    """Not even weight decay."""
    model = build_model(f"{SPARSE} --dsa-indexer-topk 5")
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert not [name for name in trained if "indexer" in name] and len(trained) > 10


@pytest.mark.flags("--dsa-indexer-rotate-activation", "--dsa-indexer-k-norm-fp32")
def test_options_of_16_bits() -> None:
    """A Hadamard matrix is orthogonal; it and the format of the norm's input change what is rounded."""
    matrix = build_hadamard(torch.empty(3, 16, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    assert matrix.abs().unique().numel() == 1
    flags = f"{SPARSE} --dsa-indexer-topk 5 --bf16 --dsa-indexer-loss-coeff 1"
    plain = build_model(flags)
    ids, positions, labels = token_batch()

    def loss_of(model: GPTModel) -> float:
        model.load_state_dict(plain.state_dict())
        model(ids, positions, labels=labels)
        return float(sum(c.take_loss() for c in model.modules() if isinstance(c, sparse_attention.SparseCore)))

    expected = loss_of(plain)
    for option in ("--no-dsa-indexer-rotate-activation", "--dsa-indexer-k-norm-fp32"):
        found = loss_of(build_model(f"{flags} {option}"))
        assert found != expected and found == pytest.approx(expected, rel=0.05)


@pytest.mark.flags("--dsa-indexer-n-heads", "--dsa-indexer-head-dim")
@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--experimental-attention-variant dsa --disable-bias-linear", "add --multi-latent-attention"),
        (f"{LATENT} --experimental-attention-variant dsa", "give --dsa-indexer-n-heads, --dsa-indexer-head-dim"),
        (f"{SPARSE} --dsa-indexer-topk 0", "--dsa-indexer-topk 0"),
        (f"{SPARSE} --dsa-indexer-topk 5 --dsa-indexer-head-dim 2", "is below --qk-pos-emb-head-dim 4"),
        (f"{SPARSE} --dsa-indexer-topk 5 --dsa-indexer-head-dim 12 --bf16", "no power of two"),
        (f"{SPARSE} --dsa-indexer-topk 5 --window-size 3,0", "has no --window-size"),
        (f"{SPARSE} --dsa-indexer-topk 5 --qk-clip", "sparse attention has those of a few"),
        (f"{SPARSE} --dsa-indexer-topk 5 --qk-l2-norm", "has no --qk-l2-norm"),
        (SPARSE.replace("--disable-bias-linear", "--dsa-indexer-topk 5"), "add --disable-bias-linear"),
        (f"{SPARSE} --dsa-indexer-topk 5 --linear-attention-freq 2", "is for all layers"),
        (f"{SPARSE} --dsa-indexer-topk 5 --hybrid-layer-pattern M-", "write D for its layers"),
        (f"{SPARSE} --dsa-indexer-topk 5 --hybrid-layer-pattern D-D- --dsa-indexer-topk-freq 4",
         "layer 3 takes the choice of layer 1"),
        (f"{SPARSE} --dsa-indexer-topk 5 --hybrid-layer-pattern -D-D --dsa-indexer-topk-freq 2",
         "layer 2 takes the choice of layer 1 (--dsa-indexer-topk-freq 2), which is no sparse attention"),
    ],
)  # fmt: skip
def test_what_is_refused(flags: str, problem: str) -> None:
    if "freq 4" in flags:
        assert read_plan(read_config(flags).model).decoder[2].options.chooser == 1
        flags, problem = f"{flags} --hybrid-layer-pattern D-|D-", f"{problem} (--dsa-indexer-topk-freq 4), which is on"
        with pytest.raises(ConfigError) as raised:
            read_config(f"{flags} --pipeline-model-parallel-size 2")
    else:
        with pytest.raises(ConfigError) as raised:
            read_config(flags)
    assert problem in str(raised.value)


# ---- generation


@pytest.mark.parametrize("freq", ["", "--dsa-indexer-topk-freq 2"])
def test_a_cache_changes_no_logits(freq: str) -> None:
    """Prompts, single tokens and several at once, before and behind as many tokens as are chosen."""
    model = build_model(f"{SPARSE} --dsa-indexer-topk 4 {freq}").eval()
    ids, positions, _ = token_batch()
    with torch.no_grad():
        whole = model(ids, positions)
        cache, parts = SequenceState(len(ids), SEQUENCE_LENGTH), []
        for first, end in ((0, 3), (3, 4), (4, 7), (7, 8), (8, 12), (12, SEQUENCE_LENGTH)):
            cache.begin([end - first] * len(ids))
            parts.append(model(ids[:, first:end], positions[:, first:end], inference_context=cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    held = sum(x.numel() for layer in cache._layers.values() for x in layer)
    indexers = 1 if freq else 2
    assert held == SEQUENCE_LENGTH * len(ids) * (2 * (11 + 4) + indexers * 8)


def test_generated_text_does_not_depend_on_the_cache() -> None:
    model = build_model(f"{SPARSE} --dsa-indexer-topk 3").eval()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    with_cache, without = (
        generate(model, prompts, max_new_tokens=9, sampling=Sampling(greedy=True), use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert with_cache == without


# ---- costs


def test_products_are_counted() -> None:
    """Of 4,096 tokens that choose 512: each sees 480 on average, and the indexer 2,048."""
    flags = f"{LATENT} --num-layers 1 --experimental-attention-variant dsa {SIZES} --dsa-indexer-topk 512"
    model = read_config(f"{flags} --seq-length 4096 --max-position-embeddings 4096").model
    products = count_products(model, padded_vocab_size=64, seq_length=4096)[1]
    assert products == 4 * (10 + 5) * 480 + 3 * (8 + 1) * 2048
    dense = count_products(read_config(f"{LATENT} --num-layers 1").model, padded_vocab_size=64, seq_length=512)
    few = count_products(model, padded_vocab_size=64, seq_length=512)
    assert few[1] == dense[1] and few[0] > dense[0]


@pytest.mark.parametrize("loss", ["", LOSS])
@pytest.mark.parametrize("length", [32, 128])
def test_memory_is_what_the_plan_says(length: int, loss: str) -> None:
    """In both forms: heads of all keys, and latent vectors that are gathered."""
    model = build_model(
        f"{SPARSE} {loss} --dsa-indexer-topk 8 --seq-length {length} --max-position-embeddings {length} "
        "--hidden-size 128 --kv-lora-rank 16 --qk-head-dim 24 --v-head-dim 12 --micro-batch-size 1"
    )
    assert model.config.gathers_chosen_keys(length) == (length == 128) and model.rotary_pos_emb is not None
    count, hidden = KeptForBackward(), torch.randn(length, 1, 128, requires_grad=True) * 1.0
    with count.counting():
        output, _ = model.decoder.layers[0].self_attention(hidden, rotation=model.rotary_pos_emb.build_rotation(length))
    rows = find_kind("sparse_attention").kept(model.config, Branch("sparse_attention"), Tokens(length, length))
    planned = {row.name: row.bytes for row in rows if row.name != "the branch's input"}
    # Which keys are hidden is no input of the operation.
    unseen = planned["chosen keys"] if length == 32 else 0
    assert output.requires_grad and count.now + unseen == pytest.approx(sum(planned.values()), rel=0.03)


@pytest.mark.flags("--dsa-kernel-backend")
def test_a_backend_of_upstream_is_noted() -> None:
    flags = f"{SPARSE} --dsa-indexer-topk 5"
    note = "--dsa-kernel-backend tilelang: sparse attention is computed as with none, the same function"
    assert note in read_config(f"{flags} --dsa-kernel-backend tilelang").notes
    assert note not in read_config(flags).notes
