# SPDX-License-Identifier: Apache-2.0
"""Attention as Llama 4 has it: chunks in layers with rotary positions, sharper queries in those without.

That chunks are right on every backend and exchange is tested with the other kinds of attention (plain_attention.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.plan.read import read_plan
from megatron.core.sequences.state import SequenceState
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.norms import HeadL2Norm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planner.throughput import count_training_flops_per_token
from megatron.training.recipes.gpt import describe_gpt_operations
from tests.support.gpt_models import assert_same_function, build_model, first_attention, read_config, token_batch
from tests.support.pretend_groups import pretend

ROPE = "--position-embedding-type rope --group-query-attention --num-query-groups 2"
CHUNKS = f"{ROPE} --num-layers 4 --attention-chunk-size 5 --window-attn-skip-freq 4 --no-rope-freq 4"
LLAMA4 = f"{CHUNKS} --attn-temperature-scale 0.7 --attn-temperature-floor 3 --qk-l2-norm --qk-l2-norm-layers rotary"


def logits(model: GPTModel, *parts: int) -> torch.Tensor:
    """Of the batch [b, s, v], read in parts of so many tokens."""
    ids, positions, _ = token_batch()
    with torch.no_grad():
        if not parts:
            return model(ids, positions)
        state, found = SequenceState(*ids.shape), []
        for count in parts:
            part = slice(state.lengths[0], state.lengths[0] + count)
            state.begin([count] * len(ids))
            found.append(model(ids[:, part], positions[:, part], inference_context=state))
    return torch.cat(found, dim=1)


@pytest.mark.flags("--attention-chunk-size")
def test_which_layers_have_chunks() -> None:
    config = read_config(CHUNKS).model
    assert [layer.options.chunk for layer in read_plan(config).decoder] == [5, 5, 5, None]
    model = build_model(CHUNKS)
    assert [layer.self_attention.core_attention.options.chunk for layer in model.decoder.layers] == [5, 5, 5, None]
    # Of chunks alone nothing comes through: a token of another chunk changes nothing.
    chunked = build_model(f"{ROPE} --attention-chunk-size 5").eval()
    ids, positions, _ = token_batch()
    changed = ids.clone()
    changed[:, 7] = (ids[:, 7] + 1) % 64
    with torch.no_grad():
        differs = (chunked(ids, positions) != chunked(changed, positions)).any(-1).any(0)
    assert differs.nonzero().flatten().tolist() == [7, 8, 9]
    # Chunks as long as the sequence hide nothing.
    assert_same_function(build_model(ROPE), build_model(f"{ROPE} --attention-chunk-size 16"))


@pytest.mark.parametrize("flags", [LLAMA4, f"{CHUNKS} --attention-backend local"])
def test_generation_sees_the_same(flags: str) -> None:
    model = build_model(flags).eval()
    torch.testing.assert_close(logits(model, 3, 1, 1, 4, 1, 6), logits(model), rtol=1e-4, atol=1e-5)


def test_chunks_of_latent_attention_in_generation() -> None:
    """A single token, whose latent form takes a way of its own, does not see earlier chunks."""
    flags = """--multi-latent-attention --kv-lora-rank 4 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8
        --position-embedding-type rope --rope-type rope --normalization RMSNorm --disable-bias-linear
        --attention-chunk-size 5"""
    model = build_model(flags).eval()
    torch.testing.assert_close(logits(model, *[1] * 16), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flags", [LLAMA4])
def test_a_packed_document_is_the_same_alone(flags: str) -> None:
    """Chunks and positions of sharper queries begin anew at each document."""
    model = build_model(flags).eval()
    ids, positions, _ = token_batch(batch=1)
    bounds = [0, 7, 8, 16]
    with torch.no_grad():
        packed = model(ids, positions, packed_seq_params=PackedSeqParams(cu_seqlens_q=torch.tensor(bounds)))
        alone = [model(ids[:, a:b], positions[:, : b - a]) for a, b in zip(bounds, bounds[1:], strict=False)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.flags("--attn-temperature-scale", "--attn-temperature-floor")
def test_the_factor_on_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(f"{ROPE} --no-rope-freq 2 --attn-temperature-scale 0.5 --attn-temperature-floor 6").eval()
    plain = build_model(f"{ROPE} --no-rope-freq 2").eval()
    plain.load_state_dict(model.state_dict())
    queries: list[torch.Tensor] = []
    forward = DotProductAttention.forward

    def record(self: DotProductAttention, query: torch.Tensor, *rest: object) -> torch.Tensor:
        queries.append(query)
        return forward(self, query, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(DotProductAttention, "forward", record)
    logits(model)
    logits(plain)
    with_factor, without = queries[:2], queries[2:]
    assert torch.equal(with_factor[0], without[0]), "rotary layers have none"
    expected = [1 + 0.5 * math.log(1 + (position + 1) // 6) for position in range(16)]
    torch.testing.assert_close(
        with_factor[1] / without[1], torch.tensor(expected).view(-1, 1, 1, 1).expand(16, 2, 4, 8)
    )


@pytest.mark.flags("--attn-temperature-layers")
def test_the_factor_in_all_layers() -> None:
    """Ministral 3's counts from position 0; in generation it is that of the positions, whatever is read at once."""
    model = build_model(f"{ROPE} --attn-temperature-layers all --attn-temperature-scale 2 --attn-temperature-floor 6")
    plain = build_model(ROPE).eval()
    plain.load_state_dict(model.eval().state_dict())
    found, expected = logits(model), logits(plain)
    # The first layer's factor is 1 up to position 5; then all that follows differs.
    torch.testing.assert_close(found[:, :6], expected[:, :6])
    assert ((found - expected)[:, 6:].abs().amax(-1) > 1e-4).all()
    torch.testing.assert_close(logits(model, 4, 3, 9), found, rtol=1e-4, atol=1e-5)


