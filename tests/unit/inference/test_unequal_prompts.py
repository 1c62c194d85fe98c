# SPDX-License-Identifier: Apache-2.0
"""Prompts of unequal lengths in one batch: read in one call, with the probabilities and tokens that each has alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.custom_mixer import DecayedSum
from megatron.core.errors import ConfigError
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.speculation import PredictionDrafter
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequences.state import SequenceState
from megatron.core.tensor_parallel.parameters import initialise_parameters
from tests.support.gpt_models import VOCAB_SIZE, build_model

LENGTHS, FURTHER = (7, 3, 3, 1, 11), 6
ROPE = "--position-embedding-type rope --normalization RMSNorm --swiglu"
GROUPS = "--group-query-attention --num-query-groups 2"
LATENT = f"""{ROPE} --multi-latent-attention --kv-lora-rank 11 --qk-head-dim 10 --qk-pos-emb-head-dim 4 --v-head-dim 5
    --rope-type rope"""
KINDS = {
    "learned positions": "",
    "grouped queries, part of a head rotated": f"{ROPE} {GROUPS} --rotary-percent 0.5 --rotary-interleaved",
    "windows, local angles, sinks": f"{ROPE} {GROUPS} --window-size 2,0 --window-attn-skip-freq 2 "
    "--rotary-base-local 50 --softmax-type learnable",
    "chunks, temperature": f"{ROPE} --num-layers 4 --attention-chunk-size 3 --no-rope-freq 2 "
    "--attn-temperature-scale 0.7 --attn-temperature-floor 3",
    "bounded scores": f"{ROPE} --attn-logit-softcapping 2 --attention-output-gate --qk-layernorm",
    "yarn": "--position-embedding-type yarn --yarn-original-max-position-embeddings 4 --rotary-scaling-factor 4",
    "latent vectors": LATENT,
    "latent vectors, low rank, window": f"{LATENT} --q-lora-rank 13 --window-size 3,0 --kv-lora-rank 3",
    "states": f"""{ROPE} --num-layers 6 --hybrid-layer-pattern MG*-KL --disable-bias-linear --mamba-num-heads 6
    --mamba-head-dim 5 --mamba-num-groups 2 --mamba-state-dim 7 --linear-num-key-heads 3 --linear-num-value-heads 3
    --linear-key-head-dim 6 --linear-value-head-dim 6 --init-method-std 0.1""",
    "experts": f"{ROPE} --num-experts 4 --moe-router-topk 2 --disable-bias-linear",
}


def texts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def model_of(flags: str) -> GPTModel:
    model = build_model(f"--max-position-embeddings 64 --init-method-std 0.3 {flags}").eval()
    for name, param in model.named_parameters():
        if "softmax_offset" in name:
            nn.init.normal_(param)
    return model


def read(model: nn.Module, state: SequenceState, new: list[list[int]]) -> Tensor:
    """Log-probabilities [b, v] of the token after each sequence."""
    layout = state.begin([len(tokens) for tokens in new])
    ids = layout.join_tokens(new)
    logits = model(ids, layout.positions.expand_as(ids), None, inference_context=state)
    return layout.take_last(logits.transpose(0, 1), 1)[0].log_softmax(-1)


def read_alone(model: nn.Module, text: list[int]) -> Tensor:
    """The same of one text, without a state."""
    ids = torch.tensor([text])
    return model(ids, torch.arange(len(text))[None], None)[0, -1].log_softmax(-1)


@torch.no_grad()
def assert_same_probabilities(model: nn.Module) -> None:
    """One call with all prompts, then one and two tokens of each, and of different numbers; all as each text alone."""
    whole = texts_of(*(length + FURTHER for length in LENGTHS))
    state, done = SequenceState(len(whole), max(LENGTHS) + FURTHER), [0] * len(whole)
    rows = list(range(len(whole)))
    for new in (LENGTHS, (1,) * 5, (2,) * 5, (1, 2, 1, 1), (1, 1, 1, 2)):
        if len(new) < len(rows):  # the second text has ended
            rows.remove(1)
            state.select([0, 2, 3, 4])
        ends = {row: done[row] + count for row, count in zip(rows, new, strict=True)}
        found = read(model, state, [whole[row][done[row] : end] for row, end in ends.items()])
        for place, (row, end) in enumerate(ends.items()):
            torch.testing.assert_close(found[place], read_alone(model, whole[row][:end]), rtol=1e-6, atol=1e-5)
            done[row] = end


CASES = [(kind, backend) for kind in KINDS for backend in ("auto", "local")]
CASES += [
    (kind, "unfused") for kind in ("grouped queries, part of a head rotated", "chunks, temperature", "latent vectors")
]


@pytest.mark.parametrize(("kind", "backend"), CASES)
def test_probabilities_are_those_of_each_text_alone(kind: str, backend: str) -> None:
    assert_same_probabilities(model_of(f"{KINDS[kind]} --attention-backend {backend}"))


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        ("windows, local angles, sinks", Sampling(greedy=True)),
        ("latent vectors", Sampling(greedy=True)),
        ("learned positions", Sampling(seed=9, top_k=8)),
        ("experts", Sampling(seed=9, temperature=2.0)),
    ],
)
def test_tokens_and_passes(kind: str, sampling: Sampling) -> None:
    model = model_of(KINDS[kind])
    batch, calls = texts_of(*LENGTHS), []
    model.decoder.register_forward_hook(lambda _, __, output: calls.append(output.shape[0] * output.shape[1]))
    options: dict[str, Any] = {"max_new_tokens": 9, "vocab_size": 60}
    done = generate(model, batch, sampling=sampling, **options)
    # All prompts in one pass, without padding, and each further token in one.
    assert calls == [sum(LENGTHS), *[len(LENGTHS)] * 8]
    for row, (prompt, completion) in enumerate(zip(batch, done, strict=True)):
        own = dataclasses.replace(sampling, seed=sampling.seed + row)
        assert generate(model, [prompt], sampling=own, **options) == [completion]
    assert generate(model, batch, sampling=sampling, use_cache=False, **options) == done
    # Texts that have ended are no longer computed.
    eod, calls[:] = done[0].tokens[4], []
    ended = generate(model, batch, sampling=sampling, eod=eod, **options)
    for completion, longer in zip(ended, done, strict=True):
        end = longer.tokens.index(eod) if eod in longer.tokens else 9
        assert completion.tokens == longer.tokens[:end]
    read_by = [len(completion.tokens) + (completion.ended_by == "eod") for completion in ended]
    assert calls[1:] == [sum(count > before for count in read_by) for before in range(1, max(read_by))]


@pytest.mark.parametrize("most", [1, 11, 12, 17, 28])
def test_texts_of_equal_length_do_not_wait_for_pages(most: int) -> None:
    """A text of a few tokens more than a page needs another one, which no other text has left over."""
    model, calls = model_of(""), []
    model.decoder.register_forward_hook(lambda _, __, output: calls.append(output.shape[0] * output.shape[1]))
    generate(model, texts_of(6, 6, 6), max_new_tokens=most, sampling=Sampling(greedy=True), vocab_size=60)
    assert calls == [18, *[3] * (most - 1)]


@pytest.mark.parametrize("kind", ["grouped queries, part of a head rotated", "latent vectors"])
def test_each_text_keeps_its_right_drafts(kind: str) -> None:
    """A batch has as many passes as the text alone that has the most, and computes no text longer than alone."""
    model = model_of(f"{KINDS[kind]} --mtp-num-layers 2")
    batch = texts_of(*LENGTHS)
    options: dict[str, Any] = {"max_new_tokens": 10, "sampling": Sampling(greedy=True), "vocab_size": 60}
    expected, passes = generate(model, batch, **options), []
    for prompt, completion in zip(batch, expected, strict=True):
        speculation = PredictionDrafter(model)
        assert generate(model, [prompt], speculation=speculation, **options) == [completion]
        passes.append(speculation.passes)
    speculation = PredictionDrafter(model)
    assert generate(model, batch, speculation=speculation, **options) == expected
    assert speculation.passes == max(passes) and speculation.texts_read == sum(passes)
    assert speculation.kept > 0 and len({*passes}) > 1


# ---- recurrent states


def test_a_recurrent_state_cannot_speculate() -> None:
    flags = "--position-embedding-type rope --mtp-num-layers 1"
    model = model_of(flags)
    for number, layer in enumerate(model.decoder.layers, start=1):
        layer.self_attention = DecayedSum(model.config, number, ProcessGroupCollection.single())
        initialise_parameters(layer.self_attention, seed=1)
    options: dict[str, Any] = {"max_new_tokens": 3, "sampling": Sampling(greedy=True)}
    with pytest.raises(ConfigError, match="--speculate reads tokens that may turn out to be wrong"):
        generate(model, texts_of(3, 5), speculation=PredictionDrafter(model), **options)
    assert len(generate(model, texts_of(3, 5), **options)) == 2
