# SPDX-License-Identifier: Apache-2.0
"""Windows, sinks, bounded scores, output gate: each against the formula written out, on every backend that has them."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.plan.read import read_plan
from megatron.core.sequences.state import SequenceState
from megatron.core.transformer.core_attention import query_blocks, sdpa
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.core_attention.interface import (
    AttentionBackend,
    AttentionInputs,
    AttentionOptions,
    Visible,
    build_causal_mask,
)
from megatron.core.transformer.core_attention.local import LocalAttention
from megatron.core.transformer.core_attention.query_blocks import CPUAttention, QueryBlocksAttention
from megatron.core.transformer.core_attention.sdpa import SDPAttention
from megatron.core.transformer.execution.operations import describe_operations
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import print_settings
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
WINDOW, CAP, SCALE = 3, 1.5, 0.7
OPTIONS = {
    "window": f"--window-size {WINDOW},0",
    "cap": f"--attn-logit-softcapping {CAP}",
    "scale": f"--softmax-scale {SCALE}",
    "off-by-one": "--softmax-type off-by-one",
    "learnable": "--softmax-type learnable",
    "all": f"--window-size {WINDOW},0 --attn-logit-softcapping {CAP} --softmax-scale {SCALE} --softmax-type learnable",
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several blocks."""
    monkeypatch.setattr(query_blocks, "_BLOCK", 5)
    monkeypatch.setattr(sdpa, "_SMALLEST_BLOCK", 5)


def written_out(query: Tensor, key: Tensor, value: Tensor, flags: str, sinks: Tensor | None) -> Tensor:
    """One query and one key at a time, float64: query [s, b, n, d], key and value [t, b, g, d] -> [s, b, n * d]."""
    per_group = query.shape[2] // key.shape[2]
    scale = SCALE if "--softmax-scale" in flags else query.shape[-1] ** -0.5
    out = torch.zeros_like(query)
    for b in range(query.shape[1]):
        for n in range(query.shape[2]):
            for i in range(query.shape[0]):
                position = i + key.shape[0] - query.shape[0]
                first = max(0, position - WINDOW) if "--window-size" in flags else 0
                seen = slice(first, position + 1)
                scores = key[seen, b, n // per_group] @ query[i, b, n] * scale
                if "softcapping" in flags:
                    scores = CAP * (scores / CAP).tanh()
                weights = scores.exp()
                total = weights.sum() + (0 if sinks is None else sinks[n].exp())
                out[i, b, n] = weights @ value[seen, b, n // per_group] / total
    return out.flatten(2)


def attention(flags: str, backend: str) -> DotProductAttention:
    config = read_config(
        f"--num-attention-heads 4 --group-query-attention --num-query-groups 2 --attention-backend {backend} {flags}"
    )
    core = DotProductAttention(config.model, 1)
    for param in core.parameters():
        torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(3))
    return core


@pytest.mark.flags("--window-size", "--attn-logit-softcapping", "--softmax-scale", "--softmax-type")
@pytest.mark.parametrize("queries", [16, 7, 1])
@pytest.mark.parametrize("backend", ["auto", "local", "unfused"])
@pytest.mark.parametrize("option", OPTIONS)
def test_attention_is_the_formula(option: str, backend: str, queries: int) -> None:
    """Output and gradients; fewer queries than keys as with a cache."""
    flags = OPTIONS[option]
    if backend == "unfused" and option not in ("window", "scale"):
        with pytest.raises(ConfigError, match="--attention-backend unfused: .* use --attention-backend auto"):
            attention(flags, backend)
        return
    core = attention(flags, backend)
    generator = torch.Generator().manual_seed(1)
    shapes = (queries, 2, 4, 8), (16, 2, 2, 8), (16, 2, 2, 8)
    ours = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in ours]
    sinks = torch.zeros(4).double() if "off-by-one" in flags else None
    if core.softmax_offset is not None:
        sinks = core.softmax_offset.detach().double().requires_grad_()
    found, expected = core(*ours), written_out(*exact, flags, sinks)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(found.shape, generator=generator)
    found.backward(grad)
    expected.backward(grad.double())
    pairs = list(zip(ours, exact, strict=True))
    if core.softmax_offset is not None:
        pairs.append((core.softmax_offset, sinks))
    for x, y in pairs:
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-6)


