# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions on patterns of letters: what its parser, run on these, returns or refuses."""

from __future__ import annotations

import importlib
import random
from typing import cast

import pytest

from megatron.core.models.hybrid.hybrid_layer_allocation import (
    get_hybrid_layer_counts,
    get_hybrid_total_layer_count,
    get_hybrid_total_pipeline_segment_count,
    get_layer_maps_from_layer_type_list,
    parse_hybrid_pattern,
    pattern_from_ratios,
    select_pipeline_segment,
)
from megatron.core.process_groups_config import Group


class Process:
    """A process of a pipeline."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def stages(
    pattern: str, size: int, first: int | None = None, last: int | None = None, chunk: int | None = None
) -> list[tuple[str, int]]:
    found = (
        select_pipeline_segment(pattern, cast(Group, Process(rank, size)), chunk, first, last) for rank in range(size)
    )
    return [("".join(letters), offset) for letters, offset in found]


@pytest.mark.parametrize(
    ("pattern", "parsed", "sizes", "counts"),
    [
        ("M", ("M", None, 0), (1, 1), "M1"),
        ("*-*-*-*-", ("*-*-*-*-", None, 0), (8, 1), "*4 -4"),
        ("GEGEGE*E", ("GEGEGE*E", None, 0), (8, 1), "*1 G3 E4"),
        ("M-M-|M-M*-", ("M-M-|M-M*-", None, 0), (9, 2), "*1 M4 -4"),
        ("|M*", ("|M*", None, 0), (2, 2), "*1 M1"),
        ("M*||M*", ("M*||M*", None, 0), (4, 3), "*2 M2"),
        ("M*M*/MM/MM", ("M*M*", "MM", 2), (4, 1), "*2 M6"),
        ("MMMM/*M/*M/*M", ("MMMM", "*M", 3), (4, 1), "*3 M7"),
        ("M*M*|/MM", ("M*M*|", "MM", 1), (4, 2), "*2 M4"),
        ("/MM/MM", (None, "MM", 2), (0, 1), "M4"),
        ("M*M*//", ("M*M*", None, 0), (4, 1), "*2 M2"),
        ("", ("", None, 0), (0, 1), ""),
        ("/", (None, None, 0), (0, 1), ""),
        ("D-+-", ("D-+-", None, 0), (4, 1), "D1 +1 -2"),
        ("M*/DM", ("M*", "DM", 1), (2, 1), "*1 D1 M2"),
        ("MK", ("MK", None, 0), (2, 1), "M1 K1"),
    ],
)
def test_patterns_are_read(
    pattern: str, parsed: tuple[str | None, str | None, int], sizes: tuple[int, int], counts: str
) -> None:
    assert tuple(parse_hybrid_pattern(pattern)) == parsed
    assert (get_hybrid_total_layer_count(pattern), get_hybrid_total_pipeline_segment_count(pattern)) == sizes
    found = get_hybrid_layer_counts(pattern)
    assert list(found)[:7] == list("*DGM+-E")
    assert {letter: count for letter, count in found.items() if count} == {
        word[0]: int(word[1:]) for word in counts.split()
    }


@pytest.mark.parametrize(
    "pattern",
    ["M*M*/MM/", "M*M*/MM/M*", "M*//MM", "M*/M|M", "*-D-", "*M+", "M/*D", "*M|D-", "MXM", "m*", "M *", "M*3", "[M*]",
     "BE", "JE", "Q-", "V", "M\n"],
)  # fmt: skip
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match="the pattern"):
        parse_hybrid_pattern(pattern)
    with pytest.raises(ValueError, match="the pattern"):
        get_hybrid_layer_counts(pattern)


def test_layers_are_dealt_out() -> None:
    assert stages("M*M*M*M*", 2) == [("M*M*", 0), ("M*M*", 4)]
    assert stages("M*M*M*M*M*", 3, 2, 2) == [("M*", 0), ("M*M*M*", 2), ("M*", 8)]
    assert stages("M*M*M*M*M*", 3, 2) == [("M*", 0), ("M*M*", 2), ("M*M*", 6)]
    assert stages("M*M*M*M*M*", 3, None, 4) == [("M*M", 0), ("*M*", 3), ("M*M*", 6)]
    cuts = "M-M-|M-M*-|M-M-|M-M*-"
    assert stages(cuts, 2, chunk=0) == [("M-M-", 0), ("M-M*-", 4)]
    assert stages(cuts, 2, chunk=1) == [("M-M-", 9), ("M-M*-", 13)]
    assert stages("*M|D-", 2) == [("*M", 0), ("D-", 2)]
    assert select_pipeline_segment("M*", None, None) == (["M", "*"], 0)


@pytest.mark.parametrize(
    ("pattern", "size", "first", "last"),
    [
        ("M*M*M*M*", 3, None, None),
        ("M|*|M", 2, None, None),
        ("M*|M*", 2, 2, None),
        ("M*M*M*M*M*", 2, 3, 3),
        ("M*", 2, 3, None),
        ("*D", 1, None, None),
    ],
)
def test_layers_that_cannot_be_dealt_out(pattern: str, size: int, first: int | None, last: int | None) -> None:
    with pytest.raises(ValueError, match=r"stage|cuts"):
        stages(pattern, size, first, last)


@pytest.mark.parametrize(
    ("layers", "attention", "mlp", "pattern"),
    [
        (8, 0.25, 0.25, "MM*-M*M-"),
        (8, 0.5, 0, "M*M**M*M"),
        (8, 0, 0.5, "M-M-M-M-"),
        (10, 0.1, 0.3, "MM-MM*-MM-"),
        (12, 1 / 3, 1 / 3, "M-*M*-M*-*M-"),
        (4, 1, 0, "****"),
        (8, 0.5, 0.5, "-*-**-*-"),
        (56, 0.08, 0.5, "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"),
    ],
)
def test_ratios(layers: int, attention: float, mlp: float, pattern: str) -> None:
    assert pattern_from_ratios(layers, attention, mlp) == pattern


def test_ratios_above_one() -> None:
    with pytest.raises(ValueError, match="together at most 1"):
        pattern_from_ratios(8, 0.6, 0.6)


def test_maps_of_layers() -> None:
    maps = get_layer_maps_from_layer_type_list(list("M*M-"))
    assert maps["M"] == {0: 0, 2: 1} and maps["*"] == {1: 0} and maps["-"] == {3: 0} and maps["E"] == {}


def test_every_pattern_is_put_together_again() -> None:
    """Stages in order make up the decoder, and counts its layers, for patterns at random."""
    generator = random.Random(3)
    for _ in range(200):
        segments = ["".join(generator.choices("MG*-E", k=generator.randint(0, 4))) for _ in range(4)]
        inner = "".join(generator.choices("M*-", k=2))
        pattern = "|".join(segments) + f"/{inner}" * generator.randint(0, 2)
        main = parse_hybrid_pattern(pattern).main_pattern or ""
        dealt = [stage for chunk in (0, 1) for stage in stages(main, 2, chunk=chunk)]
        assert [letters for letters, _ in dealt] == segments
        assert [offset for _, offset in dealt] == [sum(map(len, segments[:index])) for index in range(4)]
        assert get_hybrid_total_layer_count(pattern) == sum(map(len, segments))


def test_the_old_path() -> None:
    old = importlib.import_module("megatron.core.ssm.mamba_hybrid_layer_allocation")
    assert old.parse_hybrid_pattern is parse_hybrid_pattern
