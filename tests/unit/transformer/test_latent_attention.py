# SPDX-License-Identifier: Apache-2.0
"""Latent attention against its definition in float64, its flags, its cache, and what it refuses."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory import KeptForBackward
from megatron.core.errors import ConfigError
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.placement import get_placement
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequences.state import SequenceState
from megatron.core.transformer.execution.operations import describe_operations
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.upstream_checkpoints.names import our_names
from megatron.planner.memory import count_parameters
from megatron.planner.parameters import count_whole
from tests.support.gpt_models import (
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    assert_same_function,
    build_model,
    first_attention,
    losses_and_grads,
    read_config,
    token_batch,
)
from tests.unit.tensor_parallel.test_recomputation import LAYERS, kept, two_passes

# Widths of which none is another's multiple, so that no mix-up fits.
LATENT = (
    "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 11 --qk-head-dim 6 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 5 --disable-bias-linear --normalization RMSNorm --init-method-std 0.3"
)
LOW_RANK_QUERIES = f"{LATENT} --q-lora-rank 13"
YARN = "--rotary-scaling-factor 8 --mscale 0.7 --mscale-all-dim 0.9 --yarn-original-max-position-embeddings 4"
VARIANTS = {
    "queries of hidden states": LATENT,
    "queries of latent vectors": LOW_RANK_QUERIES,
    "norms": f"{LOW_RANK_QUERIES} --qk-layernorm",
    "norm of one": f"{LATENT} --qk-layernorm",
    "yarn": f"{LOW_RANK_QUERIES} {YARN}",
    "rope": f"{LATENT} {YARN} --rope-type rope --rotary-percent 0.5 --rotary-base 100",
    "no positions": f"{LATENT} --no-rope-freq 1",
    "learned positions as well": f"{LATENT} --position-embedding-type learned_absolute",
}


def draw_norms(model: GPTModel) -> None:
    """Norm weights that are not all one."""
    for name, param in model.named_parameters():
        if "layernorm" in name:
            torch.nn.init.uniform_(param, 0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))


def turn(x: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Rotate neighbouring channels of [s, b, ..., p] by the angles [s, pairs]; further channels stay."""
    result, pairs = x.clone(), angles.shape[1]
    for position in range(x.shape[0]):
        for pair in range(pairs):
            cos, sin = math.cos(angles[position, pair]) * factor, math.sin(angles[position, pair]) * factor
            first, second = x[position, ..., 2 * pair], x[position, ..., 2 * pair + 1]
            result[position, ..., 2 * pair] = first * cos - second * sin
            result[position, ..., 2 * pair + 1] = second * cos + first * sin
    return result


def by_definition(attention: MLASelfAttention, x: Tensor, angles: Tensor | None, factor: float, scale: float) -> Tensor:
    """[s, b, h] -> [s, b, h], in float64, token by token as the paper has it."""
    config, weights = attention.config, {name: w.double() for name, w in attention.named_parameters()}
    heads, plain, rank = config.num_attention_heads, config.qk_head_dim, config.kv_lora_rank

    def norm(y: Tensor, name: str) -> Tensor:
        weight = weights.get(f"{name}.weight")
        return y if weight is None else y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    x = x.double()
    if config.q_lora_rank is None:
        query = x @ weights["linear_q_proj.weight"].T
    else:
        query = norm(x @ weights["linear_q_down_proj.weight"].T, "q_layernorm") @ weights["linear_q_up_proj.weight"].T
    query = query.unflatten(-1, (heads, -1))
    both = x @ weights["linear_kv_down_proj.weight"].T
    latent, shared = norm(both[..., :rank], "kv_layernorm"), both[..., rank:]
    expanded = (latent @ weights["linear_kv_up_proj.weight"].T).unflatten(-1, (heads, -1))
    rotated = query[..., plain:]
    if angles is not None:
        rotated, shared = turn(rotated, angles, factor), turn(shared, angles, factor)
    scores = torch.einsum("sbnd,tbnd->bnst", query[..., :plain], expanded[..., :plain])
    scores = (scores + torch.einsum("sbnd,tbd->bnst", rotated, shared)) * scale
    future = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, -math.inf).softmax(-1)
    values = torch.einsum("bnst,tbnd->sbnd", probabilities, expanded[..., plain:])
    return values.flatten(2) @ weights["linear_proj.weight"].T


