# SPDX-License-Identifier: Apache-2.0
"""Upstream's names for reading the pattern of a hybrid decoder (core/plan/letters.py) in users' programs.

The model itself reads core/plan. Unlike a run, these functions take a pattern without a layer, and letters whose kind
cannot be built yet. Where a pattern is none they raise PatternError, which is a ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.errors import ConfigError
from megatron.core.plan.kinds import list_letters
from megatron.core.plan.letters import find_letters_problem, find_mixture_problem, split_letters
from megatron.core.process_groups_config import Group


class PatternError(ConfigError, ValueError):
    """A pattern that describes no decoder."""


class Symbols:
    """Upstream's names of the letters."""

    ATTENTION = "*"
    DS_ATTENTION = "D"
    GDN = "G"
    MAMBA = "M"
    MLA_ATTENTION = "+"
    MLP = "-"
    MOE = "E"
    PIPE = "|"
    MTP_SEPARATOR = "/"


_COUNTED = (
    Symbols.ATTENTION, Symbols.DS_ATTENTION, Symbols.GDN, Symbols.MAMBA, Symbols.MLA_ATTENTION, Symbols.MLP,
    Symbols.MOE,
)  # fmt: skip
"""Upstream's letters, in the order of its counts; those that it does not have follow where they occur."""


class ParsedHybridPattern(NamedTuple):
    """A pattern, taken apart."""

    main_pattern: str | None
    """The decoder's letters with its cuts; None where there is nothing before `/`."""
    mtp_pattern: str | None
    """The letters of one depth of multi-token prediction."""
    mtp_num_depths: int


def parse_hybrid_pattern(pattern: str | None) -> ParsedHybridPattern:
    """Take a pattern apart, such as M-M-|M-M*-/MM/MM. Raises PatternError."""
    if pattern is None:
        return ParsedHybridPattern(None, None, 0)
    problem = find_letters_problem(pattern, list_letters())
    if problem is not None:
        raise PatternError(f"the pattern {pattern!r} {problem}")
    main, separator, _ = pattern.partition("/")
    predictions = split_letters(pattern).predictions
    return ParsedHybridPattern(
        None if separator and not main else main, predictions[0] if predictions else None, len(predictions)
    )


def get_hybrid_layer_counts(pattern: str) -> dict[str, int]:
    """Count the layers of each letter, layers of multi-token prediction once for each depth. Raises PatternError."""
    parsed = parse_hybrid_pattern(pattern)
    everything = (parsed.main_pattern or "").replace("|", "") + (parsed.mtp_pattern or "") * parsed.mtp_num_depths
    return dict.fromkeys(_COUNTED, 0) | {letter: everything.count(letter) for letter in everything}


def get_hybrid_total_layer_count(pattern: str) -> int:
    """Count only the decoder's layers. Raises PatternError."""
    return len((parse_hybrid_pattern(pattern).main_pattern or "").replace("|", ""))


def get_hybrid_total_pipeline_segment_count(pattern: str) -> int:
    """Count the stages that cuts make. Raises PatternError."""
    return (parse_hybrid_pattern(pattern).main_pattern or "").count("|") + 1


def select_pipeline_segment(
    main_pattern: str | None,
    pp_group: Group | None,
    vp_stage: int | None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
) -> tuple[list[str], int]:
    """Return the letters of this process's stage, or of its chunk vp_stage, and how many layers come before them.

    main_pattern: without multi-token prediction. first_stage_layers, last_stage_layers: where there are no cuts; the
    other stages share the rest. Raises PatternError where letters and stages do not fit.
    """
    segments = (main_pattern or "").split("|")
    rank, stages = (0, 1) if pp_group is None else (pp_group.rank(), pp_group.size())
    given = {0: first_stage_layers, stages - 1: last_stage_layers}
    fixed = {stage: count for stage, count in given.items() if count is not None}
    if len(segments) > 1 and fixed:
        raise PatternError(f"{main_pattern} has cuts (|), which say all about stages; leave out the layers of a stage")
    if len(segments) == 1 and stages > 1:
        segments = _deal_out(segments[0], stages, fixed)
    index = (vp_stage or 0) * stages + rank
    if len(segments) % stages:
        raise PatternError(f"the {len(segments)} stages of {main_pattern} are no multiple of {stages} processes")
    if not index < len(segments):
        raise PatternError(f"{main_pattern} has {len(segments)} stages, none for chunk {vp_stage} of process {rank}")
    letters = segments[index]
    problem = find_letters_problem(letters, list_letters()) or find_mixture_problem(letters)
    if problem is not None:
        raise PatternError(f"the stage {letters!r} {problem}")
    return list(letters), sum(map(len, segments[:index]))


def _deal_out(letters: str, stages: int, fixed: dict[int, int]) -> list[str]:
    """fixed: layers of the first or the last stage."""
    rest, others = len(letters) - sum(fixed.values()), stages - len(fixed)
    if rest < 0 or min(fixed.values(), default=0) < 0 or (rest % others if others else rest):
        raise PatternError(
            f"{len(letters)} layers less {sum(fixed.values())} of the first and last stage do not divide over "
            f"{others} other stages; say the stages with cuts (|)"
        )
    segments, start = [], 0
    for stage in range(stages):
        count = fixed.get(stage, rest // others if others else 0)
        segments.append(letters[start : start + count])
        start += count
    return segments


def pattern_from_ratios(num_layers: int, attention_ratio: float = 0.0, mlp_ratio: float = 0.0) -> str:
    """Write the pattern for which earlier releases had shares of attention and MLPs: * and - spread evenly among M.

    Both shares are rounded to whole layers, halves to the even number. Raises PatternError for shares outside [0, 1],
    or above 1 together.
    """
    if not (0 <= attention_ratio <= 1 and 0 <= mlp_ratio <= 1 and attention_ratio + mlp_ratio <= 1):
        raise PatternError(
            f"shares of attention ({attention_ratio}) and of MLPs ({mlp_ratio}) must each be in [0, 1], and together "
            "at most 1"
        )
    attention, mlps = round(num_layers * attention_ratio), round(num_layers * mlp_ratio)
    letters = _spread("M" * num_layers, "*", (num_layers - attention) / (attention + 1))
    if mlps:
        letters = _spread(letters, "-", (num_layers - attention - mlps) / mlps)
    return letters


def _spread(letters: str, letter: str, distance: float) -> str:
    """Put a letter in place of M, with so many M between two of them."""
    spread, left = [], distance
    for old in letters:
        if old != "M":
            spread.append(old)
        elif left < 0.5:
            spread.append(letter)
            left += distance
        else:
            spread.append(old)
            left -= 1
    return "".join(spread)


def get_layer_maps_from_layer_type_list(layer_type_list: Sequence[str]) -> dict[str, dict[int, int]]:
    """Map for each letter the place of a layer in the list to its place among the layers of that letter."""
    maps: dict[str, dict[int, int]] = {letter: {} for letter in _COUNTED}
    for place, letter in enumerate(layer_type_list):
        of_letter = maps.setdefault(letter, {})
        of_letter[place] = len(of_letter)
    return maps
