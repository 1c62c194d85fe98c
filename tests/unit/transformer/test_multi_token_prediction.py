# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction against its formulas in float64, written out here; refusals, numbers, log."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.grad_statistics import _make_sort_key
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import SingleRankGroup
from megatron.core.transformer.execution.compilation import compile_regions
from megatron.core.transformer.multi_token_prediction import TokenShift
from megatron.core.upstream.layers import get_mtp_ranks, mtp_on_this_rank
from megatron.planner.throughput import count_training_flops_per_token
from tests.support.gpt_models import (
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    assert_same_function,
    build_model,
    read_config,
    token_batch,
)

LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --num-attention-heads 6 --hidden-size 72 "
    "--group-query-attention --num-query-groups 3 --kv-channels 12 --mtp-num-layers 2"
)


def normalise(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def moved(x: Tensor, ends: list[int]) -> Tensor:
    """[b, s]: what stands one place later, 0 at the ends of documents."""
    result = torch.zeros_like(x)
    result[:, :-1] = x[:, 1:]
    result[:, [end - 1 for end in ends]] = 0
    return result


def reference_losses(
    model: GPTModel, loss_mask: Tensor, ends: list[int], packed: PackedSeqParams | None
) -> list[Tensor]:
    """The language-model loss and those of the further tokens, means over the tokens that count, with a graph.

    model: in float64. Its decoder and transformer layers are used as they are; everything around is written out.
    """
    ids, positions, labels = token_batch(batch=loss_mask.shape[0])
    embed = model.embedding.word_embeddings.weight
    head = model.output_layer.weight if model.output_layer.weight is not None else embed
    angles = model.rotary_pos_emb.build_rotation(ids.shape[1])
    assert angles is not None
    hidden = model.decoder(embed[ids.t()], None, angles, packed_seq_params=packed)
    mask = loss_mask.double()
    logits = [hidden @ head.t()]
    targets, masks = [labels], [mask]
    for depth in range(2):
        part = model.mtp.layers[depth % len(model.mtp.layers)]
        ids, labels, mask = (moved(x, ends) for x in (ids, labels, mask))
        joined = torch.cat([normalise(embed[ids.t()], part.enorm.weight), normalise(hidden, part.hnorm.weight)], -1)
        layer_output = part.mtp_model_layer(joined @ part.eh_proj.weight.t(), None, angles, None, packed)
        hidden = normalise(layer_output, part.final_layernorm.weight)
        logits.append(hidden @ head.t())
        targets.append(labels)
        masks.append(mask)
    losses = (F.cross_entropy(x.transpose(0, 1).flatten(0, 1), y.flatten(), reduction="none").view_as(y)
              for x, y in zip(logits, targets, strict=True))  # fmt: skip
    return [(loss * mask).sum() / mask.sum() for loss, mask in zip(losses, masks, strict=True)]


@pytest.mark.flags("--mtp-num-layers", "--mtp-loss-scaling-factor", "--mtp-use-repeated-layer")
@pytest.mark.parametrize(
    ("flags", "packed"),
    [
        ("--mtp-loss-scaling-factor 0.3 --untie-embeddings-and-output-weights", False),
        ("--mtp-loss-scaling-factor 0.3 --mtp-use-repeated-layer", False),
        ("--mtp-loss-scaling-factor 0.7", True),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", False),
        ("--recompute-granularity selective --disable-bias-linear", True),
    ],
)
def test_losses_and_gradients_are_those_of_the_formulas(flags: str, packed: bool) -> None:
    model = build_model(f"{LLAMA} {flags}")
    with torch.no_grad():  # norms that do something
        for name, param in model.named_parameters():
            if "norm" in name:
                param.add_(torch.linspace(-0.5, 0.5, param.numel()).view_as(param))
    wide = copy.deepcopy(model).double()
    sequences, ends = (1, [5, 6, SEQUENCE_LENGTH]) if packed else (2, [SEQUENCE_LENGTH])
    bounds = torch.tensor([0, *ends], dtype=torch.int32)
    documents = PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=bounds) if packed else None
    loss_mask = torch.ones(sequences, SEQUENCE_LENGTH)
    loss_mask[:, 3] = 0.0

    expected = reference_losses(wide, loss_mask, ends, documents)
    factor = model.config.mtp_loss_scaling_factor / 2
    (expected[0] + factor * (expected[1] + expected[2])).backward()
    ids, positions, labels = token_batch(batch=sequences)
    output = model(ids, positions, labels=labels, loss_mask=loss_mask, packed_seq_params=documents)
    loss = (output * loss_mask).sum() / loss_mask.sum()
    loss.backward()

    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=0)  # and not the sum with the others
    sums = model.mtp_loss.take_sums()
    torch.testing.assert_close((sums[:, 0] / sums[:, 1]).double(), torch.stack(expected[1:]), rtol=1e-5, atol=0)
    assert model.mtp_loss.take_sums() is None, "a new interval begins"
    for (name, param), reference in zip(model.named_parameters(), wide.parameters(), strict=True):
        largest = float(reference.grad.abs().max())
        assert largest > 0, name
        torch.testing.assert_close(param.grad.double(), reference.grad, rtol=1e-4, atol=1e-5 * largest, msg=name)