@pytest.mark.flags("--multi-latent-attention", "--rope-type", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim",
                   "--qk-layernorm", "--no-rope-freq")  # fmt: skip
@pytest.mark.parametrize("fusion", ["", " --no-rope-fusion"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_definition(variant: str, fusion: str) -> None:
    model = build_model(VARIANTS[variant] + fusion)
    draw_norms(model)
    attention = first_attention(model)
    assert isinstance(attention, MLASelfAttention)
    x = torch.randn(7, 2, 32, generator=torch.Generator().manual_seed(3))
    frequencies, factor, scale = torch.tensor([1.0, 0.01]), 1.0, 10**-0.5
    stretched = variant in ("yarn", "rope")
    if stretched:
        scale *= (0.1 * 0.9 * math.log(8) + 1) ** 2
    if variant == "yarn":
        # No pair has a turn in 4 tokens, but the blend begins at a whole pair: the first is kept.
        frequencies = torch.tensor([1.0, 0.01 / 8])
        factor = (0.1 * 0.7 * math.log(8) + 1) / (0.1 * 0.9 * math.log(8) + 1)
    if variant == "rope":
        frequencies = torch.tensor([1.0])
    rotation = None
    if variant != "no positions":
        assert model.rotary_pos_emb is not None
        rotation = model.rotary_pos_emb.build_rotation(7)
    angles = None if rotation is None else torch.outer(torch.arange(7.0), frequencies)
    expected = by_definition(attention, x, angles, factor, scale)
    found, bias = attention(x, rotation=rotation)
    assert bias is None
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.flags("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim")
def test_names_and_shapes_are_those_of_upstream() -> None:
    with_rank, without = (
        {name: tuple(param.shape) for name, param in first_attention(build_model(flags)).named_parameters()}
        for flags in (f"{LOW_RANK_QUERIES} --qk-layernorm", LATENT)
    )
    shared = {
        "linear_kv_down_proj.weight": (11 + 4, 32),
        "linear_kv_up_proj.weight": (4 * (6 + 5), 11),
        "linear_proj.weight": (32, 4 * 5),
    }
    assert without == shared | {"linear_q_proj.weight": (4 * (6 + 4), 32)}
    assert with_rank == shared | {
        "linear_q_down_proj.weight": (13, 32),
        "linear_q_up_proj.weight": (4 * (6 + 4), 13),
        "q_layernorm.weight": (13,),
        "kv_layernorm.weight": (11,),
    }


def test_norms_in_upstreams_checkpoints_are_found() -> None:
    """With Transformer Engine they are part of the linear layer behind them."""
    for theirs, ours in (("linear_q_up_proj", "q_layernorm"), ("linear_kv_up_proj", "kv_layernorm")):
        name = f"decoder.layers.self_attention.{theirs}.layer_norm_weight"
        assert our_names(name, (2, 13))[1] == (f"decoder.layers.1.self_attention.{ours}.weight", 1)
        plain = f"decoder.layers.self_attention.{ours}.weight"
        assert our_names(plain, (1, 13)) == [(plain.replace("layers.", "layers.0."), 0)]


@pytest.mark.parametrize(
    "other",
    [
        "--attention-backend local",
        "--attention-backend unfused",
        "--no-rope-fusion",
        "--no-gradient-accumulation-fusion",
        "--compile",
        "--recompute-granularity selective",
    ],
)
def test_one_function_however_it_is_computed(other: str) -> None:
    flags = f"{LOW_RANK_QUERIES} --qk-layernorm {YARN}"
    assert_same_function(build_model(flags), build_model(f"{flags} {other}"), tolerance=2e-5)


@pytest.mark.flags("--recompute-modules")
@pytest.mark.parametrize("fusion", ["", " --no-rope-fusion"])
def test_heads_are_made_again_of_latent_vectors(fusion: str) -> None:
    """To the last bit, and neither queries nor keys nor values wait for backward."""
    flags = f"{LOW_RANK_QUERIES} --qk-layernorm{fusion}"
    parts = "--recompute-granularity selective --recompute-modules mla_up_proj"
    expected = two_passes(build_model(flags))
    for way in (parts, f"{parts} core_attn", f"{parts} core_attn layernorm mlp"):
        assert all(map(torch.equal, two_passes(build_model(f"{flags} {way}")), expected)), way
    of_a_layer = SEQUENCE_LENGTH * 2 * 4 * (10 + 10 + 5) * 4  # batch, heads, channels, bytes
    assert kept(flags)[0] - kept(f"{flags} {parts}")[0] == LAYERS * of_a_layer


@pytest.mark.parametrize("options", ["", "--window-size 3,0", "--softmax-type learnable --attn-logit-softcapping 2"])
def test_documents_of_a_packed_sequence_do_not_see_each_other(options: str) -> None:
    model = build_model(f"{LOW_RANK_QUERIES} --no-rope-freq 1 {options}")
    ids, _, labels = token_batch(batch=1)
    bounds = [0, 5, 12, SEQUENCE_LENGTH]
    positions = torch.arange(SEQUENCE_LENGTH)[None]
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor(bounds))
    together = model(ids, positions, labels=labels, packed_seq_params=packed)
    alone = [
        model(ids[:, first:end], positions[:, first:end], labels=labels[:, first:end])
        for first, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("further", "more"),
    [
        ("", 0),
        ("--qk-layernorm", 13 + 1 + 11 + 1),  # the norms' inputs or outputs, and the inverse root mean squares
        ("--recompute-modules core_attn mla_up_proj", -4 * (10 + 10 + 5)),
    ],
)
def test_bytes_that_wait_for_backward(further: str, more: int) -> None:
    """The formula of docs/attention.md, in float32, without what a kernel of core attention keeps."""
    model = build_model(f"{LOW_RANK_QUERIES} --recompute-granularity selective {further}")
    assert model.rotary_pos_emb is not None
    count, tokens = KeptForBackward(), SEQUENCE_LENGTH * 2
    with count.counting():
        hidden_states = torch.randn(SEQUENCE_LENGTH, 2, 32, requires_grad=True)
        rotation = model.rotary_pos_emb.build_rotation(SEQUENCE_LENGTH)
        output, _ = first_attention(model)(hidden_states, rotation=rotation)
    hidden, latents, heads = 32, 13 + 11 + 4, 4 * (10 + 10 + 5 + 5)
    assert output.requires_grad and count.now == 4 * tokens * (hidden + latents + heads + more)


# ---- generation


CACHED = {
    "plain": LOW_RANK_QUERIES,
    "norms and yarn": f"{LATENT} --qk-layernorm {YARN}",
    "window": f"{LOW_RANK_QUERIES} --window-size 3,0",
    "sinks": f"{LOW_RANK_QUERIES} --softmax-type learnable",
}


@pytest.mark.parametrize("case", CACHED)
def test_a_cache_of_latent_vectors_changes_no_logits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in the expanded form, single tokens in the absorbed one; and all in either of them."""
    model = build_model(CACHED[case]).eval()
    draw_norms(model)
    ids, positions, _ = token_batch()
    with torch.no_grad():
        whole = model(ids, positions)
    usual, taken = MLASelfAttention._is_absorbed_cheaper, []

    def choose(attention: MLASelfAttention, queries: int, keys: int) -> bool:
        taken.append(usual(attention, queries, keys))
        return taken[-1]

    for choice in (choose, lambda *_: True, lambda *_: False):
        monkeypatch.setattr(MLASelfAttention, "_is_absorbed_cheaper", choice)
        cache, parts = SequenceState(len(ids), SEQUENCE_LENGTH), []
        for first, end in ((0, 6), (6, 7), (7, 8), (8, 12), (12, SEQUENCE_LENGTH)):
            with torch.no_grad():
                cache.begin([end - first] * len(ids))
                parts.append(model(ids[:, first:end], positions[:, first:end], inference_context=cache))
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    calls = 2 * len(ids)  # in both layers, for each sequence
    assert taken[:calls] == [False] * calls, "the prompt"
    assert taken[calls : 3 * calls] == [True] * 2 * calls, "two single tokens"


def test_bytes_of_the_cache() -> None:
    model = build_model(f"{LOW_RANK_QUERIES} --bf16").eval()
    ids, positions, _ = token_batch(batch=3)
    cache = SequenceState(len(ids), 64)
    with torch.no_grad():
        cache.begin([ids.shape[1]] * len(ids))
        model(ids, positions, inference_context=cache)
    held = sum(x.numel() * x.element_size() for layer in cache._layers.values() for x in layer)
    layers, sequences, width = 2, 3, 11 + 4
    assert held == layers * 64 * sequences * width * 2


def test_generated_text_does_not_depend_on_the_cache() -> None:
    model = build_model(f"{LOW_RANK_QUERIES} --qk-layernorm").eval()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    with_cache, without = (
        generate(model, prompts, max_new_tokens=9, sampling=Sampling(greedy=True), use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert with_cache == without


# ---- counts


@pytest.mark.parametrize("flags", [LATENT, f"{LOW_RANK_QUERIES}"])
def test_counts_are_those_of_the_placements(flags: str) -> None:
    config = read_config(f"{flags} --qk-layernorm")
    model = build_model(f"{flags} --qk-layernorm")
    placed = count_whole(get_placement(param) for param in model.parameters())
    counts = count_parameters(config.model, padded_vocab_size=VOCAB_SIZE, untied=False)
    assert counts.total == placed.total - placed["positions"]
    branch = read_plan(config.model).decoder[0].branches[0]
    attention = find_kind(branch.kind).count(config.model, branch)
    assert attention.matrices + attention.projections == sum(
        param.numel() for param in first_attention(model).parameters()
    )


# ---- in Python, and what is refused


def python_model(config: TransformerConfig, **options: Any) -> GPTModel:
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config),
        VOCAB_SIZE,
        16,
        pg_collection=ProcessGroupCollection.single(),
        **options,
    )


def test_upstreams_config_class() -> None:
    config = MLATransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2)
    assert (config.q_lora_rank, config.kv_lora_rank, config.rotary_scaling_factor) == (512, 512, 40.0)
    assert (config.normalization, config.qk_head_dim, config.v_head_dim) == ("RMSNorm", 128, 128)
    widths = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5}
    small: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, **widths}
    given = MLATransformerConfig(
        **small, original_max_position_embeddings=64, beta_fast=16, beta_slow=2, rotary_base=500
    )
    same = TransformerConfig(
        **small, multi_latent_attention=True, normalization="RMSNorm", position_embedding_type="yarn",
        rotary_scaling_factor=40.0, yarn_original_max_position_embeddings=64, yarn_beta_fast=16, yarn_beta_slow=2,
    )  # fmt: skip
    assert given.uses_yarn()
    # As upstream's, the model rotates whatever it is told about positions, from the base of the config.
    models = (python_model(given), python_model(same, rotary_base=500))
    rotations = [model.rotary_pos_emb.build_rotation(9) for model in models]  # type: ignore[union-attr]
    assert torch.equal(rotations[0].cos, rotations[1].cos)
    assert not torch.equal(python_model(same).rotary_pos_emb.build_rotation(9).cos, rotations[0].cos)  # type: ignore[union-attr]
    ids = torch.arange(8)[None]
    assert torch.equal(models[0].eval()(ids, ids), models[1].eval()(ids, ids))
    plain = python_model(MLATransformerConfig(**small, rope_type="rope"))
    assert type(plain.rotary_pos_emb).__name__ == "RotaryEmbedding"


def test_a_layer_and_a_config_that_do_not_fit_each_other() -> None:
    latent = read_config(LATENT).model
    with pytest.raises(ConfigError, match="make it by get_gpt_layer_local_spec.multi_latent_attention=True"):
        GPTModel(latent, get_gpt_layer_local_spec(), VOCAB_SIZE, 16, pg_collection=ProcessGroupCollection.single())
    with pytest.raises(ConfigError, match="MLASelfAttention needs the widths of latent attention"):
        GPTModel(
            read_config().model, get_gpt_layer_local_spec(multi_latent_attention=True), VOCAB_SIZE, 16,
            pg_collection=ProcessGroupCollection.single(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--group-query-attention --num-query-groups 2", "--group-query-attention contradict each other"),
        ("--num-query-groups 2", "--num-query-groups 2 shares them among heads; leave it out"),
        ("--qk-l2-norm", "--multi-latent-attention has no --qk-l2-norm; use --qk-layernorm"),
        ("--attention-output-gate", "--multi-latent-attention has no --attention-output-gate"),
        ("--qk-layernorm --qk-norm-scope all", "latent vectors, not heads; leave out --qk-norm-scope all"),
        ("--add-qkv-bias", "leave out --add-qkv-bias"),
        ("--rotary-interleaved", "leave out --rotary-interleaved"),
        ("--position-embedding-type none", "with --no-rope-freq 1 no layer has positions"),
        ("--position-embedding-type yarn --rope-type rope", "--rope-type rope and --position-embedding-type yarn"),
        ("--use-rope-scaling", "--use-rope-scaling and --position-embedding-type yarn both scale"),
        ("--qk-pos-emb-head-dim 5", "5 channels per head is 5; use an even number, through --qk-pos-emb-head-dim"),
        ("--qk-pos-emb-head-dim 1", "--qk-pos-emb-head-dim 1 is out of range"),
        ("--kv-lora-rank 0", "--kv-lora-rank 0 is out of range"),
        ("--spec examples.custom_layer layer_spec", "the layer's spec has SelfAttention"),
    ],
)  # fmt: skip
def test_what_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        build_model(f"{LATENT} {flags}")


def test_learned_positions_are_added_and_a_part_of_each_head_is_rotated() -> None:
    """As in upstream's model, whose latent attention rotates whatever the embedding adds."""
    learned = f"{LATENT} --position-embedding-type learned_absolute"
    model, rotated = build_model(learned), build_model(LATENT)
    ids, positions, labels = token_batch()
    table = model.embedding.position_embeddings.weight
    losses = model(ids, positions, labels=labels)
    assert not torch.allclose(losses, rotated(ids, positions, labels=labels))
    with torch.no_grad():
        table.zero_()
    torch.testing.assert_close(model(ids, positions, labels=labels), rotated(ids, positions, labels=labels))
    config = read_config(learned)
    assert config.model.rope_type == "yarn" and any(
        "beside --position-embedding-type learned" in n for n in config.notes
    )


def test_only_latent_attention_has_that_projection() -> None:
    with pytest.raises(ConfigError, match="--recompute-modules mla_up_proj needs --multi-latent-attention"):
        read_config("--recompute-granularity selective --recompute-modules mla_up_proj")


def test_what_has_nothing_to_do() -> None:
    notes = read_config(f"{LATENT} --kv-channels 16 --mla-down-proj-fusion --cache-mla-latents").notes
    assert any("--kv-channels 16 has no effect" in note for note in notes)
    assert sum("--mla-down-proj-fusion" in note or "--cache-mla-latents" in note for note in notes) == 2
    assert any("--v-head-dim 8 has no effect without --multi-latent-attention" in note
               for note in read_config("--v-head-dim 8").notes)  # fmt: skip


def test_the_log_names_the_fused_rotation() -> None:
    assert "in place" in describe_operations(read_config(f"{LATENT} --qk-layernorm").model)["rotary positions"]


@pytest.mark.parametrize("width", [32, 34])
def test_gradients_reach_every_parameter(width: int) -> None:
    """Also where the heads, whose widths are their own, do not divide the hidden size."""
    _, grads = losses_and_grads(build_model(f"{LOW_RANK_QUERIES} --qk-layernorm --hidden-size {width}"))
    assert all(grad.abs().max() > 0 for grad in grads.values())