def test_auto_takes_blocks_where_torchs_operator_cannot() -> None:
    assert isinstance(attention(OPTIONS["learnable"], "auto").backend, QueryBlocksAttention)
    assert isinstance(attention(OPTIONS["window"], "auto").backend, CPUAttention)
    assert isinstance(attention(OPTIONS["window"], "unfused").backend, SDPAttention)
    with pytest.raises(ConfigError, match="flash has neither windows .* nor sinks .* on the CPU; use --att"):
        attention(OPTIONS["window"], "flash")
    with pytest.raises(ConfigError, match=r"fused: the cuDNN kernel has no sliding window \(--window-size\)"):
        attention(OPTIONS["window"], "fused")
    named = describe_operations(read_config("--window-size 3,0 --window-attn-skip-freq 2").model)["attention"]
    assert named.count(";") == 1, "the log names both kinds of layer"


@pytest.mark.parametrize("backend", ["auto", "local", "unfused"])
def test_a_mask_hides_more_than_the_window(backend: str) -> None:
    core = attention(OPTIONS["window"], backend)
    q, k, v = (torch.randn(16, 2, heads, 8) for heads in (4, 2, 2))
    causal = build_causal_mask(16, 16, q.device)[None, None]
    torch.testing.assert_close(core(q, k, v, causal), core(q, k, v))
    everything = torch.zeros(1, 1, 16, 16, dtype=torch.bool)
    torch.testing.assert_close(core(q, k, v, everything), core(q, k, v))
    hidden = torch.zeros(2, 1, 16, 16, dtype=torch.bool)
    hidden[1, :, 8:, :8] = True
    found, whole = core(q, k, v, hidden), core(q, k, v)
    torch.testing.assert_close(found[:, 0], whole[:, 0])
    torch.testing.assert_close(found[8:, 1], core(q[8:], k[8:], v[8:])[:, 1])


