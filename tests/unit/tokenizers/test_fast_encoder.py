# SPDX-License-Identifier: Apache-2.0
"""The tiktoken encoder gives a tokenizer's own ids, or is not used."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron.cli import preprocess_data
from megatron.core.datasets.preprocessing.job import preprocess
from megatron.core.errors import ConfigError
from megatron.core.tokenizers.build import build_tokenizer, tokenizer_from
from megatron.core.tokenizers.byte_pair_conversion import (
    GPT2_PATTERN,
    KNOWN,
    NotConvertible,
    convert,
    join_alternatives,
    split_alternatives,
)
from megatron.core.tokenizers.encoders import (
    EncoderMismatch,
    PlainEncoder,
    TiktokenEncoder,
    choose_encoder,
)
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from tests.preprocess_runs import DATA, write_lines
from tests.support.run_flags import run_config

pytest.importorskip("tiktoken")
CORPUS = [json.loads(line)["text"] for line in (DATA / "corpus" / "public_small.jsonl").read_text().splitlines()]
PIECES = [
    *" \n\t\r_.,;:!?'\"()[]{}<>|/\\-+=*&^%$#@~`aAzZ09", "  ", "\r\n", "'s", "'RE", "'ſ", " hello", "World",
    "12345", "naïve", "e\u0301", "你好",
    "👩‍👩‍👧", "ﬁ", "½", "Ⅷ", "١٢", "\u00a0", "\u3000", "\u200b", "\u0085", "\u2028", "\x00", "\x1c",
    "ß", "ŉ", "İ", "<|endoftext|>", "<|end", "|>",
]  # fmt: skip
TEXTS = (
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=40)
    .map("".join)
    .filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))
)


def trained(pattern: str = GPT2_PATTERN, *, vocab_size: int = 600, **changes: Any) -> tokenizers.Tokenizer:
    """A byte-level BPE trained on a part of the corpus."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|end"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:4000] for text in CORPUS[:8]], trainer)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def both(backend: tokenizers.Tokenizer) -> tuple[HuggingFaceTokenizer, TiktokenEncoder]:
    tokenizer = HuggingFaceTokenizer(backend, {})
    return tokenizer, TiktokenEncoder(tokenizer, convert(backend), include_special_tokens=True)


LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
PATTERNS = {
    "GPT-2": GPT2_PATTERN,
    "Llama 3": LLAMA3_PATTERN,
    "Qwen 2": LLAMA3_PATTERN.replace("{1,3}", ""),
    "GPT-4o": GPT4O_PATTERN,
    "Tekken": GPT4O_PATTERN.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", ""),
    "DBRX": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
}
ENCODERS = {name: both(trained(pattern)) for name, pattern in PATTERNS.items()}


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=150)
@given(text=TEXTS)
def test_equal_on_odd_texts(name: str, text: str) -> None:
    tokenizer, encoder = ENCODERS[name]
    assert encoder.encode_batch([text])[0].tolist() == tokenizer.tokenize(text)


@pytest.mark.parametrize("name", ENCODERS)
def test_equal_on_the_corpus(name: str) -> None:
    tokenizer, encoder = ENCODERS[name]
    assert [ids.tolist() for ids in encoder.encode_batch(CORPUS)] == tokenizer.tokenize_batch(CORPUS)


