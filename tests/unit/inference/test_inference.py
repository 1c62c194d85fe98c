# SPDX-License-Identifier: Apache-2.0
"""Generation: a key-value cache changes nothing, sampling draws what it should, texts end where they must."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling, choose_next_tokens, keep_likely
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequences.state import SequenceState
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, POSITIONS = 96, 40
GREEDY = Sampling(greedy=True)

GPT2_STYLE: dict[str, Any] = {"position_embedding_type": "learned_absolute"}
LLAMA_STYLE: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "num_query_groups": 2,
}
STYLES = {"gpt2": GPT2_STYLE, "llama": LLAMA_STYLE}


def model_of(style: str, **changes: Any) -> GPTModel:
    """Random weights, far enough from zero that logits differ clearly."""
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, init_method_std=0.3, **STYLES[style] | changes
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=POSITIONS,
        share_embeddings_and_output_weights=style == "gpt2",
        position_embedding_type=config.position_embedding_type,
        pg_collection=ProcessGroupCollection.single(),
    )
    return model.eval()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def greedy_by_hand(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Full recomputation of one sequence, without anything of megatron.core.inference."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            logits = model(tokens, torch.arange(tokens.shape[1])[None], None)
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("backend", ["auto", "local"])
@pytest.mark.parametrize("style", STYLES)
def test_greedy_with_cache_equals_full_recomputation(style: str, backend: str) -> None:
    model = model_of(style, attention_backend=backend)
    batch = prompts(5, 9, 1, 9)
    expected = [greedy_by_hand(model, prompt, 20) for prompt in batch]
    for use_cache in (True, False):
        completions = generate(model, batch, max_new_tokens=20, sampling=GREEDY, use_cache=use_cache)
        assert [completion.tokens for completion in completions] == expected
        assert {completion.ended_by for completion in completions} == {"length"}
    assert len({tuple(tokens) for tokens in expected}) > 1, "the model should not say the same to everything"


def logits_in_parts(model: GPTModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all tokens at once, and of three parts with a cache."""
    positions = torch.arange(12).expand_as(tokens)
    with torch.inference_mode():
        whole = model(tokens, positions, None)
        state, parts = SequenceState(2, 12), []
        for start, end in ((0, 5), (5, 6), (6, 12)):
            state.begin([end - start] * 2)
            parts.append(model(tokens[:, start:end], positions[:, start:end], None, inference_context=state))
    return whole, torch.cat(parts, dim=1)


def test_logits_with_cache_equal_those_without() -> None:
    whole, parts = logits_in_parts(model_of("llama"), torch.tensor(prompts(12, 12)))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


def test_logits_with_cache_in_bf16_differ_by_less_than_rounding_does() -> None:
    """How bfloat16 products round depends on the processor: half the distance to the float32 model is the measure."""
    tokens = torch.tensor(prompts(12, 12))
    exact, _ = logits_in_parts(model_of("llama"), tokens)
    whole, parts = logits_in_parts(model_of("llama", bf16=True), tokens)
    assert (parts - whole).abs().max() < 0.5 * (whole - exact).abs().max()


class Script(nn.Module):
    """Says for each position which token is likeliest, whatever it read: token (position + 1) % 10."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor, positions: Tensor, mask: None, inference_context: Any = None) -> Tensor:
        return nn.functional.one_hot((positions + 1) % 10, 16).float()


def test_texts_end_at_eod_each_at_its_own() -> None:
    done = generate(Script(), [[1], [1, 1, 1, 1, 1, 1, 1], [1] * 9], max_new_tokens=5, sampling=GREEDY, eod=8)
    assert [(completion.tokens, completion.ended_by) for completion in done] == [
        ([1, 2, 3, 4, 5], "length"),
        ([7], "eod"),
        ([9, 0, 1, 2, 3], "length"),
    ]


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    model = model_of("gpt2")
    with torch.no_grad():
        model.embedding.word_embeddings.weight[60:] *= 50
    chosen = generate(model, prompts(3), max_new_tokens=20, sampling=GREEDY)[0].tokens
    assert max(chosen) >= 60
    assert max(generate(model, prompts(3), max_new_tokens=20, sampling=GREEDY, vocab_size=60)[0].tokens) < 60


def test_texts_end_where_positions_do() -> None:
    done = generate(
        model_of("gpt2"), prompts(POSITIONS - 3, 2), max_new_tokens=50, sampling=GREEDY, max_sequence_length=POSITIONS
    )
    assert [len(completion.tokens) for completion in done] == [3, POSITIONS - 2]
    with pytest.raises(ConfigError, match="prompt 2 has 40 tokens; the model has 40 positions"):
        generate(Script(), prompts(3, 40), max_new_tokens=1, sampling=GREEDY, max_sequence_length=40)


@pytest.mark.parametrize(("batch", "words"), [([], "no prompt"), ([[1], []], "prompt 2 has no tokens")])
def test_nothing_to_continue(batch: list[list[int]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(Script(), batch, max_new_tokens=1, sampling=GREEDY)


# ---- sampling


LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03]]))


def kept(sampling: Sampling) -> list[int]:
    return [index for index, value in enumerate(keep_likely(LOGITS, sampling)[0].tolist()) if value > -math.inf]


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    assert kept(Sampling(top_k=2)) == [0, 1]
    assert kept(Sampling(top_k=99)) == kept(Sampling()) == [0, 1, 2, 3, 4]
    assert kept(Sampling(top_p=0.5)) == [0]
    assert kept(Sampling(top_p=0.51)) == [0, 1]
    assert kept(Sampling(top_p=0.9)) == [0, 1, 2]
    assert kept(Sampling(top_p=1e-9)) == [0]
    assert kept(Sampling(top_k=2, top_p=0.7)) == [0, 1]
    assert kept(Sampling(top_k=2, top_p=0.6)) == [0], "the share is one of what top-k left"


def drawn(sampling: Sampling, count: int = 4000) -> Tensor:
    """Share of each token among many draws."""
    generator = sampling.build_generators(1)
    draws = [int(choose_next_tokens(LOGITS, sampling, generator)) for _ in range(count)]
    return torch.bincount(torch.tensor(draws), minlength=5) / count


def test_draws_follow_the_probabilities() -> None:
    torch.testing.assert_close(drawn(Sampling()), LOGITS.exp()[0], atol=0.03, rtol=0)
    sharp = torch.softmax(LOGITS[0] / 0.5, dim=0)
    torch.testing.assert_close(drawn(Sampling(temperature=0.5)), sharp, atol=0.03, rtol=0)


def test_seed_decides_and_neighbours_do_not() -> None:
    model, batch = model_of("gpt2"), prompts(4, 4, 7)
    sampling = Sampling(seed=3)

    def texts(choice: Sampling, chosen: list[list[int]]) -> list[list[int]]:
        return [completion.tokens for completion in generate(model, chosen, max_new_tokens=12, sampling=choice)]

    assert texts(sampling, batch) == texts(sampling, batch)
    assert texts(sampling, batch) != texts(dataclasses.replace(sampling, seed=4), batch)
    assert texts(sampling, batch)[:1] == texts(sampling, batch[:1])


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"temperature": 0.0}, "--temperature"),
        ({"temperature": math.nan}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.1}, "--top-p"),
    ],
)
def test_settings_without_meaning(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        Sampling(**values)