def test_blocks_take_a_mask_that_is_not_causal() -> None:
    q, k, v = (torch.randn(12, 2, 4, 8) for _ in range(3))
    mask = (torch.rand(2, 1, 12, 12) < 0.4) & ~torch.eye(12, dtype=torch.bool)
    options = AttentionOptions.from_config(read_config(OPTIONS["cap"]).model, 1)
    inputs = AttentionInputs(q, k, v, Visible.build(mask))
    found, expected = (kind(options)(inputs) for kind in (QueryBlocksAttention, LocalAttention))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_windows_within_documents() -> None:
    core = attention(OPTIONS["all"], "auto")
    q, k, v = (torch.randn(16, 1, heads, 8) for heads in (4, 2, 2))
    bounds = (0, 6, 7, 16)
    alone = [core(q[a:b], k[a:b], v[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    torch.testing.assert_close(
        core(q, k, v, packed_seq_params=PackedSeqParams(cu_seqlens_q=torch.tensor(bounds))), torch.cat(alone)
    )


def test_dropout_of_blocks_is_for_training_and_its_gradient_true() -> None:
    core = attention(f"{OPTIONS['all']} --attention-dropout 0.5", "auto")
    q, k, v = (torch.randn(12, 1, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    core.eval()
    assert torch.equal(core(q, k, v), core(q, k, v))
    core.train()

    def drawn(value: Tensor) -> Tensor:
        torch.manual_seed(5)
        return core(q, k, value)

    assert not torch.equal(drawn(v), core(q, k, v))
    # Linear in the values for fixed dropout: the gradient is that of the very mask that forward drew.
    direction = torch.randn_like(v)
    (grad,) = torch.autograd.grad(drawn(v).sum(), v)
    difference = (drawn(v + direction) - drawn(v)).sum()
    torch.testing.assert_close((grad * direction).sum(), difference, rtol=1e-4, atol=1e-4)


def test_memory_of_a_window_grows_with_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of scores has as many columns as a window and a block, not as the sequence."""
    monkeypatch.setattr(query_blocks, "_BLOCK", 16)
    monkeypatch.setattr(sdpa, "_SMALLEST_BLOCK", 16)
    backend = QueryBlocksAttention(AttentionOptions.from_config(read_config("--window-size 20,0").model, 1))
    widths = []
    scores = backend.kernel._scores
    monkeypatch.setattr(backend.kernel, "_scores", lambda q, k: widths.append(k.shape[-2]) or scores(q, k))
    q = torch.randn(400, 1, 1, 4, requires_grad=True)

    def attend(backend: AttentionBackend, queries: Tensor, keys: Tensor) -> Tensor:
        visible = Visible.build(None, window=backend.options.window)
        return backend(AttentionInputs(queries, keys, keys, visible, training=True))

    attend(backend, q, q).sum().backward()
    assert max(widths) == 36 and len(widths) == 2 * 25

    spans = []
    operator = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, *rest, **named: spans.append((q.shape[-2], k.shape[-2])) or operator(q, k, *rest, **named),
    )
    by_operator = SDPAttention(backend.options, "auto")
    attend(by_operator, q, q)
    assert spans[:3] == [(16, 16), (16, 32), (16, 36)] and spans[-1] == (16, 36) and len(spans) == 25
    spans.clear()
    attend(by_operator, q[-1:], q)
    attend(by_operator, q[:21], q[:21])
    assert spans == [(1, 21), (21, 21)], "one step of generation; a window that reaches everything"


# ---- which layers


def patterns(flags: str, layers: int = 4) -> list[int | None]:
    config = read_config(f"--num-layers {layers} {flags}").model
    return [layer.options.window for layer in read_plan(config).decoder]


@pytest.mark.flags("--window-attn-skip-freq")
def test_which_layers_have_the_window() -> None:
    assert patterns("") == [None] * 4
    assert patterns("--window-size 7,0") == [7] * 4
    assert patterns("--window-size -1,0") == [None] * 4
    assert patterns("--window-size 7,0 --window-attn-skip-freq 2") == [7, None, 7, None]
    assert patterns("--window-size 7,-1 --window-attn-skip-freq 3") == [7, 7, None, 7]
    assert patterns("--window-size (7,0) --window-attn-skip-freq [0]+[1]*2+[0]") == [None, 7, 7, None]
    model = build_model("--window-size 7,0 --window-attn-skip-freq [0,1]")
    backends = [layer.self_attention.core_attention.backend for layer in model.decoder.layers]
    assert [backend.options.window for backend in backends] == [None, 7]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--window-size 7,1", "--window-size 7,1 is not a window of a causal model"),
        ("--window-size -2,0", "--window-size -2,0 is not a window"),
        ("--window-size 7", "--window-size 7 is not valid; give two whole numbers"),
        ("--window-size 7,0 --window-attn-skip-freq 0", "--window-attn-skip-freq 0 is not every n-th layer"),
        ("--window-size 7,0 --window-attn-skip-freq [1]", "lists 1 layers, and --num-layers is 2"),
        ("--window-size 7,0 --window-attn-skip-freq [1,2]", "--window-attn-skip-freq lists 2; use only 0 and 1"),
        (f"{ROPE} --no-rope-freq 3", "--no-rope-freq 3 does not divide --num-layers 2"),
        (f"{ROPE} --no-rope-freq [0,1,0]", "--no-rope-freq lists 3 layers"),
        (f"{ROPE} --attn-logit-softcapping 0", "--attn-logit-softcapping 0 is out of range"),
        ("--position-embedding-type yarn", "needs --yarn-original-max-position-embeddings"),
        ("--position-embedding-type yarn --rope-type rope", "contradict each other"),
        ("--position-embedding-type yarn --use-rope-scaling", "both scale rotary frequencies"),
    ],
)
def test_what_is_no_pattern_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(flags)
    assert any(message in problem for problem in caught.value.problems), caught.value.problems


def test_windows_and_patterns_are_printed_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of a checkpoint, which holds lists."""
    config = read_config("--window-size 7,0 --window-attn-skip-freq [1]+[0]")
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    for each in (config, again):
        print_settings(each, sys.stdout)
        printed = capsys.readouterr().out
        assert re.search(r"--window-size +7,0 ", printed) and re.search(r"--window-attn-skip-freq +\[1,0\] ", printed)


def test_flags_without_effect_are_noted() -> None:
    notes = read_config("--window-attn-skip-freq 2 --rotary-base-local 500 --no-rope-freq 2 --mscale 0.5").notes
    for flag in ("--window-attn-skip-freq 2", "--rotary-base-local 500", "--no-rope-freq 2", "--mscale 0.5"):
        assert any(note.startswith(f"{flag} has no effect without") for note in notes), (flag, notes)


@pytest.mark.flags("--no-rope-freq", "--rotary-base-local")
def test_which_layers_are_rotated() -> None:
    config = read_config(f"{ROPE} --num-layers 6 --window-size 4,0 --window-attn-skip-freq 2 --no-rope-freq 3").model
    assert [layer.options.rotary for layer in read_plan(config).decoder] == ["global", "global", "none"] * 2
    config = read_config(f"{ROPE} --num-layers 4 --window-size 4,0 --window-attn-skip-freq 2 --rotary-base-local 50")
    kinds = [layer.options.rotary for layer in read_plan(config.model).decoder]
    assert kinds == ["local", "global"] * 2
    # All layers skipped is no rotary positions at all; with the same base local layers are as the others.
    assert_same_function(build_model("--no-position-embedding"), build_model(f"{ROPE} --no-rope-freq 1"))
    local = f"{ROPE} --window-size 4,0"
    assert_same_function(build_model(f"{local} --rotary-base 50"), build_model(f"{local} --rotary-base-local 50"))


# ---- the whole model


@pytest.mark.flags("--attention-output-gate")
@pytest.mark.parametrize("groups", [4, 2])
def test_attention_output_gate(groups: int) -> None:
    """Gates lie between a group's queries and its key; closed by a bias they halve, opened they do nothing."""
    flags = f"{ROPE} --group-query-attention --num-query-groups {groups} --add-qkv-bias"
    plain, gated = build_model(flags), build_model(f"{flags} --attention-output-gate")
    own, theirs = first_attention(gated), first_attention(plain)
    heads = 4 // groups
    assert own.linear_qkv.weight.shape == ((2 * 4 + 2 * groups) * 8, 32)
    for wide, narrow in zip(gated.decoder.layers, plain.decoder.layers, strict=True):
        for name in ("weight", "bias"):
            target = getattr(wide.self_attention.linear_qkv, name).data.unflatten(0, (groups, -1, 8))
            source = getattr(narrow.self_attention.linear_qkv, name).data.unflatten(0, (groups, -1, 8))
            target[:, :heads], target[:, 2 * heads :] = source[:, :heads], source[:, heads:]
            target[:, heads : 2 * heads] = 0.0
            wide.self_attention.linear_proj.weight.data.copy_(2 * narrow.self_attention.linear_proj.weight)
    rest = {
        name: x for name, x in plain.state_dict().items() if "linear_qkv" not in name and "linear_proj.w" not in name
    }
    gated.load_state_dict(rest, strict=False)
    torch.testing.assert_close(losses_and_grads(gated)[0], losses_and_grads(plain)[0])
    x = torch.randn(5, 2, 32)
    before = own(x)[0]
    own.linear_qkv.bias.data.unflatten(0, (groups, -1, 8))[:, heads : 2 * heads] = -30.0
    assert own(x)[0].abs().max() < 1e-6 < before.abs().max()
    assert not own.is_rope_fused and theirs.is_rope_fused


@pytest.mark.flags("--final-logit-softcapping")
def test_final_logit_softcapping() -> None:
    ids, positions, labels = token_batch()
    plain, capped = build_model(), build_model("--final-logit-softcapping 0.02")
    logits = plain(ids, positions)
    bounded = 0.02 * (logits / 0.02).tanh()
    torch.testing.assert_close(capped(ids, positions), bounded)
    assert logits.abs().max() > 0.03
    expected = torch.nn.functional.cross_entropy(bounded.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(capped(ids, positions, labels=labels).flatten(), expected)


MODERN = (
    f"{ROPE} --group-query-attention --num-query-groups 2 {OPTIONS['all']} --window-attn-skip-freq 2 "
    "--rotary-base-local 50 --attention-output-gate --final-logit-softcapping 3 --num-layers 4 "
    "--no-rope-freq [0,0,0,1]"
)
YARN = "--position-embedding-type yarn --yarn-original-max-position-embeddings 8 --rotary-scaling-factor 4"


@pytest.mark.parametrize("backend", ["auto", "local"])
@pytest.mark.parametrize("flags", [MODERN, YARN, f"{YARN} --window-size 4,0"])
@pytest.mark.parametrize("steps", [[16], [5, 1, 1, 9], [1] * 16])
def test_cache_gives_what_full_recomputation_gives(flags: str, steps: list[int], backend: str) -> None:
    model = build_model(f"{flags} --attention-backend {backend}").eval()
    for name, param in model.named_parameters():
        if "softmax_offset" in name:
            torch.nn.init.normal_(param)
    ids, positions, _ = token_batch()
    cache, outputs, done = SequenceState(len(ids), SEQUENCE_LENGTH), [], 0
    with torch.inference_mode():
        expected = model(ids, positions)
        for count in steps:
            part = slice(done, done + count)
            cache.begin([count] * len(ids))
            outputs.append(model(ids[:, part], positions[:, part], inference_context=cache))
            done += count
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_backends_agree_on_all_options_at_once() -> None:
    ours, local = build_model(MODERN), build_model(f"{MODERN} --attention-backend local")
    assert_same_function(ours, local)


def test_the_bound_is_on_whole_scores_with_layer_scaling() -> None:
    """Scores are divided by the layer number for storage only: the bound comes after they are multiplied back."""
    q, k, v = (3 * torch.randn(8, 1, 4, 8) for _ in range(3))
    flags = ("", "--apply-query-key-layer-scaling")
    options = (AttentionOptions.from_config(read_config(f"{OPTIONS['cap']} {flag}").model, 5) for flag in flags)
    plain, scaled = (LocalAttention(each)(AttentionInputs(q, k, v)) for each in options)
    torch.testing.assert_close(scaled, plain)


def test_bfloat16_blocks_stay_near() -> None:
    core = attention(OPTIONS["all"], "auto")
    q, k, v = (torch.randn(16, 2, heads, 8) for heads in (4, 2, 2))
    found = core(*(x.bfloat16() for x in (q, k, v)))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), core(q, k, v), rtol=0.05, atol=0.05)


# ---- rotary flags


@pytest.mark.flags("--use-rope-scaling", "--rope-scaling-factor")
def test_rope_scaling() -> None:
    plain = build_model(ROPE).rotary_pos_emb.inv_freq
    scaled = build_model(f"{ROPE} --use-rope-scaling --rotary-base 500000").rotary_pos_emb.inv_freq
    other = build_model(f"{ROPE} --use-rope-scaling --rotary-base 500000 --rope-scaling-factor 32").rotary_pos_emb
    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[3], 500000 ** torch.tensor(-0.75) / 8)
    torch.testing.assert_close(other.inv_freq[3], scaled[3] / 4)


@pytest.mark.flags(
    "--rope-type", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim", "--yarn-beta-fast", "--yarn-beta-slow",
    "--yarn-original-max-position-embeddings", "--yarn-correction-range-round-to-int",
)  # fmt: skip
def test_yarn_flags() -> None:
    """Against the reference's numbers in tests/golden/test_rope.py; here that each flag arrives."""
    base = build_model(f"--num-attention-heads 1 {YARN}").rotary_pos_emb
    assert base.mscale == pytest.approx(0.1 * torch.tensor(4.0).log().item() + 1)
    assert base.build_rotation(3).cos[0, 0] == pytest.approx(base.mscale)
    assert base.inv_freq[0] == 1 and base.inv_freq[-1] == pytest.approx(base.plain_inv_freq[-1] / 4)
    by_type = build_model(f"--num-attention-heads 1 {YARN.replace('type yarn', 'type rope')} --rope-type yarn")
    torch.testing.assert_close(by_type.rotary_pos_emb.inv_freq, base.inv_freq)
    assert build_model(f"{YARN} --mscale 0.707 --mscale-all-dim 0.707").rotary_pos_emb.mscale == 1
    assert build_model(f"{YARN} --mscale 2").rotary_pos_emb.mscale == pytest.approx(2 * base.mscale - 1)
    for flag in (
        "--yarn-beta-fast 4",
        "--yarn-beta-slow 0.1",
        "--rotary-scaling-factor 3",
        "--no-yarn-correction-range-round-to-int",
        "--yarn-original-max-position-embeddings 5000",
    ):
        changed = build_model(f"--num-attention-heads 1 {YARN} --yarn-original-max-position-embeddings 64 {flag}")
        other = build_model(f"--num-attention-heads 1 {YARN} --yarn-original-max-position-embeddings 64")
        assert not torch.equal(changed.rotary_pos_emb.inv_freq, other.rotary_pos_emb.inv_freq), flag