@pytest.mark.flags("--qk-norm-after-rotation")
def test_norms_of_queries_and_keys_behind_the_rotation() -> None:
    model = build_model(f"{ROPE} --qk-layernorm --qk-norm-after-rotation").eval()
    before = build_model(f"{ROPE} --qk-layernorm").eval()
    before.load_state_dict(model.state_dict())
    # Without weights the order would be the same: a rotation keeps the mean square.
    with torch.no_grad():
        for each in (model, before):
            for layer in each.decoder.layers:
                layer.self_attention.q_layernorm.weight.copy_(torch.linspace(0.5, 2.0, 8))
    found = logits(model)
    assert (found - logits(before)).abs().max() > 1e-3
    torch.testing.assert_close(logits(model, 4, 3, 9), found, rtol=1e-4, atol=1e-5)


@pytest.mark.flags("--qk-l2-norm-layers")
def test_which_layers_normalise() -> None:
    for layers, expected in (("all", [True, True]), ("rotary", [True, False])):
        model = build_model(f"{ROPE} --no-rope-freq 2 --qk-l2-norm --qk-l2-norm-layers {layers}")
        norms = [layer.self_attention.q_layernorm for layer in model.decoder.layers]
        assert [isinstance(norm, HeadL2Norm) for norm in norms] == expected
    assert first_attention(model).k_layernorm is not None


@pytest.mark.flags("--rope-scaling-high-freq-factor")
def test_the_blend_of_scaled_frequencies() -> None:
    flags = "--position-embedding-type rope --kv-channels 64 --rotary-base 500000 --use-rope-scaling"
    plain = build_model(flags.replace("--use-rope-scaling", "")).rotary_pos_emb.inv_freq
    blended = build_model(flags).rotary_pos_emb.inv_freq
    scaled = build_model(f"{flags} --rope-scaling-high-freq-factor 1").rotary_pos_emb.inv_freq
    # Nothing in between: either kept, or divided by the factor.
    turns = 8192 * plain / (2 * math.pi)
    torch.testing.assert_close(scaled, torch.where(turns < 1, plain / 8, plain))
    assert ((turns > 1) & (turns < 4) & (blended != plain)).any()


def test_floating_point_operations_of_chunks() -> None:
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}

    def count(length: int, **fields: int) -> int:
        config = TransformerConfig(**sizes, **fields)
        return count_training_flops_per_token(config, seq_length=length, padded_vocab_size=128)

    # What does not depend on the length is left out: 6 x 2 x hidden size / 2 for each token that is seen.
    assert count(128, attention_chunk_size=32) == count(32)
    assert count(128, attention_chunk_size=32, window_attn_skip_freq=4) - count(32) == 6 * 64 * (128 - 32)
    assert count(40, attention_chunk_size=32) - count(32) == 4 * 6 * 64 * ((32 * 32 + 8 * 8) // 40 - 32)
    assert count(32, attention_chunk_size=64) == count(32)


def test_floating_point_operations_of_windows() -> None:
    def count(length: int, *, sees_all: bool = False, **fields: Any) -> int:
        config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **fields)
        return count_training_flops_per_token(config, seq_length=length, padded_vocab_size=128, sees_all=sees_all)

    # A token sees 32 with itself; those at the beginning see fewer: the corner of a triangle is missing.
    seen = (128**2 - (128 - 32) ** 2) // 128
    assert count(128, window_size=(31, 0)) == count(128) - 4 * 6 * 64 * (128 - seen)
    assert count(128, window_size=(31, 0), window_attn_skip_freq=4) == count(128) - 3 * 6 * 64 * (128 - seen)
    assert count(128, window_size=(127, 0)) == count(128, window_size=(-1, 0)) == count(128)
    for fields in ({"window_size": (31, 0)}, {"attention_chunk_size": 32}):
        assert count(128, sees_all=True, **fields) == count(128), "as the reference counts"


def test_the_log_has_the_figure_of_the_reference_beside_ours() -> None:
    def describe(flags: str) -> dict[str, str]:
        config = read_config(f"{ROPE} {flags}")
        return dict(
            describe_gpt_operations(config, 64, [build_model(f"{ROPE} {flags}")], pretend(), torch.device("cpu"))
        )

    assert "which does not know windows and chunks, counts" in describe("--window-size 7,0")["work"]
    assert "work" not in describe("") and "work" not in describe("--window-size 15,0"), "the same number"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--attention-chunk-size 8 --window-size 7,0", "--window-size 7,0 and --attention-chunk-size 8 contradict"),
        ("--attention-chunk-size 0", "--attention-chunk-size 0 is out of range"),
        ("--attn-temperature-scale -1", "--attn-temperature-scale -1 is out of range"),
        (
            "--use-rope-scaling --rope-scaling-high-freq-factor 0.5",
            "--rope-scaling-high-freq-factor 0.5 is out of range",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(f"{ROPE} --no-rope-freq 2 {flags}")
    assert any(message in problem for problem in caught.value.problems), caught.value.problems
