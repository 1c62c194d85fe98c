# SPDX-License-Identifier: Apache-2.0
"""Flags of attention and positions, each attention backend against the plain reference, and the cache protocol."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.transformer.core_attention import query_blocks
from megatron.core.transformer.core_attention.interface import AttentionInputs, AttentionOptions, Visible
from megatron.core.transformer.core_attention.local import LocalAttention
from megatron.core.transformer.core_attention.sdpa import SDPAttention
from megatron.core.transformer.execution.operations import describe_operations
from tests.support.gpt_models import (
    SEQUENCE_LENGTH,
    assert_same_function,
    build_model,
    first_attention,
    losses_and_grads,
    read_config,
    token_batch,
)

ROPE = "--position-embedding-type rope"


def logits(model: GPTModel, **named: object) -> Tensor:
    ids, positions, _ = token_batch()
    return model(ids, positions, **named)


# ---- backends


@pytest.mark.flags("--attention-backend")
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("backend", ["auto", "flash", "unfused"])
def test_backends_equal_the_reference(backend: str, groups: int) -> None:
    flags = f"--group-query-attention --num-query-groups {groups}"
    ours = build_model(f"{flags} --attention-backend {backend}")
    local = build_model(f"{flags} --attention-backend local")
    assert isinstance(first_attention(local).core_attention.backend, LocalAttention)
    assert backend in first_attention(ours).core_attention.backend.name or backend == "auto"
    assert_same_function(ours, local)


@pytest.mark.flags("--use-flash-attn")
def test_use_flash_attn_means_the_flash_backend() -> None:
    assert "flash" in first_attention(build_model("--use-flash-attn")).core_attention.backend.name


def test_backends_that_cannot_refuse() -> None:
    with pytest.raises(ConfigError, match="--attention-dropout is 0.1"):
        build_model("--attention-backend flash --attention-dropout 0.1")
    with pytest.raises(ConfigError, match="--attention-backend fused needs a GPU"):
        build_model("--attention-backend fused")


def test_auto_on_the_cpu_goes_by_blocks_only_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(query_blocks, "blocked_causal_attention", lambda q, *rest: called.append(q.shape) or q)
    backend = query_blocks.CPUAttention(AttentionOptions.from_config(read_config("--attention-dropout 0.1").model, 1))
    q, few = torch.randn(6, 2, 4, 8), torch.randn(6, 2, 2, 8)
    longer, mask = torch.randn(7, 2, 4, 8), torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    backend(AttentionInputs(q, q, q))
    assert called == [q.shape]
    backend(AttentionInputs(q, q, q, training=True))  # dropout
    backend(AttentionInputs(q, few, few))  # groups
    backend(AttentionInputs(q, longer, longer))  # a cache
    backend(AttentionInputs(q, q, q, Visible.build(mask)))
    backend(AttentionInputs(*[q.bfloat16()] * 3))
    backend(AttentionInputs(*[torch.randn(2100, 1, 8, 2)] * 3))  # 71 MB of probabilities
    assert len(called) == 1


def test_the_reference_is_the_formula() -> None:
    q, k, v = (torch.randn(5, 2, 3, 8) for _ in range(3))
    options = AttentionOptions.from_config(read_config("").model, 1)
    found = LocalAttention(options)(AttentionInputs(q, k, v, training=True))
    for batch in range(2):
        for head in range(3):
            scores = q[:, batch, head] @ k[:, batch, head].t() / 8**0.5
            scores[torch.ones(5, 5, dtype=torch.bool).triu(1)] = float("-inf")
            expected = scores.softmax(-1) @ v[:, batch, head]
            torch.testing.assert_close(found[:, batch, head * 8 : head * 8 + 8], expected)


@pytest.mark.parametrize("backend", ["auto", "unfused", "local"])
def test_attention_mask(backend: str) -> None:
    """A causal mask handed over changes nothing; one that hides the first half makes the second independent of it."""
    model = build_model(f"--attention-backend {backend} --position-embedding-type rope")
    causal = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool).triu(1)
    torch.testing.assert_close(logits(model, attention_mask=causal), logits(model))
    half = SEQUENCE_LENGTH // 2
    documents = causal.clone().expand(2, -1, -1, -1).clone()
    documents[..., half:, :half] = True
    ids, positions, _ = token_batch()
    other = ids.clone()
    other[:, :half] = (other[:, :half] + 1) % 64
    kept, changed = (model(x, positions, attention_mask=documents) for x in (ids, other))
    torch.testing.assert_close(kept[:, half:], changed[:, half:])
    assert not torch.allclose(kept[:, :half], changed[:, :half])


@pytest.mark.flags("--attention-dropout")
@pytest.mark.parametrize("backend", ["auto", "local"])
def test_attention_dropout(backend: str) -> None:
    model = build_model(f"--attention-dropout 0.5 --attention-backend {backend}")
    assert not torch.equal(losses_and_grads(model)[0], losses_and_grads(model)[0])
    model.eval()
    evaluated = losses_and_grads(model)[0]
    assert torch.equal(evaluated, losses_and_grads(model)[0])
    plain = build_model(f"--attention-backend {backend}")
    torch.testing.assert_close(losses_and_grads(plain)[0], evaluated)


@pytest.mark.flags("--attention-softmax-in-fp32")
def test_softmax_in_fp32() -> None:
    torch.manual_seed(0)
    q, k, v = (2 * torch.randn(16, 2, 4, 8, dtype=torch.bfloat16) for _ in range(3))
    exact = SDPAttention(AttentionOptions.from_config(read_config("").model, 1), "unfused")(
        AttentionInputs(q.double(), k.double(), v.double())
    )

    def error(flags: str) -> float:
        options = AttentionOptions.from_config(read_config(f"--attention-backend local {flags}").model, 1)
        return (LocalAttention(options)(AttentionInputs(q, k, v)).double() - exact).abs().mean().item()

    assert error("--bf16 --attention-softmax-in-fp32") < error("--bf16")


@pytest.mark.flags("--apply-query-key-layer-scaling")
def test_query_key_layer_scaling_saves_float16_scores_from_overflow() -> None:
    q = torch.full((4, 1, 1, 8), 160.0, dtype=torch.float16)
    v = torch.randn(4, 1, 1, 8, dtype=torch.float16)

    def attend(flags: str) -> Tensor:
        config = read_config(f"--attention-backend local {flags}").model
        return LocalAttention(AttentionOptions.from_config(config, layer_number=8))(AttentionInputs(q, q, v))

    assert not attend("").isfinite().all()
    means = torch.stack([v[: i + 1].float().mean(0) for i in range(4)]).flatten(2)  # equal scores: running means
    torch.testing.assert_close(attend("--apply-query-key-layer-scaling").float(), means, rtol=2e-3, atol=2e-3)


def test_query_key_layer_scaling_changes_nothing_else() -> None:
    flags = "--attention-backend local"
    assert_same_function(build_model(flags), build_model(f"{flags} --apply-query-key-layer-scaling"))


@pytest.mark.flags("--qk-layernorm")
def test_qk_layernorm() -> None:
    model = build_model(f"--qk-layernorm --normalization RMSNorm {ROPE}")
    attention = first_attention(model)
    assert attention.q_layernorm.weight.shape == attention.k_layernorm.weight.shape == (8,)
    query, key, _ = attention.get_query_key_value_tensors(torch.randn(4, 2, 32))
    torch.testing.assert_close(query.square().mean(-1), torch.ones(4, 2, 4), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(key.square().mean(-1), torch.ones(4, 2, 4), rtol=1e-2, atol=1e-2)
    _, grads = losses_and_grads(model)
    assert grads["decoder.layers.0.self_attention.q_layernorm.weight"].any()


@pytest.mark.flags("--qk-l2-norm")
def test_qk_l2_norm() -> None:
    """Without weights; rotation leaves the size of a head as it is."""
    flags = f"--norm-epsilon 1e-3 {ROPE}"
    model, plain = build_model(f"--qk-l2-norm {flags}"), build_model(flags)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    x = torch.randn(4, 2, 32)
    found, raw = (first_attention(built).get_query_key_value_tensors(x) for built in (model, plain))
    for normalised, given in zip(found[:2], raw[:2], strict=True):
        torch.testing.assert_close(normalised, given / (given.square().mean(-1, keepdim=True) + 1e-3).sqrt())
    assert torch.equal(found[2], raw[2])
    assert not torch.equal(logits(model), logits(plain))
    with pytest.raises(ConfigError, match="--qk-layernorm and --qk-l2-norm contradict each other"):
        read_config("--qk-layernorm --qk-l2-norm")


# ---- positions


@pytest.mark.flags("--position-embedding-type", "--use-rotary-position-embeddings", "--no-position-embedding")
def test_position_kinds() -> None:
    learned, rope = build_model(""), build_model(ROPE)
    assert learned.rotary_pos_emb is None and learned.embedding.position_embeddings is not None
    assert rope.rotary_pos_emb is not None and rope.embedding.position_embeddings is None
    assert build_model("--use-rotary-position-embeddings").rotary_pos_emb is not None
    for flags in ("--position-embedding-type none", "--no-position-embedding"):
        model = build_model(flags)
        assert model.rotary_pos_emb is None and model.embedding.position_embeddings is None
        # Without positions, and with every earlier token equal, order cannot matter.
        ids = torch.tensor([[5, 5, 5, 7], [5, 5, 5, 7]])
        out = model(ids, torch.arange(4).expand(2, -1))
        torch.testing.assert_close(out[:, 0], out[:, 2])
    for model in (learned, rope):
        ids = torch.tensor([[5, 7, 5, 7]])
        out = model(ids, torch.arange(4)[None])
        assert not torch.allclose(out[:, 1], out[:, 3])


def test_learned_positions_follow_the_position_ids() -> None:
    model = build_model("")
    ids, positions, _ = token_batch()
    assert not torch.allclose(model(ids, positions), model(ids, positions.flip(1)))
    with pytest.raises(ConfigError, match="17 tokens is longer than --max-position-embeddings 16"):
        model(torch.zeros(1, 17, dtype=torch.long), torch.arange(17)[None])


@pytest.mark.flags("--rotary-base", "--rotary-percent", "--rotary-interleaved", "--rotary-seq-len-interpolation-factor")
def test_rotary_options() -> None:
    rope = build_model(ROPE).rotary_pos_emb
    assert rope is not None
    torch.testing.assert_close(rope.compute_angles(4)[3], 3 * 10000 ** -(torch.arange(4) / 4))
    base = build_model(f"{ROPE} --rotary-base 500").rotary_pos_emb
    torch.testing.assert_close(base.compute_angles(4)[3], 3 * 500 ** -(torch.arange(4) / 4))
    stretched = build_model(f"{ROPE} --rotary-seq-len-interpolation-factor 4").rotary_pos_emb
    torch.testing.assert_close(stretched.compute_angles(9)[8], rope.compute_angles(9)[2])
    assert build_model(f"{ROPE} --rotary-percent 0.5").rotary_pos_emb.build_rotation(3).channels == 4

    x = torch.randn(3, 2, 32)
    plain = first_attention(build_model(ROPE))
    for flags, pairs in (("", ([0, 1], [4, 5])), ("--rotary-percent 0.5 --rotary-interleaved", ([0, 2], [1, 3]))):
        model = build_model(f"{ROPE} {flags}")
        unrotated = plain.get_query_key_value_tensors(x)[0]
        rotated = first_attention(model).get_query_key_value_tensors(
            x, rotation=model.rotary_pos_emb.build_rotation(3)
        )[0]
        first, second = pairs
        for one, two in zip(first, second, strict=True):  # rotation keeps the length of each pair
            before = unrotated[..., one] ** 2 + unrotated[..., two] ** 2
            torch.testing.assert_close(rotated[..., one] ** 2 + rotated[..., two] ** 2, before)
            assert not torch.allclose(rotated[1:, ..., one], unrotated[1:, ..., one])
        if "percent" in flags:
            torch.testing.assert_close(rotated[..., 4:], unrotated[..., 4:])


# ---- the cache protocol


class GrowingCache:
    """The smallest key-value cache: keeps lists."""

    max_tokens = 64

    def __init__(self) -> None:
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer_number: int, key: Tensor, value: Tensor) -> list[tuple[slice, tuple[Tensor, ...]]]:
        if layer_number in self.held:
            key, value = (torch.cat(pair) for pair in zip(self.held[layer_number], (key, value), strict=True))
        self.held[layer_number] = (key, value)
        rows = zip(key.split(1, dim=1), value.split(1, dim=1), strict=True)
        return [(slice(row, row + 1), held) for row, held in enumerate(rows)]

    def find_padding(self, layer_number: int) -> None:
        """Nothing that is held is padding."""


@pytest.mark.parametrize("backend", ["auto", "local"])
@pytest.mark.parametrize("flags", ["", f"{ROPE} --group-query-attention --num-query-groups 2 --swiglu"])
@pytest.mark.parametrize("steps", [[16], [5, 1, 1, 9], [1] * 16])
def test_cache_gives_what_full_recomputation_gives(flags: str, steps: list[int], backend: str) -> None:
    model = build_model(f"{flags} --attention-backend {backend}").eval()
    ids, positions, _ = token_batch()
    cache, outputs, done = GrowingCache(), [], 0
    with torch.no_grad():
        expected = model(ids, positions)
        for count in steps:
            part = slice(done, done + count)
            cache.layout = TokenLayout((count,) * len(ids), (done,) * len(ids), is_packed=False)
            outputs.append(model(ids[:, part], positions[:, part], inference_context=cache))
            done += count
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-4, atol=1e-5)


# ---- what the log says


def test_describe_operations() -> None:
    fused = describe_operations(read_config("--swiglu --normalization RMSNorm").model)
    assert fused["activation"] == "gated silu, fused, keeps only its input"
    assert fused["linear"].startswith("torch matmul, weight gradient added into main_grad")
    assert fused["attention"].startswith("blocks of queries") and fused["layers"] == "eager"
    plain = describe_operations(
        read_config(
            "--no-gradient-accumulation-fusion --no-bias-gelu-fusion --attention-backend local --no-persist-layer-norm"
        ).model
    )
    assert plain["activation"] == "gelu, elementary operations"
    assert plain["norm"] == "LayerNorm, elementary operations"
    assert plain["attention"].startswith("local reference")
    assert plain["linear"].endswith("by autograd")
