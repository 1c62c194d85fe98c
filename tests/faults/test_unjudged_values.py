# SPDX-License-Identifier: Apache-2.0
"""No rule reads a value before it has been judged: command lines that lack what must be given, and hostile numbers."""

from __future__ import annotations

import random

import pytest

from megatron.core.config_base import check, unchecked
from megatron.core.setting import Setting
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.flags.declarations import declared_flags
from megatron.training.flags.read import examine

REQUIRED = {"--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "2"}
NEEDED = {"--seq-length": "32", "--max-position-embeddings": "32", "--lr": "1e-2", "--train-iters": "2"}
FURTHER = {"--micro-batch-size": "2", "--global-batch-size": "4", "--vocab-size": "1000"}
BASE = {**REQUIRED, **NEEDED, **FURTHER, "--tokenizer-type": "NullTokenizer"}
NUMBERS = ["0", "1", "3", "100", "-1", "0.5", "1e18", "9223372036854775807", "1e-300", "nan", "1_0", ""]
TEXTS = ["1", "[0,1]", "3,0", "Et|t", "word", "1:2", "a b", "../../x", "M*-"]
FLAGS = [flag for flag in declared_flags() if flag.status == "works"]


def examine_without(left_out: str | None, *words: str, world_size: int = 2) -> list[str]:
    given = [word for name, value in BASE.items() if name != left_out for word in (name, value)]
    problems = examine([*given, "--mock-data", *words], {"WORLD_SIZE": str(world_size)}).problems
    return [problem.text for problem in problems]


def draw_words(flag: Setting, rng: random.Random) -> list[str]:
    """The flag with a value, which may be one that nobody should give."""
    if flag.is_switch:
        return [rng.choice(flag.spellings)]
    texts = NUMBERS if flag.value_type in (int, float) else TEXTS
    if flag.choices:
        texts = [*map(str, flag.choices), *texts[:2]]
    values = [rng.choice(texts) for _ in range(flag.nargs if isinstance(flag.nargs, int) else 1)]
    return [f"{flag.name}={values[0]}"] if flag.nargs is None else [flag.name, *values]


@pytest.mark.parametrize("left_out", [*BASE])
def test_flags_beside_one_that_is_left_out(left_out: str) -> None:
    """Random flags, several at once: every command line ends in sentences, one of which says what is missing."""
    for seed in range(20):
        rng = random.Random(f"{left_out} {seed}")
        words = [word for flag in rng.sample(FLAGS, 4) for word in draw_words(flag, rng)]
        sentences = examine_without(left_out, *words, world_size=rng.choice([1, 2, 8]))
        is_given = any(word.partition("=")[0] == left_out for word in words)
        if left_out in REQUIRED and not is_given:
            assert sum(text.startswith(f"{left_out} is missing; give the number") for text in sentences) == 1, words


@pytest.mark.parametrize("left_out", REQUIRED)
@pytest.mark.parametrize(
    "words",
    [
        "--attention-backend fused",
        "--attention-backend fused --window-size 3,0",
        "--first-last-layers-bf16 --num-layers-at-start-in-bf16 3 --bf16 --fp8-format hybrid --fp8-recipe tensorwise",
        "--fp4-format e2m1 --bf16",
        "--cpu-offloading-num-layers 30 --pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-layout Et|tL --pipeline-model-parallel-size 2",
        "--window-size 3,0 --window-attn-skip-freq [0,1]",
    ],
)
def test_one_sentence_says_what_is_missing(words: str, left_out: str) -> None:
    sentences = examine_without(left_out, *words.split())
    about = [text for text in sentences if left_out in text]
    assert about == [
        f"{left_out} is missing; give the number, for example {left_out} {768 if 'hid' in left_out else 12}"
    ]


def test_a_rule_speaks_where_the_missing_value_does_not_matter() -> None:
    """And is silent where it does: how many layers a stage has nobody knows."""
    further = ["--tensor-model-parallel-size", "3", "--cpu-offloading-num-layers", "30"]
    sentences = examine_without("--num-layers", *further)
    assert sentences[0].startswith("--num-layers is missing")
    assert any("--num-attention-heads 2 cannot be split over --tensor-model-parallel-size 3" in s for s in sentences)
    assert not any("--cpu-offloading-num-layers" in s for s in sentences)
    # Python callers hear the same.
    values = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "tensor_model_parallel_size": 3,
        "attention_backend": "fused",
    }
    problems = check(unchecked(TransformerConfig, values))
    assert problems[0] == "--num-layers is missing; give the number, for example --num-layers 12"
    assert len(problems) == 3 and "cannot be split" in problems[1] and "--ffn-hidden-size" in problems[2]


def test_hostile_numbers() -> None:
    """Two numbers of each numeric flag; `python -m tests.trial` draws others."""
    for flag in (flag for flag in FLAGS if flag.value_type in (int, float)):
        count = flag.nargs if isinstance(flag.nargs, int) else 1
        for text in random.Random(flag.name).sample(NUMBERS, 2):
            sentences = examine_without(None, flag.name, *[text] * count)
            if text in ("nan", "1_0", ""):
                assert any(flag.name in sentence for sentence in sentences), (flag.name, text)


def test_times_fit_a_clock() -> None:
    for name in ("--distributed-timeout-minutes", "--distributed-timeout-seconds-after-init"):
        assert "is out of range" in examine_without(None, name, "1000000000")[0]
