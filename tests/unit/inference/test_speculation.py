# SPDX-License-Identifier: Apache-2.0
"""Speculation with multi-token prediction: the same greedy texts, the same distribution of sampled ones."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.generate import Completion, generate
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Draft, Sampling, confirm_tokens, find_probabilities
from megatron.core.inference.speculation import PredictionDrafter, PromptLookup
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.support.gpt_models import VOCAB_SIZE, build_model

GREEDY = Sampling(greedy=True)
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --init-method-std 0.3"
LATENT = """--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 4 --qk-head-dim 8 --qk-pos-emb-head-dim 4
    --v-head-dim 8 --position-embedding-type rope --rope-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --init-method-std 0.3 --num-experts 4 --moe-router-pre-softmax"""
CHUNKS = f"""{LLAMA} --num-layers 4 --attention-chunk-size 5 --no-rope-freq 2 --attn-temperature-scale 0.5
    --attn-temperature-floor 3"""


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def model_of(flags: str) -> GPTModel:
    return build_model(f"{flags} --max-position-embeddings 64").eval()


def look_ahead(model: GPTModel) -> GPTModel:
    """The model with a first layer of prediction that often foresees what the model itself would say: decoder and
    prediction do nothing, so that the next token follows from the last one."""
    with torch.no_grad():
        for layer in [*model.decoder.layers, *(part.mtp_model_layer for part in model.mtp.layers)]:
            layer.self_attention.linear_proj.weight.zero_()
            layer.mlp.linear_fc2.weight.zero_()
        for part in model.mtp.layers:
            part.eh_proj.weight.zero_()
            part.eh_proj.weight[:, : part.eh_proj.weight.shape[0]].fill_diagonal_(1.0)
    return model


def texts(model: GPTModel, batch: list[list[int]], **options: Any) -> list[Completion]:
    return generate(model, batch, **({"max_new_tokens": 20, "sampling": GREEDY, "vocab_size": 60} | options))


@pytest.mark.parametrize("lengths", [(5,), (1, 4), (7, 3, 12, 7)])
@pytest.mark.parametrize(
    "flags",
    [
        f"{LLAMA} --mtp-num-layers 1",
        f"{LLAMA} --mtp-num-layers 3 --group-query-attention --num-query-groups 2",
        f"{LLAMA} --mtp-num-layers 2 --mtp-use-repeated-layer",
        f"{LATENT} --mtp-num-layers 2",
        f"{CHUNKS} --mtp-num-layers 2",
    ],
)
def test_greedy_texts_are_the_same(flags: str, lengths: tuple[int, ...]) -> None:
    model = model_of(flags)
    speculation = PredictionDrafter(model)
    batch = prompts(*lengths)
    expected = texts(model, batch)
    assert texts(model, batch, speculation=speculation) == expected
    # Some drafts were right, others not: both ways have been gone.
    assert 0 <= speculation.kept < speculation.drafted
    # Texts that end, at a token that the model says.
    eod = expected[0].tokens[7]
    assert texts(model, batch, eod=eod, speculation=speculation) == texts(model, batch, eod=eod)


@pytest.mark.parametrize("depths", [1, 3])
def test_right_drafts_save_passes(depths: int) -> None:
    """Every draft is right: a pass for each 1 + depths tokens."""
    model = look_ahead(model_of(f"{LLAMA} --disable-bias-linear --mtp-num-layers {depths}"))
    speculation, calls = PredictionDrafter(model), []
    model.decoder.register_forward_hook(lambda *_: calls.append(1))
    batch = prompts(6)
    expected = texts(model, batch)
    count = len(calls)
    assert count == 20
    written: list[int] = []
    assert texts(model, batch, speculation=speculation, on_tokens=lambda _, new: written.extend(new)) == expected
    assert written == expected[0].tokens
    assert speculation.kept == speculation.drafted > 0
    assert len(calls) - count == speculation.passes == 1 + math.ceil(19 / (1 + depths))
    drafted = speculation.drafted
    assert f"{drafted} of {drafted} drafted tokens accepted (100.0 %), " in speculation.describe()


def test_drafts_are_those_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What depth k drafts in generation, from caches, is the logits of its loss over the whole text."""
    model = model_of(f"{LLAMA} --mtp-num-layers 2")
    drafted: list[tuple[int, Tensor]] = []
    compute = GPTModel.compute_further_states

    def record(self: GPTModel, depth: int, states: Tensor, ids: Tensor, cache: Any) -> Tensor:
        further = compute(self, depth, states, ids, cache)
        drafted.append((depth, further[-1, 0]))
        return further

    monkeypatch.setattr(GPTModel, "compute_further_states", record)
    (prompt,) = prompts(6)
    (completion,) = texts(model, [prompt], max_new_tokens=6, speculation=PredictionDrafter(model))
    ids = torch.tensor([[*prompt, *completion.tokens]])
    states: list[Tensor] = []
    model.mtp.register_forward_hook(lambda _, __, output: states.extend(output))
    with torch.no_grad():
        model(ids, torch.arange(ids.shape[1])[None], labels=ids)
    # The first depth has read nothing but the text itself, wherever it was.
    firsts = [further for depth, further in drafted if depth == 1]
    assert len(firsts) >= 3
    for further in firsts:
        assert any(torch.allclose(further, one, rtol=1e-4, atol=1e-5) for one in states[0][len(prompt) - 1 :, 0])
    depth, second = next(item for item in drafted if item[0] == 2)
    assert not any(torch.allclose(second, one, rtol=1e-4, atol=1e-5) for one in states[0][:, 0])


