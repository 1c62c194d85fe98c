# SPDX-License-Identifier: Apache-2.0
"""Read a byte-level BPE `tokenizer.json` as a table of ranks that tiktoken's much faster encoder can use.

Both libraries cut a text into pieces with a regular expression and merge the bytes of each piece. They differ in what
drives the merging: `tokenizers` has a list of pairs in order of priority, tiktoken merges any two neighbours whose
concatenation is a known token, lowest rank first. `convert` accepts only tokenizers for which the two rules give the
same result, and says why it refuses another one:

- the pre-tokenizer's regular expression is made of alternatives whose matches are equal in both regex engines (KNOWN);
- every pair that makes a token is at one place in the list, so the token has one rank;
- without `ignore_merges`, encoding a token's text gives that token. Then two neighbours can only ever form it in
  the way the list says: merging inside a token's bytes does not depend on what stands around them;
- with `ignore_merges` (a piece that is a token is taken whole), the list holds every pair that makes a token.

Byte-level BPE: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = f"{_BEFORE_WORD}{_CAPITALS}*{_SMALL}+"
_SHOUTED = f"{_BEFORE_WORD}{_CAPITALS}+{_SMALL}*"

KNOWN_LETTERS = {
    r" ?\p{L}+",
    rf"{_BEFORE_WORD}\p{{L}}+",
    rf"{_BEFORE_WORD}+\p{{L}}+",
    rf"{_BEFORE_WORD}+\p{{L}}++",
    _CASED,
    f"{_CASED}{_CONTRACTIONS}?",
}
KNOWN_NUMBERS = {r" ?\p{N}+", r"\p{N}", r"\p{N}+", r"\p{N}{1,2}", r"\p{N}{1,3}", r"\p{N}{1,4}"}
KNOWN_SYMBOLS = {
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*+",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
}
KNOWN_SPACES = {r"\s+"}
KNOWN_OTHERS = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    _CONTRACTIONS,
    "'(?i:[sdmt]|ll|ve|re)",
    _SHOUTED,
    f"{_SHOUTED}{_CONTRACTIONS}?",
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    r"\s+(?!\S)",
}
KNOWN = (KNOWN_LETTERS, KNOWN_NUMBERS, KNOWN_SYMBOLS, KNOWN_SPACES, KNOWN_OTHERS)
"""Alternatives of regular expressions that both engines match alike, as both take the first alternative that matches.

One of each set but the last must be there, so that no character is left out: of what lies between matches, `tokenizers`
makes pieces, but tiktoken drops it."""


class NotConvertible(Exception):
    """Reason that a tokenizer has to stay with the `tokenizers` library."""


@dataclass(frozen=True)
class AddedToken:
    """A token that is cut out of the text before anything else happens."""

    content: str
    id: int
    is_plain: bool
    """Matched exactly as written, without regard to the characters around it."""


@dataclass(frozen=True)
class BytePairTables:
    """All that an encoder needs to know of a byte-level BPE."""

    pattern: str
    """Regular expression that cuts a text into pieces, as tiktoken's engine matches it fastest."""
    ranks: dict[bytes, int]
    """Bytes of a token to its priority; single bytes first, then in order of merging."""
    ids: npt.NDArray[np.uint32]
    """Rank to token id, [number of ranks]."""
    added_tokens: tuple[AddedToken, ...]
    needs_nfc: bool
    """The normalizer composes characters; only texts in normal form C may take the fast path."""
    prefix: tuple[int, ...]
    """Ids that the post-processor puts before every text, if special tokens are included."""
    suffix: tuple[int, ...]


