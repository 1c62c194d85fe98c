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


def find_letters_problem(pattern: str, known: Collection[str]) -> str | None:
    """Return what is wrong with a pattern, to be read after its flag; None where nothing is. known: the letters that
    stand for kinds of layers."""
    letters = split_letters(pattern)
    unknown = [letter for letter in letters.decoder + "".join(letters.predictions) if letter not in known]
    if "|" in "".join(letters.predictions):
        return "has a cut (|) in a part of multi-token prediction, which lies on one stage; leave it out"
    if unknown:
        return (
            f"has the letter {unknown[0]!r}, for which there is no kind of layer; the letters are {' '.join(known)}, | "
            "between pipeline stages, and / before multi-token prediction"
        )
    if not letters.decoder:
        return "has no layer; write a letter for each layer of the decoder"
    if len(set(letters.predictions)) > 1:
        return "has parts of multi-token prediction (behind /) that differ; write the same letters in each"
    return None