@pytest.mark.flags("--mtp-detach-heads")
@pytest.mark.parametrize("tying", ["", "--untie-embeddings-and-output-weights"])
def test_detached_heads_train_their_own_layers_only(tying: str) -> None:
    """Everything else has the gradients of the model without them; their own layers those of a run with."""
    flags = LLAMA + " " + tying

    def gradients(flags: str) -> dict[str, Tensor]:
        model = build_model(flags)
        ids, positions, labels = token_batch()
        model(ids, positions, labels=labels).mean().backward()
        return {name: param.grad for name, param in model.named_parameters()}

    detached, together = gradients(f"{flags} --mtp-detach-heads"), gradients(flags)
    alone = gradients(flags.replace("--mtp-num-layers 2", ""))
    assert all(torch.equal(detached[name], grad) for name, grad in alone.items())
    assert any(not torch.equal(together[name], grad) for name, grad in alone.items())
    own = detached.keys() - alone.keys()
    assert own and all(torch.equal(detached[name], together[name]) for name in own)


@pytest.mark.flags("--freeze-base-for-mtp")
def test_a_frozen_base_stays_as_it_is() -> None:
    """And the layers that train have the gradients that they have with detached heads."""
    ids, positions, labels = token_batch()
    frozen, detached = (build_model(f"{LLAMA} {flag}") for flag in ("--freeze-base-for-mtp", "--mtp-detach-heads"))
    losses = [model(ids, positions, labels=labels).mean() for model in (frozen, detached)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    expected = {name: param.grad for name, param in detached.named_parameters()}
    for name, param in frozen.named_parameters():
        assert param.requires_grad == (param.grad is not None) == name.startswith("mtp."), name
        assert param.grad is None or torch.equal(param.grad, expected[name]), name


def test_tokens_move_one_place_inside_their_documents() -> None:
    bounds = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    packed = PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    tokens = torch.arange(1, 9).unsqueeze(0)  # the last one belongs to no document, and so is one by itself
    shift = TokenShift(SingleRankGroup(), packed.layout(8))
    assert shift(tokens).tolist() == [[2, 3, 0, 5, 6, 7, 0, 0]]
    assert shift(shift(tokens)).tolist() == [[3, 0, 0, 6, 7, 0, 0, 0]]
    assert TokenShift(SingleRankGroup())(tokens).tolist() == [[2, 3, 4, 5, 6, 7, 8, 0]]


def test_right_guesses_are_counted() -> None:
    """Of tokens that count; of equally likely ones the first is the guess; nothing in evaluation."""
    model = build_model(LLAMA)
    loss, groups = model.mtp_loss, model.pg_collection
    logits = torch.zeros(4, 1, 5)  # four tokens of one sequence, of which the last two guess nothing
    logits[0, 0, 3] = logits[1, 0, 2] = 1.0
    labels, mask = torch.tensor([[3, 1, 0, 0]]), torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    for guesses in (logits, logits):
        assert loss.watch(lambda x: x, groups)(guesses) is guesses
        loss.attach(logits, 1, torch.ones(1, 4), labels, mask, SingleRankGroup())
    assert loss.take_sums().tolist() == [[0.0] * 3, [6.0, 6.0, 4.0]]


def test_a_microbatch_without_tokens_that_count_has_finite_gradients() -> None:
    model = build_model(LLAMA)
    ids, positions, labels = token_batch()
    mask = torch.zeros(2, SEQUENCE_LENGTH)
    (model(ids, positions, labels=labels, loss_mask=mask) * mask).sum().backward()
    assert all(torch.isfinite(param.grad).all() for param in model.parameters())
    assert model.mtp_loss.take_sums().tolist() == [[0.0] * 3] * 2


def test_evaluation_and_logits_leave_no_trace() -> None:
    model = build_model(LLAMA).eval()
    ids, positions, labels = token_batch()
    losses = model(ids, positions, labels=labels)
    assert model.mtp_loss.take_sums() is None
    without = build_model(LLAMA.replace("--mtp-num-layers 2", "")).eval()
    assert torch.equal(without(ids, positions, labels=labels), losses)
    assert torch.equal(without(ids, positions), model(ids, positions))


def test_the_layers_are_like_the_last_of_the_decoder() -> None:
    experts = "--num-experts 4 --moe-layer-freq ([0]+[1]) --moe-ffn-hidden-size 24"
    for pattern, sizes in (("([0]+[1])", [2, 2, 2]), ("([1]+[0])", [2, 0, 0])):
        model = build_model(f"{LLAMA} {experts.replace('([0]+[1])', pattern)}")
        layers = [model.decoder.layers[0 if pattern == "([1]+[0])" else 1],
                  *(part.mtp_model_layer for part in model.mtp.layers)]  # fmt: skip
        assert [2 if hasattr(layer.mlp, "router") else 0 for layer in layers] == sizes
        assert [layer.layer_number for layer in layers[1:]] == [3, 4]


@pytest.mark.parametrize("flags", ["", "--mtp-use-repeated-layer"])
def test_compiled_regions_compute_the_same(flags: str) -> None:
    eager, compiled = build_model(f"{LLAMA} {flags}"), build_model(f"{LLAMA} {flags} --compile")
    compile_regions(compiled, backend="aot_eager")
    assert compiled.mtp.layers[0].mtp_model_layer.mlp.activate is compiled.decoder.layers[0].mlp.activate
    assert_same_function(eager, compiled)


def test_norms_by_layer_are_in_the_order_of_the_model() -> None:
    names = ["output_layer", "mtp.layers.1", "decoder.final_layernorm", "mtp.layers.0", "decoder.layers.10",
             "decoder.layers.9", "embedding.word_embeddings"]  # fmt: skip
    assert sorted(names, key=_make_sort_key) == [
        "embedding.word_embeddings", "decoder.layers.9", "decoder.layers.10", "decoder.final_layernorm", "mtp.layers.0",
        "mtp.layers.1", "output_layer",
    ]  # fmt: skip


# ---- settings


def layout_of(text: str, depths: int = 1, flags: str = "") -> str:
    stages = text.count("|") + 1
    return (
        f"--position-embedding-type rope --num-layers 4 --mtp-num-layers {depths} --pipeline-model-parallel-size "
        f"{stages} --pipeline-model-parallel-layout {text} {flags}"
    )


@pytest.mark.flags("--mtp-standalone")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--mtp-num-layers 1", "--mtp-num-layers 1 works with --position-embedding-type rope, yarn or none, not"),
        ("--mtp-num-layers -1", "--mtp-num-layers -1"),
        ("--position-embedding-type rope --mtp-num-layers 16", "reaches beyond the end of every sequence"),
        ("--position-embedding-type rope --mtp-num-layers 1 --mtp-standalone", "--mtp-standalone needs a"),
        (layout_of("Ett|ttL"), "has 0 layers of multi-token prediction (m), but --mtp-num-layers 1"),
        (layout_of("Ett|ttmL", 2), "has 1 layers of multi-token prediction (m), but --mtp-num-layers 2"),
        (layout_of("Ett|ttmL", 0), "(m), but --mtp-num-layers is not given"),
        (layout_of("Ettm|tt|L"), "must have all m (multi-token prediction) on one stage, behind the last layer"),
        (layout_of("Etttt|m|mL", 2), "must have all m (multi-token prediction) on one stage"),
        (layout_of("Etttt|mL", 1, "--mtp-standalone"), "--mtp-standalone needs a"),
    ],
)
def test_refusals(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_with_processes(flags)


def read_with_processes(flags: str):  # type: ignore[no-untyped-def]
    from megatron.training.flags.read import read_run_config

    words = flags.split()
    stages = (
        words[words.index("--pipeline-model-parallel-size") + 1] if "--pipeline-model-parallel-size" in words else "1"
    )
    sizes = {"--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4"}
    usual = [word for name, value in sizes.items() if name not in words for word in (name, value)]
    run = "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data"
    argv = [*usual, *run.split(), "--tokenizer-type", "NullTokenizer", "--vocab-size", "63", *words]
    return read_run_config(argv, {"WORLD_SIZE": stages})


def test_a_stage_of_its_own_follows_from_the_layout() -> None:
    assert read_with_processes(layout_of("Etttt|m|L")).model.mtp_standalone
    assert not read_with_processes(layout_of("Etttt|mL")).model.mtp_standalone
    assert read_with_processes(layout_of("Ett|ttm|L", 1, "--mtp-standalone")).model.mtp_standalone
    model = read_with_processes(layout_of("Etttt|m|L")).model
    assert get_mtp_ranks([4, 5, 6], model) == [5]
    assert mtp_on_this_rank(None, 1) and not mtp_on_this_rank(None, None)


def test_specs_as_upstreams_scripts_make_them() -> None:
    config = read_config(LLAMA).model
    spec = get_gpt_mtp_block_spec(config, get_gpt_decoder_layer_specs(config))
    assert spec is not None and len(spec.submodules.layer_specs) == 2
    assert get_gpt_mtp_block_spec(read_config().model, get_gpt_decoder_layer_specs(config)) is None
    with pytest.raises(ConfigError, match="mtp_block_spec=get_gpt_mtp_block_spec"):
        GPTModel(config, get_gpt_decoder_layer_specs(config)[0], 64, 16, position_embedding_type="rope")


def test_flops_count_each_further_token() -> None:
    with_two, without = (read_config(flags).model for flags in (LLAMA, LLAMA.replace("--mtp-num-layers 2", "")))
    counts = [
        count_training_flops_per_token(m, seq_length=16, padded_vocab_size=VOCAB_SIZE) for m in (with_two, without)
    ]
    layer = 72 * (72 + 2 * 36) + 72 * 72 + 3 * 72 * without.ffn_hidden_size + 2 * 72 * 8
    assert counts[0] - counts[1] == 6 * 2 * (layer + 2 * 72 * 72 + 3 * 72 + VOCAB_SIZE * 72)