def test_engines_agree_on_every_character() -> None:
    """The classes in the known patterns hold the same characters for both regex engines."""
    import tiktoken

    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF]
    text = "".join(characters)
    ranks = {bytes([byte]): byte for byte in range(256)}
    for pattern in (
        r"\p{L}",
        r"\p{N}",
        r"\s",
        r"\p{M}",
        r"\p{Lu}",
        r"\p{Ll}",
        r"\p{Lt}",
        r"\p{Lm}",
        r"\p{Lo}",
        "(?i:[sdmtrelv])",
    ):
        without = normalizers.Replace(Regex(pattern), "").normalize_str(text)
        encoding = tiktoken.Encoding(pattern, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        matched = bytes(encoding.encode_ordinary(text)).decode()
        assert set(matched) == set(characters) - set(without), pattern


def test_alternatives_of_a_pattern() -> None:
    assert split_alternatives(r"a|(?:b|c)+|[|(]|\||[^]|]d") == ["a", "(?:b|c)+", "[|(]", r"\|", "[^]|]d"]
    for known in KNOWN:
        assert all(split_alternatives(alternative) == [alternative] for alternative in known)


def test_alternatives_join_in_groups_without_possessive_quantifiers() -> None:
    assert join_alternatives(r" ?[^\s\p{L}]++[\r\n]*+|\p{N}|\s+(?!\S)|\s+") == (
        r"(?: ?[^\s\p{L}]+[\r\n]*|\p{N})|\s+(?!\S)|(?:\s+)"
    )


@pytest.mark.parametrize("alternative", sorted(set().union(*KNOWN)))
@settings(max_examples=20)
@given(text=TEXTS)
def test_engines_agree_on_every_alternative(alternative: str, text: str) -> None:
    """The same pieces of a text match, and what is left between them is the same."""
    import tiktoken

    pieces = pre_tokenizers.Split(Regex(f"{alternative}"), "removed").pre_tokenize_str(text)
    # With every byte a token, tiktoken returns what matched; the rest of the pattern matches nothing else.
    encoding = tiktoken.Encoding(
        "x",
        pat_str=join_alternatives(alternative),
        mergeable_ranks={bytes([b]): b for b in range(256)},
        special_tokens={},
    )
    matched = bytes(encoding.encode_ordinary(text))
    assert len(matched) + sum(len(piece.encode()) for piece, _ in pieces) == len(text.encode())


def test_long_runs() -> None:
    """Where tiktoken would overflow its stack or take long, the result is still the tokenizer's."""
    tokenizer, encoder = ENCODERS["GPT-2"]
    for text in (" " * 1_200_000 + "x", " \n" * 600_000, "a" * 300_000, "=" * 300_000, "x" + "\n" * 99_999 + "y"):
        assert np.array_equal(encoder.encode_batch([text])[0], tokenizer.tokenize(text))


def test_template_adds_tokens_to_every_text() -> None:
    template = processors.TemplateProcessing(
        single="<|endoftext|> $A <|end", special_tokens=[("<|endoftext|>", 0), ("<|end", 1)]
    )
    for post_processor in (template, processors.Sequence([processors.ByteLevel(trim_offsets=True), template])):
        tokenizer, encoder = both(trained(post_processor=post_processor))
        for text in ("", "x", CORPUS[0]):
            assert encoder.encode_batch([text])[0].tolist() == tokenizer.tokenize(text)
        assert encoder.encode_batch([""])[0].tolist() == [0, 1]


def test_awkward_added_tokens() -> None:
    backend = trained()
    backend.add_special_tokens([tokenizers.AddedToken("<tag>", lstrip=True, rstrip=True)])
    backend.add_tokens([tokenizers.AddedToken("whole", single_word=True, normalized=False), "<<", "<<<"])
    tokenizer, encoder = both(backend)
    for text in ("a  <tag>  b", "whole wholesome a whole", "<<<< x <<", "<|endoftext|><|end", "a<|end x"):
        assert encoder.encode_batch([text])[0].tolist() == tokenizer.tokenize(text), text


def test_normal_form_c() -> None:
    tokenizer, encoder = both(trained(normalizer=normalizers.NFC()))
    for text in ("plain", "é", "e\u0301 x", "ﬁ", "가"):
        assert encoder.encode_batch([text])[0].tolist() == tokenizer.tokenize(text)


def rebuilt(change: Any) -> tokenizers.Tokenizer:
    content = json.loads(trained().to_str())
    change(content)
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def set_pattern(content: dict[str, Any], pattern: str) -> None:
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}


def odd_priority(content: dict[str, Any]) -> None:
    """A second pair for an old token, far down the list."""
    merges = content["model"]["merges"]
    long = next(left + right for left, right in merges if len(left + right) == 3)
    content["model"]["vocab"].setdefault(long[1:], len(content["model"]["vocab"]) + 5)
    pair = [long[0], long[1:]] if [long[:2], long[2:]] in merges else [long[:2], long[2:]]
    content["model"]["vocab"].setdefault(pair[0], len(content["model"]["vocab"]) + 9)
    merges.append(pair)


def no_byte(content: dict[str, Any]) -> None:
    """A soft hyphen, which is not among the characters that stand for bytes, although Latin-1 has it."""
    content["model"]["vocab"] |= {"\xad": 9000, "a\xad": 9001}
    content["model"]["merges"].append(["a", "\xad"])


def unreachable(content: dict[str, Any]) -> None:
    """A token that merging never arrives at: its halves are merged apart before."""
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    vocab |= {"QX": 9000, "XZ": 9001, "QXZ": 9002}
    merges += [["X", "Z"], ["Q", "X"], ["QX", "Z"]]


