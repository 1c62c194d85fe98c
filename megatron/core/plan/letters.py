# SPDX-License-Identifier: Apache-2.0
"""The pattern of letters that describes a hybrid decoder: one letter a layer, and each layer has one branch.

M-M-|M-M*-/MM/MM      M - * ...    a layer of that kind; kinds.py has the letters
                      |            where one pipeline stage ends and the next begins
                      /            before the layers of each depth of multi-token prediction, all depths alike
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Letters(NamedTuple):
    """A pattern, taken apart."""

    segments: tuple[str, ...]
    """The decoder's letters, stage by stage; one entry where the pattern has no cuts."""
    predictions: tuple[str, ...] = ()
    """The letters of each depth of multi-token prediction."""

    @property
    def decoder(self) -> str:
        """All of the decoder's letters."""
        return "".join(self.segments)


def split_letters(pattern: str) -> Letters:
    """Take a pattern apart; letters may be any. A `/` that nothing follows says that there is no prediction."""
    main, *parts = pattern.split("/")
    return Letters(tuple(main.split("|")), tuple(parts) if any(parts) else ())


COMING = {
    "V": "compressed sparse attention of DeepSeek-V4.1",
}
"""Letters of Megatron-LM that are no kind of layer here, and what they are there."""


def find_letters_problem(pattern: str, known: Collection[str]) -> str | None:
    """Return what is wrong with a pattern, to be read after its flag; None where nothing is. known: the letters of
    kinds of layers. A pattern without a layer is one, too."""
    letters = split_letters(pattern)
    prediction = "".join(letters.predictions)
    if "|" in prediction:
        return "has a cut (|) in a part of multi-token prediction, which lies on one stage; leave it out"
    unknown = next((letter for letter in letters.decoder + prediction if letter not in known), None)
    if unknown is not None:
        what = COMING.get(unknown)
        kind = "for which there is no kind of layer" if what is None else f"{what}, which does not exist here yet"
        return (
            f"has the letter {unknown!r}, {kind}; the letters are {' '.join(known)}, | "
            "between pipeline stages, and / before multi-token prediction"
        )
    if len(set(letters.predictions)) > 1:
        return "has parts of multi-token prediction (behind /) that differ; write the same letters in each"
    for part, where in ((letters.decoder, ""), (prediction, " in its multi-token prediction")):
        problem = find_mixture_problem(part)
        if problem is not None:
            return problem + where
    return None


def find_mixture_problem(part: str) -> str | None:
    """Return what is wrong with the letters of one part, or of one stage, in combination."""
    latent = next((letter for letter in part if letter in "D+"), None)
    compressed = next((letter for letter in part if letter in "CHW"), None)
    if "*" in part and (latent or compressed):
        return (
            f"has * and {latent or compressed}, attention without latent vectors and with them, which one model cannot "
            f"have; write {latent or compressed} for *, or * for {latent or compressed}"
        )
    if latent and compressed:
        return (
            f"has {latent} and {compressed}, attention with many keys of a token and with one, which one model cannot "
            f"have; write one of C, H and W for {latent}"
        )
    return None
