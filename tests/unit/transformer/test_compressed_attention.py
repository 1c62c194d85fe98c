# SPDX-License-Identifier: Apache-2.0
"""Compressed attention against its definition in float64: outputs, all gradients, the indexer's loss; its cache, its
counts and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.plan.read import read_plan
from megatron.core.sequences.state import SequenceState
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.traffic import Traffic
from megatron.core.transformer.compressed_attention import CompressedSelfAttention
from megatron.core.transformer.compressor import Compressor
from megatron.core.transformer.core_attention import chosen_keys, compressed_keys
from megatron.core.transformer.rotary import Rotation
from megatron.planner.memory import count_parameters
from megatron.training.hooks.measures import IndexerHook
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.run import HookContext
from tests.support.gpt_models import (
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    assert_same_function,
    build_model,
    losses_and_grads,
    read_config,
    token_batch,
)

LATENT = (
    "--multi-latent-attention --position-embedding-type rope --q-lora-rank 13 --qk-pos-emb-head-dim 4 --v-head-dim 10 "
    "--disable-bias-linear --normalization RMSNorm --init-method-std 0.3 --csa-window-size 5 --o-groups 2 "
    "--o-lora-rank 6 --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8"
)
VARIANT = "--experimental-attention-variant dsv4_hybrid --num-layers 3 --csa-compress-ratios [0,4,6]"
COMPRESSED = f"{LATENT} {VARIANT} --dsa-indexer-topk 2"
LOSS = "--dsa-indexer-loss-coeff 0.7"
TABLES = "--num-experts 4 --moe-router-score-function sqrtsoftplus --moe-n-hash-layers 2 --actual-vocab-size 64"
FURTHER = f"{COMPRESSED} --csa-compress-ratios [0,4,6,4,0] --mtp-num-layers 2"
TOKENS, BATCH, BOUNDS = 19, 2, [0, 3, 12, 19]


def attention_of(flags: str, layer: int) -> CompressedSelfAttention:
    """A layer's attention in float64, with vectors that are not all ones or zeros."""
    attention = build_model(flags).decoder.layers[layer].self_attention
    assert isinstance(attention, CompressedSelfAttention)
    for name, param in attention.named_parameters():
        if "norm" in name or "ape" in name:
            torch.nn.init.uniform_(param, 0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return attention.double()


def normalise(x: Tensor, weight: Tensor | float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turn(x: Tensor, angles: Tensor, sign: float = 1.0) -> Tensor:
    """Rotate pairs of the last four channels of [s, b, ..., c]."""
    plain, part = x[..., :-4], x[..., -4:]
    pairs = torch.view_as_complex(part.unflatten(-1, (2, 2)).contiguous())
    turns = torch.polar(torch.ones_like(angles), sign * angles).view(x.shape[0], *[1] * (x.dim() - 2), 2)
    return torch.cat((plain, torch.view_as_real(pairs * turns).flatten(-2)), -1)


def compress(compressor: Compressor, x: Tensor, angles: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Entries [w, b, c], and the last token of the window of each: one window after the other."""
    content, gate = x @ compressor.linear_wkv.weight.T, x @ compressor.linear_wgate.weight.T
    size, width, made, lasts = compressor.ratio, compressor.norm.hidden_size, [], []
    for document in documents.unique():
        places = (documents == document).nonzero().flatten()
        for start in range(0, len(places) - size + 1, size):
            own = places[start : start + size]
            parts = [(content[own][..., -width:], gate[own][..., -width:] + compressor.ape[:, None, -width:])]
            if compressor.overlaps and start:
                before = places[start - size : start]
                parts.append(
                    (content[before][..., :width], gate[before][..., :width] + compressor.ape[:, None, :width])
                )
            values, gates = (torch.cat(each) for each in zip(*parts, strict=True))
            entry = normalise((values * gates.softmax(0)).sum(0), compressor.norm.weight)
            made.append(turn(entry[None], angles[own[:1]])[0])
            lasts.append(own[-1])
    return torch.stack(made), torch.stack(lasts)


def by_definition(
    attention: CompressedSelfAttention, x: Tensor, angles: Tensor, documents: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [s, b, h] and the mean of KL over the rows. documents: the number of each token's."""
    config, core, weights = attention.config, attention.core_attention, dict(attention.named_parameters())
    latent = normalise(x @ weights["linear_q_down_proj.weight"].T, weights["q_layernorm.weight"])
    query = (latent @ weights["linear_q_up_proj.weight"].T).unflatten(-1, (4, 10))
    query = turn(normalise(query, 1.0), angles)
    key = turn(normalise(x @ weights["linear_kv_proj.weight"].T, weights["kv_layernorm.weight"]), angles)
    place = torch.arange(len(x))
    sees = (place[:, None] - place).clamp(min=0) + 99 * (place[:, None] < place) < 5
    sees = (sees & (documents[:, None] == documents)).expand(x.shape[1], -1, -1)  # [b, s, t]
    divergence = torch.zeros((), dtype=x.dtype)
    if core.compressor is not None:
        entries, lasts = compress(core.compressor, x, angles, documents)
        key = torch.cat((key, entries))
        allowed = ((lasts <= place[:, None]) & (documents[:, None] == documents[lasts])).expand(x.shape[1], -1, -1)
        chosen = allowed
        if core.indexer is not None:
            found, _ = compress(core.indexer.compressor, x.detach(), angles, documents)
            index_query = (latent.detach() @ core.indexer.linear_wq_b.weight.T).unflatten(-1, (3, 8))
            products = torch.einsum("sbgd,tbd->bsgt", turn(index_query, angles), found)
            products = products.relu() if config.dsa_indexer_scoring_relu else products
            weight = x.detach() @ core.indexer.linear_weights_proj.weight.T * 24**-0.5
            scores = torch.einsum("sbg,bsgt->bst", weight, products).masked_fill(~allowed, -torch.inf)
            best = scores.argsort(dim=-1, descending=True, stable=True)[..., : config.dsa_indexer_topk]
            chosen = torch.zeros_like(allowed).scatter(-1, best, True) & allowed
        sees = torch.cat((sees, chosen), -1)
    logits = torch.einsum("sbnd,tbd->bnst", query, key) * 10**-0.5
    logits = logits.masked_fill(~sees[:, None], -torch.inf)
    sinks = core.attn_sink.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    probabilities = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
    context = turn(torch.einsum("bnst,tbd->sbnd", probabilities, key), angles, -1.0)
    groups = context.flatten(2).unflatten(-1, (2, -1))
    joined = torch.einsum("sbgi,goi->sbgo", groups, weights["linear_o_group_proj"].unflatten(0, (2, -1)))
    if core.indexer is not None:
        among = chosen if config.dsa_indexer_use_sparse_loss else allowed
        everywhere = torch.cat((torch.einsum("sbnd,tbd->bnst", query, key) * 10**-0.5, sinks), -1).detach()
        target = (everywhere - torch.cat((logits, sinks), -1).detach().logsumexp(-1, keepdim=True)).exp()
        target = target[..., len(x) : -1].masked_fill(~among[:, None], 0.0).sum(1)
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-10)
        logs = scores.masked_fill(~among, -1e30).log_softmax(-1)
        distance = target * (target.clamp(min=1e-10).log() - logs)
        divergence = torch.where(among, distance, 0.0).sum() / target[..., 0].numel()
    return joined.flatten(2) @ weights["linear_proj.weight"].T, divergence


@pytest.mark.flags(
    "--csa-compress-ratios", "--csa-window-size", "--csa-dense-mode", "--o-groups", "--o-lora-rank",
    "--experimental-attention-variant",
)  # fmt: skip
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("layer", "options"),
    [(0, ""), (1, ""), (1, "--dsa-indexer-use-sparse-loss --no-dsa-indexer-scoring-relu"), (1, "--csa-dense-mode"),
     (2, "")],
)  # fmt: skip
def test_the_definition(layer: int, options: str, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, loss, and the gradient of everything, by blocks of a few queries, also where no block has many keys."""
    monkeypatch.setattr(chosen_keys, "_BLOCK_ELEMENTS", 300)
    monkeypatch.setattr(compressed_keys, "_BLOCK_ELEMENTS", 700)
    attention = attention_of(f"{COMPRESSED} {LOSS} {options}", layer).train()
    generator = torch.Generator().manual_seed(3)
    batch = 1 if is_packed else BATCH
    x = torch.randn(TOKENS, batch, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    angles = torch.outer(torch.arange(float(TOKENS)), torch.tensor([1.0, 0.01])).double()
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor(BOUNDS)) if is_packed else None
    documents = torch.zeros(TOKENS) if packed is None else TokenLayout.of_documents(BOUNDS).sequences
    expected, loss = by_definition(attention, x, angles, documents)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    ((expected * weight).sum() + 0.7 * loss).backward()
    parameters = {"x": x, **dict(attention.named_parameters())}
    grads = {name: param.grad for name, param in parameters.items()}
    for param in parameters.values():
        param.grad = None
    found, _ = attention(x, rotation=Rotation(angles.cos(), angles.sin(), True), packed_seq_params=packed)
    (found * weight).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    if attention.core_attention.indexer is not None:
        torch.testing.assert_close(attention.core_attention.take_loss(), 0.7 * loss.detach(), rtol=1e-9, atol=0)
    for name, param in parameters.items():
        assert grads[name] is not None and grads[name].abs().max() > 0, f"{name} counts for nothing"
        bound = 1e-11 * max(1.0, grads[name].abs().max().item())
        torch.testing.assert_close(param.grad, grads[name], rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")


# ---- generation


@pytest.mark.flags("--csa-compress-rotary-base", "--moe-n-hash-layers", "--actual-vocab-size")
@pytest.mark.parametrize("more", ["", f"--swiglu {TABLES}"])
def test_a_cache_changes_no_logits(more: str) -> None:
    """Prompts, single tokens and several at once, in step and packed; it keeps a window, entries, and a few tokens."""
    model = build_model(f"{COMPRESSED} --csa-compress-rotary-base 50 {more}").eval()
    ids, positions, _ = token_batch()
    with torch.no_grad():
        whole = model(ids, positions)
        cache, parts = SequenceState(len(ids), SEQUENCE_LENGTH), []
        for first, end in ((0, 3), (3, 4), (4, 7), (7, 8), (8, 9), (9, SEQUENCE_LENGTH)):
            cache.begin([end - first] * len(ids))
            parts.append(model(ids[:, first:end], positions[:, first:end], inference_context=cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    # Of 16 tokens: entries, what the last tokens are made of, their angles.
    held = [tuple(x.shape) for x in cache.rows[0].recurrent[2]]
    assert held == [(4, 10), (4, 8), (8, 40), (8, 32), (8, 4)]
    assert [tuple(x.shape) for x in cache.rows[0].recurrent[3]] == [(2, 10), (6, 20), (6, 4)]


def test_generated_text_does_not_depend_on_the_cache() -> None:
    model = build_model(COMPRESSED).eval()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    with_cache, without = (
        generate(model, prompts, max_new_tokens=9, sampling=Sampling(greedy=True), use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert with_cache == without


# ---- settings


def test_the_indexers_loss_is_logged() -> None:
    for flags, is_logged in ((f"{COMPRESSED} {LOSS}", True), (COMPRESSED, False)):
        config = read_config(flags)
        hook = IndexerHook.build(config, HookContext(build_gpt_recipe(config), Traffic()))
        assert (hook is not None) is is_logged


def test_letters_are_the_same_layers() -> None:
    """C, H and W, with ratios of 4, 128 and none; the list says the same of a GPT."""
    alternating = read_config(f"{LATENT} --dsa-indexer-topk 2 --hybrid-layer-pattern W-C-H-").model
    kinds = [layer.kinds for layer in read_plan(alternating).decoder]
    assert kinds[::2] == [("sliding_attention",), ("compressed_sparse",), ("compressed_heavy",)]
    by_letters = build_model(f"{LATENT} --dsa-indexer-topk 2 {LOSS} --hybrid-layer-pattern WCH")
    options = [layer.options for layer in read_plan(by_letters.config).decoder]
    assert [each.compress_ratio for each in options] == [0, 4, 128]
    listed = read_config(f"{COMPRESSED} --csa-compress-ratios [0,4,128]").model
    assert [layer.options for layer in read_plan(listed).decoder] == options
    losses, _ = losses_and_grads(by_letters)
    assert losses.isfinite().all()


@pytest.mark.parametrize(
    ("flags", "decoder"),
    [(FURTHER, [0, 4, 6]), (f"{LATENT} --dsa-indexer-topk 2 --hybrid-layer-pattern WCH/C/C", [0, 4, 128])],
)
def test_further_tokens_have_ratios_and_positions_of_their_own(flags: str, decoder: list[int]) -> None:
    """Those behind the decoder's, whatever its last layer has."""
    model = build_model(f"{flags} {LOSS}")
    cores = [part for part in model.modules() if isinstance(part, CompressedSelfAttention)]
    turned = []
    for attention in cores:
        attention.register_forward_pre_hook(
            lambda part, args: turned.append(next(x for x in args if isinstance(x, Rotation)).cos)
        )
    _, grads = losses_and_grads(model)
    assert [attention.core_attention.ratio for attention in cores] == [*decoder, 4, 4 * ("/" in flags)]
    assert [torch.equal(cos, turned[1]) for cos in turned] == [False, True, True, True, "/" in flags]
    assert all(grad.abs().sum() > 0 for name, grad in grads.items() if name.startswith("mtp."))


@pytest.mark.parametrize(
    "other",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective --recompute-modules core_attn",
    ],
)
def test_recomputed_layers_are_the_same_function(other: str) -> None:
    flags = f"{COMPRESSED} {LOSS} --csa-compress-ratios [0,4,6]"
    assert_same_function(build_model(flags), build_model(f"{flags} {other}"))
    # Experts by a table are the same where backward asks again behind another microbatch.
    flags, (ids, positions, labels) = f"--swiglu {TABLES}", token_batch()
    model, again = build_model(flags), build_model(f"{flags} {other}")
    loss = again(ids, positions, labels=labels).mean()
    again(labels, positions)
    loss.backward()
    model(ids, positions, labels=labels).mean().backward()
    for expected, found in zip(model.parameters(), again.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad)


def test_parameters_are_counted() -> None:
    """As the plan counts them; nothing trains tables, and of further tokens it counts the layers."""
    for flags in (f"{COMPRESSED} --swiglu {TABLES}", f"{COMPRESSED} --csa-dense-mode", FURTHER):
        config, model = read_config(flags), build_model(flags)
        names = {name for name in dict(model.named_parameters()) if "mtp." not in name or "mtp_model_layer" in name}
        trained = sum(
            param.numel() for name, param in model.named_parameters() if name in names and "tid2eid" not in name
        )
        counts = count_parameters(config.model, padded_vocab_size=VOCAB_SIZE, untied=False)
        assert counts.total == trained


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (f"{LATENT} --experimental-attention-variant dsv4_hybrid", "give --csa-compress-ratios one of 0, 4 and 128"),
        (f"{LATENT} {VARIANT}", "has no sizes of its own; give --dsa-indexer-topk"),
        (f"{COMPRESSED} --num-layers 4", "--csa-compress-ratios has 3 entries, and --num-layers 4"),
        (f"{COMPRESSED} --csa-compress-ratios [0,2,128]", "has the entry 2; use 0, 4 or more"),
        (f"{COMPRESSED} --csa-compress-ratios 4", "give --csa-compress-ratios one of 0, 4 and 128"),
        (f"{COMPRESSED} --o-groups 3", "--o-groups 3 does not divide --num-attention-heads 4"),
        (f"{COMPRESSED} --v-head-dim 4", "is not above --qk-pos-emb-head-dim 4"),
        (f"{COMPRESSED} --attention-dropout 0.1", "has no --attention-dropout 0.1; use --attention-dropout 0"),
        (f"{COMPRESSED} --mtp-num-layers 2", "has 3 entries, and --num-layers 3 and --mtp-num-layers 2; give one per"),
        (f"{COMPRESSED} --window-size 3,0", "use --csa-window-size"),
        (f"{COMPRESSED} --qk-layernorm", "latent vectors and keys are always normalised"),
        (f"{LATENT} --dsa-indexer-topk 2 --hybrid-layer-pattern WC+", "write one of C, H and W for +"),
        (f"{LATENT} --dsa-indexer-topk 2 --hybrid-layer-pattern WC*", "write W for *"),
        ("--num-experts 4 --moe-router-score-function sqrtsoftplus --moe-n-hash-layers 1", "give --actual-vocab-size"),
        ("--num-experts 4 --moe-n-hash-layers 1 --actual-vocab-size 64", "use --moe-router-score-function sqrt"),
    ],
)  # fmt: skip
def test_what_is_refused(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_config(flags)
    assert problem in str(raised.value)


def test_tables_lie_where_tokens_are_read() -> None:
    flags = f"--swiglu --num-layers 4 {TABLES} --pipeline-model-parallel-size 2"
    with pytest.raises(ConfigError, match="needs the numbers of tokens in layer 3"):
        read_config(f"{flags} --moe-n-hash-layers 3")