@pytest.mark.parametrize(("change", "reason"), [
    (lambda c: c.update(normalizer={"type": "Lowercase"}), "normalizer changes"),
    (lambda c: c.update(pre_tokenizer={"type": "Whitespace"}), "not one known regular exp"),
    (lambda c: set_pattern(c, r"\S+|\s+"), "unknown regular expression"),
    (lambda c: set_pattern(c, GPT2_PATTERN.removesuffix(r"|\s+")), "unknown regular expression"),
    (lambda c: set_pattern(c, GPT2_PATTERN.replace(r"| ?\p{N}+", "")), "unknown regular expression"),
    (lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"), "not one known regular exp"),
    (lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "not one known regular exp"),
    (lambda c: c["model"].update(dropout=0.1), "uses dropout"),
    (lambda c: c["model"].update(ignore_merges=True), "leave out pairs|no merge makes"),
    (lambda c: c["model"]["vocab"].pop("Ā"), "lacks 1 of the 256 bytes"),
    (no_byte, "stands for no byte"),
    (odd_priority, "different priority"),
    (unreachable, "never arrives"),
])  # fmt: skip
def test_what_is_not_understood_is_not_converted(change: Any, reason: str) -> None:
    with pytest.raises(NotConvertible, match=reason):
        convert(rebuilt(change))


def test_ignore_merges_with_every_pair_listed() -> None:
    """The form in which Llama 3's tokenizer.json lists merges."""

    def list_all_pairs(content: dict[str, Any]) -> None:
        model = content["model"]
        tokens = sorted(
            (token for token in model["vocab"] if len(token) > 1 and not token.startswith("<|end")),
            key=model["vocab"].get,
        )
        model["merges"] = [
            [token[:cut], token[cut:]]
            for token in tokens
            for cut in range(1, len(token))
            if token[:cut] in model["vocab"] and token[cut:] in model["vocab"]
        ]
        model["ignore_merges"] = True

    tokenizer, encoder = both(rebuilt(list_all_pairs))
    assert [ids.tolist() for ids in encoder.encode_batch(CORPUS)] == tokenizer.tokenize_batch(CORPUS)


def test_a_wrong_encoder_is_found_out() -> None:
    tokenizer, encoder = both(trained())
    encoder._ids = encoder._ids + 1
    with pytest.raises(EncoderMismatch, match="differs from the tokenizer on"):
        encoder.verify("ee")


def test_choice() -> None:
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(DATA / "tok" / "hf_bpe1k"))
    assert "tiktoken encoder, verified on" in choose_encoder(tokenizer, CORPUS[:3]).description
    plain = choose_encoder(HuggingFaceTokenizer(trained(normalizer=normalizers.Lowercase()), {}), [])
    assert isinstance(plain, PlainEncoder) and "its normalizer changes the text" in plain.description
    assert isinstance(choose_encoder(build_tokenizer("NullTokenizer", vocab_size=9), []), PlainEncoder)


def test_choice_without_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.optional_deps.available", lambda name: False)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(DATA / "tok" / "hf_bpe1k"))
    encoder = choose_encoder(tokenizer, [])
    assert "pip install tiktoken" in encoder.description
    rng = random.Random(0)
    texts = ["".join(rng.choices(PIECES, k=30)) for _ in range(20)]
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == tokenizer.tokenize_batch(texts)


@pytest.mark.flags("--use-gigatoken")
def test_the_fast_encoder_or_none(tmp_path: Path) -> None:
    """A tokenizer that it does not know is slow without the flag, refused with it; the flag reaches the job."""
    source = write_lines(tmp_path / "in.jsonl", {"text": "some text"})
    for name, pattern in (("known", GPT2_PATTERN), ("unknown", r"[a-z]+|\s|.")):
        trained(pattern).save(str(tmp_path / f"{name}.json"))
    parsed = {}
    for name in ("known", "unknown"):
        argv = ["--input", str(source), "--output-prefix", str(tmp_path / name), "--workers", "1", "--use-gigatoken"]
        argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / f"{name}.json")]
        arguments, flags = preprocess_data.parse_arguments(argv, preprocess_data.make_parser())
        parsed[name] = (preprocess_data.build_options(arguments, flags), tokenizer_from(flags))
    assert preprocess(*parsed["known"]).encoder.startswith("tiktoken encoder")
    with pytest.raises(ConfigError, match="--use-gigatoken asks for the fast encoder.*no faster encoder.*leave"):
        preprocess(*parsed["unknown"])
    options, tokenizer = parsed["unknown"]
    assert preprocess(dataclasses.replace(options, use_gigatoken=False), tokenizer).documents == 1
    assert any("--use-gigatoken has no effect here" in note for note in run_config("--use-gigatoken").notes)