def convert(backend: tokenizers.Tokenizer) -> BytePairTables:
    """The tables of a tokenizer. Raises NotConvertible for one that is built in another way."""
    content = json.loads(backend.to_str())
    pattern = _pattern(content["pre_tokenizer"])
    prefix, suffix = _template(content["post_processor"])
    ranks, ids = _ranks(content["model"], backend)
    return BytePairTables(
        pattern=join_alternatives(pattern),
        ranks=ranks,
        ids=ids,
        added_tokens=_added_tokens(content["added_tokens"]),
        needs_nfc=_needs_nfc(content["normalizer"]),
        prefix=prefix,
        suffix=suffix,
    )


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """The regular expression that cuts a text into pieces."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            _check_pattern(pattern)
            return pattern
    raise NotConvertible("its pre-tokenizer is not one known regular expression over bytes")


def _check_pattern(pattern: str) -> None:
    """The pattern must consist of known alternatives that leave out no character."""
    alternatives = set(split_alternatives(pattern))
    # An unknown alternative may match alike in both engines, but nobody has shown it.
    if alternatives - set().union(*KNOWN) or not all(alternatives & known for known in KNOWN[:-1]):
        raise NotConvertible("its pre-tokenizer has an unknown regular expression")


def split_alternatives(pattern: str) -> list[str]:
    """The parts of a regular expression between the `|` outside of all groups."""
    parts = [""]
    depth = 0
    # Escapes and character classes are taken whole, as a parenthesis or bar inside them means itself.
    for token in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def join_alternatives(pattern: str) -> str:
    """A pattern with the same matches as one of KNOWN alternatives, in two thirds of the time.

    tiktoken's engine tries one alternative after the other where any of them looks ahead; neighbours that do not are
    put into a group here, which it matches at once by an automaton. Automata have no possessive quantifiers; a known
    alternative matches alike without them, as nothing after one could match what it gives back.
    """
    groups = itertools.groupby(split_alternatives(pattern), lambda alternative: "(?!" in alternative)
    return "|".join(
        "|".join(run) if looks_ahead else "(?:" + "|".join(map(_without_possessive, run)) + ")"
        for looks_ahead, run in groups
    )


def _without_possessive(alternative: str) -> str:
    return re.sub(r"(?<=[?*+])\+", "", alternative)


def _needs_nfc(normalizer: dict[str, Any] | None) -> bool:
    match normalizer:
        case None | {"type": "Sequence", "normalizers": []}:
            return False
        case {"type": "NFC"}:
            return True
    raise NotConvertible("its normalizer changes the text")


def _template(post_processor: dict[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before and after every text."""
    match post_processor:
        case None | {"type": "ByteLevel"}:  # the latter only moves offsets
            return (), ()
        case {"type": "Sequence", "processors": [*processors]}:
            found = [template for template in map(_template, processors) if template != ((), ())]
            if len(found) > 1:
                raise NotConvertible("its post-processor has several templates")
            return found[0] if found else ((), ())
        case {"type": "TemplateProcessing", "single": [*pieces], "special_tokens": special_tokens}:
            sides: list[list[int]] = [[]]
            for piece in pieces:
                if "Sequence" in piece:
                    sides.append([])
                else:
                    sides[-1] += special_tokens[piece["SpecialToken"]["id"]]["ids"]
            if len(sides) == 2:
                return tuple(sides[0]), tuple(sides[1])
    raise NotConvertible("its post-processor does more than add tokens before and after a text")


def _added_tokens(added_tokens: list[dict[str, Any]]) -> tuple[AddedToken, ...]:
    """Added tokens; those matched after normalizing are not plain where others are matched before it."""
    mixed = len({token["normalized"] for token in added_tokens}) > 1
    return tuple(
        AddedToken(
            content=token["content"],
            id=token["id"],
            is_plain=not (
                token["lstrip"] or token["rstrip"] or token["single_word"] or (mixed and token["normalized"])
            ),
        )
        for token in added_tokens
    )


def _ranks(model: dict[str, Any], backend: tokenizers.Tokenizer) -> tuple[dict[bytes, int], npt.NDArray[np.uint32]]:
    """Ranks by bytes, and ids by rank."""
    if model["type"] != "BPE":
        raise NotConvertible(f"its model is {model['type']}, not BPE")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise NotConvertible(f"its BPE uses {option}")
    vocab: dict[str, int] = model["vocab"]
    alphabet = byte_alphabet()
    missing = [char for char in alphabet if char not in vocab]
    if missing:
        raise NotConvertible(f"its vocabulary lacks {len(missing)} of the 256 bytes")

    merges = ["".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    # Byte-level vocabularies of GPT-2 list a token's merges together; the first one has the token's rank.
    merged = [token for token, _ in itertools.groupby(merges)]
    if len(set(merged)) < len(merged):
        raise NotConvertible("a token is made by merges of different priority")
    ignore_merges = bool(model.get("ignore_merges"))
    if ignore_merges:
        _check_every_pair_is_listed(
            merged, vocab, len(merges), added={t.content for t in backend.get_added_tokens_decoder().values()}
        )
    else:
        _check_reachable(merged, backend)

    texts = [*alphabet, *merged]
    others = sorted(set("".join(texts)) - alphabet.keys())
    if others:
        raise NotConvertible(f"a merge holds the character {others[0]!r}, which stands for no byte")
    # Latin-1 has a character for each byte, so that a whole text is turned into bytes at once.
    bytes_as_latin = {ord(char): byte for char, byte in alphabet.items()}
    ranks = {text.translate(bytes_as_latin).encode("latin-1"): rank for rank, text in enumerate(texts)}
    return ranks, np.array([vocab[text] for text in texts], dtype=np.uint32)


def _check_reachable(merged: list[str], backend: tokenizers.Tokenizer) -> None:
    """Encoding a token's text must give this token."""
    tokenize = backend.model.tokenize
    for token in merged:
        if len(tokenize(token)) != 1:
            raise NotConvertible(f"merging never arrives at its token {token!r}")


def _check_every_pair_is_listed(merged: list[str], vocab: dict[str, int], num_merges: int, added: set[str]) -> None:
    """Every pair of tokens that makes a token must be a merge, and every token must come from one."""
    pairs, known = 0, set(merged)
    for token in vocab:
        if len(token) == 1 or token in added:
            continue
        if token not in known:
            raise NotConvertible(f"no merge makes its token {token!r}")
        pairs += sum(token[:cut] in vocab and token[cut:] in vocab for cut in range(1, len(token)))
    # Every listed merge makes a token, so equal numbers mean that all possible pairs are listed.
    if pairs != num_merges:
        raise NotConvertible("its merges leave out pairs that make a token")


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, to that byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    # Bytes without a printable character get those from U+0100 on, in order: GPT-2's table, which all byte-level
    # vocabularies use.
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
