# SPDX-License-Identifier: Apache-2.0
"""--qk-clip rescales the projections of heads whose scores are too large; --log-max-attention-logit reports them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.transformer.core_attention.interface import AttentionInputs, AttentionOptions, Visible
from megatron.core.transformer.core_attention.local import LocalAttention
from megatron.core.transformer.core_attention.max_logits import MaxLogits
from megatron.training.run import Run
from tests.support.run_flags import run_config
from tests.support.tiny_training import finish, prepare

NAME = "decoder.layers.{}.self_attention.linear_qkv.{}"
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0", "--train-iters", "1")


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_largest_score_of_what_is_seen(window: int | None, masked: bool, groups: int) -> None:
    options = AttentionOptions(
        scale=0.3, layer_number=1, dropout=0.0, softmax_in_fp32=False, query_key_layer_scaling=False,
        masked_softmax_fusion=False, window=window, chunk=None, softcap=2.0,
    )  # fmt: skip
    torch.manual_seed(0)
    query, key = torch.randn(140, 2, 4, 8), torch.randn(140, 2, groups, 8)
    mask = torch.rand(2, 1, 140, 140) < 0.5 if masked else None
    if mask is not None:
        mask |= torch.ones(140, 140, dtype=torch.bool).triu(1)
        mask[..., 0] = False
    measuring = MaxLogits(LocalAttention(options), options)

    def inputs(query: Tensor, training: bool) -> AttentionInputs:
        return AttentionInputs(query, key, key, Visible.build(mask, window=window), training=training)

    output = measuring(inputs(query, True))
    assert torch.equal(output, LocalAttention(options)(inputs(query, True)))
    expected = []
    for head in range(4):
        scores = 0.3 * torch.einsum("sbd,tbd->bst", query[:, :, head], key[:, :, head * groups // 4])
        place = torch.arange(140)
        seen = place[:, None] >= place
        if window is not None:
            seen = seen & (place[:, None] - place <= window)
        if mask is not None:
            seen = seen & ~mask[:, 0]
        expected.append(scores.masked_fill(~seen, -torch.inf).max())
    assert measuring.largest is not None
    torch.testing.assert_close(measuring.largest, torch.stack(expected))
    before = measuring.largest.clone()
    measuring(inputs(100 * query, False))
    assert torch.equal(measuring.largest, before), "evaluation does not count"
    measuring(inputs(2 * query, True))
    assert (measuring.largest > before).all(), "all microbatches count"


def scores_of_heads(run: Run) -> list[list[Tensor]]:
    """For each layer, the largest score of each head in each call; filled while the run trains."""
    found: list[list[Tensor]] = []
    for layer in run.model[0].module.decoder.layers:  # type: ignore[union-attr, operator]
        calls: list[Tensor] = []

        def note(_: object, inputs: tuple[Any, ...], calls: list[Tensor] = calls) -> None:
            query, key = (x.detach().repeat_interleave(2 // x.shape[2], dim=2) for x in inputs[:2])
            scores = torch.einsum("sbnd,tbnd->nbst", query, key) / query.shape[-1] ** 0.5
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
            calls.append(scores.amax(dim=(1, 2, 3)))

        layer.self_attention.core_attention.register_forward_pre_hook(note)
        found.append(calls)
    return found


def parameters(run: Run) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in run.model[0].module.named_parameters()}


@pytest.mark.flags("--qk-clip", "--qk-clip-alpha", "--qk-clip-threshold")
@pytest.mark.parametrize("alpha", [0.5, 0.2])
@pytest.mark.parametrize("groups", [2, 1])
@pytest.mark.parametrize("gate", [False, True])
def test_heads_above_the_threshold_are_scaled(alpha: float, groups: int, gate: bool) -> None:
    model = ("--group-query-attention", "--num-query-groups", str(groups), *NO_DROPOUT)
    model += ("--init-method-std", "0.3", *(["--attention-output-gate"] if gate else []))
    plain = prepare(*model)
    scores = scores_of_heads(plain)
    finish(plain)
    largest = [torch.stack(calls).amax(0) for calls in scores]
    threshold = float(torch.cat(largest).median())
    given = [] if alpha == 0.5 else ["--qk-clip-alpha", str(alpha)]
    clipped = parameters(finish(prepare(*model, "--qk-clip", "--qk-clip-threshold", str(threshold), *given)))
    scaled_layers = 0
    for name, expected in parameters(plain).items():
        for layer in range(2):
            if name in (NAME.format(layer, "weight"), NAME.format(layer, "bias")):
                gamma = (threshold / largest[layer]).clamp(max=1.0)
                scaled_layers += bool((gamma < 1).any())
                blocks = []
                for own in gamma.split(2 // groups):
                    blocks += [*(own**alpha), *([torch.tensor(1.0)] * len(own) if gate else [])]
                    blocks += [own.min() ** (1 - alpha), torch.tensor(1.0)]
                factors = torch.stack(blocks).repeat_interleave(8)
                expected = expected * (factors[:, None] if expected.dim() == 2 else factors)
        torch.testing.assert_close(clipped[name], expected, rtol=1e-5, atol=1e-7, msg=name)
    assert scaled_layers
    untouched = parameters(finish(prepare(*model, "--qk-clip", "--qk-clip-threshold", "1e6")))
    assert all(torch.equal(untouched[name], value) for name, value in parameters(plain).items())


@pytest.mark.parametrize("rank", [(), ("--q-lora-rank", "6")])
def test_heads_of_latent_attention_are_scaled(rank: tuple[str, ...]) -> None:
    """All heads share the rotated key channels, so that the queries get the whole factor there."""
    model = (
        "--multi-latent-attention", "--kv-lora-rank", "5", "--qk-head-dim", "6", "--qk-pos-emb-head-dim", "4",
        "--v-head-dim", "3", "--position-embedding-type", "rope", "--qk-layernorm", "--init-method-std", "0.3",
        *rank, *NO_DROPOUT,
    )  # fmt: skip
    plain = prepare(*model)
    scores = scores_of_heads(plain)
    finish(plain)
    largest = [torch.stack(calls).amax(0) for calls in scores]
    threshold = float(torch.cat(largest).median())
    clip = ("--qk-clip", "--qk-clip-threshold", str(threshold), "--qk-clip-alpha", "0.2")
    clipped = parameters(finish(prepare(*model, *clip)))
    queries = "linear_q_up_proj" if rank else "linear_q_proj"
    scaled = 0
    for name, expected in parameters(plain).items():
        for layer, of_heads in enumerate(largest):
            rows: list[Tensor] = []
            for gamma in (threshold / of_heads).clamp(max=1.0):
                scaled += bool(gamma < 1)
                if f"layers.{layer}.self_attention.{queries}." in name:
                    rows += [gamma**0.2] * 6 + [gamma] * 4
                if f"layers.{layer}.self_attention.linear_kv_up_proj." in name:
                    rows += [gamma**0.8] * 6 + [torch.tensor(1.0)] * 3
            expected = expected * torch.stack(rows)[:, None] if rows else expected
        torch.testing.assert_close(clipped[name], expected, rtol=1e-5, atol=1e-7, msg=name)
    assert scaled


@pytest.mark.flags("--log-max-attention-logit")
def test_the_largest_score_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = prepare(*NO_DROPOUT, "--log-max-attention-logit", "--metrics-dir", tmp_path, "--log-interval", "1")
    scores = scores_of_heads(run)
    finish(run)
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["max-attention-logit"] == pytest.approx(float(torch.stack(scores[0] + scores[1]).max()), rel=1e-5)
    assert f"max attention logit: {row['max-attention-logit']:.3f}" in capsys.readouterr().out


def test_what_cannot_be_clipped_is_refused() -> None:
    for flags, said in (
        ("--qk-clip --qk-layernorm", "--qk-clip scales weights, which --qk-layernorm makes good again"),
        ("--qk-clip --qk-l2-norm", "--qk-clip scales weights, which --qk-l2-norm makes good again"),
        ("--qk-clip-alpha 2", "--qk-clip-alpha 2 is out of range"),
        ("--qk-clip-threshold 0", "--qk-clip-threshold 0 is out of range"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_config(flags)
    with pytest.raises(ConfigError, match="--qk-clip .*--context-parallel-size 2"):
        run_config("--qk-clip --context-parallel-size 2", world_size=2)
    with pytest.raises(ConfigError, match="--qk-clip .*--use-torch-fsdp2"):
        run_config("--qk-clip --use-torch-fsdp2 --untie-embeddings-and-output-weights", world_size=2)
    assert any(
        "--qk-clip-alpha 0.2 has no effect without --qk-clip" in n for n in run_config("--qk-clip-alpha 0.2").notes
    )