# ---- sampling


def test_a_confirmed_token_has_the_models_distribution() -> None:
    """Whatever drafted it: chi-squared of 10,000 draws."""
    logits, other = torch.tensor([[2.0, 1.0, 0.0, -1.0, -math.inf]]), torch.tensor([[-1.0, 1.5, 0.5, 1.0, 0.0]])
    sampling, count = Sampling(temperature=0.8, top_k=3), 10_000
    wanted = find_probabilities(logits, sampling)[0]
    generator = torch.Generator().manual_seed(11)
    certain = torch.eye(5)[1:2]
    for drafts in (
        find_probabilities(other, Sampling()),
        find_probabilities(logits, sampling),
        certain.roll(2),
        certain,
    ):
        found = torch.zeros(5)
        for token in torch.multinomial(drafts[0], count, replacement=True, generator=generator):
            draft = Draft(token.view(1), None if drafts is certain else drafts)
            found[confirm_tokens(logits, draft, sampling, [generator])] += 1
        likely = wanted > 0
        assert found[~likely].sum() == 0
        statistic = ((found - wanted * count)[likely].square() / (wanted * count)[likely]).sum()
        # Mean and deviation with two degrees of freedom, of three tokens.
        assert statistic <= 2 + 5 * 2, f"{found} instead of {wanted * count}"


def test_sampled_texts_have_the_same_distribution() -> None:
    """Pairs of tokens, the second of which was often drafted, of texts with and without speculation: as far from each
    other as two samples of one distribution (chi-squared)."""
    model = model_of(f"{LLAMA} --mtp-num-layers 1")
    (prompt,) = prompts(3)
    count, batch, sampling = 600, 3, {"top_k": 3, "temperature": 1.5}

    def sample(seed: int, speculation: PredictionDrafter | None) -> collections.Counter[tuple[int, ...]]:
        """In small batches, in which a draft is sometimes right in all texts."""
        found: collections.Counter[tuple[int, ...]] = collections.Counter()
        for first in range(seed, seed + count, batch):
            found.update(
                tuple(each.tokens)
                for each in texts(
                    model, [prompt] * batch, max_new_tokens=3, sampling=Sampling(seed=first, **sampling),
                    speculation=speculation,
                )
            )  # fmt: skip
        return found

    speculation = PredictionDrafter(model)
    plain, drafted = sample(0, None), sample(10**6, speculation)
    assert 0 < speculation.kept < speculation.drafted
    assert speculation.passes < 3 * count // batch
    kinds = [kind for kind in plain | drafted if plain[kind] + drafted[kind] >= 10]
    assert len(kinds) >= 8
    statistic = sum((plain[kind] - drafted[kind]) ** 2 / (plain[kind] + drafted[kind]) for kind in kinds)
    # Mean and deviation of chi-squared with so many degrees of freedom.
    assert statistic <= len(kinds) + 5 * math.sqrt(2 * len(kinds)), f"{statistic} for {len(kinds)} kinds"


def test_drafted_texts_have_the_models_distribution() -> None:
    """Three tokens each, often drafted from the text so far, against the products of the model's own probabilities."""
    model = model_of(LLAMA)
    count, sampling = 1200, Sampling(top_k=2, temperature=1.5)
    (likely,) = texts(model, [[3]], max_new_tokens=12)
    prompt = [3, *likely.tokens, 3, *likely.tokens]  # what comes next has often been there before
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        texts_so_far = [[*prompt, *kind] for kind in expected]
        logits = model(
            torch.tensor(texts_so_far), torch.arange(len(texts_so_far[0])).expand(len(texts_so_far), -1), None
        )
        rows = find_probabilities(logits[:, -1].detach(), sampling)
        expected = {
            (*kind, int(token)): share * float(row[token])
            for (kind, share), row in zip(expected.items(), rows, strict=True)
            for token in row.nonzero().flatten()
        }
    drafter = PromptLookup(2)
    engine = Engine(model, EngineSettings(32, max_requests=256), drafter=drafter)
    done = engine.run(Request(prompt, 3, dataclasses.replace(sampling, seed=seed)) for seed in range(count))
    found = collections.Counter(tuple(each.new_tokens) for each in done)
    assert 0.1 * drafter.drafted < drafter.kept < drafter.drafted and drafter.drafted > count // 4
    assert found.keys() <= expected.keys() and len(expected) == 8
    statistic = sum((found[kind] - count * share) ** 2 / (count * share) for kind, share in expected.items())
    assert statistic <= 7 + 5 * math.sqrt(2 * 7), f"{statistic} for 8 kinds"


# ---- refusals


def test_what_cannot_speculate() -> None:
    with pytest.raises(ConfigError, match="--speculate drafts tokens with multi-token prediction, and the model has"):
        PredictionDrafter(model_of(LLAMA))
    with pytest.raises(ConfigError, match="--speculate drafts"):
        PredictionDrafter(nn.Linear(2, 2))
    dropping = f"{LLAMA} --disable-bias-linear --mtp-num-layers 1 --num-experts 4 --moe-expert-capacity-factor 1"
    with pytest.raises(ConfigError, match="--speculate reads several tokens at once"):
        PredictionDrafter(model_of(dropping))
    model = model_of(f"{LLAMA} --mtp-num-layers 1")
    with pytest.raises(ConfigError, match="--speculate needs the cache .* leave out --no-kv-cache"):
        texts(model, prompts(3), use_cache=False, speculation=PredictionDrafter(model))
